"""The queue of a replica of the engine, worked out by hand, and lengths of responses."""

from __future__ import annotations

import json
from pathlib import Path

import plan_parts
import pytest
from plan_parts import work

from aligner.commands.plan.command import measured_lengths, with_lengths
from aligner.errors import ConfigError
from aligner.planner.config import PlanConfig
from aligner.planner.times import ReplicaQueue, shares, turns_of
from aligner.planner.workload import Component, Engine, Phase, ResponseLengths


def queue(seats: int = 2, capacity: float = 1000, step=lambda active, cached: 1.0, prefill=lambda tokens: 0.0, **settings):
    return ReplicaQueue(seats=seats, capacity=capacity, step=step, prefill=prefill, **settings)


def sampled(lengths: list[int], prompt: float = 10, **settings) -> ReplicaQueue:
    found = queue(**settings)
    for number, length in enumerate(lengths):
        found.add(number, [length], prompt)
    return found


def cache(active: int, cached: float) -> float:
    return cached


def test_steps_and_tokens_in_the_cache():
    """Prompts of 10 tokens, responses of 2 and 4. Side by side two steps read 22 tokens on average, and two more 13; one behind the other
    two steps read 11, and four 12."""
    assert sampled([2, 4]).until() == [(2.0, 0), (4.0, 1)]
    assert sampled([2, 4], seats=1).until() == [(2.0, 0), (6.0, 1)]
    for seats, seconds in ((2, 2 * 22 + 2 * 13), (1, 2 * 11 + 4 * 12)):
        own = sampled([2, 4], seats=seats, step=cache)
        own.until()
        assert own.now == seconds
    # a seat that becomes free is taken at once: 3 runs from step 1 to step 4
    assert sampled([1, 2, 3], step=lambda active, cached: active).until() == [(2.0, 0), (4.0, 1), (6.0, 2)]
    # in fixed batches it waits for 2: from step 2 to step 5
    assert sampled([1, 2, 3], static=True).until() == [(1.0, 0), (2.0, 1), (5.0, 2)]
    # a seat costs 0.5 s: both at first, then that of 3 while 2 waits
    assert [end for end, _ in sampled([1, 2, 3], seating=0.5).until()] == [2.0, 3.5, 5.5]
    # prompts of 10 tokens, at 0.1 s each: both at first, then that of 3 while 2 waits
    assert [round(end, 6) for end, _ in sampled([1, 2, 3], prefill=lambda tokens: tokens / 10).until()] == [3.0, 5.0, 7.0]


def test_a_cache_that_is_too_small_takes_the_youngest_one_s_seat():
    """Room for 26 tokens: two prompts of 10 and three steps. The second, with 3 of its 5 tokens, waits; the first has 2 to go, alone.
    Then the second computes its 13 tokens again, and samples 2 more."""
    computed: list[float] = []

    def prefill(tokens: float) -> float:
        computed.append(tokens)
        return 0.0

    own = sampled([5, 5], capacity=26, prefill=prefill)
    assert own.until() == [(5.0, 0), (7.0, 1)]
    assert own.preempted == 1 and computed == [20, 13]
    # One sequence alone goes on whatever the cache holds.
    assert sampled([50], capacity=5).until() == [(50.0, 0)]
    many = sampled([40] * 30, seats=30, capacity=300)
    assert len(many.until()) == 30 and many.preempted > 0 and many.idle


def test_requests_that_come_later_and_turns():
    own = queue()
    own.add(0, [4], 10)
    own.add(1, [2], 10, release=2.5)  # between two steps
    assert own.until() == [(4.0, 0), (5.0, 1)]
    own = queue()
    own.add(0, [2, 3], 10)  # two turns, with a wait of 1.5 s between them
    assert own.until(pause=1.5) == [(6.5, 0)]
    own = queue()
    own.add(0, [8], 10)
    assert own.until(3.0) == [] and own.now == 3.0
    own.now = 5.0
    assert own.until() == [(10.0, 0)]


def test_turns_have_their_mean_and_all_tokens():
    found = [turns_of(10, 2.5, number) for number in range(1000)]
    assert all(sum(turns) == 10 for turns in found) and {len(turns) for turns in found} == {2, 3}
    assert sum(map(len, found)) / 1000 == pytest.approx(2.5, abs=0.01)
    assert turns_of(1, 3, 0) == [1] and turns_of(7, 1, 5) == [7]


def test_lengths_have_their_mean_after_the_cut():
    for mean, longest in ((869, 3946), (3101, 3946), (10, 1000)):
        found = ResponseLengths(mean=mean).drawn(2048, longest)
        assert sum(found) / len(found) == pytest.approx(mean, rel=0.002) and max(found) <= longest and min(found) >= 1
        assert found == ResponseLengths(mean=mean).drawn(2048, longest) != ResponseLengths(mean=mean).drawn(2048, longest, seed=1)
    assert set(ResponseLengths(mean=900).drawn(16, 900)) == {900}
    assert shares([5, 1, 2, 3], 3) == [[5, 3], [1], [2]] and len(shares([1, 2], 4)) == 2


def component(engine: Engine | None = None) -> Component:
    return plan_parts.component(num_ranks=1, optimizer=None, work=work(Phase.generate, rows=8), engine=engine)


@pytest.fixture
def found() -> list[Component]:
    return [component(plan_parts.engine())]


def test_lengths_that_no_sequence_has(found):
    with pytest.raises(
        ConfigError, match="^plan.response_length=129: responses of 129 tokens; allowed: 1 to rollout.sampling.max_response_le"
    ):
        with_lengths(found, PlanConfig(response_length=129))
    with pytest.raises(ConfigError, match="^plan.prompt_length=200: allowed: at most data.max_prompt_length=128"):
        with_lengths(found, PlanConfig(prompt_length=200))
    with pytest.raises(ConfigError, match="^plan.response_length=5: this recipe samples no responses"):
        with_lengths([component()], PlanConfig(response_length=5))
    with pytest.raises(ConfigError, match="^plan.example_length=257: allowed: 1 to 256, by data.max_length"):
        with_lengths([component()], PlanConfig(example_length=257))
    assert with_lengths([component()], PlanConfig(example_length=64))[0].work.lengths == ResponseLengths(mean=64)
    (changed,) = with_lengths(found, PlanConfig(response_length=32, prompt_length=64))
    assert changed.work.mean_length() == 96 and changed.work.length == 256  # memory is that of the longest
    assert with_lengths(found, PlanConfig()) == found


def test_lengths_of_a_run(tmp_path: Path, found):
    lines = [{"step": step, "rollout/response_length": length} for step, length in enumerate((10.0, 30.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert measured_lengths(tmp_path) == measured_lengths(tmp_path / "metrics.jsonl") == (20, ())
    assert with_lengths(found, PlanConfig(lengths_of=str(tmp_path)))[0].work.lengths == ResponseLengths(mean=20)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="metrics.jsonl: no rollout/response_length in its last 20 lines"):
        measured_lengths(tmp_path)
    with pytest.raises(ConfigError, match="plan.lengths_of=.*nowhere"):
        measured_lengths(tmp_path / "nowhere")


def test_lengths_in_a_file(tmp_path: Path, found):
    (path := tmp_path / "lengths.txt").write_text("4\n100\n16\n\n200\n")
    lengths = with_lengths(found, PlanConfig(lengths_of=str(path)))[0].work.lengths
    assert lengths.mean == 80 and lengths.measured == (4, 16, 100, 200)
    assert sorted(lengths.drawn(4, 128)) == [4, 16, 100, 128] and sorted(lengths.drawn(2, 500)) == [16, 200]
    assert sorted(lengths.drawn(8, 500)) == [4, 4, 16, 16, 100, 100, 200, 200]
    for text, message in (("", "needs a length of at least 1"), ("0\n", "needs a length of at least 1"), ("x\n", "invalid literal")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"plan.lengths_of={path}: {message}"):
            measured_lengths(path)


def test_work_without_lengths_is_the_longest():
    own = work(Phase.train, rows=4, length=12, response_length=8)
    assert own.responses(3) == [8, 8, 8] and own.mean_length() == 12 and own.mean_prompt == 4


def test_images_take_the_prompt_unless_their_tokens_are_given() -> None:
    own = plan_parts.component()  # prompts of 128 tokens
    assert own.seen_tokens == 128
    assert plan_parts.component(work=work(Phase.train, response_length=256)).seen_tokens == 256
    assert with_lengths([own], PlanConfig(image_tokens=12))[0].seen_tokens == 12
    with pytest.raises(ConfigError, match="^plan.image_tokens=129: allowed: at most 128, the longest prompt or example"):
        with_lengths([own], PlanConfig(image_tokens=129))
