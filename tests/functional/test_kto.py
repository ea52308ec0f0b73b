"""KTO from the entry script: it learns a rule that holds for unseen responses; a run in two parts equals one in one, to the last bit."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from resumed_runs import same_runs
from training_jobs import metrics_of, run_job, steps_of, tiny_settings, train, write_task

pytestmark = pytest.mark.timeout(600)
TRAIN = train("kto")
NUM_STEPS, FIRST = 12, 5


def write_judged(path: Path, *, seed: int, count: int) -> None:
    """Prompts like `3+4=`; responses of even digits are good, those of odd digits bad: one of the former to two of the latter."""
    draw = random.Random(seed)
    records = []
    for number in range(count):
        good = number % 3 == 0
        response = "".join(draw.choices("02468" if good else "13579", k=draw.randint(2, 6)))
        prompt = f"{draw.randrange(10)}+{draw.randrange(10)}="
        records.append({"prompt": prompt, "response": response, "preference": "chosen" if good else "rejected"})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def settings(folder: Path) -> list[str]:
    """32 of 150 responses a step, so that step 5 straddles epochs, in micro-batches of 8."""
    return [
        *(one for one in tiny_settings(folder) if not one.startswith(("data.", "rollout.", "optimizer.lr=", "model.micro_batch_size="))),
        *(f"data.train={folder / 'judged.jsonl'}", f"data.validation={folder / 'held_out.jsonl'}", "data.max_length=16"),
        *("algorithm.batch_size=32", "algorithm.desirable_weight=2.0", "optimizer.lr=5e-3", "model.micro_batch_size=8"),
        *("loop.validate_first=true", "loop.validate_every=6"),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The directories of a run in one and of one in two parts, and what the first said."""
    folder = tmp_path_factory.mktemp("kto")
    write_task(folder)
    write_judged(folder / "judged.jsonl", seed=1, count=150)
    write_judged(folder / "held_out.jsonl", seed=2, count=60)
    whole, parts = folder / "whole", folder / "parts"
    said = run_job(TRAIN, whole, [*settings(folder), f"loop.max_steps={NUM_STEPS}"])
    run_job(TRAIN, parts, [*settings(folder), f"loop.max_steps={FIRST}"])
    assert f"resumed after step {FIRST}" in run_job(TRAIN, parts, [*settings(folder), f"loop.max_steps={NUM_STEPS}"])
    return whole, parts, said


def test_it_tells_good_from_bad_on_unseen_responses(runs: tuple[Path, Path, str]) -> None:
    whole, _, said = runs
    assert "50 desirable and 100 undesirable responses\n" in said  # weights that make up for the numbers need no advice
    before, *_, after = (line.values for line in metrics_of(whole) if "validation/accuracy" in line.values)
    # The policy is the reference: all sigma(0), z is 0, a third has weight 2.
    assert before["validation/loss"] == pytest.approx(0.5 * 4 / 3) and before["validation/kl"] == before["validation/accuracy"] == 0
    assert after["validation/accuracy"] > 0.9 and after["validation/loss"] < 0.55
    assert after["validation/desirable_reward"] > after["validation/undesirable_reward"] + 0.3


def test_in_two_parts_it_is_the_same_to_the_last_bit(runs: tuple[Path, Path, str]) -> None:
    whole, parts, _ = runs
    assert steps_of(parts) == list(range(NUM_STEPS + 1))
    same_runs(parts, whole, NUM_STEPS)
