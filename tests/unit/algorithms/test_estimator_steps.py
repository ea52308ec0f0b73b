"""Whole steps without a critic, on fakes: what every estimator makes of known rewards, dynamic sampling, and going on after a resume."""

from __future__ import annotations

import json
import math

import pytest
import torch

from aligner.algorithms.grpo import GRPO, Exhausted, GRPOConfig, KLIn
from aligner.errors import ConfigError, RunHalted, ServerUnreachable
from aligner.loop.loop import Clock
from aligner.losses.advantages import Estimator
from aligner.losses.kl import KLEstimator
from aligner.losses.shaping import ShapingConfig, Standardize
from aligner.models.training.guard import GuardConfig, NonFinite, NonFiniteReward
from aligner.online import collect as rollouts
from aligner.online.collect import sample_seeds
from aligner.protocols import Replica
from aligner.telemetry.metrics import Mean

RUN_SEED = 3  # of `make_task`
GROUPS = [1.0, 0.0, 3.0, 3.0]  # two groups of two
GREEDY = {0: 0.5, 1: 2.0}  # by the prompt's id


@pytest.fixture
def make(fakes, make_task):
    """`make(rewards by round, task fields, **settings)`: a GRPO of two prompts, twice each; rewards are by the position in the round.

    Prompt i has i + 2 response tokens; greedy responses begin with the token 8. Log-probs are -1, those of the reference -1.5.
    """

    class Engine(fakes.FakeEngine):
        def generate(self, prompts, seeds, sampling=None):
            for finished in super().generate(prompts, seeds, sampling):
                yield [fakes.rollout(r.prompt, 8, fakes.EOS, seed=r.seed) for r in finished] if sampling == "greedy" else finished

    class Policy(fakes.FakePolicy):
        def train_step(self, batch, loss):
            return super().train_step(batch, loss) | {"policy/ref_kl": Mean(total=0.5, count=1)}

    def build(rounds: dict[int, list[float]] | list[float], fields: dict | None = None, **settings) -> GRPO:
        settings = {"prompts_per_step": 2, "group_size": 2, "mini_batch_size": 4, "kl_coef": 0.0} | settings
        config = GRPOConfig(**settings)
        numbered = rounds if isinstance(rounds, dict) else dict.fromkeys(range(1, 9), rounds)
        by_seed = {
            seed: float(reward)
            for number, rewards in numbered.items()
            for seed, reward in zip(sample_seeds(RUN_SEED, number, len(rewards)), rewards, strict=True)
        }
        log: list[str] = []
        parts = {
            "engine": Engine(log),
            "reward": fakes.FakeReward(lambda r: GREEDY[r.prompt.id] if r.response[0] == 8 else by_seed[r.seed]),
            "reference": fakes.FakePolicy(log, level=-1.5) if config.needs_reference else None,
        }
        task = make_task(log, num_prompts=2, batch_size=config.prompts_per_step, **(parts | (fields or {})))
        return GRPO(config, Policy(log), task)

    return build


def learnt(algorithm: GRPO) -> list[list[float]]:
    """The advantages of the policy's tokens, row by row, of everything that was trained on."""
    return [a[m].tolist() for batch in algorithm.policy.trained for a, m in zip(batch.advantages, batch.loss_mask, strict=True)]


def rows(*values: float) -> list[list[float]]:
    """One value per response, of 2, 2, 3 and 3 tokens."""
    return [pytest.approx([value] * count, rel=1e-5, abs=1e-7) for value, count in zip(values, (2, 2, 3, 3), strict=True)]


OVER_STD = 0.5 / math.sqrt(0.5)  # the sample deviation of (1, 0)
WHITE = math.sqrt(1.6)  # returns 1, 1, 0, 0 and six times 3: mean 2, variance (2 * 1 + 2 * 4 + 6 * 1) / 10
CENTRED = math.sqrt(0.1)  # 0.5, 0.5, -0.5, -0.5 and six times 0


@pytest.mark.parametrize(
    ("estimator", "settings", "expected"),
    [
        ("grpo", {}, rows(OVER_STD, -OVER_STD, 0, 0)),
        ("grpo", {"normalize_std": False}, rows(0.5, -0.5, 0, 0)),
        ("rloo", {}, rows(1, -1, 0, 0)),
        ("remax", {}, rows(0.5, -0.5, 1, 1)),
        ("reinforce", {}, rows(1, 0, 3, 3)),
        ("reinforce_pp", {}, rows(-1 / WHITE, -2 / WHITE, 1 / WHITE, 1 / WHITE)),
        ("reinforce_pp_baseline", {}, rows(0.5 / CENTRED, -0.5 / CENTRED, 0, 0)),
    ],
)
def test_advantages_that_reach_the_policy(estimator: str, settings: dict, expected: list, make) -> None:
    algorithm = make(GROUPS, advantage_estimator=Estimator(estimator), **settings)
    metrics = algorithm.step(1, Clock()).metrics
    assert learnt(algorithm) == expected
    assert metrics["rollout/reward"] == 7 / 4  # of the sampled responses alone
    sampled = 2 if estimator == "remax" else 1
    assert algorithm.task.engine.sampling == [None, "greedy"][:sampled]
    assert algorithm.task.engine.log[:3] == ["policy sleeps", "engine wakes", "generate"]
    assert algorithm.task.engine.log.count("engine sleeps") == 1  # no refit between responses and baselines


def _kl_in_reward(**settings) -> dict:
    return {"kl_in": KLIn.reward, "kl_estimator": KLEstimator.k1, "kl_coef": 0.1} | settings


def test_the_kl_in_the_reward_is_of_the_policy_that_sampled(make) -> None:
    """KL 0.5 a token, coefficient 0.1: each token gives up 0.05. A pass for log-probs is made although there is one update."""
    algorithm = make(GROUPS, advantage_estimator=Estimator("reinforce"), **_kl_in_reward())
    metrics = algorithm.step(1, Clock()).metrics
    assert learnt(algorithm) == [
        pytest.approx([0.9, 0.95]),
        pytest.approx([-0.1, -0.05]),
        *[pytest.approx([2.85, 2.9, 2.95])] * 2,
    ]
    assert (metrics["policy/kl"], metrics["policy/kl_coef"]) == (0.5, 0.1)
    (batch,) = algorithm.policy.trained
    assert batch.old_logprobs is None and algorithm.task.engine.log.count("logprobs") == 2  # the policy's and the reference's
    assert algorithm.loss().keywords["kl_coef"] == 0.0  # not a second time
    # All of a response's KL is in its sum: groups of equal lengths do not see it, others do.
    grouped = make(GROUPS, advantage_estimator=Estimator("rloo"), **_kl_in_reward())
    grouped.step(1, Clock())
    assert learnt(grouped) == rows(1, -1, 0, 0)


def test_a_fixed_coefficient_is_the_settings_and_not_the_checkpoints(make) -> None:
    algorithm = make(GROUPS, kl_coef=0.1)
    algorithm.step(1, Clock())
    resumed = make(GROUPS, kl_coef=0.2)
    resumed.load_state(algorithm.state())
    assert resumed.kl_coef == 0.2


def test_scores_are_shaped_before_they_are_compared(make) -> None:
    """Clipped to (1, 0, 2, 2), times 10; what is reported is the judge's. ReMax's baselines 0.5 and 2 go the same way."""
    shaping = ShapingConfig(clip_high=2.0, scale=10.0)
    algorithm = make(GROUPS, advantage_estimator=Estimator("remax"), shaping=shaping)
    metrics = algorithm.step(1, Clock()).metrics
    assert learnt(algorithm) == rows(5, -5, 0, 0)
    assert (metrics["rollout/reward"], metrics["shaping/clipped_fraction"]) == (7 / 4, 0.5)


def test_a_greedy_response_without_a_reward_takes_its_prompt_along(make, fakes, monkeypatch) -> None:
    monkeypatch.setitem(GREEDY, 1, math.nan)
    algorithm = make(GROUPS, {"guard": GuardConfig(reward=NonFiniteReward.skip)}, advantage_estimator=Estimator("remax"))
    metrics = algorithm.step(1, Clock()).metrics
    assert learnt(algorithm) == [[0.5] * 2, [-0.5] * 2, [], []]
    assert metrics["rollout/rewards_not_finite"] == 2.0


def test_statistics_are_of_the_whole_batch_wherever_it_was_sampled(make, fakes, monkeypatch) -> None:
    """Two replicas of the engine that split both groups: each rank's advantages are those of one process."""
    both: list = []
    for share in ([0, 3], [1, 2]):
        algorithm = make(GROUPS, advantage_estimator=Estimator("reinforce_pp_baseline"))
        algorithm.task.engine.replica = Replica(index=len(both), count=2)
        algorithm.task.engine.share = share
        with monkeypatch.context() as patch:
            patch.setattr(rollouts, "gather_objects", lambda local: both.append(local) or [*both])
            if len(both) == 0:
                with pytest.raises(Exception, match="2 responses to 4 prompts"):
                    algorithm.step(1, Clock())
            else:
                algorithm.step(1, Clock())
    assert learnt(algorithm) == rows(0.5 / CENTRED, -0.5 / CENTRED, 0, 0)


SIGNALS = {1: [1.0, 1, 0, 1], 2: [0.0, 1, 1, 0], 3: [0.0, 0, 2, 2], 4: [5.0, 1, 0, 4], 5: [1.0, 0, 0, 1]}


def test_dynamic_sampling_goes_on_until_there_are_enough_groups(make) -> None:
    """Round 1 has one group with a signal (prompt 1), round 2 both: the second of these is surplus. Step 2 goes on with round 3."""
    algorithm = make(SIGNALS, dynamic_sampling=True, normalize_std=False)
    metrics = algorithm.step(1, Clock()).metrics
    assert [row.tolist() for batch in algorithm.policy.trained for row in batch.tokens[:, 0]] == [2, 2, 1, 1]  # prompt i begins with i + 1
    assert [row[0] for row in learnt(algorithm)] == [-0.5, 0.5, -0.5, 0.5]
    assert (metrics["rollout/rounds"], metrics["rollout/groups_surplus"], metrics["rollout/groups_without_signal"]) == (2, 1, 0.25)
    assert metrics["rollout/reward"] == 5 / 8  # of all that was sampled, not of what was chosen
    assert algorithm.state()["rounds"] == {"extra_rounds": 1}
    algorithm.policy.trained.clear()
    second = algorithm.step(2, Clock()).metrics
    assert second["rollout/rounds"] == 2  # rounds 3 and 4
    assert [row[0] for row in learnt(algorithm)] == [2, -2, -2, 2]
    asked = [seeds for _, seeds in algorithm.task.engine.asked]
    assert asked == [sample_seeds(RUN_SEED, number, 4) for number in (1, 2, 3, 4)]


def test_a_reward_that_failed_is_no_signal(make) -> None:
    """One of each group of round 1 has no reward, which stands as 0 beside 1 and 2: what is learnt from is round 2, whole."""
    failing = {1: [1.0, math.nan, math.nan, 2.0], 2: [0.0, 1.0, 3.0, 1.0]}
    algorithm = make(failing, {"guard": GuardConfig(reward=NonFiniteReward.skip)}, dynamic_sampling=True, normalize_std=False)
    metrics = algorithm.step(1, Clock()).metrics
    assert [row[0] for row in learnt(algorithm)] == [-0.5, 0.5, 1, -1]
    assert (metrics["rollout/rounds"], metrics["rollout/groups_surplus"], metrics["rollout/groups_without_signal"]) == (2, 0, 0.5)
    assert metrics["rollout/rewards_not_finite"] == 2.0


def test_dynamic_sampling_that_finds_too_little(make) -> None:
    scarce = {1: [1.0, 1, 0, 1], 2: [0.0, 0, 1, 1]}
    algorithm = make(scarce, dynamic_sampling=True, max_rounds_per_step=2)
    with pytest.raises(RunHalted, match=r"1 of 4 groups .* 2 are needed, after algorithm.max_rounds_per_step=2 rounds"):
        algorithm.step(1, Clock())
    assert not algorithm.policy.trained
    filled = make(scarce, dynamic_sampling=True, max_rounds_per_step=2, exhausted=Exhausted.fill, normalize_std=False)
    metrics = filled.step(1, Clock()).metrics
    assert [row[0] for row in learnt(filled)] == [0, 0, -0.5, 0.5]  # as many rows as ever
    assert (metrics["rollout/rounds"], metrics["rollout/groups_surplus"]) == (2, 0)


def _everything() -> dict:
    """Settings with all the state that there is."""
    state = {"dynamic_sampling": True, "kl_target": 0.1, "kl_horizon": 10, "num_epochs": 2, "mini_batch_size": 2}
    return _kl_in_reward(shaping=ShapingConfig(standardize=Standardize.running), **state)


def _trained(algorithm: GRPO) -> list:
    return [(batch.advantages, batch.tokens, batch.loss_mask, batch.old_logprobs) for batch in algorithm.policy.trained]


def test_a_resumed_run_is_the_same_to_the_bit(make) -> None:
    whole, first, second = (make(SIGNALS, **_everything()) for _ in range(3))
    reported = [whole.step(step, Clock()).metrics for step in (1, 2, 3)]
    for step in (1, 2):
        first.step(step, Clock())
    second.load_state(json.loads(json.dumps(first.state())))
    again = second.step(3, Clock()).metrics
    assert all(again[name] == value for name, value in reported[-1].items() if not name.endswith("per_second") and "imbalance" not in name)
    assert second.state() == whole.state() and whole.state()["rounds"] == {"extra_rounds": 2}
    expected = _trained(whole)[-4:]
    for ours, theirs in zip(_trained(second), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_state_of_a_step_that_broke_off_is_that_of_the_step_before(make, fakes) -> None:
    algorithm = make(SIGNALS, **_everything())
    algorithm.step(1, Clock())
    before = algorithm.state()

    def broken(batch):
        raise ServerUnreachable("while the KL was measured")

    algorithm.task.reference.logprobs = broken
    with pytest.raises(ServerUnreachable):
        algorithm.step(2, Clock())
    assert algorithm.state() == before


def test_steps_that_are_left_out_leave_out_their_rounds(make) -> None:
    algorithm = make(GROUPS, kl_coef=0.1)
    algorithm.load_state(make(GROUPS, kl_coef=0.1).state())
    assert algorithm.task.engine.log == ["refit 0"]
    algorithm.step(5, Clock())
    algorithm.step(7, Clock())
    assert [seeds for _, seeds in algorithm.task.engine.asked] == [sample_seeds(RUN_SEED, number, 4) for number in (5, 7)]
    assert algorithm.kl_coef == 0.1


def test_a_kl_that_holds_nothing_is_said() -> None:
    (warning,) = GRPOConfig(kl_estimator=KLEstimator.k1).warnings
    assert warning.startswith("algorithm.kl_estimator=k1 in the loss holds nothing")
    assert not GRPOConfig(kl_estimator=KLEstimator.k1, kl_in=KLIn.reward).warnings and not GRPOConfig().warnings


def test_a_kl_that_is_not_finite_moves_no_coefficient(make) -> None:
    """One row's log-probs under the reference are NaN: with guard.non_finite=skip it is left out, and the others are learnt from."""
    settings = _kl_in_reward(kl_target=0.1, kl_horizon=10)
    algorithm = make(GROUPS, {"guard": GuardConfig(non_finite=NonFinite.skip)}, advantage_estimator=Estimator("reinforce"), **settings)
    reference = algorithm.task.reference.logprobs
    algorithm.task.reference.logprobs = lambda batch: reference(batch).index_fill(0, torch.tensor([1]), torch.nan)
    metrics = algorithm.step(1, Clock()).metrics
    assert [bool(row) for row in learnt(algorithm)] == [True, False, True, True]
    assert metrics["policy/kl"] == 0.5 and algorithm.kl_coef == pytest.approx(0.108)  # of the others
    broken = make(GROUPS, **settings | {"kl_in": KLIn.loss})
    broken.policy.train_step = lambda batch, loss: {"policy/ref_kl": Mean(total=math.nan, count=1)}
    broken.step(1, Clock())
    assert broken.kl_coef == 0.1


def test_what_remax_cannot_shape() -> None:
    for shaping, text in (
        (
            ShapingConfig(standardize=Standardize.batch),
            "algorithm.shaping.standardize=batch: advantage_estimator=remax compares with greedy",
        ),
        (ShapingConfig(overlong_buffer=4), "algorithm.shaping.overlong_buffer=4: advantage_estimator=remax keeps only the reward"),
    ):
        with pytest.raises(ConfigError, match=text):
            GRPOConfig(advantage_estimator=Estimator("remax"), shaping=shaping)
