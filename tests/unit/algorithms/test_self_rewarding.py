"""Self-rewarding on fakes: pairs by hand, what is left out, and that a run in parts is the run in one."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from aligner.algorithms.iterations import Answer, Iteration
from aligner.algorithms.judge import Judge, Rubric, score_pattern
from aligner.algorithms.self_rewarding import JudgedBy, SelfRewarding, SelfRewardingConfig
from aligner.errors import CheckpointError, ConfigError, EngineError, RunHalted
from aligner.loop.loop import Clock
from aligner.losses.preference import DPOVariant
from aligner.online.selection import pairs_by_length
from aligner.types import SamplingConfig

EOS, ASKS = 0, 8
REWARDED = {"judge": JudgedBy.reward}


def engine_of(fakes, log: list[str], fails_at: int = 0):
    """Responses of one to three tokens 7 and EOS; judges (asked by a first token 8) say the last digit of their seed.

    `fails_at`: the number of the generation that raises.
    """

    class Engine(fakes.FakeEngine):
        def generate(self, prompts, seeds, sampling=None):
            judges = prompts[0].tokens[0] == ASKS
            log.append("judge" if judges else "generate")
            if log.count("judge") + log.count("generate") == fails_at:
                raise EngineError("the device is gone")
            said = [(seed % 10, EOS) if judges else (*[7] * (1 + seed % 3), EOS) for seed in seeds]
            yield [fakes.rollout(p, *tokens, seed=seed) for p, tokens, seed in zip(prompts, said, seeds, strict=True)]

    return Engine(log)


def make(fakes, make_task, log: list[str], files: dict | None = None, **settings) -> SelfRewarding:
    """Three prompts; groups of two; files of two prompts; the judge's scores are from 0 to 5, other digits do not parse."""
    fails_at = settings.pop("fails_at", 0)
    small = {"group_size": 2, "num_judgements": 2, "batch_size": 2, "sampled_together": 2, "epochs_per_iteration": 2}
    config = SelfRewardingConfig(**(small | settings))
    task = make_task(log, num_prompts=3, engine=engine_of(fakes, log, fails_at), reward=fakes.FakeReward(lambda r: float(len(r.response))))
    files = {} if files is None else files
    kept = {name: files.setdefault(name, fakes.FakeKept(log, name)) for name in ("responses", "judgements")}
    asks = config.judge is JudgedBy.policy
    judge = Judge(
        Rubric(template="", pattern=score_pattern(r"(\d)"), lowest=0.0, highest=5.0),
        task.engine,
        ask=lambda prompt, response: (ASKS, *prompt.tokens, *response),
        read=lambda tokens: f"{tokens[0]}",
        sampling=SamplingConfig(),
        num_judgements=config.num_judgements,
        longest=20,
    )
    return SelfRewarding(
        config,
        fakes.FakePolicy(log),
        task,
        fakes.FakeMovingReference(log),
        kept["responses"],
        judge=judge if asks else None,
        judgements=kept["judgements"] if asks else None,
        rewarded=not asks,
    )


def answer(reward: float | None, *tokens: int, ended: bool = True) -> Answer:
    return Answer(tokens=tokens, ended=ended, reward=reward)


def test_pairs_by_hand(fakes, make_task) -> None:
    algorithm = make(fakes, make_task, [], group_size=3, min_gap=0.5, batch_size=4, **REWARDED)
    groups = [
        [answer(1, 1), answer(3, 2), answer(2, 3)],  # the second before the first
        [answer(2, 1), answer(2, 2), answer(2, 3)],  # a tie
        [answer(None, 1), answer(4, 2), answer(None, 3)],  # nothing to compare with
        [answer(1, 1, 1), answer(5, 2, ended=False), answer(3, 3)],  # the best was cut
        [answer(1, 4), answer(2, 4), answer(1, 3)],  # the same tokens, judged twice
        [answer(1.0, 1), answer(1.25, 2), answer(1.0, 3)],  # too close
    ]
    algorithm.prompts = [fakes.prompt(number) for number in range(6)]
    rows = (4, 5, 0, 1, 2, 3)  # of the prompts
    iteration = Iteration(number=1, name="", parts=(rows[:4], rows[4:]))
    metrics, shown = algorithm.prepare(iteration, [one for group in groups for one in group], Clock())
    assert {name: metrics[f"pairs/{name}"] for name in ("count", "ties", "identical", "prompts_without_any")} == {
        "count": 2.0,
        "ties": 2.0,
        "identical": 1.0,
        "prompts_without_any": pytest.approx(4 / 6),
    }
    assert metrics["rollout/reward"] == 32.25 / 16 and metrics["rollout/rewards_invalid"] == 2
    assert metrics["pairs/reward_gap"] == pytest.approx((2 + 2 + 1) / 3) and metrics["pairs/length_gap"] == pytest.approx(-1 / 3)
    assert [(row.prompt, row.response, row.reward) for row in shown[:2]] == [("p4", "(1,)", 1), ("p4", "(2,)", 3)]
    algorithm.steps_per_iteration = 3  # two pairs, twice, in three steps
    found = [algorithm.pairs(1, position) for position in range(3)]
    assert [metrics["pairs/in_update"] for _, metrics in found] == [1, 1, 2]
    taken = Counter((pair.chosen.tokens, pair.rejected.tokens, pair.margin) for pairs, _ in found for pair in pairs)
    assert taken == {((5, 2), (5, 1), 2.0): 2, ((2, 3), (2, 1, 1), 2.0): 2}
    assert found[0][0][0].chosen.loss_mask == (False, True)
    algorithm.config.drop_truncated = False
    algorithm.recall(iteration, [one for group in groups for one in group])
    assert {pair.margin for pair in algorithm.pairs(1, 2)[0]} <= {2.0, 4.0}
    nothing = Iteration(number=1, name="", parts=((0,),))
    algorithm.recall(nothing, groups[1])
    assert algorithm.pairs(1, 0) == ([], {"pairs/in_update": 0.0})


def test_length_control_by_hand() -> None:
    """Of range 4 the slack of 0.1 is 0.4: 4.75 is nearly 5, and 1.25 nearly 1."""
    rewards = torch.tensor([5.0, 4.75, 1.0, 1.25, 3.0, 3.0, 3.0, 3.0, 1.0, 2.0, 9.0, 9.0])
    allowed = torch.tensor([True] * 8 + [False, True, False, False])
    lengths = torch.tensor([9, 4, 3, 8, 1, 2, 3, 4, 1, 1, 1, 1])
    common = {"group_size": 4, "min_gap": 0.0}
    found = pairs_by_length(rewards, allowed, lengths, slack=0.1, **common)
    assert (found.chosen.tolist(), found.rejected.tolist(), found.gaps.tolist(), found.num_ties) == ([1], [3], [3.5], 1)
    strict = pairs_by_length(rewards, allowed, lengths, slack=0.0, **common)
    assert (strict.chosen.tolist(), strict.rejected.tolist(), strict.num_ties) == ([0], [2], 1)


def test_an_iteration(fakes, make_task) -> None:
    """All responses, then all judgements; three prompts twice in pairs of two are three steps."""
    log: list[str] = []
    algorithm = make(fakes, make_task, log)
    assert algorithm.steps_per_iteration == 3
    results = [algorithm.step(step, Clock()) for step in (1, 2, 3, 4)]
    both = [(what, f"write {files} {part}") for what, files in (("generate", "responses"), ("judge", "judgements")) for part in (0, 1)]
    made = [line for what, write in both for line in ("engine wakes", what, "engine sleeps", write)]
    assert [line for line in log if line != "update"] == ["policy sleeps", "refit 0", *made, "renewed 3", "policy sleeps", "refit 3", *made]
    assert [one.metrics["self_rewarding/iteration"] for one in results] == [1, 1, 1, 2]
    first = results[0].metrics
    judgements = [one for part in sorted(algorithm.judgements.parts) for one in algorithm.judgements.parts[part]][:6]
    scores = [one.score for one in judgements if one.parsed]
    assert len(judgements) == 6 and first["judge/judgements"] == 12
    assert first["judge/unparsed"] == sum(score is None for one in judgements for score in one.scores) > 0
    assert first["rollout/reward"] == pytest.approx(sum(scores) / len(scores))
    assert "rollout/reward" not in results[1].metrics
    margins = algorithm.policy.trained[0].margins
    assert bool((margins > 0).all()) and first["pairs/reward_gap"] > 0


def test_a_run_in_parts(fakes, make_task) -> None:
    """Stopped in the middle of the second iteration, and while it judged: the same updates, and nothing is made twice."""
    whole = make(fakes, make_task, [])
    for step in range(1, 6):
        whole.step(step, Clock())
    log, files = [], {}
    first = make(fakes, make_task, log, files)
    for step in (1, 2, 3):
        first.step(step, Clock())
    before = first.state()
    first.step(4, Clock())
    second = make(fakes, make_task, log, files)
    second.policy.version = first.policy.version
    del log[:]
    second.load_state(first.state())
    second.step(5, Clock())
    assert log == ["restored 3", "update"]
    del files["judgements"].parts[first.name, 1]
    with pytest.raises(CheckpointError, match="part 1 of the judgements iteration_0002_step_000003"):
        make(fakes, make_task, [], files).load_state(first.state())
    third = make(fakes, make_task, log, files)
    third.policy.version = whole.policy.version - 2  # of step 3
    third.load_state(before)
    del log[:]
    for step in (4, 5):
        third.step(step, Clock())
    assert [line for line in log if line in ("generate", "judge") or line.startswith("write")] == ["judge", "write judgements 1"]
    for one, other in zip(whole.policy.trained, [*first.policy.trained[:-1], *third.policy.trained], strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.margins, other.margins)


def test_a_run_whose_engine_fails_goes_on_before_the_iteration(fakes, make_task) -> None:
    """What it would save after the error can be loaded: that iteration is not said to be there before all of it is."""
    log, files = [], {}
    failing = make(fakes, make_task, log, files, fails_at=8)  # the last judgements of the second iteration
    for step in (1, 2, 3):
        failing.step(step, Clock())
    before = failing.state()
    with pytest.raises(EngineError, match="the device is gone"):
        failing.step(4, Clock())
    assert failing.state() == before
    again = make(fakes, make_task, log, files)
    again.policy.version = failing.policy.version
    again.load_state(failing.state())
    del log[:]
    again.step(4, Clock())
    assert [line for line in log if line in ("generate", "judge")] == ["judge"] and again.iteration == 2


def test_rewards_in_the_judges_place(fakes, make_task) -> None:
    """Longer is better here: nobody is asked for a score."""
    log: list[str] = []
    algorithm = make(fakes, make_task, log, **REWARDED)
    metrics = algorithm.step(1, Clock()).metrics
    assert "judge" not in log and metrics["pairs/length_gap"] > 0 and not any(name.startswith("judge/") for name in metrics)
    again = make(fakes, make_task, log, {"responses": algorithm.answers}, **REWARDED)
    again.load_state(algorithm.state())
    assert again.pairs(1, 0) == algorithm.pairs(1, 0)
    del log[:]
    assert algorithm.validate()["validation/reward"] == sum(2 + seed % 3 for seed in range(2)) / 2
    assert log[:2] == ["policy sleeps", f"refit {algorithm.policy.version}"]


def test_validation_by_the_judge(fakes, make_task) -> None:
    """The same seeds each time; the reward that is given is not what is reported."""
    algorithm = make(fakes, make_task, [])
    one, other = algorithm.validate(), algorithm.validate()
    assert one == other and 0 <= one["validation/reward"] <= 5 and 0 <= one["validation/judgements_unparsed"] < 1


def test_rewards_beside_a_judge_are_reported(fakes, make_task) -> None:
    algorithm = make(fakes, make_task, [])
    algorithm.rewarded = True
    metrics = algorithm.step(1, Clock()).metrics
    answers = [one for part in sorted(algorithm.answers.parts) for one in algorithm.answers.parts[part]]
    assert metrics["judge/reward"] == sum(len(one.tokens) for one in answers) / 6 and metrics["judge/reward"] != metrics["rollout/reward"]
    assert 0 <= metrics["judge/agreement"] <= 1


def test_a_judge_that_names_no_score_ends_the_run(fakes, make_task) -> None:
    algorithm = make(fakes, make_task, [])
    algorithm.judge.read = lambda tokens: "I cannot say"
    with pytest.raises(RunHalted, match="none of 6 responses got a score from 0.0 to 5.0 by algorithm.score_pattern=.*'I cannot say'"):
        algorithm.step(1, Clock())
    algorithm = make(fakes, make_task, [])
    algorithm.judge.longest = 1
    with pytest.raises(RunHalted, match="all are too long to be judged"):
        algorithm.step(1, Clock())
    assert math.isnan(algorithm.validate()["validation/reward"])


def test_bad_settings() -> None:
    for settings, text in (
        ({"group_size": 1}, "algorithm.group_size=1: must be at least 2"),
        ({"num_judgements": 0}, "algorithm.num_judgements=0: must be at least 1"),
        ({"batch_size": 0}, "algorithm.batch_size=0: must be at least 1"),
        ({"min_gap": -1}, "algorithm.min_gap=-1: must not be negative"),
        ({"length_control": 0.5}, "algorithm.length_control=0.5: must be at least 0 and below 0.5"),
        ({"loss": DPOVariant.simpo}, "algorithm.loss=simpo: needs one with a reference"),
        ({"lowest_score": 5.0}, "algorithm.lowest_score=5.0: must be below highest_score=5.0"),
        ({"score_pattern": "x"}, "algorithm.score_pattern=x: has 0 groups"),
        ({"judge_template": "t.txt", **REWARDED}, "algorithm.judge_template=t.txt: with judge=reward nobody is asked"),
        ({"judge_temperature": 0.0}, "algorithm.num_judgements=3: with judge_temperature=0 all are the same; allowed: 1"),
        ({"judge_top_p": 0.0}, "top_p=0.0"),
    ):
        with pytest.raises(ConfigError) as caught:
            SelfRewardingConfig(**settings)
        assert text in str(caught.value)
    config = SelfRewardingConfig(batch_size=16, epochs_per_iteration=2)
    assert (config.rollouts_per_step, config.judgements_per_step) == (32, 96)
    assert SelfRewardingConfig(**REWARDED).judgements_per_step == 0
