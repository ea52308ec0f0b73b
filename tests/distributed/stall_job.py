"""One rank of a component of which rank 1 stalls in step 3. Arguments: run directory, how it stalls (sleep, stop or native).

Ranks 0 and 1 are one group, all of them another: rank 2 waits for rank 0, which waits for rank 1.
"""

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from aligner.loop.loop import Clock
from aligner.parallel.topology import ParallelConfig
from aligner.run.session import Session, open_session
from aligner.run.settings import RunConfig

STALL_SECONDS = 3.0  # a loaded machine may take a second for one collective


@dataclass(kw_only=True, slots=True)
class Config:
    """As much of a job's config as a session needs."""

    run: RunConfig = field(default_factory=RunConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    sampler = None  # it samples nothing
    num_processes: int = 1

    def servers(self) -> tuple[()]:
        return ()

    def readers(self) -> dict[str, object]:
        return {}


def main() -> None:
    directory, how = sys.argv[1:]
    run = RunConfig(
        directory=directory, num_threads=1, start_timeout_seconds=60, collective_timeout_seconds=60, stall_timeout_seconds=STALL_SECONDS
    )
    with open_session(Config(run=run), run, ParallelConfig(), component="actor") as session:
        pair = dist.new_group([0, 1], group_desc="FIRST_PAIR_GROUP")
        print(f"pid {os.getpid()}", flush=True)
        for step in range(1, 5):
            train(session, step, how, pair)


def train(session: Session, step: int, how: str, pair: dist.ProcessGroup) -> None:
    session.progress.at_step(step)
    with Clock(session.progress).phase("train"):
        if step == 3 and session.topology.rank == 1:
            stall(how)
        if session.topology.rank < 2:
            dist.all_reduce(torch.ones(1), group=pair)
        dist.all_reduce(torch.ones(1))


def stall(how: str) -> None:
    time.sleep(0.5)  # until the health file has this step
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "native":
        ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock: no Python thread of this process runs
    time.sleep(60)


if __name__ == "__main__":
    main()
