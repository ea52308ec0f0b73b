"""A mixture of experts in several layouts of one world, one after another: a training step with every auxiliary loss and moving biases, on
rows of many lengths, once as it is and once with padding taken for tokens. Rank 0 writes what it found.

usage: experts_job.py LAYOUTS_JSON OUTPUT     (by name: (fields of ParallelConfig, fields of ModelConfig))
"""

from __future__ import annotations

import gc
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from layout_job import Spec, gradients, make_batch, make_losses, make_model

from aligner.parallel import launch

ROUTER = {"router_aux_loss_coef": 0.3, "router_z_loss_coef": 0.05, "router_bias_update_rate": 0.01}


@contextmanager
def padding_is_taken_for_tokens():
    from aligner.models.training import forward

    real = forward._padding
    with mock.patch.object(forward, "_padding", lambda part, model: torch.zeros_like(real(part, model))):
        yield


def step(parallel: dict, settings: dict, topology) -> dict:
    """What one training step reports, its gradients, and the biases behind it."""
    from aligner.models.training.optimizer import OptimizerConfig
    from aligner.models.weights import export_hf

    spec = Spec(parallel=parallel, model=ROUTER | settings, experts=True, biases=True, num_layers=4)
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-3, warmup_steps=0, distributed=False, clip_grad=0.0, eps=1e-4)
    model = make_model("ppo", spec, topology, optimizer)
    metrics = model.train_step(make_batch("ppo"), make_losses("ppo")[0])
    biases = {name: tensor.clone() for name, tensor in export_hf(model.model.chunks) if name.endswith("e_score_correction_bias")}
    return {"metrics": {name: one.value() for name, one in metrics.items()}, "gradients": gradients(model.model.chunks), "biases": biases}


def both(parallel: dict, settings: dict, topology) -> dict:
    """The step, and the same one with padding taken for tokens."""
    found = step(parallel, settings, topology)
    with padding_is_taken_for_tokens():
        return found | {"unmasked": step(parallel, settings, topology)}


def main() -> None:
    launch.initialize("gloo", timeout_seconds=120, fingerprint="experts", collective_timeout_seconds=120)
    from aligner.parallel.mcore import parallel_state
    from aligner.parallel.topology import ParallelConfig, initialize

    gc.collect()
    gc.freeze()
    results = {}
    for name, (parallel, settings) in json.loads(sys.argv[1]).items():
        print(f"layout {name}", flush=True)  # which one an error is of
        topology = initialize(ParallelConfig(**parallel), seed=1)  # the single process's
        results[name] = both(parallel, settings, topology)
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        torch.save(results, Path(sys.argv[2]))
    launch.shutdown()


if __name__ == "__main__":
    main()
