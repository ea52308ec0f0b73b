"""What steps say they learnt from, by hand, and what ends a run that learns nothing."""

from __future__ import annotations

import pytest
import torch

from aligner.algorithms.rejection_sampling import RejectionSampling, RejectionSamplingConfig
from aligner.data.collate import rollout_batch
from aligner.errors import ConfigError
from aligner.loop.learnt import LearntNothingAlarm, of_mask, of_rows
from aligner.loop.loop import Clock
from aligner.models.training.guard import GuardConfig, LearntNothing
from aligner.online.collect import ScoredRollouts
from aligner.reporting.summary import is_empty, reasons, totals

HEALTHY = {"learnt/tokens": 5.0, "optim/grad_norm": 0.1, "optim/updates": 1.0, "optim/lr": 1e-3}
EMPTY = {
    "nothing kept": {"learnt/tokens": 0.0, "learnt/samples": 0.0, "learnt/samples_seen": 4.0, "left_out/truncated": 4.0},
    "no gradient": {**HEALTHY, "optim/grad_norm": 0.0},
    "every update left out by the guard": {**HEALTHY, "optim/grad_norm": float("nan"), "optim/updates": 0.0, "optim/skipped": 2.0},
    "no token with a weight": {**HEALTHY, "learnt/tokens": 0.0},
}
TOLD = {
    "nothing kept": "of 12 samples 100.0% cut at the length limit",
    "no gradient": "the gradient of every update was 0",
    "every update left out by the guard": "no update was made",
    "no token with a weight": "no token had a weight in a loss",
}


def alarm(weights: list[list[int]] | None = None, **settings) -> LearntNothingAlarm:
    """One whose weights are these, one after the other (the last stays); others at every look, where None are given."""
    looks = iter(range(1000))
    given = iter(weights or [])
    last: list[list[int]] = []

    def fingerprint() -> list[int]:
        if weights is None:
            return [next(looks)]
        last.extend([next(given, last[-1] if last else [])])
        return last[-1]

    return LearntNothingAlarm(GuardConfig(**({"learnt_nothing_steps": 3} | settings)), fingerprint)


def test_of_mask_by_hand() -> None:
    """Rows with 2, 0, 0, 0 tokens: of two pairs one has none, of four rows three."""
    mask = torch.tensor([[False, True, True], [False] * 3, [False] * 3, [False] * 3])
    tokens = {"learnt/tokens": 2, "learnt/tokens_seen": 2}
    assert of_mask(mask, unit=2) == {"learnt/samples": 1, "learnt/samples_seen": 2, "left_out/no_token": 1} | tokens
    assert of_mask(mask)["left_out/no_token"] == 3
    assert of_mask(mask[:1]) == {"learnt/samples": 1, "learnt/samples_seen": 1} | tokens


def test_a_row_is_left_out_for_its_first_reason() -> None:
    weighs = torch.tensor([[True, True], [False, False], [False, False], [False, False]])
    cut, invalid = torch.tensor([True, True, True, False]), torch.tensor([False, True, False, False])
    found = of_rows(weighs, torch.ones_like(weighs), no_reward=invalid, truncated=cut, no_signal=torch.ones(4, dtype=torch.bool))
    assert (found["learnt/samples"], found["learnt/tokens"], found["learnt/tokens_seen"]) == (1, 2, 8)
    assert {name: found[f"left_out/{name}"] for name in ("no_reward", "truncated", "no_signal")} == dict.fromkeys(
        ("no_reward", "truncated", "no_signal"), 1
    )
    counts = totals([found, found])
    assert counts["learnt/samples_seen"] == 8 and sorted(line[:5] for line in reasons(counts)) == ["25.0%"] * 3


@pytest.mark.usefixtures("topology")
@pytest.mark.parametrize("kind", EMPTY)
def test_so_many_empty_steps_in_a_row_end_a_run(kind: str) -> None:
    watch, metrics = alarm(), EMPTY[kind]
    watch.begin(0)
    assert is_empty(metrics) and not is_empty(HEALTHY)
    verdicts = [watch.judge(step, given) for step, given in enumerate([metrics, metrics, HEALTHY, metrics, metrics], start=1)]
    assert not any(verdict.halt or verdict.note for verdict in verdicts)  # a step in between learnt
    halt = watch.judge(6, metrics).halt
    assert halt.startswith(f"nothing was learnt in the last 3 steps, to step 6: {TOLD[kind]}")
    assert halt.endswith("(guard.learnt_nothing=stop, guard.learnt_nothing_steps=3)")


def test_a_step_that_does_not_say_what_it_learnt_from_is_not_judged() -> None:
    assert not is_empty({"optim/step_left_out": 1.0}) and not is_empty({})


@pytest.mark.usefixtures("topology")
def test_a_warning_instead_comes_again() -> None:
    watch = alarm(learnt_nothing=LearntNothing.warn)
    watch.begin(0)
    notes = [watch.judge(step, EMPTY["nothing kept"]).note for step in range(1, 7)]
    assert [bool(note) for note in notes] == [False, False, True, False, False, True]
    assert notes[2].startswith("warning: nothing was learnt in the last 3 steps")
    assert watch.verdict(watch.whole_run(has_learnt_before=False)).note.startswith("warning: nothing was learnt in the whole run")


@pytest.mark.usefixtures("topology")
def test_weights_that_do_not_change() -> None:
    watch = alarm([[1, 2]])
    watch.begin(4)
    verdicts = [watch.judge(step, HEALTHY) for step in (5, 6, 7)]
    assert [bool(verdict.halt) for verdict in verdicts] == [False, False, True]
    assert verdicts[2].halt.startswith("no weight changed in 3 updates to step 7: optimizer.lr is too small")
    changes, hidden, still = alarm([[1, 2], [1, 3]]), alarm([[]]), alarm([[1, 2]])
    for other, metrics in ((changes, HEALTHY), (hidden, HEALTHY), (still, {**HEALTHY, "optim/lr": 0.0})):
        other.begin(0)  # changed; the optimizer does not show its weights; the schedule's rate is 0
        assert not any(other.judge(step, metrics).halt for step in (1, 2, 3))


@pytest.mark.usefixtures("topology")
def test_the_end_of_a_run() -> None:
    """Shorter than `learnt_nothing_steps`, in one start or the last of several."""
    for began, before, metrics, weights, said in (
        (0, False, EMPTY["nothing kept"], None, "nothing was learnt in the whole run, to step 2: of 8 samples 100.0% cut at the"),
        (7, False, EMPTY["nothing kept"], None, "nothing was learnt in the whole run, to step 9"),
        (7, True, EMPTY["nothing kept"], None, ""),  # now and then a step learns nothing
        (0, False, HEALTHY, None, ""),
        (0, False, HEALTHY, [[1]], "no weight changed in 2 updates to step 2"),
        (7, True, HEALTHY, [[1]], ""),  # the schedule may have come to an end
    ):
        watch = alarm(weights)
        watch.begin(began)
        assert not any(watch.judge(began + step, metrics).halt for step in (1, 2))
        assert watch.num_steps == 2
        found = watch.whole_run(has_learnt_before=before)
        assert found.startswith(said) and bool(found) == bool(said)


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match=r"guard\.learnt_nothing_steps=0: must be at least 1"):
        GuardConfig(learnt_nothing_steps=0)


def test_rejection_sampling_accounts_for_every_response(fakes, make_task) -> None:
    """Rewards 1, 5 (cut) | 3, 3 | 2, none."""
    responses = [(1, fakes.EOS), (2, 2), (3, fakes.EOS), (4, fakes.EOS), (5, 5, fakes.EOS), (6, fakes.EOS)]
    rollouts = [fakes.rollout(fakes.prompt(row // 2), *response) for row, response in enumerate(responses)]
    given = ScoredRollouts(rollouts=rollouts, rewards=torch.tensor([1.0, 5, 3, 3, 2, 0]), valid=torch.tensor([True] * 5 + [False]))
    config = RejectionSamplingConfig(prompts_per_step=3, group_size=2, min_reward=2.0)
    algorithm, batch = RejectionSampling(config, fakes.FakePolicy([]), make_task([])), rollout_batch(rollouts, 9)
    assert algorithm.account(algorithm.select(batch, given), batch, given) == {
        **{"learnt/samples": 2, "learnt/samples_seen": 6, "learnt/tokens": 5, "learnt/tokens_seen": 13},
        **{f"left_out/{why}": 1 for why in ("no_reward", "truncated", "below_min_reward", "not_best")},
    }


def test_grpo_without_a_signal_has_learnt_nothing(fakes, make_task) -> None:
    from aligner.algorithms.grpo import GRPO, GRPOConfig

    def step(reward) -> dict[str, float]:
        config = GRPOConfig(prompts_per_step=2, group_size=2, mini_batch_size=4)
        task = make_task([], batch_size=2, reward=fakes.FakeReward(reward))
        return dict(GRPO(config, fakes.FakePolicy([]), task).step(1, Clock()).metrics)

    equal, differ = step(lambda rollout: 0.3), step(lambda rollout: float(rollout.seed % 2))
    assert is_empty(equal) and equal["left_out/no_signal"] == equal["learnt/samples_seen"] == 4
    assert not is_empty(differ) and differ["learnt/samples"] == 4 and "left_out/no_signal" not in differ
