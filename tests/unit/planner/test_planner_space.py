"""What a search may choose, and how a whole job is put together from its components."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import plan_parts
import pytest
from plan_parts import architecture

from aligner.commands.parts import PlanOptions
from aligner.commands.plan.search import _Search, hours, run
from aligner.errors import ConfigError
from aligner.models.config import Recompute
from aligner.models.training.optimizer import OptimizerConfig
from aligner.planner.config import ClusterConfig, Device
from aligner.planner.job_search import Option, step_seconds
from aligner.planner.search import Space, uneven
from aligner.planner.workload import Component, Phase

CLUSTER = ClusterConfig(device=Device.gpu, gpus_per_node=8)


def component(**changes) -> Component:
    return plan_parts.component(**{"architecture": architecture(num_layers=6, num_key_value_heads=8)} | changes)


def space(*typed: str) -> Space:
    return Space(cluster=CLUSTER, main="actor", typed=frozenset(typed))


def test_sizes_are_parts_of_a_node_and_whole_nodes():
    assert space().sizes(64) == [1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 64]
    assert space().sizes(40) == [1, 2, 3, 4, 6, 8, 16, 24, 32, 40] and space().sizes(4) == [1, 2, 3, 4]


@pytest.mark.parametrize(("layers", "pp", "ends"), [(94, 8, (11, 11)), (61, 16, (3, 2)), (6, 4, (1, 1)), (3, 8, (0, 0)), (5, 2, (3, 2))])
def test_stages_where_layers_do_not_divide(layers: int, pp: int, ends: tuple[int, int]):
    assert uneven(layers, pp) == ends
    if ends[0]:
        assert sum(ends) + (pp - 2) * -(-layers // pp) == layers


def test_layouts_divide_and_have_uneven_stages():
    found = [one.parallel for one in space().layouts(component(), 8)]
    assert {(p.tp, p.pp) for p in found} == {(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if tp * pp <= 8 and pp <= 6}
    assert {(p.first_stage_layers, p.last_stage_layers) for p in found if p.pp == 4} == {(1, 1)}
    assert all(p.vpp == 1 for p in found if p.pp == 4) and {p.vpp for p in found if p.pp == 2} == {1, 3}  # 3 layers a stage
    assert all(p.sequence_parallel == (p.tp > 1) for p in found) and {p.cp for p in found} == {1}  # 256 tokens are not worth splitting


def test_what_was_typed_stays():
    fixed = space("parallel.pp", "model.recompute", "rollout.tp", "num_processes")
    own = component(parallel={"pp": 2}, model={"recompute": Recompute.full})
    assert {one.parallel.pp for one in fixed.layouts(own, 8)} == {2}
    assert {model.recompute for model in fixed.models(own)} == {Recompute.full} and fixed.ranks(own, 64) == [8]
    assert len({model.recompute for model in space().models(own)}) == 3 and space().ranks(own, 8) == [1, 2, 3, 4, 6, 8]
    engine = plan_parts.engine(tp=2, max_batch_size=64)
    assert {one.tp for one in fixed.engines(own, engine, 8)} == {2} and {one.tp for one in space().engines(own, engine, 8)} == {1, 2, 4, 8}
    chosen = fixed.settings(replace(own, engine=engine))
    assert "parallel.pp" not in chosen and "rollout.tp" not in chosen
    assert chosen["parallel.tp"] == "1" and chosen["rollout.max_batch_size"] == "64" and chosen["optimizer.offload"] == "false"
    critic = replace(own, name="critic")
    assert fixed.settings(critic)["critic.parallel.pp"] == "2"  # the critic's was not typed
    fixed = space("model.micro_batch_size")
    assert {model.micro_batch_size for model in fixed.models(own)} == {own.model.micro_batch_size}
    assert {model.recompute for model in fixed.models(own)} == set(Recompute)
    # One row for each of 64 replicas: no larger micro-batch differs.
    assert {model.micro_batch_size for model in space().models(component(num_ranks=64))} == {1}
    assert {model.micro_batch_size for model in space().models(component(num_ranks=16))} == {1, 2, 4}


def test_the_host_updates_where_it_may():
    """In a search for what fits with nothing else, and where the config has it."""

    def found(own: Space, **optimizer) -> set[bool]:
        one = component(optimizer=OptimizerConfig(**optimizer))
        return {relieved(one).optimizer.cpu_offload for relieved in own.reliefs(one)}

    last = replace(space(), host_updates=True)
    assert found(space()) == {False} and found(last) == {False, True}
    assert found(space(), cpu_offload=True) == found(last, cpu_offload=True) == {True}
    assert found(last, precision_aware=True) == found(last, distributed=False) == {False}
    assert found(replace(space("optimizer.cpu_offload"), host_updates=True)) == {False}


@pytest.mark.cpu  # the simulated GPU cannot hold a plan's fake tensors
def test_all_weights_of_70b_fit_on_two_nodes_with_the_optimizer_on_the_host(on_ranks):
    """In a process of its own: plans have a world."""
    ((h100, h200),) = on_ranks(fastest_of_70b, 1, timeout=600)
    assert h100["settings"]["optimizer.cpu_offload"] == "true" and h100["fits"] and h100["gpus"] == 16
    assert h200["fits"] and "optimizer.cpu_offload" not in h200["settings"]  # it is not needed


def option(ranks: int, **seconds: float) -> Option:
    return Option(component=component(num_ranks=ranks), guest=None, times={Phase(name): value for name, value in seconds.items()}, host=0)


def test_a_step_by_how_its_components_meet():
    actor, critic = option(8, generate=10, ref_logprobs=2, train=4), option(4, values=12, train=6)
    assert step_seconds([actor, critic], colocated=False, asynchronous=False) == 12 + 2 + 6
    assert step_seconds([actor, critic], colocated=True, asynchronous=False) == 16 + 18
    assert step_seconds([actor], colocated=False, asynchronous=True) == 10  # longer than 2 + 4
    assert step_seconds([option(8, generate=3, ref_logprobs=2, train=4)], colocated=False, asynchronous=True) == 6


@pytest.mark.parametrize(("deadline", "expected"), [("24h", 24), ("2d", 48), ("90m", 1.5), ("1d6h", 30), ("1.5h", 1.5), ("", 0)])
def test_deadlines(deadline: str, expected: float):
    assert hours(PlanOptions(deadline=deadline, steps=10)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PlanOptions(deadline="24", steps=1), "--deadline 24: allowed: a duration in days, hours or minutes, such as 2d, 24h or 90m"),
        (PlanOptions(deadline="24h"), "--deadline 24h: needs --steps N"),
        (PlanOptions(deadline="0h", steps=1), "--deadline 0h: must be above 0"),
    ],
)
def test_deadlines_that_are_none(options: PlanOptions, message: str):
    with pytest.raises(ConfigError, match=message):
        hours(options)
    with pytest.raises(ConfigError, match="^--steps 8: needs --search"):
        run("grpo", [], PlanOptions(steps=8))


def test_presets_leave_their_sections_free():
    """Values do not: they are what the user wants."""
    search = _Search("grpo", ["model=llama3_8b", "cluster=dgx_h100", "parallel.tp=4", "reward={serve: false}"], PlanOptions(gpus=8))
    assert search.space.typed == {"parallel.tp", "reward"}
    assert search.space.is_free("model.recompute") and not search.space.is_free("reward.serve")
    search.options = replace(search.options, gpus=12)
    with pytest.raises(ConfigError, match="--gpus 12: must fill nodes of cluster.gpus_per_node=8; allowed: 1, 2, 4, 8, 16, 24, ..."):
        search.found(0.0)


def fastest_of_70b() -> list[dict[str, Any]]:
    """On two nodes, of H100 and of H200."""
    layout = ["rollout.asynchronous.max_staleness=0", "parallel.tp=4", "parallel.pp=4"]
    typed = [*layout, "model.recompute=none", "model.micro_batch_tokens=8192"]
    found = []
    for cluster in ([], ["cluster=dgx_h200"]):
        (best,) = _Search("grpo_70b", [*cluster, *typed], PlanOptions(gpus=16)).rows(16, all_of_them=False)
        found.append({"settings": dict(best.settings), "fits": not best.job.problems, "gpus": best.gpus})
    return found
