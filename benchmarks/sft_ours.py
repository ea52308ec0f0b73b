"""Our side of the SFT comparison: time steps of the `SFT` algorithm on given weights and token rows.

    <python of this project's environment> benchmarks/sft_ours.py SPEC.json RESULT.json

SPEC.json and RESULT.json have the fields of `trl_sft_reference.py`. The parts are those of a `train_sft.py` job: session, policy,
algorithm.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from pathlib import Path

from trl_grpo_reference import Clock as PhaseClock, median_seconds
from trl_sft_reference import Spec, read_spec

from aligner.algorithms.sft import SFT, SFTConfig, TrainSFT
from aligner.data.collate import SupervisedExample
from aligner.data.order import EpochSampler
from aligner.loop.loop import Clock
from aligner.models.config import ModelConfig
from aligner.models.training.optimizer import Decay, OptimizerConfig
from aligner.run.settings import RunConfig


def make_config(spec: Spec, folder: str) -> TrainSFT:
    """The settings that TRL's side has, in this project's names."""
    optimizer = OptimizerConfig(
        lr=spec.learning_rate,
        min_lr=spec.learning_rate,
        decay=Decay.constant,
        warmup_steps=0,
        weight_decay=0.0,
        beta2=0.999,
        clip_grad=1.0,
    )
    return TrainSFT(
        run=RunConfig(directory=folder, seed=spec.seed, num_threads=spec.threads),
        model=ModelConfig(
            path=spec.model,
            micro_batch_size=spec.micro_batch_size,
            micro_batch_tokens=spec.pack_tokens,
            packing=bool(spec.pack_tokens),
        ),
        optimizer=optimizer,
        algorithm=SFTConfig(batch_size=len(spec.rows)),
    )


def make_algorithm(config: TrainSFT, spec: Spec, topology) -> SFT:
    """SFT over a policy with the model's weights, whose every step takes all rows in their order. Imports Megatron-Core."""
    from aligner.models import create

    architecture = create.read_architecture(config.model, vocab_size=0)
    training = create.training(config.model, config.optimizer, total_steps=spec.warmup_steps + spec.steps)
    policy = create.create_policy(config.model, architecture, config.parallel, topology, training)
    examples = [
        SupervisedExample(tokens=tuple(row), loss_mask=(False,) * prompt + (True,) * (len(row) - prompt), source=f"row {number}")
        for number, (row, prompt) in enumerate(zip(spec.rows, spec.prompt_lengths, strict=True))
    ]
    algorithm = SFT(config.algorithm, policy, train=examples, validation=[], pad_id=0, seed=spec.seed)
    algorithm.order = EpochSampler(len(examples), len(examples), spec.seed, shuffle=False)
    return algorithm


def run(spec: Spec, folder: str) -> dict:
    """Warm up, time the steps, and return the result."""
    import torch

    from aligner.parallel.mcore import version
    from aligner.run.session import open_session

    clock = PhaseClock()
    config = make_config(spec, folder)
    losses, grad_norms = [], []
    with open_session(config, config.run, config.parallel, component="trainer") as session:
        algorithm = make_algorithm(config, spec, session.topology)
        for step in range(1, spec.warmup_steps + spec.steps + 1):
            with clock.phase("total"):
                metrics = algorithm.step(step, Clock()).metrics
            clock.end_step()
            losses.append(metrics["sft/loss"])
            grad_norms.append(metrics["optim/grad_norm"])
    return {
        "versions": {"megatron-core": version, "torch": torch.__version__, "python": sys.version.split()[0]},
        "losses": losses,
        "grad_norms": grad_norms,
        "median": median_seconds([step["total"] for step in clock.steps[spec.warmup_steps :]]),
    }


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: sft_ours.py SPEC.json RESULT.json")
    spec = read_spec(Path(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        result = run(spec, folder)
    result["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path(sys.argv[2]).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
