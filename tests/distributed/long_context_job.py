"""One long sequence over context-parallel ranks: log-probs and a training step. Every rank writes its losses and its peak memory.

usage: long_context_job.py measure|predict SPEC DIRECTORY      (SPEC: JSON of `Spec`'s fields; `predict` asks the planner instead)
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from aligner.parallel import launch

PAGE = os.sysconf("SC_PAGE_SIZE")
M_MMAP_THRESHOLD = -3  # of mallopt


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is run."""

    length: int
    parallel: dict = field(default_factory=dict)  # fields of ParallelConfig
    model: dict = field(default_factory=dict)  # fields of ModelConfig
    architecture: dict = field(default_factory=dict)  # fields of Architecture


def resident() -> int:
    """This process's resident memory, in bytes."""
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


def configs(spec: Spec):
    """(model, architecture, layout, optimizer) of the run."""
    from aligner.models.config import Architecture, Dtype, ModelConfig, Recompute
    from aligner.models.training.optimizer import OptimizerConfig
    from aligner.parallel.topology import ParallelConfig

    settings = spec.model | ({"recompute": Recompute(spec.model["recompute"])} if "recompute" in spec.model else {})
    model = ModelConfig(dtype=Dtype.float32, micro_batch_size=1, **settings)
    return model, Architecture(**spec.architecture), ParallelConfig(**spec.parallel), OptimizerConfig(lr=1e-3, min_lr=0.0, warmup_steps=0)


def predict(spec: Spec, directory: Path) -> None:
    """What the planner says of the activations of a rank, in bytes by phase."""
    from aligner.planner.config import ClusterConfig
    from aligner.planner.estimate import Scales, plan_component
    from aligner.planner.workload import Component, Head, Phase, Work

    model, architecture, parallel, optimizer = configs(spec)
    phases = (Phase.logprobs, Phase.train)
    work = Work(phases=phases, rows=1, length=spec.length, response_length=spec.length - 1, update_rows=1, num_updates=1)
    component = Component(
        name="trainer",
        head=Head.language,
        num_ranks=parallel.replica_size,
        architecture=architecture,
        model=model,
        parallel=parallel,
        optimizer=optimizer,
        work=work,
    )
    planned = plan_component(component, ClusterConfig(), Scales(ClusterConfig().device))
    (directory / "plan.json").write_text(json.dumps({phase.value: planned.activations(phase) for phase in phases}))


def measure(spec: Spec, directory: Path) -> None:
    """Log-probs and one training step; every rank writes what it saw."""
    # Every activation gets pages of its own, which go back when it is freed: resident memory is then what is alive.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    launch.initialize("gloo", timeout_seconds=120, fingerprint="long context", collective_timeout_seconds=1800)
    from aligner.losses.sft import sft_loss
    from aligner.models.create import create_policy, training
    from aligner.parallel.topology import initialize
    from aligner.types import LabeledBatch

    model, architecture, parallel, optimizer = configs(spec)
    topology = initialize(parallel, seed=3)
    policy = create_policy(model, architecture, parallel, topology, training(model, optimizer))
    tokens = torch.randint(1, architecture.vocab_size, (1, spec.length), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(spec.length)[None] > 0
    batch = LabeledBatch(tokens=tokens, lengths=torch.tensor([spec.length]), loss_mask=mask)
    peaks: dict[str, int] = {}
    with peak(peaks, "logprobs"):
        logprobs = policy.logprobs(batch)
    with peak(peaks, "train"):
        metrics = policy.train_step(batch, sft_loss)
    result = {"peak_bytes": peaks, "loss_before": -logprobs.double().sum().item() / (spec.length - 1)}
    result |= {"loss": metrics["sft/loss"].value(), "grad_norm": metrics["optim/grad_norm"].value()}
    (directory / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    launch.shutdown()


if __name__ == "__main__":
    {"predict": predict, "measure": measure}[sys.argv[1]](Spec(**json.loads(sys.argv[2])), Path(sys.argv[3]))
