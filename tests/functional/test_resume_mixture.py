"""Runs on several sources: the shares are as the weights say; a run that goes on with other ranks has the same batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_jobs import SAYS_77, grpo_settings, launcher, run_job, series, tiny_settings, train, without_times

pytestmark = [pytest.mark.timeout(300), pytest.mark.cpu]
DATA = ("data/share/sums", "data/share/rest", "data/epoch/sums", "data/epoch/rest", "learnt/tokens", "learnt/samples")


@pytest.fixture(scope="module")
def task(task: Path) -> Path:
    records = [{"prompt": f"{a}+{b}=", "response": f"{a + b}"[: 1 + b % 2] * (1 + a)} for a in range(6) for b in range(5)]
    (task / "sums.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records[:10]))
    (task / "rest.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records[10:]))
    return task


def sft_settings(task: Path, max_steps: int) -> list[str]:
    sources = f"[{{path: {task}/sums.jsonl, weight: 3}}, {{path: {task}/rest.jsonl, weight: 1, max_records: 15}}]"
    return [
        *(one for one in tiny_settings(task) if not one.startswith(("data.", "rollout.", "model.micro_batch_size="))),
        *(f"data.train={sources}", f"data.cache={task}/cache", "data.num_workers=2", "data.max_length=16"),
        *("algorithm.batch_size=8", "model.micro_batch_size=4", f"loop.max_steps={max_steps}"),
    ]


def test_other_ranks_go_on_with_the_same_batches(task: Path) -> None:
    whole, parts = task / "whole", task / "parts"
    said = run_job(train("sft"), whole, sft_settings(task, 4))
    assert "shares of the 2 sources: sums 75.0%, rest 25.0%" in said
    assert f"{task}/rest.jsonl: 15 of 15 records used" in said and "25 rows of " in said
    # 4 steps of 8: of the 10 and 15 examples 24 and 8 were drawn
    assert series(whole, "data/share/sums") == [0.75] * 4 and series(whole, "data/epoch/sums")[-1] == 2.4
    assert series(whole, "data/epoch/rest")[-1] == pytest.approx(8 / 15)
    run_job(train("sft"), parts, sft_settings(task, 2))
    assert without_times(parts) == without_times(whole)[:2]
    run_job(launcher("sft"), parts, [*sft_settings(task, 4), "num_processes=2"])
    assert "resumed after step 2" in "".join(log.read_text() for log in (parts / "logs").glob("*.log"))
    assert all(series(parts, name) == series(whole, name) for name in DATA)
    assert series(parts, "sft/loss") == pytest.approx(series(whole, "sft/loss"), rel=1e-5)
    assert len(list((task / "cache").glob("*/manifest.json"))) == 2  # of three runs and four processes


def test_prompts_are_sampled_by_their_weights(task: Path) -> None:
    for name, most in (("low", 40), ("high", 64)):
        lines = (task / "prompts.jsonl").read_text().splitlines()[most - 40 if name == "low" else 40 : most]
        (task / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    sources = f"data.train=[{{path: {task}/low.jsonl, weight: 1}}, {{path: {task}/high.jsonl, weight: 3}}]"
    run_job(train("grpo"), task / "grpo", [*grpo_settings(task), *SAYS_77, sources, "loop.max_steps=1"])
    assert series(task / "grpo", "data/share/low") == [0.25] and series(task / "grpo", "data/share/high") == [0.75]
