"""`aligner preflight` as a step on the nodes of every component, before the components start."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from aligner.cluster.exit_codes import ExitCode
from aligner.cluster.slurm.attempt import POLL_SECONDS, Ending, Verdict
from aligner.cluster.slurm.requests import StopRequests
from aligner.cluster.slurm.spec import ComponentSpec, JobSpec
from aligner.cluster.slurm.steps import Place, Step

SKIP_VARIABLE = "ALIGNER_PREFLIGHT"  # 0: do not run it
# What depends on the nodes. Data, models and rewards are looked at once, on the first component's.
_ITEMS_OF_OTHERS = ("versions", "devices", "clock", "network", "filesystem", "ports")
_SHOWN_LINES = 60
_NAME = "preflight"


def run_preflight(spec: JobSpec, place: Place, requests: StopRequests, variables: Mapping[str, str]) -> Verdict | None:
    """Try on the job's nodes what it will need; None where it may start."""
    if not spec.preflight or place.environ.get(SKIP_VARIABLE) == "0":
        return None
    place.say(f"preflight on {sum(component.num_nodes for component in spec.components)} nodes ({SKIP_VARIABLE}=0 skips it)")
    components = [_component(spec, index) for index in range(len(spec.components))]
    for component in components:
        place.run.log(component.name, 0).unlink(missing_ok=True)
    steps = [place.start(component, index=index, key=component.name, variables=variables) for index, component in enumerate(components)]
    deadline = time.monotonic() + spec.slurm.preflight_timeout_seconds
    while not all(step.has_ended() for step in steps) and time.monotonic() < deadline and not requests.any:
        time.sleep(POLL_SECONDS)
    late = [step.name for step in steps if not step.has_ended()]
    place.stop(steps, time.sleep, gently=False)
    for component in components:
        place.say(f"{component.name}:")
        for line in place.last_lines(component, 0, _SHOWN_LINES):
            place.say(f"  | {line}")
    if requests.terminate:
        return Verdict(ending=Ending.terminated, reason="Slurm is ending the job")
    if requests.stop:
        return Verdict(ending=Ending.stopped, reason="it had to stop during the preflight")
    if late:
        return Verdict(ending=Ending.crashed, reason=f"{', '.join(late)} took longer than {spec.slurm.preflight_timeout_seconds:g} s")
    verdicts = [verdict for step in steps if (verdict := _verdict(step)) is not None]
    refused = [verdict for verdict in verdicts if verdict.ending is Ending.refused]
    return next(iter(refused + verdicts), None)


def _component(spec: JobSpec, index: int) -> ComponentSpec:
    """The preflight of a component: all items for the first, those of the nodes for the others."""
    component = spec.components[index]
    if index == 0:
        return replace(component, name=_NAME, program=spec.preflight)
    program = (*spec.preflight, "--only", ",".join(_ITEMS_OF_OTHERS))
    return replace(component, name=f"{_NAME}-{component.name}", program=program)


def _verdict(step: Step) -> Verdict | None:
    outcome = step.outcome()
    if outcome is None or outcome.code not in (ExitCode.done, ExitCode.refused):
        return Verdict(ending=Ending.crashed, reason=step.describe_end())
    if outcome.code == ExitCode.refused:
        return Verdict(ending=Ending.refused, reason=outcome.message or f"{step.name} found what the job cannot run with (see above)")
    return None
