"""`make chaos`, short: a PPO run of two actor ranks and a critic, hit twice, equals one that was left alone and leaves nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from chaos import WEIGHTS, Chaos, Kill, Left, Report, role, table

NUM_KILLS = 2


@pytest.mark.slow
@pytest.mark.pytriton
@pytest.mark.timeout(1200)
def test_a_run_that_is_hit_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:  # sockets of servers lie in it: a short path
        monkeypatch.setenv("TMPDIR", f"{folder}/tmp")
        report = Chaos(Path(folder), seed=7).run(NUM_KILLS)
    assert len(report.kills) == NUM_KILLS and report.num_runs >= 1
    assert report.left == Left()


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("python -u -m aligner.cli train ppo a=b", "actor"),
        ("python -m aligner.cli serve critic ppo", "critic"),
        ("/x/tritonserver --id 7 --model-repository /aligner.cli", "Triton"),
        ("python -I -S processes.py exec 17 python -m aligner.cli serve critic ppo", "critic"),
        ("python -I -S processes.py guard 0a 10", "helper process"),
        ("sleep 3", "helper process"),
    ],
)
def test_kinds_of_processes(command: str, kind: str) -> None:
    assert role(command) == kind
    assert kind in WEIGHTS


def test_the_table_counts_what_was_hit() -> None:
    kills = [Kill(victim="critic", after=1.0, went_on=True), Kill(victim="critic", after=2.0, went_on=False)]
    lines = table(Report(kills=kills, num_starts=2, num_runs=1, left_by_dead=Left(files=1), left=Left())).splitlines()
    assert "| critic | 2 | 1 | 1 |" in lines and "| together | 2 | 1 | 1 |" in lines
    assert lines[-1] == "Left at the end: 0 processes, 0 listening ports, 0 segments of shared memory, 0 temporary files."
