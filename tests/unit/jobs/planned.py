"""A small plan of PPO whose figures are chosen, not computed, for tests of what is made of plans."""

from __future__ import annotations

from dataclasses import replace

from aligner.jobs import plan
from aligner.planner.estimate import ComponentPlan
from aligner.planner.memory import PhaseMemory
from aligner.planner.report import JobPlan
from aligner.planner.simulation import Simulated
from aligner.planner.timing import PhaseTime
from aligner.planner.workload import GIB, Phase
from aligner.spans import Span

SECONDS = {
    "actor": {Phase.generate: 10.0, Phase.logprobs: 1.0, Phase.ref_logprobs: 2.0, Phase.train: 4.0},
    "critic": {Phase.values: 6.0, Phase.train: 5.0},
    "reward": {Phase.scores: 12.0},
}
PHASES = {
    **{"host work": 0.5, "refit": 0.5, "generate": 10.0, "waiting for scores": 2.0, "logprobs": 1.0, "ref_logprobs": 2.0},
    **{"train": 4.0, "waiting for the critic's training": 1.0, "validation": 3.0, "checkpoints": 2.0},
}
SPANS = (
    Span("generate", "actor", "rank 0", 30.0, 10.0),
    Span("response", "engine", "replica 0", 30.0, 8.0, {"tokens": 100}),
    Span("score", "reward", "rank 0", 32.0, 10.0),
    Span("train", "actor", "rank 0", 42.0, 8.0),
)


def planned_ppo(*, problems: tuple[str, ...] = ()) -> JobPlan:
    """Phases take the seconds of SECONDS, half of them "layers". Memory grows with phase and stage."""
    config = plan.load("ppo_8b", [])
    found = []
    for component in plan.components(config):
        times, memory = [], []
        for number, (phase, seconds) in enumerate(SECONDS[component.name].items()):
            times.append(PhaseTime(phase=phase, parts={"layers": seconds / 2, "other": seconds / 2}))
            for stage in range(2):
                memory.append(PhaseMemory(phase=phase, stage=stage, parts={"weights": (number + 1) * GIB, "KV cache": stage * GIB}))
        found.append(
            ComponentPlan(
                component=replace(component, work=replace(component.work, phases=tuple(SECONDS[component.name]))),
                stage_parameters=(5,),
                model_parameters=5,
                sizes=None,
                memory=tuple(memory),
                host={},
                times=tuple(times),
                limit=8 * GIB,
            )
        )
    run = Simulated(phases=PHASES, useful=1.0, run_seconds=2600.0, preemptions=0, spans=SPANS)
    return JobPlan(name="ppo <8b>", cluster=config.cluster, components=tuple(found), alternatives={}, problems=problems, run=run)
