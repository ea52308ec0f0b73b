"""Adapters in several layouts of two ranks, one after another in one world. Rank 0 writes what it found.

usage: lora_job.py ADAPTERS OUTPUT     (ADAPTERS: a folder with an adapter in PEFT's format for each of `MODELS`)

Each layout trains for two steps. Where `MOVES` says so, a new model goes on from another layout's checkpoint of the first one.
"""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from layout_job import Spec, gradients, make_batch, make_losses, make_model

from aligner.parallel import launch

SP = {"tp": 2, "sequence_parallel": True}
MODELS = {"dense": ["qkv", "proj", "fc1", "fc2"], "experts": ["qkv", "proj", "experts"]}
LAYOUTS = {  # name: (model, kinds, fields of ParallelConfig, fields of ModelConfig)
    "tp2_shared_prompts": ("dense", ["dpo"], {"tp": 2}, {"micro_batch_tokens": 48, "packing": True, "share_prompts": True}),
    "pp2_recompute": ("dense", ["dpo", "value"], {"pp": 2}, {"recompute": "full"}),
    "tp2_etp2": ("experts", ["dpo"], SP | {"etp": 2}, {}),
    "tp2_ep2": ("experts", ["dpo"], SP | {"ep": 2}, {}),
}
MOVES = {"pp2_recompute": "tp2_shared_prompts", "tp2_ep2": "tp2_etp2"}  # which layout's checkpoint it goes on from; those save
DROPPING = ("tp2_shared_prompts", "tp2_etp2")  # that show which inputs of adapters are dropped
RESUMED = "tp2_shared_prompts"  # that of them which goes on from its own checkpoint, too


def spec_of(name: str, adapters: Path, **lora) -> Spec:
    """The settings of a layout; of a name of `MODELS`: of one process."""
    model, _, parallel, settings = LAYOUTS.get(name, (name, [], {}, {}))
    lora = {"rank": 3, "alpha": 6.0, "targets": MODELS[model], "path": str(adapters / model)} | lora
    return Spec(parallel=parallel, model=settings, experts=model == "experts", lora=lora, distributed_optimizer=True)


def start(kind: str, spec: Spec, topology):
    """A model of which every update counts: of a gradient that is only rounding Adam would make another step in every layout."""
    from aligner.models.training.optimizer import OptimizerConfig

    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-3, warmup_steps=0, clip_grad=0.5, eps=1e-4)
    return make_model(kind, spec, topology, optimizer)


def outputs_of(kind: str, model) -> torch.Tensor:
    return (model.values if kind == "value" else model.logprobs)(make_batch(kind))


def step(kind: str, model) -> dict[str, float]:
    return {name: metric.value() for name, metric in model.train_step(make_batch(kind), make_losses(kind)[0]).items()}


def end(kind: str, model) -> dict:
    """The second step, and what it leaves."""
    from aligner.models.weights import export_hf

    metrics = step(kind, model)
    merged = {name: tensor.clone() for name, tensor in export_hf(model.model.chunks)}
    return {"metrics": metrics, "outputs": outputs_of(kind, model), "merged": merged}


def train(kind: str, spec: Spec, topology, saved: Path | None = None) -> dict:
    """Two steps; a checkpoint of the first one goes to `saved`."""
    from aligner.models.checkpoint import checkpoint

    model = start(kind, spec, topology)
    found = {"outputs": outputs_of(kind, model), "metrics": step(kind, model), "gradients": gradients(model.model.chunks)}
    if saved is not None:
        checkpoint.save(saved, model.model, checkpoint.SaveRequest(step=1, state={"at": 1}))
    return found | {"end": end(kind, model)}


def go_on(kind: str, spec: Spec, topology, saved: Path) -> dict:
    """The second step from another layout's checkpoint."""
    from aligner.models.checkpoint import checkpoint

    model = start(kind, spec, topology)
    assert checkpoint.load(model.model, checkpoint.resolve(saved)) == {"at": 1}
    return end(kind, model)


def new(spec: Spec, topology) -> dict[str, torch.Tensor]:
    """The adapters that training starts from where none are given, whole."""
    from aligner.models.modules.peft import export_adapters

    return {name: tensor.clone() for name, tensor in export_adapters(start("dpo", spec, topology).model.chunks)}


@contextmanager
def noting_drops(found: list):
    """Note of each adapter's inputs whether the tensor-parallel ranks drop the same numbers, and whether they are to."""
    from aligner.models.modules.lora import Adapter

    real = Adapter._dropped

    def noting(self, x: torch.Tensor) -> torch.Tensor:
        dropped = real(self, x)
        zeros = (dropped == 0).contiguous()
        both = [torch.empty_like(zeros) for _ in range(self.group.size())]
        dist.all_gather(both, zeros, group=self.group)
        whole = self.pairs.splits_output and not self.splits_sequence
        found.append((whole, torch.equal(*both), float(zeros.float().mean())))
        return dropped

    Adapter._dropped = noting
    try:
        yield
    finally:
        Adapter._dropped = real


def drop(spec: Spec, topology, saved: Path | None) -> tuple[list[tuple[bool, bool, float]], bool | None]:
    """(of every adapter's input in one step: whether the ranks have the same one, whether they drop the same of it, which part; whether
    a run that is resumed behind that step from `saved` drops what one does that was not interrupted)."""
    from aligner.models.checkpoint import checkpoint

    found: list = []
    model = start("dpo", spec, topology)
    with noting_drops(found):
        step("dpo", model)
    if saved is None:
        return found, None
    checkpoint.save(saved, model.model, checkpoint.SaveRequest(step=1, state={}))
    again, expected = start("dpo", spec, topology), step("dpo", model)
    checkpoint.load(again.model, checkpoint.resolve(saved))
    return found, step("dpo", again) == expected


def main() -> None:
    adapters, output = Path(sys.argv[1]), Path(sys.argv[2])
    launch.initialize("gloo", timeout_seconds=120, fingerprint="lora", collective_timeout_seconds=120)
    from aligner.parallel.mcore import parallel_state
    from aligner.parallel.topology import ParallelConfig, initialize

    gc.collect()
    gc.freeze()  # Megatron-Core collects at every save: what it is made of need not be looked at
    folder, results = output.parent, {}
    for name, (_, kinds, parallel, _) in LAYOUTS.items():
        topology = initialize(ParallelConfig(**parallel), seed=1)  # the single process's
        spec = spec_of(name, adapters)
        results[name] = {kind: train(kind, spec, topology, folder / name if name in MOVES.values() else None) for kind in kinds}
        results[name]["new"] = new(spec_of(name, adapters, path=""), topology)
        if name in MOVES:
            results[name]["moved"] = go_on("dpo", spec, topology, folder / MOVES[name])
        if name in DROPPING:
            results[name]["drops"] = drop(spec_of(name, adapters, dropout=0.5), topology, folder / "drops" if name == RESUMED else None)
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        torch.save(results, output)
    launch.shutdown()


if __name__ == "__main__":
    main()
