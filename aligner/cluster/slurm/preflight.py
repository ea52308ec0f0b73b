"""`aligner preflight` as a step of the job, before its components start."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from aligner.cluster.exit_codes import ExitCode
from aligner.cluster.slurm.attempt import POLL_SECONDS, Ending, Verdict
from aligner.cluster.slurm.requests import StopRequests
from aligner.cluster.slurm.spec import JobSpec
from aligner.cluster.slurm.steps import Place, Step

SKIP_VARIABLE = "ALIGNER_PREFLIGHT"  # 0: do not run it
_SHOWN_LINES = 60
_NAME = "preflight"


def run_preflight(spec: JobSpec, place: Place, requests: StopRequests, variables: Mapping[str, str]) -> Verdict | None:
    """Try on the nodes of the component that trains what the job will need; None where it may start."""
    if not spec.preflight or place.environ.get(SKIP_VARIABLE) == "0":
        return None
    place.say(f"preflight on {spec.components[0].num_nodes} nodes ({SKIP_VARIABLE}=0 skips it)")
    place.run.log(_NAME, 0).unlink(missing_ok=True)
    component = replace(spec.components[0], name=_NAME, program=spec.preflight)
    step = place.start(component, index=0, key=_NAME, variables=variables)
    deadline = time.monotonic() + spec.slurm.preflight_timeout_seconds
    while not step.has_ended() and time.monotonic() < deadline and not requests.any:
        time.sleep(POLL_SECONDS)
    late = not step.has_ended()
    place.stop([step], time.sleep, gently=False)
    for line in place.last_lines(component, 0, _SHOWN_LINES):
        place.say(f"  | {line}")
    if requests.terminate:
        return Verdict(ending=Ending.terminated, reason="Slurm is ending the job")
    if requests.stop:
        return Verdict(ending=Ending.stopped, reason="it had to stop during the preflight")
    if late:
        return Verdict(ending=Ending.crashed, reason=f"the preflight took longer than {spec.slurm.preflight_timeout_seconds:g} s")
    return _verdict(step)


def _verdict(step: Step) -> Verdict | None:
    outcome = step.outcome()
    if outcome is None or outcome.code not in (ExitCode.done, ExitCode.refused):
        return Verdict(ending=Ending.crashed, reason=step.describe_end())
    if outcome.code == ExitCode.refused:
        return Verdict(ending=Ending.refused, reason=outcome.message or "the preflight found what the job cannot run with (see above)")
    return None
