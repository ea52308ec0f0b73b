"""SPIN on fakes: what an iteration samples, pairs and trains on, and that a run in parts is the run in one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aligner.algorithms.spin import SPIN, Answer, SPINConfig, pairs_of
from aligner.data.encoding import response_start
from aligner.data.supervised import Demonstration
from aligner.errors import CheckpointError, ConfigError, DataError
from aligner.loop.loop import Clock
from aligner.losses.preference import DPOVariant

EOS = 0


def demonstrations(fakes, count: int = 4) -> list[Demonstration]:
    """The prompt of number n is token n + 1; the given response is 5 and the end."""
    return [Demonstration(prompt=fakes.prompt(number), response=(5, EOS)) for number in range(count)]


def spin(fakes, make_task, log: list[str], files=None, **settings) -> SPIN:
    config = SPINConfig(**({"batch_size": 2, "epochs_per_iteration": 1, "sampled_together": 3} | settings))
    train = demonstrations(fakes)
    return SPIN(
        config,
        fakes.FakePolicy(log),
        make_task(log),
        fakes.FakeMovingReference(log),
        files or fakes.FakeKept(log),
        train=train,
        validation=train[:2],
    )


def test_an_iteration(fakes, make_task) -> None:
    """Four prompts, pairs of two: two steps an iteration; sampled in parts of three and one; the second one renews the reference."""
    log: list[str] = []
    algorithm = spin(fakes, make_task, log)
    assert algorithm.steps_per_iteration == 2
    metrics = [algorithm.step(step, Clock()).metrics for step in (1, 2, 3)]
    sampled = ["engine wakes", "generate", "engine sleeps"]
    both = [*sampled, "write {} 0", *sampled, "write {} 1"]
    assert log == [
        *("policy sleeps", "refit 0", *(line.format("iteration_0001") for line in both), "update", "update"),
        *("renewed 2", "policy sleeps", "refit 2", *(line.format("iteration_0002") for line in both), "update"),
    ]
    assert [one["spin/iteration"] for one in metrics] == [1, 1, 2]
    assert "rollout/response_length" in metrics[0] and "rollout/response_length" not in metrics[1]
    assert metrics[0]["rollout/response_length"] == 3.5  # 2, 3, 4, 5
    first, second = algorithm.policy.trained[:2]
    rows = [*first.tokens.tolist(), *second.tokens.tolist()]
    pairs = {tuple(token for token in row if token != 9) for row in rows}  # 9 pads
    assert pairs == {(n + 1, 5, EOS) for n in range(4)} | {(n + 1, *[7] * (n + 1), EOS) for n in range(4)}
    assert first.loss_mask[0].tolist()[:3] == [False, True, True] and first.tokens[0].tolist()[1:3] == [5, EOS]
    torch.testing.assert_close(first.ref_logprobs, -1.5 * first.loss_mask)
    assert algorithm.state()["reference_step"] == 2 and algorithm.state()["iteration"] == 2
    assert algorithm.validate() == {"validation/loss": 1.0}


def test_a_lost_part_of_the_responses_is_said(fakes, make_task) -> None:
    files = fakes.FakeKept([])
    first = spin(fakes, make_task, [], files)
    first.step(1, Clock())
    del files.parts[first.name, 0]
    with pytest.raises(CheckpointError, match="part 0 of the responses iteration_0001_step_000000_version_000000"):
        spin(fakes, make_task, [], files).load_state(first.state())


def test_other_settings_sample_anew(fakes, make_task) -> None:
    log: list[str] = []
    files = fakes.FakeKept(log)
    spin(fakes, make_task, log, files).step(1, Clock())
    other = spin(fakes, make_task, log, files)
    other.settings = "temperature=0.5"
    other.step(1, Clock())
    assert log.count("generate") == 4


def test_responses_that_are_the_given_ones_are_left_out(fakes, make_task) -> None:
    given = demonstrations(fakes, 2)
    same, other = Answer(tokens=(5, EOS), ended=True), Answer(tokens=(5, 5), ended=False)
    (pair,) = pairs_of([(given[0], same), (given[1], other)])
    assert pair.chosen.tokens == (2, 5, EOS) and pair.rejected.tokens == (2, 5, 5)
    algorithm = spin(fakes, make_task, [])
    algorithm.train = [replace(one, response=(*[7] * (one.prompt.id + 1), EOS)) for one in algorithm.train]
    metrics = algorithm.step(1, Clock()).metrics
    assert metrics["spin/identical"] == 1 and algorithm.policy.trained == []


def test_where_a_response_begins() -> None:
    def start(*mask: int) -> int:
        return response_start(tuple(map(bool, mask)))

    assert start(0, 1, 1) == 1 and start(0, 1, 0, 0, 1) == 4
    with pytest.raises(DataError, match="ends with a turn that is not learnt"):
        start(0, 1, 0)


def test_bad_settings(fakes, make_task) -> None:
    for settings, text in (
        ({"batch_size": 0}, "algorithm.batch_size=0: must be at least 1"),
        ({"prompts_per_iteration": -1}, "algorithm.prompts_per_iteration=-1: must not be negative"),
        ({"loss": DPOVariant.simpo}, "algorithm.loss=simpo: needs one with a reference and without rewards"),
        ({"prompts_per_iteration": 5}, "algorithm.prompts_per_iteration=5: data.train has 4 usable prompts"),
    ):
        with pytest.raises(ConfigError) as caught:
            spin(fakes, make_task, [], **settings)
        assert text in str(caught.value)
