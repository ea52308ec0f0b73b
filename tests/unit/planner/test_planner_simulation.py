"""Runs of small jobs, event by event, worked out by hand: one replica of an engine that takes a second for every decode step."""

from __future__ import annotations

import math
from dataclasses import replace

import plan_parts
import pytest
from plan_parts import work

from aligner.models.config import Architecture
from aligner.planner.config import ClusterConfig, Device, PlanConfig
from aligner.planner.simulation import Habits, Part, simulate
from aligner.planner.workload import Head, Phase, ResponseLengths, StateBytes

NOTHING = StateBytes(weights=0, gradients=0, optimizer=0)
SIZES = plan_parts.sizes()
# All that takes time is a decode step, of one second.
CLUSTER = ClusterConfig(
    device=Device.gpu,
    gpus_per_node=1,
    bf16_tflops=1e12,
    hbm_gb_per_second=1e12,
    collective_microseconds=0,
    launch_microseconds=0,
    host_layer_microseconds=1e-9,
    engine_step_milliseconds=1000,
    engine_sequence_microseconds=0,
    step_seconds=0,
    sequence_milliseconds=0,
)
HABITS = Habits()
STREAMED = work(Phase.generate, Phase.train)


EIGHT = plan_parts.engine()


def actor(*, rows: int = 2, response: int = 10, **changes) -> Part:
    own_work = work(
        Phase.generate, Phase.ref_logprobs, Phase.train, rows=rows, length=20, response_length=response, update_rows=0, num_updates=0
    )
    settings = {"num_ranks": 1, "architecture": Architecture(vocab_size=100), "work": own_work, "engine": EIGHT}
    own = plan_parts.component(**settings | changes)
    return Part(component=own, sizes=SIZES, seconds={Phase.generate: 0.0, Phase.ref_logprobs: 2.0, Phase.train: 5.0})


def server(name: str, **seconds: float) -> Part:
    own_work = replace(actor().component.work, phases=tuple(Phase(phase) for phase in seconds))
    own = replace(actor().component, name=name, head=Head.scalar, engine=None, work=own_work)
    return Part(component=own, sizes=SIZES, seconds={Phase(phase): value for phase, value in seconds.items()})


def phases(*parts: Part, assumed: PlanConfig | None = None, habits: Habits = HABITS, cluster: ClusterConfig = CLUSTER, turns: bool = False):
    found = simulate(parts, cluster, assumed or PlanConfig(), habits, take_turns=turns)
    assert found.step_seconds == pytest.approx(sum(found.phases.values()))
    return {name: pytest.approx(seconds, abs=1e-3) for name, seconds in found.phases.items()}


def test_one_thing_after_the_other():
    assert phases(actor()) == {"generate": 10, "ref_logprobs": 2, "train": 5}
    host = replace(CLUSTER, step_seconds=1, sequence_milliseconds=500, phase_seconds=3)
    assert phases(actor(), cluster=host) == {"host work": 2, "generate": 13, "ref_logprobs": 2, "train": 5}
    seating = replace(CLUSTER, engine_request_microseconds=250_000)  # of both responses
    assert phases(actor(), cluster=seating)["generate"] == 10.5
    assert phases(replace(actor(engine=None), seconds={Phase.generate: 0.0, Phase.ref_logprobs: 0.0, Phase.train: 4.0})) == {"train": 4}


def test_a_critic_in_the_trainers_processes():
    """It computes and trains in turn with the policy, whatever servers do meanwhile; its checkpoints are written too."""
    critic = server("critic", values=6.0, train=7.0)
    critic = replace(critic, component=replace(critic.component, within="actor"))
    assert phases(actor(), critic) == {"generate": 10, "ref_logprobs": 2, "values": 6, "critic": 7, "train": 5}
    found = phases(actor(), critic, server("reward", scores=2.0))
    assert found == {"generate": 10, "waiting for scores": 2, "ref_logprobs": 2, "values": 6, "critic": 7, "train": 5}


def test_servers_take_what_has_been_sampled():
    """Two responses end after 10 s; the critic takes 3 s for each, the reward model 1 s. The critic trains for 7 s, the actor for 5."""
    found = phases(actor(), server("critic", values=6.0, train=7.0), server("reward", scores=2.0))
    assert found == {"generate": 10, "waiting for scores": 6, "ref_logprobs": 2, "train": 5, "waiting for the critic's training": 2}
    # One after the other where all share the GPUs.
    shared = phases(actor(), server("critic", values=6.0, train=7.0), server("reward", scores=2.0), turns=True)
    assert shared == {"generate": 10, "waiting for scores": 8, "ref_logprobs": 2, "train": 5, "waiting for the critic's training": 7}
    # Of different lengths the first is scored while the second is still sampled.
    uneven = replace(actor().component.work, lengths=ResponseLengths(mean=6, spread=1.0))
    apart = actor(work=uneven)
    longest = max(uneven.responses(2))
    assert phases(apart, server("reward", scores=2.0))["generate"] == longest
    assert phases(apart, server("reward", scores=2.0))["waiting for scores"] == 1
    # A reward function of 4 s, one response after the other.
    assert phases(actor(), assumed=PlanConfig(reward_seconds=4))["waiting for scores"] == 8


def test_turns_and_static_batches():
    assert phases(actor(), assumed=PlanConfig(turns=2, environment_seconds=3))["generate"] == 13
    uneven = replace(actor().component.work, rows=3, lengths=ResponseLengths(mean=6, spread=1.0))
    two = replace(EIGHT, max_batch_size=2)
    first, second, third = uneven.responses(3)
    own = actor(work=uneven, engine=two)
    assert phases(own, assumed=PlanConfig(steps=1))["generate"] == max(first, second, min(first, second) + third)
    assert phases(own, assumed=PlanConfig(steps=1, static_batches=True))["generate"] == max(first, second) + third
    seeds = [uneven.responses(3, seed) for seed in range(8)]  # each step has the lengths in another order
    taken = [max(*two, min(two) + last) for *two, last in seeds]
    assert len(set(taken)) > 1 and phases(own, assumed=PlanConfig(steps=8))["generate"] == sum(taken) / 8


def ahead(own_ranks: int = 0, **habits) -> tuple[Part, Habits]:
    engine = plan_parts.engine(asynchronous=True, own_ranks=own_ranks)
    return actor(engine=engine), Habits(max_staleness=1, **habits)


def test_rollouts_ahead_on_gpus_of_their_own():
    """Sampling takes 10 s and training 7. Rounds that follow each other: a step takes 10, of which the trainer waits 3. Streams: that of
    step 3 begins with the end of step 1 beside the one of step 2, so two steps take 17. Where responses are short, training bounds both."""
    for partial, wait in ((True, 1.5), (False, 3)):
        part, habits = ahead(own_ranks=1, partial=partial)
        assert phases(part, habits=habits) == {"waiting for rollouts": wait, "ref_logprobs": 2, "train": 5}
        short = replace(part, component=replace(part.component, work=replace(part.component.work, response_length=4)))
        assert phases(short, habits=habits) == {"ref_logprobs": 2, "train": 5}


def test_rollouts_ahead_on_the_same_gpus():
    """Where each has all of its speed beside the other, it is as on GPUs of their own; at half speed nothing is won."""
    part, habits = ahead()
    free = replace(CLUSTER, concurrency=1.0)
    assert sum(simulate([part], free, PlanConfig(), habits, take_turns=False).phases.values()) == pytest.approx(10, abs=0.1)
    half = simulate([part], CLUSTER, PlanConfig(), habits, take_turns=False).step_seconds
    assert half == pytest.approx(17, rel=0.1)


def test_streams_have_no_tail():
    """Eight seats, sixteen responses of very different lengths a step: with rounds that follow each other some seats are free at the end of
    each; with the next ones' requests they never are."""
    own_work = replace(STREAMED, rows=16, length=110, response_length=100, lengths=ResponseLengths(mean=20, spread=1.2))
    engine = plan_parts.engine(asynchronous=True, own_ranks=1, kv_cache_tokens=10_000)
    part = replace(actor(work=own_work, engine=engine), seconds={Phase.train: 1.0})
    rounds, stream = (
        simulate([part], CLUSTER, PlanConfig(), Habits(max_staleness=3, partial=partial), take_turns=False).step_seconds
        for partial in (False, True)
    )
    assert stream < 0.8 * rounds and stream >= 16 * 20 / 8 * 0.9


def test_what_comes_between_steps():
    """Steps of 17 s. Validation of 8 responses takes 10 s, every 5 steps; checkpoints of 20 GB at 1 GB/s, every 10, in the background 0."""
    state = replace(SIZES, stages=(replace(NOTHING, optimizer=20 * 10**9),))
    habits = Habits(validate_every=5, save_every=10)
    found = phases(replace(actor(), sizes=state), assumed=PlanConfig(validation_responses=8), habits=habits)
    assert found["validation"] == 2 and found["checkpoints"] == 2
    hidden = phases(replace(actor(), sizes=state), habits=replace(habits, saves_in_background=True))
    assert "checkpoints" not in hidden


def test_failures():
    run = simulate([actor()], CLUSTER, PlanConfig(), Habits(max_steps=1000), take_turns=False)
    assert (run.useful, run.run_seconds) == (1.0, pytest.approx(17_000, rel=1e-3))
    often = PlanConfig(node_mtbf_hours=1, restart_minutes=5)
    lost = simulate([actor()], CLUSTER, often, Habits(max_steps=1000, save_every=10), take_turns=False)
    # One failure in an hour loses 5 minutes and half of 170 s, of 3,600 s.
    assert lost.useful == pytest.approx(1 - 385 / 3985, abs=0.04) and lost.run_seconds == pytest.approx(17_000 / lost.useful, rel=1e-3)
    again = simulate([actor()], CLUSTER, often, Habits(max_steps=1000, save_every=10), take_turns=False)
    assert again.run_seconds == lost.run_seconds  # the seed's
    rarely = simulate([actor()], CLUSTER, often, Habits(max_steps=1000, save_every=500), take_turns=False)
    assert rarely.useful < lost.useful
    never = simulate([actor()], CLUSTER, PlanConfig(node_mtbf_hours=0.01), Habits(max_steps=1000), take_turns=False)
    assert math.isinf(never.run_seconds) and never.useful < 0.01


def test_spans_are_of_one_step():
    found = simulate([actor(), server("critic", values=6.0)], CLUSTER, PlanConfig(), HABITS, take_turns=False)
    by_name = {(span.component, span.name): (round(span.start, 3), round(span.end, 3)) for span in found.spans}
    assert by_name["actor", "generate"] == (0, 10) and by_name["critic", "score"] == (10, 16)
    assert by_name["actor", "train"] == (18, 23) and len([span for span in found.spans if span.name == "response"]) == 2


def test_ten_thousand_gpus_and_a_hundred_steps():
    """All of it follows some of the replicas, so that its size costs little."""
    own_work = replace(STREAMED, rows=65_536, length=8192, response_length=7168, lengths=ResponseLengths(mean=2000, spread=1.0))
    engine = plan_parts.engine(tp=8, max_batch_size=64, asynchronous=True, own_ranks=5000, kv_cache_tokens=500_000)
    part = replace(actor(work=own_work, engine=engine, num_ranks=5000), seconds={Phase.train: 30.0})
    run = simulate([part], CLUSTER, PlanConfig(steps=100), Habits(max_staleness=2), take_turns=False)
    assert run.step_seconds >= 30


def test_checkpoints_by_time_come_in_between_rarer_ones_by_steps():
    """Steps of 17 s: half an hour is 106 of them."""
    state = replace(SIZES, stages=(replace(NOTHING, optimizer=20 * 10**9),))

    def saving(**habits: float) -> float:
        return phases(replace(actor(), sizes=state), habits=Habits(**habits)).get("checkpoints", 0.0)

    assert saving(save_minutes=30) == saving(save_minutes=30, save_every=500) == pytest.approx(20 / 106)
    assert saving(save_minutes=30, save_every=10) == 2 and saving() == 0
    often = PlanConfig(node_mtbf_hours=1, restart_minutes=5)
    at_the_end, by_time = (
        simulate([actor()], CLUSTER, often, Habits(max_steps=1000, save_minutes=minutes), take_turns=False).useful for minutes in (0, 10)
    )
    assert by_time > at_the_end
