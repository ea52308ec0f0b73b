"""`transformers`' own modules on two data-parallel ranks: the steps of one process, also in a run that changes its number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_steps import adam, save, train, weights_of
from own_models import make_directory
from ranks import world
from vision_models import write_seeing
from vision_rows import Rows

from aligner.losses.sft import sft_loss
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype, Implementation, LoraConfig, ModelConfig
from aligner.models.create import create_policy, read_architecture
from aligner.models.training.trainable import Training
from aligner.parallel.topology import ParallelConfig

KINDS = {"experts": ("minimax_m2", {}), "adapters": ("granite", {"rank": 4}), "packed": ("smollm3", {}), "unused": ("unused", {})}
SEES = "qwen3_vl"


def steps(
    topology: Any, directory: Path, kind: str, folder: Path, *, saved: Path | None = None
) -> tuple[list, dict[str, torch.Tensor], Path]:
    """Two steps, or the two after a checkpoint: metrics, weights, and the checkpoint behind them."""
    packed = {"packing": True, "micro_batch_tokens": 32} if kind == "packed" else {"micro_batch_size": 1}
    model = ModelConfig(path=str(directory), dtype=Dtype.float32, lora=LoraConfig(**KINDS[kind][1]), **packed)
    training = Training(optimizer=adam(distributed=True), total_steps=10, overlap=True, **packed)  # as on a GPU
    policy = create_policy(model, read_architecture(model, vocab_size=0), ParallelConfig(), topology, training)
    if saved is not None:
        checkpoint.load(policy.model, saved)
    metrics = train(policy, range(2, 4) if saved else range(2))
    policy.model.settle()
    return metrics, weights_of(policy), save(policy, folder, 4 if saved else 2)


def seeing_steps(topology: Any, directory: Path) -> tuple[list, dict[str, torch.Tensor]]:
    """Two steps of every part on rows with 1, 0, 2 and 1 images; of two ranks one has rows without any in a micro-batch."""
    rows = Rows(SEES, directory)
    own = Implementation.transformers
    model = ModelConfig(path=str(directory), implementation=own, dtype=Dtype.float32, micro_batch_size=1, freeze=[])
    training = Training(optimizer=adam(distributed=True), total_steps=10, micro_batch_size=1, sees=rows.vision)
    policy = create_policy(model, read_architecture(model, vocab_size=0), ParallelConfig(), topology, training)
    metrics = [{name: one.value() for name, one in policy.train_step(rows.batch(), sft_loss).items()} for _ in range(2)]
    policy.model.settle()
    return metrics, weights_of(policy)


def on_two(directory: Path, folder: Path, saved: dict[str, Path], seed: int) -> dict[str, tuple]:
    found: dict[str, tuple] = {}
    with world(seed=seed) as topology:
        found[SEES] = (*seeing_steps(topology, directory / SEES), None)
        for kind, (name, _) in KINDS.items():
            found[kind] = steps(topology, directory / name, kind, folder / kind)
            found[f"{kind} resumed"] = steps(topology, directory / name, kind, folder / kind, saved=saved[kind])
    return found


def test_two_ranks_take_the_steps_of_one(on_ranks, topology, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    make = make_directory(tmp_path_factory)
    for name, _ in KINDS.values():
        (tmp_path / name).symlink_to(make(name))
    write_seeing(SEES, tmp_path / SEES)
    alone: dict[str, tuple] = {kind: steps(topology, tmp_path / name, kind, tmp_path / "alone" / kind) for kind, (name, _) in KINDS.items()}
    saved = {kind: found[2] for kind, found in alone.items()}
    for kind, (name, _) in KINDS.items():
        alone[f"{kind} resumed"] = steps(topology, tmp_path / name, kind, tmp_path / "alone" / kind, saved=saved[kind])
    alone[SEES] = seeing_steps(topology, tmp_path / SEES)
    for rank in on_ranks(on_two, 2, tmp_path, tmp_path / "two", saved, topology.seed):
        for kind, (metrics, weights, _) in rank.items():
            for one, other in zip(metrics, alone[kind][0], strict=True):
                assert one == pytest.approx(other, rel=1e-4, abs=1e-6), kind
            # Adam moves a weight whose gradient is next to nothing by its sign: the last bits of sums show in a few.
            compared = {name: one for name, one in alone[kind][1].items() if not name.endswith("k_proj.bias")}
            assert all(torch.allclose(weights[name], expected, atol=2e-4) for name, expected in compared.items()), kind
