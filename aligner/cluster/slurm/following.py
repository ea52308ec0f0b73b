"""The jobs that go on with a run: the one that a job submits when it has to stop, and the one that waits in case it crashes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from aligner.cluster.slurm.allocation import Allocation, submission_environment
from aligner.cluster.slurm.client import JobRecord, SlurmClient
from aligner.cluster.slurm.history import History
from aligner.errors import LaunchError


class FollowingJobs:
    """Submits and cancels them; every one runs the same script with the same arguments, so in the same run directory."""

    def __init__(
        self,
        allocation: Allocation,
        client: SlurmClient,
        history: History,
        *,
        script: Path,
        arguments: Sequence[str],
        components: Sequence[JobRecord],
        environ: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        """`components`: the job's own, whose partition, account and time the following jobs get, wherever these were given."""
        self._allocation = allocation
        self._client = client
        self._history = history
        self._script = script
        self._arguments = list(arguments)
        self._options = [component.options for component in components]
        self._environ = environ
        self._say = say
        self.follow_up = ""

    def queue_follow_up(self) -> None:
        """The job that starts if this one does not end well. Without it the run still goes on, until a crash."""
        try:
            self.follow_up = self._submit("afternotok")
        except LaunchError as error:
            self._say(f"warning: no job is queued for the case of a crash: {error}")
            return
        self._history.add("follow_up_queued", follow_up=self.follow_up)
        self._say(f"job {self.follow_up} is queued for the case that this one crashes")

    def submit_successor(self) -> None:
        """The job that goes on after this one; the follow-up takes its place where it cannot be submitted."""
        try:
            successor = self._submit("afterany")
        except LaunchError as error:
            self._history.add("successor_failed", reason=str(error), follow_up=self.follow_up)
            instead = f"job {self.follow_up} goes on instead" if self.follow_up else "submit the same again to go on"
            self._say(f"warning: cannot submit the next job ({error}); {instead}")
            return
        self._history.add("successor_submitted", successor=successor)
        self._say(f"job {successor} goes on after this one")
        self.cancel_follow_up("a successor is submitted")

    def cancel_follow_up(self, reason: str) -> None:
        """Called when it must not start. A failure is reported: a person then has to cancel it."""
        if not self.follow_up:
            return
        job, self.follow_up = self.follow_up, ""
        try:
            self._client.cancel(job)
        except LaunchError as error:
            self._say(f"warning: job {job} is not needed ({reason}) and could not be cancelled: {error}. Cancel it: scancel {job}")
            return
        self._history.add("follow_up_cancelled", follow_up=job, reason=reason)

    def _submit(self, dependency: str) -> str:
        first, *others = self._options or [()]
        options = [f"--dependency={dependency}:{self._allocation.job}", "--kill-on-invalid-dep=yes"]
        options += [f"--job-name={self._allocation.name}", *first]
        for other in others:
            options += [":", *other]
        return self._client.submit(
            options,
            self._script,
            self._arguments,
            cwd=self._allocation.submit_directory,
            environ=submission_environment(self._environ, self._allocation.job),
        )
