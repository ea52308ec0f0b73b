"""Rejection sampling on fakes: what is kept, what a step trains on, and the config's checks."""

from __future__ import annotations

import pytest
import torch
from rollout_parts import Episode, scored

from aligner.algorithms.rejection_sampling import RejectionSampling, RejectionSamplingConfig
from aligner.data.collate import rollout_batch
from aligner.loop.loop import Clock
from aligner.losses.sft import sft_loss
from aligner.online.collect import ScoredRollouts
from aligner.online.selection import updates_of
from aligner.telemetry.metrics import values
from aligner.types import TokenOutputs


def sampler(fakes, task, log=None, **config) -> RejectionSampling:
    settings = {"prompts_per_step": 2, "group_size": 2, "mini_batch_size": 4} | config
    return RejectionSampling(RejectionSamplingConfig(**settings), fakes.FakePolicy([] if log is None else log), task)


def collected(fakes) -> ScoredRollouts:
    """Rewards 1, 5 (cut at the length limit) | 3, 3 | 2, none."""
    responses = [(1, fakes.EOS), (2, 2), (3, fakes.EOS), (4, fakes.EOS), (5, 5, fakes.EOS), (6, fakes.EOS)]
    rollouts = [fakes.rollout(fakes.prompt(row // 2), *response) for row, response in enumerate(responses)]
    valid = torch.tensor([True] * 5 + [False])
    return ScoredRollouts(rollouts=rollouts, rewards=torch.tensor([1.0, 5, 3, 3, 2, 0]), valid=valid)


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({}, [0, 2, 4]),  # the best response of the first prompt was cut; of equals the first; one without a reward is never kept
        ({"drop_truncated": False}, [1, 2, 4]),
        ({"keep": 2, "drop_truncated": False}, [0, 1, 2, 3, 4]),
        ({"require_spread": True}, [0]),  # the first prompt's rewards differ, though the better response is not kept
        ({"min_reward": 2.0}, [2, 4]),
    ],
)
def test_what_is_kept(settings: dict, rows: list[int], fakes, make_task) -> None:
    algorithm, given = sampler(fakes, make_task([]), prompts_per_step=3, **settings), collected(fakes)
    assert algorithm.select(rollout_batch(given.rollouts, 9), given).tolist() == rows


def test_examples_and_metrics_by_hand(fakes, make_task) -> None:
    """Rows 0 and 4: rewards 1 and 2, responses of 2 and 3 tokens; loss 5 tokens of -log-prob 0.5."""
    algorithm, given = sampler(fakes, make_task([]), prompts_per_step=3), collected(fakes)
    batch, kept = rollout_batch(given.rollouts, 9), torch.tensor([0, 4])
    examples = algorithm.examples(batch, kept)
    assert examples.tokens.tolist() == [[1, 1, 0, 9], [3, 5, 5, 0]]
    assert examples.loss_mask.tolist() == [[False, True, True, False], [False, True, True, True]]
    result = sft_loss(TokenOutputs(logprobs=torch.full((2, 4), -0.5)), examples)
    assert (result.total.item(), result.count.item()) == (2.5, 5)
    assert torch.equal(examples.rollout_logprobs, -1.0 * examples.loss_mask)
    watched = algorithm.loss(TokenOutputs(logprobs=torch.full((2, 4), -0.5)), examples)
    assert watched.total == result.total and values(watched.metrics)["rollout/logprob_gap"] == 0.5
    metrics = algorithm.kept_metrics(kept, batch, given)
    expected = {"fraction": 2 / 6, "prompts_without_any": 1 / 3, "reward": 1.5, "response_length": 2.5}
    assert metrics == pytest.approx({f"kept/{name}": value for name, value in expected.items()})


def test_sessions_are_kept_with_all_their_rows(fakes, make_task) -> None:
    """Of two sessions each, the second of two rows is the best; then the first of three, one of which was cut: the other is kept."""

    def session(number: int, reward: float, *responses: tuple[int, ...]) -> Episode:
        return Episode(rollouts=tuple(fakes.rollout(fakes.prompt(number), *own) for own in responses), reward=reward)

    end = fakes.EOS
    episodes = [session(0, 1.0, (1, end)), session(0, 2.0, (2, 2, end), (3, end))]
    episodes += [session(1, 5.0, (4, end), (5, 5), (6, end)), session(1, 3.0, (7, end), (8, 8, end))]
    given = scored(episodes)
    algorithm, batch = sampler(fakes, make_task([])), rollout_batch(given.rollouts, 9)
    kept = algorithm.select(batch, given)
    rows = given.episodes.rows_of(kept)
    assert kept.tolist() == [1, 3] and rows.tolist() == [1, 2, 6, 7]
    assert algorithm.kept_metrics(kept, batch, given) == {
        **{"kept/fraction": 0.5, "kept/prompts_without_any": 0.0, "kept/reward": 2.5, "kept/response_length": 5.0}
    }
    account = algorithm.account(kept, batch, given)
    assert (account["learnt/samples"], account["left_out/truncated"], account["left_out/not_best"]) == (4, 3, 1)
    parts = updates_of(algorithm.examples(batch, rows), 1, 2, key="k", least=2, episodes=given.episodes.take(rows))
    first = [[2, 3], [7, 8]]
    seen = [part.tokens[part.loss_mask][part.tokens[part.loss_mask] != end].unique().tolist() for part in parts]
    assert seen[:2] == first and sorted(seen[2:]) == first  # a session is never cut, and what fills a part up is not learnt from
    assert [part.tokens.shape[0] for part in parts] == [4] * 4


def test_a_step(fakes, make_task) -> None:
    log: list[str] = []
    task = make_task(log, batch_size=2, reference=None)
    algorithm = sampler(fakes, task, log)
    metrics = algorithm.step(1, Clock()).metrics
    assert log == ["policy sleeps", "engine wakes", "generate", "engine sleeps", "update", "policy sleeps", "refit 1"]
    assert task.engine.asked[0][0] == [0, 0, 1, 1]
    (batch,) = algorithm.policy.trained
    assert batch.tokens.tolist() == [[1, 7, 0, 9], [2, 7, 7, 0]]  # the first response to each prompt: the fake rewards a prompt's id
    assert metrics["rollout/reward"] == 0.5 and metrics["kept/reward"] == 0.5 and metrics["kept/fraction"] == 0.5


def test_a_step_that_keeps_nothing_trains_nothing(fakes, make_task) -> None:
    log: list[str] = []
    algorithm = sampler(fakes, make_task(log, batch_size=2), log, min_reward=7.0)
    metrics = algorithm.step(1, Clock()).metrics
    assert "update" not in log and metrics["kept/prompts_without_any"] == 1.0 and "kept/reward" not in metrics
