"""Continue a run from a checkpoint at this layout: save what was loaded, take one more step, save again. Rank 0 writes the metrics.

usage: checkpoint_job.py SPEC OUTPUT      (SPEC: JSON of the fields of `Spec`)
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from aligner.parallel import launch

ROWS, WIDTH, VOCAB = 4, 16, 61


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is continued, and where."""

    source: str  # a checkpoint, or a folder of them
    step: int  # that it is of; the batch of the next step is trained on
    parallel: dict = field(default_factory=dict)  # fields of ParallelConfig
    kind: str = "policy"  # or "value"
    in_background: bool = False  # how the second checkpoint is saved
    vocab_divisor: int = 8
    breaks: bool = False  # whether a last save fails on the last rank, and a byte of the one before is flipped


def make_batch(kind: str, step: int):
    """The batch of a step, the same everywhere."""
    from aligner.types import LabeledBatch, ValueBatch

    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, VOCAB, (ROWS, WIDTH), generator=generator)
    mask = torch.arange(WIDTH).expand(ROWS, WIDTH) > 3
    common = {"tokens": tokens, "lengths": torch.full((ROWS,), WIDTH), "loss_mask": mask}
    if kind == "policy":
        return LabeledBatch(**common)
    old, returns = torch.randn(2, ROWS, WIDTH, generator=generator)
    return ValueBatch(**common, old_values=old, returns=returns)


def train_step(model, kind: str, step: int) -> dict[str, float]:
    """Train on the batch of `step`."""
    from functools import partial

    from aligner.losses.sft import sft_loss
    from aligner.losses.value import value_loss

    loss = sft_loss if kind == "policy" else partial(value_loss, clip=None)
    return {name: metric.value() for name, metric in model.train_step(make_batch(kind, step), loss).items()}


def make_training():
    from aligner.models.training.optimizer import OptimizerConfig
    from aligner.models.training.trainable import Training

    # eps is large, so that gradients which are zero but for rounding move nothing.
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-3, warmup_steps=1, eps=1e-3)
    return Training(optimizer=optimizer, total_steps=6, micro_batch_size=1)


def save(folder: Path, model, step: int, *, in_background: bool = False) -> Path:
    from aligner.models.checkpoint import checkpoint

    request = checkpoint.SaveRequest(step=step, state={"position": 4 * step})
    return checkpoint.start_save(folder, model.model, request, in_background=in_background).publish(60)


def run(spec: Spec, topology, output: Path) -> dict:
    from aligner.models import create
    from aligner.models.checkpoint import checkpoint
    from aligner.models.config import ModelConfig
    from aligner.parallel.topology import ParallelConfig

    config = ModelConfig(path=spec.source, make_vocab_divisible_by=spec.vocab_divisor)
    build = create.create_policy if spec.kind == "policy" else create.create_value_model
    architecture = create.read_architecture(config, vocab_size=0)
    model = build(config, architecture, ParallelConfig(**spec.parallel), topology, make_training())
    state = checkpoint.load(model.model, Path(spec.source))
    result = {"state": state, "version": model.model.version}
    save(output / "loaded", model, spec.step)
    result["metrics"] = train_step(model, spec.kind, spec.step + 1)
    saved = save(output / "trained", model, spec.step + 1, in_background=spec.in_background)
    if spec.breaks:
        result["errors"] = [fail_to_save(model, output / "trained", spec.step + 2), fail_to_load(model, saved)]
    return result


def fail_to_save(model, folder: Path, step: int) -> str:
    """The disk of the last rank is full: what every rank says."""
    from aligner.errors import CheckpointError
    from aligner.models.checkpoint import async_save

    real = async_save._write_bucket

    def broken(part, number: int):
        raise OSError(28, "No space left on device")

    if dist.get_rank() == dist.get_world_size() - 1:
        async_save._write_bucket = broken
    try:
        save(folder, model, step, in_background=True)
    except CheckpointError as error:
        return agreed(str(error))
    finally:
        async_save._write_bucket = real
    raise AssertionError("a save that failed on one rank was published")


def fail_to_load(model, directory: Path) -> str:
    """Each rank hashes a part of the files; all of them say what one found."""
    from aligner.errors import CheckpointError
    from aligner.models.checkpoint import checkpoint

    if dist.get_rank() == 0:
        path = directory.parent / "spoilt" / directory.name
        path.parent.mkdir()
        shutil.copytree(directory, path)
        for name in ("weights/__1_0.distcp", "config.yaml"):
            (path / name).write_bytes((path / name).read_bytes() + b"!")
    dist.barrier()
    try:
        checkpoint.load(model.model, directory.parent / "spoilt" / directory.name)
    except CheckpointError as error:
        return agreed(str(error))
    raise AssertionError("a damaged checkpoint was loaded")


def agreed(text: str) -> str:
    """Raise AssertionError where another rank has another text."""
    texts: list = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1, texts
    return text


def main() -> None:
    spec, output = Spec(**json.loads(sys.argv[1])), Path(sys.argv[2])
    launch.initialize("gloo", timeout_seconds=120, fingerprint="checkpoint", collective_timeout_seconds=120)
    from aligner.parallel.topology import ParallelConfig, initialize

    topology = initialize(ParallelConfig(**spec.parallel), seed=5)
    result = run(spec, topology, output)
    if dist.get_rank() == 0:
        (output / "result.json").write_text(json.dumps(result))
    launch.shutdown()


if __name__ == "__main__":
    main()
