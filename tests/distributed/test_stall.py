"""A rank that stands still is named, with everybody's stack, and the component ends."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "stall_job.py"
RANKS = 3
DEADLINE_SECONDS = 60.0


@pytest.fixture
def run_job(tmp_path, preloaded, clean_environment):
    """Runs the job; returns the ranks' exit codes (None: still there) once `awaited` have ended, and their outputs."""
    from torch.distributed import TCPStore

    ranks = []

    def run(how: str, awaited: list[int]) -> tuple[list[int | None], list[str]]:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        for rank in range(RANKS):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
            log = tmp_path / f"{rank}.log"
            ranks.append(preloaded.start([str(JOB), str(tmp_path / "run"), how], clean_environment(common | place), log, tmp_path))
        deadline = time.monotonic() + DEADLINE_SECONDS
        while any(ranks[rank].poll() is None for rank in awaited) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [rank.poll() for rank in ranks], [(tmp_path / f"{rank}.log").read_text() for rank in range(RANKS)]

    yield run
    for rank in ranks:
        if rank.poll() is None:
            os.kill(rank.pid, signal.SIGKILL)
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
