"""GRPO with judges behind an API: one scores responses, one compares those of a group, whose rows are of two replicas; a resumed run pays
for no question again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from judge_server import Refusal, asked, judge_server
from training_jobs import grpo_settings, launcher, metrics_of, run_job

pytestmark = pytest.mark.timeout(600)
KEY = "a-secret-key"


def reply(body: dict[str, Any]) -> str | Refusal:
    """Counts digits; refuses one question in five the first time."""
    text = asked(body)
    if "[Response A]" in text:
        one, two = (text.split(f"[Response {name}]\n")[1].split("\n\n[")[0] for name in "AB")
        return f"Better: {'tie' if len(one) == len(two) else 'A' if len(one) > len(two) else 'B'}"
    if text not in SEEN and len(SEEN) % 5 == 0:
        SEEN.add(text)
        return Refusal(429, headers={"Retry-After": "0.05"})
    SEEN.add(text)
    said = text.split("[Response]\n")[1].split("\n\n[")[0]
    return "no idea" if "77" in said else f"Score: {min(10, len(said))}"


SEEN: set[str] = set()


def test_a_run_with_judges(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    run = task / "judged"
    with judge_server(reply) as server:
        settings = [one for one in grpo_settings(task) if not one.startswith("reward.function")]
        settings += ["num_processes=2", "loop.save_every=2", "guard.learnt_nothing=warn"]
        for name, judge in {"score": "temperature=0", "beats": "compare=group"}.items():
            settings += [f"reward.functions.{name}.url={server.url}", f"reward.functions.{name}.judge.model=m"]
            settings += [f"reward.functions.{name}.token_variable=JUDGE_KEY", f"reward.functions.{name}.judge.{judge}"]
        settings += ["reward.functions.beats.weight=2"]
        said = run_job(launcher("grpo"), run, [*settings, "loop.max_steps=2"])
        asked_before = len(server.requests)
        assert set(server.keys) == {f"Bearer {KEY}"} and asked_before > 50
        run_job(launcher("grpo"), run, [*settings, "loop.max_steps=3"])
        questions = [json.dumps(body, sort_keys=True) for body in server.requests]
    steps = metrics_of(run)
    for step in steps:
        values = step.values
        whole = values["reward/score"] + 2 * values["reward/beats"]
        assert values["rollout/reward"] == pytest.approx(whole, abs=1e-4)
        assert 0 <= values["reward/beats"] <= 1 and values["reward/score_tokens"] >= 0 and "reward/beats_tokens" in values
    assert [step.step for step in steps if step.step] == [1, 2, 3] and not any(math.isnan(step.values["reward/score"]) for step in steps)
    once = [question for question in set(questions) if questions.count(question) > 1]
    # Two ranks may ask the same in one step, and some were refused at first; nothing is asked a third time.
    assert max(questions.count(question) for question in once or questions) <= 3
    assert "tokens asked" in said
    kept = list((run / "judges").glob("*/*.jsonl"))
    assert {path.name for path in kept} == {"score.jsonl", "beats.jsonl"}
    everything = [path for path in run.rglob("*") if path.is_file() and path.suffix in (".json", ".jsonl", ".yaml", ".log")]
    assert everything and not any(KEY in path.read_text(errors="replace") for path in everything)
