"""What is reported of a step's responses for the rules of aligner/reporting/diagnosis_rules.py."""

from __future__ import annotations

import pytest
import torch

from aligner.online.collect import ScoredRollouts
from aligner.online.response_health import COMPARED_TOKENS, MAX_SAMPLED, NGRAM, READ_TOKENS, health_metrics
from aligner.types import FinishReason, Prompt, Rollout

EOS = 9


def rollout(response: tuple[int, ...], *, prompt: int = 0, reason: FinishReason = FinishReason.stop, written: int | None = None) -> Rollout:
    """Log-prob -0.5 for each token that the policy wrote: the first `written` (None: all)."""
    count = len(response) if written is None else written
    mine = tuple(position < count for position in range(len(response)))
    return Rollout(
        prompt=Prompt(id=prompt, tokens=(1, prompt), source=""),
        response=response,
        logprobs=tuple(-0.5 * own for own in mine),
        finish_reason=reason,
        policy_version=0,
        seed=0,
        written=None if written is None else mine,
    )


def metrics(*rollouts: Rollout, rewards: list[float] | None = None, **fields) -> dict[str, float]:
    collected = ScoredRollouts(rollouts=list(rollouts), rewards=torch.tensor(rewards or [0.0] * len(rollouts)), **fields)
    return health_metrics(collected.rollouts, collected.rewards, collected.valid, collected.parts)


def test_entropy_is_of_the_tokens_that_the_policy_wrote() -> None:
    assert metrics(rollout((5, 5, EOS)), rollout((5, 6, 6, 6, 6), written=1))["rollout/entropy"] == 0.5
    assert "rollout/entropy" not in metrics(rollout(()))


def test_one_response_of_each_prompt_is_compared() -> None:
    answers = [(7,), (7,), (7,), (8,), (5,), (6,), (4,), (3,)]
    rollouts = [rollout(answer, prompt=prompt) for prompt, answer in enumerate(answers)]
    same = [rollout((7,), prompt=7) for _ in range(8)]  # further samples of one prompt
    assert metrics(*rollouts, *same)["rollout/same_response"] == 3 / 8
    assert "rollout/same_response" not in metrics(*rollouts[:7], *same[:0])  # too few prompts to tell
    long = [rollout((*range(COMPARED_TOKENS), prompt), prompt=prompt) for prompt in range(8)]
    assert metrics(*long)["rollout/same_response"] == 1.0
    many = [rollout((prompt % 2,), prompt=prompt) for prompt in range(2 * MAX_SAMPLED)]
    assert metrics(*many)["rollout/same_response"] == 1.0  # every second prompt is looked at


def test_repeated_ngrams() -> None:
    loop = (1, 2) * NGRAM  # 9 sequences of 8 tokens, 2 of them distinct
    distinct = tuple(range(2 * NGRAM))
    assert metrics(rollout(loop), rollout(distinct), rollout((3,) * 14))["rollout/repeated_ngrams"] == pytest.approx(7 / 9 / 2)
    assert "rollout/repeated_ngrams" not in metrics(rollout((3,) * 14))  # too short
    late = rollout((*range(1000, 3000), *((4,) * READ_TOKENS)))
    assert metrics(late)["rollout/repeated_ngrams"] == pytest.approx(1 - 1 / (READ_TOKENS - NGRAM + 1))


def test_rewards_by_how_a_response_ended() -> None:
    rollouts = [rollout((5, EOS)), rollout((5, EOS)), rollout((5, 5), reason=FinishReason.length), rollout((EOS,)), rollout(())]
    measured = metrics(*rollouts, rewards=[1.0, 2.0, 3.0, 4.0, 6.0])
    assert {name: value for name, value in measured.items() if "entropy" not in name} == {
        "rollout/empty_fraction": 0.4,
        "rollout/reward_ended": 1.5,
        "rollout/reward_truncated": 3.0,
        "rollout/reward_empty": 5.0,
    }
    one_token = metrics(rollout((5,), reason=FinishReason.length), rewards=[1.0])
    assert one_token["rollout/empty_fraction"] == 0.0 and "rollout/reward_ended" not in one_token


def test_parts_of_rewards_that_were_given() -> None:
    parts = {"form": torch.tensor([1.0, 1.0, float("nan")]), "maths": torch.tensor([0.0, 2.0, 1.0])}
    valid = torch.tensor([True, True, False])
    measured = metrics(*[rollout((5, EOS))] * 3, rewards=[1.0, 3.0, 50.0], parts=parts, valid=valid)
    assert (measured["reward_std/form"], measured["reward_std/maths"], measured["rollout/reward_ended"]) == (0.0, 1.0, 2.0)
    none = metrics(rollout((5, EOS)), parts={"form": torch.ones(1)}, valid=torch.tensor([False]))
    assert "reward_std/form" not in none and "rollout/reward_ended" not in none
