"""131,072 tokens in one sequence over four context-parallel ranks, within the memory that the planner said."""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from plan_parts import activations
from ranks import world

from aligner.losses.sft import sft_loss
from aligner.models.config import Architecture, Dtype, ModelConfig
from aligner.models.create import create_policy, training
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel.topology import ParallelConfig
from aligner.planner.config import ClusterConfig
from aligner.planner.estimate import plan_component
from aligner.planner.workload import Component, Head, Phase, Work
from aligner.types import LabeledBatch

PAGE = os.sysconf("SC_PAGE_SIZE")
M_MMAP_THRESHOLD = -3  # of mallopt
# One layer with a narrow head: attention is quadratic. Hidden states are wide enough to weigh.
ARCHITECTURE = {"num_layers": 1, "hidden_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
ARCHITECTURE |= {"ffn_hidden_size": 256, "vocab_size": 512, "max_position_embeddings": 131072}

MODEL, OPTIMIZER = ModelConfig(dtype=Dtype.float32, micro_batch_size=1), OptimizerConfig(lr=1e-3, min_lr=0.0, warmup_steps=0)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@contextmanager
def peak(into: dict[str, int], name: str) -> Iterator[None]:
    """Store the most memory that the block held above what was there before it."""
    ctypes.CDLL(None).malloc_trim(0)
    before, highest, stop = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not stop.is_set():
            highest = max(highest, resident())
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    stop.set()
    thread.join()
    into[name] = highest - before


def predict(length: int, cp: int, architecture: dict) -> dict[str, float]:
    """What the planner says of the activations of a rank, in bytes by phase."""
    phases = (Phase.logprobs, Phase.train)
    component = Component(
        name="trainer",
        head=Head.language,
        num_ranks=cp,
        architecture=Architecture(**architecture),
        model=MODEL,
        parallel=ParallelConfig(cp=cp),
        optimizer=OPTIMIZER,
        work=Work(phases=phases, rows=1, length=length, response_length=length - 1, update_rows=1, num_updates=1),
    )
    planned = plan_component(component, ClusterConfig())
    return {phase.value: activations(planned, phase) for phase in phases}


def measure(length: int, cp: int, architecture: dict) -> dict:
    """Log-probs and one training step: losses, and this rank's peak memory."""
    # Every activation gets pages of its own, which go back when it is freed: resident memory is then what is alive.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    with world({"cp": cp}, seed=3, timeout_seconds=1800) as topology:
        policy = create_policy(MODEL, Architecture(**architecture), ParallelConfig(cp=cp), topology, training(MODEL, OPTIMIZER))
        tokens = torch.randint(1, architecture["vocab_size"], (1, length), generator=torch.Generator().manual_seed(1))
        batch = LabeledBatch(tokens=tokens, lengths=torch.tensor([length]), loss_mask=torch.arange(length)[None] > 0)
        peaks: dict[str, int] = {}
        with peak(peaks, "logprobs"):
            logprobs = policy.logprobs(batch)
        with peak(peaks, "train"):
            metrics = policy.train_step(batch, sft_loss)
        result = {"peak_bytes": peaks, "loss_before": -logprobs.double().sum().item() / (length - 1)}
        return result | {"loss": metrics["sft/loss"].value(), "grad_norm": metrics["optim/grad_norm"].value()}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("length", [32768, pytest.param(131072, marks=pytest.mark.slow)])
def test_a_long_context_over_four_ranks(length: int, on_ranks) -> None:
    predicted, ranks = on_ranks(predict, 1, length, 4, ARCHITECTURE)[0], on_ranks(measure, 4, length, 4, ARCHITECTURE, timeout=1500)
    for phase in ("logprobs", "train"):
        held = [rank["peak_bytes"][phase] for rank in ranks]
        assert max(held) == pytest.approx(predicted[phase], rel=0.2), f"{phase}: ranks held {held}"
    first = ranks[0]
    assert first["loss"] == pytest.approx(math.log(512), rel=0.02)  # random weights
    assert first["loss"] == pytest.approx(first["loss_before"], rel=1e-5) and first["grad_norm"] > 0
    assert all(rank["loss"] == first["loss"] and rank["grad_norm"] == first["grad_norm"] for rank in ranks)
