"""The search of a whole job of three components beside the product of all layouts, micro-batches, engines and shares of the ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import plan_parts
import pytest
from plan_parts import architecture, work

from aligner.models.config import ModelConfig
from aligner.models.training.optimizer import OptimizerConfig
from aligner.planner.config import ClusterConfig, Device
from aligner.planner.job_search import COMMUNICATORS, Aim, Arrangement, JobSearch, Option, RoleSearch, step_seconds
from aligner.planner.memory import host_memory
from aligner.planner.search import Estimator, Space
from aligner.planner.times import phase_times
from aligner.planner.workload import GIB, BlockBytes, Component, Head, Phase, StateBytes

GPUS = 6
PARAMETERS = 1_200_000_000  # of each model
ARCHITECTURE = architecture(num_layers=3, hidden_size=1024, ffn_hidden_size=4096, vocab_size=32000)  # two stages are uneven
WORK = {"rows": 32, "length": 512, "response_length": 256}
TRAINED = {**WORK, "update_rows": 16, "num_updates": 2}
TYPED = frozenset(f"{role}model.recompute" for role in ("", "critic."))


def component(name: str, phases: tuple[Phase, ...], *, trains: bool = True, **changes) -> Component:
    own, head = work(*phases, **(TRAINED if trains else WORK)), Head.language if name == "actor" else Head.scalar
    more = {} if trains else {"optimizer": None}
    model = {"make_vocab_divisible_by": ModelConfig().make_vocab_divisible_by}
    return plan_parts.component(name=name, head=head, work=own, architecture=ARCHITECTURE, model=model, num_ranks=4, **more, **changes)


ENGINE = plan_parts.engine(bucket_bytes=2**32, on_gpu=True)
ACTOR = component("actor", (Phase.generate, Phase.ref_logprobs, Phase.train), engine=ENGINE)
CRITIC = component("critic", (Phase.values, Phase.train))
REWARD = component("reward", (Phase.scores,), trains=False)


class Weighed(Estimator):
    """Weights and activations by simple rules, so that nothing has to be built."""

    def _states(self, component: Component) -> tuple[StateBytes, ...]:
        p = component.parallel
        weights = 2 * PARAMETERS // (p.tp * p.pp)
        if component.optimizer is None:
            return (StateBytes(weights=weights, gradients=0, optimizer=0),) * p.pp
        return (StateBytes(weights=weights, gradients=2 * weights, optimizer=6 * weights // component.dp),) * p.pp

    def _engine_sizes(self, component: Component) -> dict[str, int]:
        return {"engine_weights": 2 * PARAMETERS // component.engine.tp if component.engine is not None else 0}

    def measured(self, component: Component, sizes):
        rows = component.model.micro_batch_size
        block = BlockBytes(layer=rows * 2**30 // component.parallel.tp, ends=2**20, backward=rows * 2**29, forward=rows * 2**28)
        return replace(sizes, train=block, inference=block)


def cluster(gib: float) -> ClusterConfig:
    return ClusterConfig(device=Device.gpu, gpus_per_node=8, gpu_memory_gib=gib, host_memory_gib=500, communicator_gib=0.1)


def everything(role: Component, space: Space, estimator: Estimator, *, room: int, beside: int) -> list[Option]:
    """All that fit on up to `room` ranks, with all that may move to host memory and without."""
    found, limit = [], space.cluster.gpu_memory_gib * GIB
    for ranks in space.ranks(role, room):
        engines = space.engines(role, role.engine, ranks) if role.engine is not None else [None]
        for layout in space.layouts(role, ranks):
            for model, engine, relieved in product(space.models(layout), engines, space.reliefs(role)):
                one = relieved(replace(layout, model=model, engine=engine, work=role.work, beside_bytes=beside))
                sizes = estimator.sizes(one)
                if estimator.peak_of(one, estimator.measured(one, sizes)) <= limit:
                    times = {time.phase: time.total for time in phase_times(one, sizes, space.cluster)}
                    found.append(Option(component=one, guest=None, times=times, host=sum(host_memory(one, sizes, space.cluster).values())))
    return found


def fastest(options: list[list[Option]], *, colocated: bool, gpus: int) -> float:
    """Of the whole product."""
    best = float("inf")
    for job in product(*options):
        sizes = [one.component.num_ranks for one in job]
        if (max(sizes) if colocated else sum(sizes)) <= gpus and (not colocated or max(sizes) == sizes[0]):
            best = min(best, step_seconds(job, colocated=colocated, asynchronous=False))
    return best


@pytest.mark.parametrize("gib", [14.0, 22.0, 80.0])  # of a GPU: little fits, most, all
@pytest.mark.parametrize("colocated", [False, True])
def test_nothing_in_the_product_is_faster(gib: float, colocated: bool) -> None:
    roles = [ACTOR, CRITIC, REWARD]
    if colocated:
        offloading = [replace(ENGINE, offload=True), None, None]
        roles = [
            replace(
                one,
                turns=frozenset(one.work.phases) - {Phase.ref_logprobs},
                engine=engine,
                optimizer=OptimizerConfig(offload=True) if one.optimizer is not None else None,
            )
            for one, engine in zip(roles, offloading, strict=True)
        ]
    space = Space(cluster=cluster(gib), main="actor", typed=TYPED)
    estimator = Weighed(space.cluster)
    search = JobSearch(Arrangement(words="", settings={}, components=tuple(roles), colocated=colocated), space, estimator)
    found = search.candidates(GPUS)
    beside = int(2 * (space.cluster.reserved_gib + COMMUNICATORS * space.cluster.communicator_gib) * GIB) if colocated else 0
    options = [everything(one, space, estimator, room=GPUS, beside=beside) for one in roles]
    expected = fastest([_shortened(one) for one in options], colocated=colocated, gpus=GPUS)
    assert found and found[0].seconds == pytest.approx(expected)
    assert all(one.gpus <= GPUS for one in found) and found == sorted(found, key=lambda one: one.seconds)


@pytest.mark.parametrize("gib", [14.0, 80.0])
@pytest.mark.parametrize("role", [ACTOR, CRITIC], ids=lambda role: role.name)
def test_fronts_are_what_nothing_beats(role: Component, gib: float) -> None:
    space = Space(cluster=cluster(gib), main="actor")
    estimator = Weighed(space.cluster)

    def cost(option: Option) -> tuple[float, ...]:
        sampling, training = (option.times.get(phase, 0.0) for phase in (Phase.generate, Phase.train))
        return tuple(round(seconds, 9) for seconds in (sampling, option.between, training))

    costs = {cost(one) for one in everything(role, space, estimator, room=GPUS, beside=0) if one.component.num_ranks == 4}
    unbeaten = {one for one in costs if not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in costs)}
    found = RoleSearch(role, None, space, estimator, aim=Aim.phases, beside=0).front(4)
    assert sorted(map(cost, found)) == sorted(unbeaten) and len(unbeaten) > 1
    for one in (option.component for option in found):  # what stays on the device fits there
        assert estimator.peak_of(one, estimator.measured(one, estimator.sizes(one))) <= gib * GIB
    assert any(one.component.optimizer.offload for one in found) == (gib < 80 and role is ACTOR)


def _shortened(options: list[Option]) -> list[Option]:
    """Without doubles: the same ranks and times."""
    return list({(one.component.num_ranks, tuple(one.times.items())): one for one in options}.values())


def test_a_guest_is_computed_where_its_host_is() -> None:
    space = Space(cluster=cluster(80.0), main="actor", typed=TYPED)
    guest = replace(REWARD, within="critic")
    together = Arrangement(words="", settings={"critic.with_reward": "true"}, components=(ACTOR, CRITIC), guests={"critic": guest})
    best = JobSearch(together, space, Weighed(space.cluster)).candidates(GPUS)[0]
    actor, critic = best.options
    assert (
        critic.guest is not None
        and critic.guest.parallel == critic.component.parallel
        and critic.guest.num_ranks == critic.component.num_ranks
    )
    assert Phase.scores in critic.times and critic.between == critic.times[Phase.values] + critic.times[Phase.scores]
    chosen = best.settings(space)
    assert chosen["critic.with_reward"] == "true" and not any(key.startswith("reward.parallel") for key in chosen)
    assert chosen["reward.model.micro_batch_size"] == chosen["critic.model.micro_batch_size"]
    assert best.gpus == actor.component.num_ranks + critic.component.num_ranks
