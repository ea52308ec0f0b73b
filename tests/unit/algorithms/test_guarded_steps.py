"""Rewards, returns and replies that are not finite in the algorithms, and runs that are rolled back."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from fake_parts import Recorder, raises

from aligner.algorithms.grpo import GRPO, GRPOConfig
from aligner.algorithms.ppo import PPO, PPOConfig
from aligner.data.collate import rollout_batch
from aligner.errors import RollBack, RunHalted
from aligner.jobs.parts import SkippedStepsFile
from aligner.loop.loop import Clock
from aligner.models.training.guard import SKIPPED, SKIPPED_IN_A_ROW, GuardConfig, NonFinite, NonFiniteReward
from aligner.online.collect import ScoredRollouts, Scorers, collect, response_metrics
from aligner.online.critics import ServedCritic

pytestmark = pytest.mark.usefixtures("topology")
BAD = {1: math.nan, 2: math.inf}  # rewards by the prompt's id


def score(rollout) -> float:
    return BAD.get(rollout.prompt.id, float(rollout.prompt.id))


def test_a_reward_that_is_not_finite_ends_the_run_and_names_the_prompt(fakes):
    prompts = [fakes.prompt(number) for number in range(4)]
    scorers = Scorers(reward=fakes.FakeReward(score), reward_name="reward function taste.py:judge")
    with pytest.raises(RunHalted) as raised:
        collect(fakes.FakeEngine([]), prompts, [5, 6, 7, 8], scorers=scorers)
    message = str(raised.value)
    assert message.startswith("reward function taste.py:judge gave 2 of 4 rewards that are not finite: ")
    assert all(f"for prompt {prompts[number].source}, a response of {number + 2} tokens" in message for number in (1, 2))


def test_such_rollouts_can_be_left_out(fakes, capsys):
    prompts = [fakes.prompt(number) for number in range(4)]
    scorers = Scorers(reward=fakes.FakeReward(score), non_finite=NonFiniteReward.skip)
    collected = collect(fakes.FakeEngine([]), prompts, [5, 6, 7, 8], scorers=scorers)
    assert collected.valid.tolist() == [True, False, False, True]
    assert collected.rewards.tolist() == [0.0, 0.0, 0.0, 3.0]
    metrics = response_metrics(collected, 1.0)
    assert (metrics["rollout/reward"], metrics["rollout/rewards_not_finite"]) == (1.5, 2.0)  # (0 + 3) / 2
    assert "2 of 4 rewards that are not finite" in capsys.readouterr().out


def test_a_group_is_compared_without_them(fakes, make_task):
    """Groups (1, x, 5), (x, x, 3), (2, 2, 2): the first one's mean is 3; of the second one nothing is left to compare with."""
    rollouts = [fakes.rollout(fakes.prompt(0), 7, 7) for _ in range(9)]
    batch, rewards = rollout_batch(rollouts, 9), torch.tensor([1.0, 0, 5, 0, 0, 3, 2, 2, 2])
    valid = torch.tensor([True, False, True, False, False, True, True, True, True])
    config = GRPOConfig(prompts_per_step=3, group_size=3, mini_batch_size=9, normalize_std=False)
    collected = ScoredRollouts(rollouts=rollouts, rewards=rewards, valid=valid)
    made = GRPO(config, fakes.FakePolicy([]), make_task([])).experience(batch, collected, None, None)
    learnt = made.loss_mask.any(dim=1)
    assert learnt.tolist() == [True, False, True, False, False, False, True, True, True]
    rows = zip(made.advantages[learnt], made.loss_mask[learnt], strict=True)
    assert [row[mask].unique().tolist() for row, mask in rows] == [[-2.0], [2.0], [0.0], [0.0], [0.0]]


def ppo(fakes, make_task, guard: GuardConfig, critic=None) -> PPO:
    task = make_task([], guard=guard)
    critic = ServedCritic(task, critic or fakes.FakeCritic([]))
    return PPO(PPOConfig(rollouts_per_step=4, mini_batch_size=2), fakes.FakePolicy([]), task, critic)


def test_rows_without_a_reward_are_no_part_of_ppos_batches(fakes, make_task):
    rollouts = [fakes.rollout(fakes.prompt(number), 7, 7) for number in range(3)]
    batch = rollout_batch(rollouts, 9)
    zeros = [torch.zeros(len(rollout.tokens)) for rollout in rollouts]
    kl = torch.zeros(batch.tokens.shape)
    kl[2, -1] = math.nan  # log-probs of the third one are not finite
    valid = torch.tensor([True, False, True])
    collected = ScoredRollouts(rollouts=rollouts, rewards=torch.tensor([1.0, 0.0, 1.0]), values=zeros, valid=valid)
    old = torch.zeros(batch.tokens.shape)
    skipping = ppo(fakes, make_task, GuardConfig(non_finite=NonFinite.skip))
    for made in skipping.experience(batch, collected, old, kl):
        assert made.loss_mask.any(dim=1).tolist() == [True, False, False]
    policy_batch, value_batch = skipping.experience(batch, collected, old, kl)
    assert policy_batch.advantages.isfinite().all() and value_batch.returns.isfinite().all()
    with pytest.raises(RunHalted, match="the returns of 1 of 3 rollouts are not finite"):
        ppo(fakes, make_task, GuardConfig()).experience(batch, collected, old, kl)


def test_a_critic_that_left_out_an_update_is_judged_by_the_actor(fakes, make_task):
    reply = fakes.critic_metrics(1.0) | {SKIPPED: 1.0, SKIPPED_IN_A_ROW: 1.0}
    for guard, error in ((GuardConfig(), RunHalted), (GuardConfig(non_finite=NonFinite.roll_back), RollBack)):
        algorithm = ppo(fakes, make_task, guard, fakes.FakeCritic([], [fakes.done(reply)]))
        algorithm.step(1, Clock())
        with pytest.raises(error, match="the critic left out 1 updates of step 1"):
            algorithm.step(2, Clock())
    algorithm = ppo(fakes, make_task, GuardConfig(non_finite=NonFinite.skip), fakes.FakeCritic([], [fakes.done(reply)]))
    algorithm.step(1, Clock())
    assert algorithm.step(2, Clock()).metrics["critic/optim_skipped"] == 1.0


def bad_run(saved: int, bad: int, skipped_steps: SkippedStepsFile) -> tuple[Recorder, Callable[[], int]]:
    """A run that saves every second step; the gradient of step `bad` is not finite."""
    made = Recorder(start=(saved, {}), on_step={bad: raises(RollBack("the gradient is not finite"))})
    return made, lambda: made.run(parts={"skipped_steps": skipped_steps}, max_steps=6, save_every=2)


def test_a_rolled_back_run_goes_on_from_its_checkpoint_without_the_step(tmp_path):
    path = tmp_path / "skipped_steps.json"
    first, run = bad_run(0, 4, SkippedStepsFile(path, most=2))
    with pytest.raises(RollBack):
        run()
    assert first.on_disk == 2 and first.events[-1] == "step 4"  # step 3 was whole, and yet it is gone back to step 2
    again, run = bad_run(2, 4, SkippedStepsFile(path, most=2))
    assert run() == 6
    assert [event for event in again.events if event.startswith("step")] == ["step 3", "step 5", "step 6"] and again.on_disk == 6
    assert again.logged[4] == {"optim/step_left_out": 1.0}


def test_a_run_is_not_rolled_back_for_ever(tmp_path):
    path = tmp_path / "skipped_steps.json"
    SkippedStepsFile(path, most=1).add(3, "the gradient is not finite")
    skipped_steps = SkippedStepsFile(path, most=1)
    assert skipped_steps.steps == {3}
    with pytest.raises(RunHalted, match=r"rolled back enough \(guard.max_roll_backs=1; steps skipped: 3\)"):
        bad_run(4, 5, skipped_steps)[1]()
