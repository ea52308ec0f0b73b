"""A small plan of PPO whose figures are chosen, not computed, for tests of what is made of plans."""

from __future__ import annotations

from dataclasses import replace

from aligner.commands.plan import command as plan
from aligner.planner.estimate import ComponentPlan
from aligner.planner.memory import PhaseMemory
from aligner.planner.report import JobPlan
from aligner.planner.simulation import Simulated
from aligner.planner.times import PhaseTime
from aligner.planner.workload import GIB, Phase
from aligner.telemetry.spans import Span

SECONDS = {
    "actor": {Phase.generate: 10.0, Phase.logprobs: 1.0, Phase.ref_logprobs: 2.0, Phase.train: 4.0},
    "critic": {Phase.values: 6.0, Phase.train: 5.0},
    "reward": {Phase.scores: 12.0},
}
SPANS = tuple(
    Span(name, component, "rank 0", start, seconds)
    for component, name, start, seconds in (
        ("actor", "generate", 0.0, 10.0),
        ("critic", "score", 0.0, 6.0),
        ("reward", "score", 0.0, 12.0),
        ("actor", "logprobs", 12.0, 1.0),
        ("actor", "ref_logprobs", 13.0, 2.0),
        ("actor", "train", 15.0, 4.0),
        ("critic", "train", 15.0, 5.0),
    )
)


def planned_ppo(*, take_turns: bool = False, problems: tuple[str, ...] = ()) -> JobPlan:
    """Seconds are those of SECONDS, half of them "layers"; a refit is 0.5 of the sampling. Memory grows with phase and stage."""
    config = plan.load("ppo_8b", [])
    found = []
    for component in plan.components(config):
        times, memory = [], []
        for number, (phase, seconds) in enumerate(SECONDS[component.name].items()):
            refit = 0.5 if phase is Phase.generate else 0.0
            parts = {"layers": seconds / 2, "other": seconds / 2 - refit} | ({"refit": refit} if refit else {})
            times.append(PhaseTime(phase=phase, parts=parts))
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
    phases = {
        "host work": 0.5,
        "refit": 0.5,
        "generate": 9.5,
        "waiting for scores": 1.5,
        "logprobs": 1.0,
        "ref_logprobs": 2.0,
        "train": 4.0,
        "waiting for the critic's training": 1.0,
        "validation": 3.0,
        "checkpoints": 2.0,
    }
    run = Simulated(phases=phases, useful=1.0, run_seconds=2000.0, preemptions=0, spans=SPANS)
    return JobPlan(name="ppo <8b>", cluster=config.cluster, components=tuple(found), problems=problems, run=run, take_turns=take_turns)
