"""A rank that stands still is named, with everybody's stack, and the component ends."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import time
from dataclasses import dataclass, field

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from training_jobs import eventually

from aligner.loop.loop import Clock
from aligner.parallel.topology import ParallelConfig
from aligner.run.session import Session, open_session
from aligner.run.settings import RunConfig

RANKS = 3
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


def component(directory: str, how: str) -> None:
    """A component of which rank 1 stalls in step 3: sleep, stop or native. Ranks 0 and 1 are one group, all of them another: rank 2 waits
    for rank 0, which waits for rank 1."""
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


@pytest.fixture
def run_job(tmp_path, preloaded, clean_environment):
    """Runs the component; returns the ranks' exit codes (None: still there) once `awaited` have ended, and their outputs."""
    started = []

    def run(how: str, awaited: list[int]) -> tuple[list[int | None], list[str]]:
        ranks.ask(tmp_path, component, (str(tmp_path / "run"), how))
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, variables in enumerate(ranks.local_variables(RANKS, store.port)):
            log = tmp_path / f"{rank}.log"
            started.append(preloaded.start([ranks.__file__, str(tmp_path)], clean_environment(variables), log, tmp_path))
        eventually(lambda: all(started[rank].poll() is not None for rank in awaited), 60)
        return [rank.poll() for rank in started], [(tmp_path / f"{rank}.log").read_text() for rank in range(RANKS)]

    yield run
    for rank in started:
        rank.kill()
        rank.wait()


def test_a_rank_that_sleeps_is_named_and_all_end(run_job, tmp_path):
    codes, outputs = run_job("sleep", [0, 1, 2])
    assert codes == [1, 1, 1], outputs
    report = (tmp_path / "run" / "stacks" / "actor.report.txt").read_text()
    assert all(report in output for output in outputs)  # everybody says it
    stalled = r"rank 1 \(\S+\) stalled: in phase train of step 3 outside any collective since \d\d:\d\d:\d\d \(after all_reduce #2"
    assert re.search(stalled, report)
    # Steps 1 and 2 made two collectives of each group; the third of the pair was entered by rank 0, the third of the world by rank 2.
    assert "it is waited for by rank 0 in all_reduce #3 (first pair group of 2), rank 2 in all_reduce #3 (world group of 3)" in report
    assert "in phase train of step 3 in all_reduce #3 (world group of 3), waiting for ranks 0-1: rank 2" in report
    stacks = {rank: next((tmp_path / "run" / "stacks").glob(f"actor.{rank}.*.txt")).read_text() for rank in range(RANKS)}
    assert "in stall" in stacks[1] and "in all_reduce" in stacks[0]
    health = json.loads((tmp_path / "run" / "health" / "actor.0.json").read_text())
    assert (health["record"]["phase"], health["record"]["step"], health["record"]["inside"]["name"]) == ("train", 3, "all_reduce")


def test_a_process_that_was_stopped_is_named_by_the_others(run_job, tmp_path):
    codes, outputs = run_job("stop", [0, 2])
    assert codes == [1, None, 1], outputs  # the launcher ends the stopped one
    report = (tmp_path / "run" / "stacks" / "actor.report.txt").read_text()
    assert report in outputs[0] and report in outputs[2]
    pid = re.search(r"pid (\d+)", outputs[1])[1]
    assert re.search(rf"rank 1 \(\S+\) does not run \(process {pid} is in state T \(stopped\); it did not write its stack", report)
    assert "it was last seen in phase train of step 3 outside any collective" in report
    assert not list((tmp_path / "run" / "stacks").glob("actor.1.2*.txt"))


def test_a_process_whose_interpreter_is_held_ends_itself(run_job, tmp_path):
    codes, outputs = run_job("native", [0, 1, 2])
    assert codes == [1, 1, 1], outputs
    assert "rank 1" in (tmp_path / "run" / "stacks" / "actor.report.txt").read_text()
    assert "Timeout" in outputs[1] and "in stall" in outputs[1]  # faulthandler's own thread needs no lock
