"""`make chaos`, short: a PPO run of two actor ranks and a critic, hit twice, equals one that was left alone and leaves nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from chaos import Chaos, table

NUM_KILLS = 2


@pytest.mark.slow
@pytest.mark.pytriton
@pytest.mark.timeout(1200)
def test_a_run_that_is_hit_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:  # sockets of servers lie in it: a short path
        monkeypatch.setenv("TMPDIR", f"{folder}/tmp")
        report = Chaos(Path(folder), seed=7).run(NUM_KILLS)
    assert len(report.kills) == NUM_KILLS and report.num_runs >= 1
    assert not report.left and f"| together | {NUM_KILLS} |" in table(report)
