"""The batch script's program: it starts and watches the components, and decides whether the run continues.

done       0    cancels the gatekeeper (see `following`)
refused    2    an error in the request: cancels the gatekeeper
stopped    0    before the time limit: submits the successor, cancels the gatekeeper; 75 without a successor
halted    78    numbers went bad, or no progress: cancels the gatekeeper
crashed    1    restarts all components in the same allocation; if that is disabled, the gatekeeper submits the job again

`aligner preflight` runs before the components start, as a step on the nodes of every component.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from aligner.cluster import lease as leases
from aligner.cluster.lease import Lease, LeaseRecord
from aligner.cluster.outcomes import ExitCode
from aligner.cluster.slurm.attempt import (
    ENDED,
    POLL_SECONDS,
    STARTED,
    SUBMITTED,
    Attempt,
    Ending,
    History,
    Verdict,
    done_step,
    newest_step,
    no_progress,
)
from aligner.cluster.slurm.client import OVER, JobRecord
from aligner.cluster.slurm.following import FollowingJobs, Request
from aligner.cluster.slurm.spec import ComponentSpec, JobSpec, OnFailure
from aligner.cluster.slurm.steps import Place, Step
from aligner.errors import LaunchError

SKIP_VARIABLE = "ALIGNER_PREFLIGHT"  # 0: do not run it
# What depends on the nodes. Data, models and rewards are looked at once, on the first component's.
_ITEMS_OF_OTHERS = ("versions", "devices", "clock", "network", "filesystem", "ports")
_SHOWN_LINES = 60
_NAME = "preflight"


def run_preflight(place: Place, variables: Mapping[str, str]) -> Verdict | None:
    """Run the preflight on the job's nodes; None if the job may start."""
    spec, requests, say = place.spec, place.requests, place.say
    if not spec.preflight or place.environ.get(SKIP_VARIABLE) == "0":
        return None
    say(f"preflight on {sum(place.allocation.num_nodes)} nodes ({SKIP_VARIABLE}=0 skips it)")
    components = [_component(spec, index) for index in range(len(spec.components))]
    for component in components:
        for path in (place.run.log(component.name, 0), place.run.logs / f"{component.name}.step.log"):
            path.unlink(missing_ok=True)
    steps = [place.start(one, key=one.name, variables=variables) for one in components]
    deadline = time.monotonic() + spec.slurm.preflight_timeout_seconds
    while not all(step.has_ended() for step in steps) and time.monotonic() < deadline and not requests.any:
        time.sleep(POLL_SECONDS)
    late = [step.name for step in steps if not step.has_ended()]
    place.stop(steps, time.sleep, gently=False)
    for component in components:
        lines = place.last_lines(component, 0, _SHOWN_LINES)
        if component is not components[0] and lines and lines[-1].endswith(": ready"):
            lines = lines[-1:]  # one table is enough if all is well
        say(f"{component.name}:")
        for line in lines:
            say(f"  | {line}")
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
        return Verdict(ending=Ending.refused, reason=outcome.message or f"{step.name} found what prevents the job from running (see above)")
    return None


_CODES = {
    Ending.done: ExitCode.done,
    Ending.refused: ExitCode.refused,
    Ending.halted: ExitCode.halted,
    Ending.stopped: ExitCode.stopped,
    Ending.crashed: ExitCode.failed,
    Ending.terminated: ExitCode.failed,
    Ending.lost: ExitCode.refused,
}


def conduct(place: Place) -> int:
    """Run a job of this run to its end; the exit code. Raises LaunchError if another job holds the run."""
    spec, run, job = place.spec, place.run.create(), place.allocation.job
    place.allocation.check(spec)
    if step := done_step(run, spec):
        place.say(f"the run in {run.path} is done (step {step}, {run.done.name}): nothing to do")
        return ExitCode.done
    record = LeaseRecord(job=job, attempt=f"{job}.0", host=place.allocation.node, pid=os.getpid(), valid_seconds=spec.slurm.lease_seconds)
    lease = leases.claim(run.lease, record, is_over=lambda other: _is_over(place, other))
    try:
        return _Conductor(replace(place, runtime=place.runtime.with_mount(run.path)), lease).run()
    finally:
        lease.release()


def _is_over(place: Place, other: LeaseRecord) -> bool | None:
    """Whether the job that held the run has ended; None if Slurm does not know, or it was no job."""
    try:
        return place.client.is_over(other.job) if other.job.isdigit() else None
    except LaunchError as error:
        place.say(f"warning: cannot ask whether job {other.job} still runs: {error}")
        return None


class _Conductor:
    def __init__(self, place: Place, lease: Lease) -> None:
        self._place = place
        self._spec = place.spec
        self._run = place.run
        self._lease = lease
        self._say = place.say
        self._history = History(place.run.attempts, place.allocation.job)
        self._restarts = 0
        self._is_looked_at = False
        self._components = self._ask_for_components()
        self._following = FollowingJobs(
            Request(
                job=place.allocation.job,
                name=place.allocation.name,
                directory=str(place.allocation.submit_directory),
                script=str(place.script),
                arguments=place.arguments,
                options=tuple(record.options for record in self._components),
            ),
            place,
            self._history,
        )

    def run(self) -> int:
        allocation, step = self._place.allocation, self._newest()
        self._history.add(SUBMITTED, continues=allocation.continues, step=step)
        where = f"continues after step {step}" if step else "starts"
        self._say(f"run {self._run.run_id()[:8]} in {self._run.path} {where}; logs in {self._run.logs}")
        if reason := self._no_progress():
            return self._end(Verdict(ending=Ending.halted, reason=reason))
        if lost := self._place.lost(self._place.allocation.beside):
            return self._end(Verdict(ending=Ending.stopped, reason=f"nothing was begun: {lost}"))
        if self._spec.slurm.follow_up:
            self._following.queue_gatekeeper()
        number = 0
        while True:
            self._history.add(STARTED, attempt=self._attempt_id(number), step=self._newest())
            verdict = None
            if not (self._is_looked_at or self._place.requests.any):  # a preflight that crashed runs again
                verdict = run_preflight(self._place, self._variables(number))
                self._is_looked_at = verdict is None
            verdict = verdict or self._attempt(number)
            again = self._judge(verdict)
            if again is not None:
                return self._end(again)
            number += 1
            deadline = time.monotonic() + self._spec.slurm.restart_delay_seconds
            while time.monotonic() < deadline and not self._place.requests.any:
                time.sleep(POLL_SECONDS)

    def _newest(self) -> int:
        return newest_step(self._run, self._spec.checkpoints)

    def _attempt_id(self, number: int) -> str:
        return f"{self._place.allocation.job}.{number}"

    def _variables(self, number: int) -> dict[str, str]:
        """Variables of an attempt's processes."""
        variables = {leases.ATTEMPT_VARIABLE: self._attempt_id(number), leases.VARIABLE: str(self._run.lease)}
        if ends := [one.end_time for one in self._components if one.end_time is not None]:  # Unix times of their limits
            variables["ALIGNER_END_TIME"] = f"{min(ends) - self._spec.slurm.abandon_seconds:.0f}"
        return variables

    def _attempt(self, number: int) -> Verdict:
        if self._place.requests.terminate:
            return Verdict(ending=Ending.terminated, reason="Slurm is ending the job")
        if self._place.requests.stop:
            return Verdict(ending=Ending.stopped, reason="it had to stop before the components were started")
        if number:
            self._lease.renew(self._attempt_id(number))
        attempt = Attempt(self._place, self._lease, self._history, number=number)
        self._say(f"attempt {self._attempt_id(number)}: starting {', '.join(one.name for one in self._spec.components)}")
        verdict = attempt.run(self._variables(number), restarts=self._restarts)
        self._restarts = attempt.restarts
        return verdict

    def _judge(self, verdict: Verdict) -> Verdict | None:
        """None if all components restart in this allocation; else the job's final verdict."""
        self._history.add("attempt_ended", ending=verdict.ending.value, reason=verdict.reason, step=self._newest())
        if verdict.ending not in (Ending.crashed, Ending.stopped):
            return verdict
        if reason := self._no_progress():
            return Verdict(ending=Ending.halted, reason=f"{reason}; the last one: {verdict.reason}")
        if verdict.ending is Ending.stopped or self._spec.slurm.on_actor_failure is OnFailure.end or not self._is_intact():
            return verdict
        self._say(f"attempt over: {verdict.reason}. All components start again in this allocation")
        return None

    def _no_progress(self) -> str:
        return no_progress(self._history, self._newest(), self._spec.slurm.max_restarts_without_progress)

    def _is_intact(self) -> bool:
        """Whether the allocation can be reused: not if Slurm is ending the job (its signal may still be on the way)."""
        if self._place.requests.any:
            return False
        return not any(component.state in (*OVER, "COMPLETING") for component in self._ask_for_components())

    def _ask_for_components(self) -> Sequence[JobRecord]:
        try:
            return self._place.records()
        except LaunchError as error:
            self._place.say(f"warning: cannot ask Slurm about job {self._place.allocation.job}: {error}")
            return []

    def _end(self, verdict: Verdict) -> int:
        """Arrange the following jobs, and exit."""
        code = _CODES[verdict.ending]
        if verdict.ending is Ending.stopped and self._spec.slurm.successor:
            if self._following.submit_successor():
                code = ExitCode.done  # the job has done its part, and Slurm shows it as COMPLETED
        elif verdict.ending not in (Ending.crashed, Ending.terminated):
            self._following.cancel_gatekeeper(verdict.ending.value)
        gatekeeper = self._following.gatekeeper
        self._history.add(ENDED, ending=verdict.ending.value, exit_code=int(code), reason=verdict.reason, gatekeeper=gatekeeper)
        self._say(
            f"{verdict.ending.value}: {verdict.reason} (exit code {int(code)}{f'; job {gatekeeper} looks into it' if gatekeeper else ''})"
        )
        return code
