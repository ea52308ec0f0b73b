"""The jobs that continue a run: the successor, submitted by a job that must stop, and the gatekeeper, which waits for a job to fail.

The gatekeeper is a job of one task that starts if the other one failed (`afternotok`): `python3 -m aligner.cluster.slurm.following
FOLDER`. It submits the job again unless that is useless: for a run that was cancelled, is done, or makes no progress.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from aligner.cluster.run_directory import RunDirectory
from aligner.cluster.slurm.allocation import export_option, submission_environment
from aligner.cluster.slurm.attempt import History, done_step, newest_step, no_progress
from aligner.cluster.slurm.client import SlurmClient
from aligner.cluster.slurm.separate import Together
from aligner.cluster.slurm.spec import JobSpec, read_spec
from aligner.cluster.slurm.steps import Place
from aligner.errors import AlignerError, LaunchError

REQUEST, GATEKEEPER = "following.json", "gatekeeper.sub"
NAME = "{}-gatekeeper"
# A small job may run where the big one may; nodes and sizes are not copied.
_SAME_PLACE = ("--partition=", "--account=", "--qos=", "--reservation=", "--comment=", "--wckey=")
_SIZE = ("--nodes=1", "--ntasks=1", "--time=10", "--no-requeue")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The job that continues `job`: the same script, arguments and run directory. `options`: those of each part, as Slurm reports them."""

    job: str
    name: str
    directory: str
    script: str
    arguments: tuple[str, ...]
    options: tuple[tuple[str, ...], ...]

    def submit(self, client: SlurmClient, spec: JobSpec, environ: Mapping[str, str], *, after: str = "") -> str:
        """The id of the new job, which starts `after` that one has ended. Raises LaunchError."""
        cwd, given = Path(self.directory), submission_environment(environ, self.job)
        if spec.is_separate:
            together = Together.of(spec, self.name, [[export_option(environ), *options] for options in self.options])
            return together.submit(client, Path(self.script), self.arguments, cwd=cwd, environ=given, after=after)
        first, *others = self.options or ((),)
        depending = [f"--dependency=afterany:{after}", "--kill-on-invalid-dep=yes"] if after else []
        options = [*depending, export_option(environ), f"--job-name={self.name}", *first]
        for other in others:
            options += [":", *other]
        return client.submit(options, Path(self.script), self.arguments, cwd=cwd, environ=given)


class FollowingJobs:
    """Submits and cancels what follows the job of `place`, and records it in `<run>/jobs/<job>`."""

    def __init__(self, request: Request, place: Place, history: History) -> None:
        self._request = request
        self._history = history
        self._spec, self._slurm = place.spec, place.spec.slurm
        self._client, self._environ, self._say = place.client, place.environ, place.say
        self._folder = place.run.jobs / request.job
        self.gatekeeper = ""

    def queue_gatekeeper(self) -> None:
        """Queue the small job that starts if this one fails. Without it the run still continues, until a crash."""
        job = self._request.job
        script = self._folder / GATEKEEPER
        path = os.environ.get("PYTHONPATH", "")
        lines = ["#!/bin/bash", f"# If job {job} fails: is it to be submitted again?", self._slurm.setup.strip()]
        lines += [f"export PYTHONPATH={shlex.quote(path)}"] if path else []
        program = [sys.executable, "-m", "aligner.cluster.slurm.following", str(self._folder)]
        same = [option for option in (self._request.options or ((),))[0] if option.startswith(_SAME_PLACE)]
        options = [f"--dependency=afternotok:{job}", "--kill-on-invalid-dep=yes", export_option(self._environ)]
        options += [f"--job-name={NAME.format(self._request.name)}", f"--output={self._folder}/gatekeeper-%j.out", *_SIZE, *same]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / REQUEST).write_text(json.dumps(asdict(self._request), indent=1) + "\n")
            script.write_text("\n".join([*lines, f"exec {shlex.join(program)}"]) + "\n")
            environ = submission_environment(self._environ, job)
            options += self._slurm.gatekeeper_options
            self.gatekeeper = self._client.submit(options, script, (), cwd=Path(self._request.directory), environ=environ)
        except (LaunchError, OSError) as error:
            advice = "if it may not run on these nodes, name others in slurm.gatekeeper_options, such as ['--partition=cpu']"
            self._say(f"warning: no job is queued to restart after a crash: {error}; {advice}")
            return
        self._history.add("gatekeeper_queued", gatekeeper=self.gatekeeper)
        self._say(f"gatekeeper: job {self.gatekeeper} (one task) starts if this one crashes, and is cancelled otherwise")

    def submit_successor(self) -> bool:
        """Submit the job that continues this one; if that fails, the gatekeeper will, and this job must end as failed."""
        try:
            successor = self._request.submit(self._client, self._spec, self._environ, after=self._request.job)
        except LaunchError as error:
            self._history.add("successor_failed", reason=str(error), gatekeeper=self.gatekeeper)
            instead = f"job {self.gatekeeper} tries it again" if self.gatekeeper else "submit the same script again to continue"
            self._say(f"warning: cannot submit the next job ({error}); {instead}")
            return False
        self._history.add("successor_submitted", successor=successor)
        self._say(f"job {successor} will continue this run")
        self.cancel_gatekeeper("a successor is submitted")
        return True

    def cancel_gatekeeper(self, reason: str) -> None:
        """Called when it must not start. A failure is reported: it then finds out itself that it is not needed."""
        if not self.gatekeeper:
            return
        job, self.gatekeeper = self.gatekeeper, ""
        try:
            self._client.cancel(job)
        except LaunchError as error:
            self._say(f"warning: job {job} is not needed ({reason}) and could not be cancelled: {error}")
            return
        self._history.add("gatekeeper_cancelled", gatekeeper=job, reason=reason)


def go_on(folder: Path, client: SlurmClient, environ: Mapping[str, str]) -> str:
    """The gatekeeper's work; returns a line about it. Raises LaunchError if Slurm refuses the job."""
    spec = read_spec(folder / "spec.json")
    found = json.loads((folder / REQUEST).read_text())
    request = Request(**found | {"arguments": tuple(found["arguments"]), "options": tuple(map(tuple, found["options"]))})
    history = History(RunDirectory(Path(spec.run_directory)).attempts, request.job)
    if reason := _in_vain(spec, request.job, history, client):
        history.add("not_continued", reason=reason)
        return f"job {request.job} is not submitted again: {reason}"
    successor = request.submit(client, spec, environ)
    history.add("successor_submitted", successor=successor)
    return f"job {request.job} failed; job {successor} continues the run"


def _in_vain(spec: JobSpec, job: str, history: History, client: SlurmClient) -> str:
    """Why the run must not continue by itself; empty if it may."""
    run = RunDirectory(Path(spec.run_directory))
    if step := done_step(run, spec):
        return f"the run is done (step {step})"
    later = history.started_after(job)
    if later:
        return f"job {later} has continued it since"
    ending = history.ending_of(job)
    if ending in ("refused", "halted", "lost"):
        return f"it ended as {ending}"
    # Slurm reports who ended a job only after its end.
    if ending in ("", "terminated") and any(record.state.startswith("CANCELLED") for record in client.show(job)):
        return "somebody cancelled it: submit it again to continue"
    return no_progress(history, newest_step(run, spec.checkpoints), spec.slurm.max_restarts_without_progress)


def main(arguments: Sequence[str]) -> int:
    try:
        folder = Path(arguments[0])
        spec = read_spec(folder / "spec.json")
        print(go_on(folder, SlurmClient(spec.slurm.command_timeout_seconds), os.environ), flush=True)
    except AlignerError as error:
        print(f"error: {error}: the run does not continue by itself; submit it again", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
