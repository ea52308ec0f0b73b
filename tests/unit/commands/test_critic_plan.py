"""What a plan knows of a critic in the actor's processes (`critic.kind=model`, `head`): its memory and layout; and of steps without one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aligner.algorithms.grpo import GRPOConfig, KLIn
from aligner.commands.plan import command as plan
from aligner.commands.plan.search import STALENESS, _arrangement
from aligner.commands.programs import programs
from aligner.errors import ConfigError
from aligner.losses.advantages import Estimator
from aligner.planner.dry_run import shard_parameters
from aligner.planner.engine_memory import cache_bytes
from aligner.planner.memory import Sizes, device_optimizer, head_bytes, resting_bytes, train_micro_batches
from aligner.planner.workload import BlockBytes, Component, Parameter, Phase, StateBytes

NAME = "ppo_8b_one_node"
STATE = StateBytes(weights=8 * 10**9, gradients=16 * 10**9, optimizer=12 * 10**9)
BLOCK = BlockBytes(layer=0, ends=0, backward=0, forward=0)
SIZES = Sizes(stages=(STATE,), train=BLOCK, inference=BLOCK, engine_weights=7 * 10**9)


def components(*settings: str):
    return plan.components(plan.load(NAME, settings))


def test_one_component_is_started() -> None:
    config = plan.load(NAME, [])
    assert [(one.component, one.num_ranks) for one in programs(NAME, config, [])] == [("actor", 8)]
    actor, critic = plan.components(config)
    assert (critic.name, critic.process, critic.num_ranks, critic.parallel) == ("critic", "actor", 8, actor.parallel)
    assert critic.work.phases == (Phase.values, Phase.train) and critic.optimizer is not None
    arrangement = _arrangement([actor, critic], {}, {"placement": config.placement, "critic.with_reward": False, STALENESS: 0})
    assert arrangement.words == "" and arrangement.guests == {"actor": critic}


def test_what_each_holds_while_the_other_computes() -> None:
    actor, critic = components()  # both are told to offload
    assert resting_bytes(critic, SIZES) == 0 and critic.turns == {Phase.values, Phase.train}
    assert resting_bytes(actor, SIZES) == STATE.weights
    actor, critic = components("critic.optimizer.offload=false", "optimizer.offload=false", "rollout.offload=false")
    assert not critic.turns
    trained = STATE.weights + STATE.gradients + device_optimizer(critic, STATE)
    assert resting_bytes(critic, SIZES) == trained
    own = replace(actor, engine=replace(actor.engine, settings=replace(actor.engine.settings, cuda_graphs=False)))
    assert resting_bytes(own, SIZES) == trained  # the engine reads the policy's weights in place
    ahead = replace(own, engine=replace(own.engine, asynchronous=True))  # it has its own, and its cache is there at any time
    assert resting_bytes(ahead, SIZES) > trained + SIZES.engine_weights + cache_bytes(ahead, ahead.engine)


def test_a_layout_is_refused_by_the_settings_that_it_has() -> None:
    with pytest.raises(ConfigError, match="^critic: parallel.pp=4"):
        components("parallel.pp=4", "critic.model.architecture.num_layers=30")
    with pytest.raises(ConfigError, match="^critic: critic.mini_batch_size=510: the last mini-batch of 512 rollouts has 2"):
        components("critic.mini_batch_size=510")


def parameters(*of: Component) -> list[dict[str, Parameter]]:
    """Of the first stage, by name."""
    return [{one.name: one for one in shard_parameters(component, 0)[0]} for component in of]


def test_a_head_is_a_layer_of_the_policy(on_ranks) -> None:
    """No second model: 4,096 weights and a bias in float32, and its input in float32 beside that of the output layer."""
    (actor,) = components("critic.kind=head")
    assert actor.has_values and plan.load(NAME, ["critic.kind=head"]).residents() == ()
    without = replace(actor, has_values=False)
    ((held, before),) = on_ranks(parameters, 1, actor, without)  # a plan needs a process of its own
    added = [held[name] for name in held.keys() - before.keys()]
    assert held.items() >= before.items() and sorted(one.numel for one in added) == [1, 4096]
    assert {one.itemsize for one in added} == {4} and not any(one.is_frozen for one in added)
    passes = train_micro_batches(actor)
    states = passes.tokens * 4096
    assert (
        head_bytes(actor, passes, training=True) - head_bytes(without, passes, training=True) > states * 2
    )  # gathered once more, in bfloat16


@pytest.mark.parametrize(
    ("settings", "extra", "phases"),
    [
        ({}, 0, {Phase.ref_logprobs}),  # one update: the policy is the one that sampled
        ({"mini_batch_size": 128, "kl_coef": 0.0}, 0, {Phase.logprobs}),
        ({"advantage_estimator": Estimator.remax, "kl_in": KLIn.reward}, 64, {Phase.logprobs, Phase.ref_logprobs}),  # 64 are greedy
        ({"kl_in": KLIn.reward, "kl_coef": 0.0}, 0, set()),
    ],
)
def test_work_of_a_step_without_a_critic(settings: dict, extra: int, phases: set[Phase]) -> None:
    config = plan.load("grpo", ["model=llama3_8b"])
    actor, *_ = plan.components(replace(config, algorithm=GRPOConfig(**settings)))
    assert (actor.work.rows, actor.work.extra_rows) == (512, extra)
    assert set(actor.work.phases) == {Phase.generate, Phase.train} | phases
    assert actor.has_reference == (Phase.ref_logprobs in phases)
