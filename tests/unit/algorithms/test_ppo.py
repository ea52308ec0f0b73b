"""PPO on fakes: what it makes of a batch, by hand, and in which order it talks to its parts."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from aligner.algorithms.ppo import PPO, PPOConfig
from aligner.data.collate import rollout_batch
from aligner.errors import ServerUnreachable
from aligner.loop.loop import Clock
from aligner.losses.shaping import ShapingConfig, Standardize
from aligner.online.collect import ScoredRollouts
from aligner.online.critics import ServedCritic


def ppo(fakes, task, log=None, critic=None, **config) -> PPO:
    log = [] if log is None else log
    settings = {"rollouts_per_step": 4, "mini_batch_size": 2, "gae_lambda": 0.5, "kl_coef": 0.1} | config
    return PPO(PPOConfig(**settings), fakes.FakePolicy(log), task, ServedCritic(task, critic or fakes.FakeCritic(log)))


@pytest.fixture
def case(fakes):
    """Two rollouts: 5 -> 1 EOS with score 1, and 5 6 -> 3, cut, with score 0. Values of prompt tokens (9) must not matter."""
    stopped, cut = fakes.rollout(fakes.prompt(0, 5), 1, fakes.EOS), fakes.rollout(fakes.prompt(1, 5, 6), 3)
    values = [torch.tensor([9, 0.5, 0.25]), torch.tensor([9, 9, 0.2])]
    collected = ScoredRollouts(rollouts=[stopped, cut], rewards=torch.tensor([1.0, 0.0]), values=values)
    kl = torch.tensor([[0, 0.5, -0.2], [0, 0, 1.0]])
    return rollout_batch(collected.rollouts, pad_id=9), collected, torch.full((2, 3), -1.0), kl


def test_experience_by_hand(fakes, make_task, case) -> None:
    """gamma 1, lambda 0.5, kl_coef 0.1.

    row 0: rewards -0.05, 1 + 0.02 (the end token carries the score); deltas -0.05 + 0.25 - 0.5 = -0.3 and 1.02 - 0.25 = 0.77;
           advantages -0.3 + 0.5 * 0.77 = 0.085 and 0.77; returns 0.585 and 1.02
    row 1: reward -0.1; delta = advantage = -0.1 - 0.2 = -0.3; return -0.1
    whitening over all three tokens: mean 0.555 / 3 = 0.185, deviations -0.1, 0.585, -0.485, variance 0.58745 / 3
    """
    batch, collected, old_logprobs, kl = case
    policy_batch, value_batch = ppo(fakes, make_task([])).experience(batch, collected, old_logprobs, kl)
    std = math.sqrt(0.58745 / 3)
    expected = torch.tensor([[0, -0.1 / std, 0.585 / std], [0, 0, -0.485 / std]])
    torch.testing.assert_close(policy_batch.advantages, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(value_batch.returns, torch.tensor([[0, 0.585, 1.02], [0, 0, -0.1]]))
    mask = value_batch.loss_mask
    assert mask.tolist() == policy_batch.loss_mask.tolist() == [[False, True, True], [False, False, True]]
    torch.testing.assert_close(value_batch.old_values * mask, torch.tensor([[0, 0.5, 0.25], [0, 0, 0.2]]))
    assert policy_batch.old_logprobs is old_logprobs
    assert policy_batch.rollout_logprobs is batch.rollout_logprobs


def test_a_truncated_response_is_left_out_of_both_losses(fakes, make_task, case) -> None:
    """Row 0 alone is whitened: 0.085 and 0.77 are one standard deviation below and above their mean."""
    batch, collected, old_logprobs, kl = case
    policy_batch, value_batch = ppo(fakes, make_task([]), mask_truncated=True).experience(batch, collected, old_logprobs, kl)
    torch.testing.assert_close(policy_batch.advantages, torch.tensor([[0.0, -1, 1], [0, 0, 0]]), rtol=1e-4, atol=1e-6)
    assert policy_batch.loss_mask.tolist() == value_batch.loss_mask.tolist() == [[False, True, True], [False, False, False]]


def test_the_order_of_a_step(fakes, make_task) -> None:
    log: list[str] = []
    algorithm = ppo(fakes, make_task(log), log)
    first = algorithm.step(1, Clock()).metrics
    # Values of finished responses are asked for while others are sampled; the critic trains beside the policy.
    sampling = ["policy sleeps", "engine wakes", "generate", "values", "values", "engine sleeps"]
    assert log == [*sampling, "logprobs", "critic trains 1", "update", "update", "policy sleeps", "refit 2"]
    assert "critic/loss" not in first
    second = algorithm.step(2, Clock()).metrics
    assert (second["critic/loss"], second["critic/optim_lr"], second["critic/explained_variance"]) == (1.0, 0.5, 0.75)  # of step 1
    assert log[-1] == "refit 4"
    # Policy -1, reference -1.5 on every token: KL 0.5 a token. Rewards are the prompts' ids.
    assert (second["policy/kl"], second["policy/kl_coef"], second["rollout/reward"]) == (0.5, 0.1, 1.5)
    assert second["optim/steps"] == 2


def test_the_order_of_a_step_on_shared_gpus(fakes, make_task) -> None:
    """Nothing is asked of the critic but while the actor waits; the numbers, and when they come, are the same."""
    log: list[str] = []

    class Shared:
        @contextmanager
        def given_away(self):
            log.append("away")
            yield
            log.append("back")

    apart, together = ppo(fakes, make_task([])), ppo(fakes, make_task(log, shared=Shared()), log)
    for step in (1, 2):
        metrics = [one.step(step, Clock()).metrics for one in (apart, together)]
        same = [{k: v for k, v in one.items() if "per_second" not in k and "imbalance" not in k} for one in metrics]
        assert same[0] == same[1]
    sampling = ["policy sleeps", "engine wakes", "generate", "engine sleeps", "away", "values", "values", "back"]
    step = [*sampling, "logprobs", "away", "critic trains 1", "back", "update", "update", "policy sleeps", "refit 2"]
    assert log[: len(step)] == step


def test_a_step_waits_for_the_critic_before_it_asks_for_values(fakes, make_task) -> None:
    log: list[str] = []

    class Waited(fakes.Future):
        def result(self, timeout=None):
            log.append("waited")
            return fakes.critic_metrics(1.0)

    algorithm = ppo(fakes, make_task(log), log, fakes.FakeCritic(log, [Waited()]))
    algorithm.step(1, Clock())
    assert "waited" not in log
    algorithm.step(2, Clock())
    assert log.count("waited") == 1
    assert log.index("waited") == len(log) // 2  # first of the second step


def test_the_critics_error_is_raised_by_the_next_step_or_the_end(fakes, make_task) -> None:
    for late in (lambda algorithm: algorithm.step(2, Clock()), lambda algorithm: algorithm.finish()):
        log: list[str] = []
        critic = fakes.FakeCritic(log, [fakes.failed(ServerUnreachable("the critic is gone"))])
        algorithm = ppo(fakes, make_task(log), log, critic)
        algorithm.step(1, Clock())
        before = list(log)
        with pytest.raises(ServerUnreachable, match="the critic is gone"):
            late(algorithm)
        assert log == before  # nothing was sampled or trained after it
        algorithm.finish()  # said once


def test_all_rows_are_trained_on_with_whitened_advantages(fakes, make_task) -> None:
    algorithm = ppo(fakes, make_task([]), num_epochs=2)
    algorithm.step(1, Clock())
    parts = algorithm.policy.trained
    assert [part.tokens.shape[0] for part in parts] == [2, 2, 2, 2]
    for epoch in (parts[:2], parts[2:]):
        assert sorted(row[0] for part in epoch for row in part.tokens.tolist()) == [1, 2, 3, 4]
        whitened = torch.cat([part.advantages[part.loss_mask] for part in epoch])
        assert whitened.mean().item() == pytest.approx(0, abs=1e-6)
        assert whitened.square().mean().item() == pytest.approx(1, abs=1e-4)
    (step, values), *_ = algorithm.critic.asked.trained
    assert step == 1 and values.tokens.shape[0] == 4  # the critic cuts its own mini-batches


def test_warm_up_trains_the_critic_only(fakes, make_task) -> None:
    """The policy stands still, so what its KL is moves nothing: neither its weights nor the KL's coefficient."""
    log: list[str] = []
    algorithm = ppo(fakes, make_task(log), log, critic_warmup_steps=2, kl_target=0.1, kl_horizon=10)
    for step in (1, 2):
        metrics = algorithm.step(step, Clock()).metrics
        assert (metrics["policy/kl"], metrics["policy/kl_coef"]) == (0.5, 0.1)
        assert f"critic trains {step}" in log
    assert "update" not in log and algorithm.policy.version == 0 and not algorithm.policy.trained
    assert [line for line in log if line.startswith("refit")] == ["refit 0", "refit 0"]  # the weights that the engine has
    assert metrics["critic/loss"] == 1.0  # of step 1
    assert algorithm.step(3, Clock()).metrics["policy/kl_coef"] == 0.1
    assert log.count("update") == 2 and algorithm.kl_coef == pytest.approx(0.108)


def test_scores_are_shaped_before_the_kl_is_taken_off(fakes, make_task) -> None:
    """Rewards 0, 1, 2, 3 clipped at 2 and times 10; KL 0.5 a token costs 0.05 each. With gamma = lambda = 1 returns are sums to come."""
    shaping = ShapingConfig(clip_high=2.0, scale=10.0)
    algorithm = ppo(fakes, make_task([]), shaping=shaping, gae_lambda=1.0)
    metrics = algorithm.step(1, Clock()).metrics
    (_, batch), *_ = algorithm.critic.asked.trained
    last = [returns[mask][-1].item() for returns, mask in zip(batch.returns, batch.loss_mask, strict=True)]
    first = [returns[mask][0].item() for returns, mask in zip(batch.returns, batch.loss_mask, strict=True)]
    assert last == pytest.approx([-0.05, 9.95, 19.95, 19.95])
    assert first == pytest.approx([-0.1, 9.85, 19.8, 19.75])  # responses of 2, 3, 4 and 5 tokens
    assert (metrics["rollout/reward"], metrics["shaping/clipped_fraction"]) == (1.5, 0.25)


def test_running_moments_are_part_of_the_state(fakes, make_task) -> None:
    """Scores 0, 1, 2, 3: mean 1.5, squared deviations 5 in all. Checkpoints from before there was any shaping have none."""
    shaping = ShapingConfig(standardize=Standardize.running)
    whole = ppo(fakes, make_task([]), shaping=shaping)
    whole.step(1, Clock())
    whole.finish()
    state = json.loads(json.dumps(whole.state()))
    assert state["shaping"] == {"count": 4, "mean": 1.5, "squares": 5.0}
    resumed = ppo(fakes, make_task([]), shaping=shaping)
    resumed.load_state(state)
    for run in (whole, resumed):
        assert run.step(2, Clock()).metrics["shaping/mean"] == 1.5
    assert torch.equal(whole.policy.trained[-1].advantages, resumed.policy.trained[-1].advantages)


def test_a_row_whose_judge_failed_may_have_no_token(fakes, make_task, case) -> None:
    """Of a row that is not valid nothing is asked: neither a reward nor a token that could carry one."""
    batch, collected, old_logprobs, kl = case
    mask = batch.loss_mask.clone()
    mask[1] = False
    algorithm = ppo(fakes, make_task([]))
    with pytest.raises(ValueError, match="rows \\[1\\]"):
        algorithm.experience(replace(batch, loss_mask=mask), collected, old_logprobs, kl)
    made, _ = algorithm.experience(replace(batch, loss_mask=mask), replace(collected, valid=torch.tensor([True, False])), old_logprobs, kl)
    assert made.loss_mask.any(dim=1).tolist() == [True, False]


def test_a_step_in_which_everything_is_cut_trains_nothing(fakes, make_task) -> None:
    """With mask_truncated no token is left: neither the critic (which would refuse it) nor the policy is asked to train."""
    log: list[str] = []
    task = make_task(log)
    task.engine.generate = lambda prompts, seeds, sampling: iter(
        [[fakes.rollout(p, 7, 7, seed=seed) for p, seed in zip(prompts, seeds, strict=True)]]
    )
    algorithm = ppo(fakes, task, log, mask_truncated=True)
    metrics = algorithm.step(1, Clock()).metrics
    assert metrics["rollout/truncated_fraction"] == 1.0
    assert "update" not in log and "critic trains 1" not in log
    algorithm.finish()


def test_the_adaptive_coefficient_is_part_of_the_state(fakes, make_task) -> None:
    """KL 0.5 against a target of 0.1: the error is clipped at 0.2, 4 rollouts of a horizon of 10: 0.1 * (1 + 0.2 * 0.4) = 0.108."""
    algorithm = ppo(fakes, make_task([]), kl_target=0.1, kl_horizon=10)
    assert algorithm.step(1, Clock()).metrics["policy/kl_coef"] == 0.1
    assert algorithm.state() == {
        "kl_coef": pytest.approx(0.108),
        "shaping": {"count": 0, "mean": 0.0, "squares": 0.0},
        "critic_metrics": {},
        "critic_mark": "after 1",
    }
    resumed = ppo(fakes, make_task([]), kl_target=0.1, kl_horizon=10)
    resumed.load_state(algorithm.state())
    assert resumed.step(2, Clock()).metrics["policy/kl_coef"] == pytest.approx(0.108)


def test_the_critics_metrics_survive_a_checkpoint(fakes, make_task) -> None:
    """A checkpoint waits for the critic; what it said is reported by the next step all the same, in this run or in the resumed one."""
    algorithm = ppo(fakes, make_task([]))
    algorithm.step(1, Clock())
    algorithm.finish()
    resumed = ppo(fakes, make_task([]))
    resumed.load_state(json.loads(json.dumps(algorithm.state())))
    for run in (algorithm, resumed):
        assert run.step(2, Clock()).metrics["critic/loss"] == 1.0
        run.finish()
        assert run.state()["critic_metrics"]["critic/loss"] == 2.0  # each is said once


def test_the_state_names_the_training_that_it_goes_with(fakes, make_task) -> None:
    """Also where a step breaks off after it has sent its training: the step before it is saved then, and its critic is the one before."""
    log: list[str] = []
    algorithm = ppo(fakes, make_task(log), log)
    algorithm.step(1, Clock())
    assert algorithm.state()["critic_mark"] == "after 1"

    def broken(part, loss, added):
        raise ServerUnreachable("in the policy's update")

    algorithm.policy.train_step = broken
    with pytest.raises(ServerUnreachable):
        algorithm.step(2, Clock())
    assert algorithm.critic.asked.mark == "after 2" and algorithm.state()["critic_mark"] == "after 1"
    resumed = ppo(fakes, make_task(log), log)
    resumed.load_state(algorithm.state())
    assert log[-2] == "critic resumes after 1" and resumed.critic.asked.mark == "after 1"
