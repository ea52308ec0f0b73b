"""The training steps that a run skips after it was rolled back, kept in its directory: `skipped_steps.json`."""

from __future__ import annotations

import json
from pathlib import Path

from aligner.errors import AlignerError, RunHalted, describe_os_error
from aligner.files import publish
from aligner.parallel.collectives import from_rank_0

FORMER_NAME = "left_out.json"  # of the file, in runs of before


class SkippedStepsFile:
    """`aligner.loop.loop.SkippedSteps` in a file. Every rank constructs one, at the same point: rank 0 reads and writes."""

    def __init__(self, path: Path, *, most: int) -> None:
        self._path = path
        self._most = most
        self._reasons: dict[int, str] = from_rank_0(self._read)

    @property
    def steps(self) -> frozenset[int]:
        """The steps that are not trained on."""
        return frozenset(self._reasons)

    def add(self, step: int, reason: str) -> None:
        """Keep `step` for this run's next start. Raises RunHalted where `most` are kept already, or this one is."""
        if len(self._reasons) >= self._most or step in self._reasons:
            known = ", ".join(map(str, sorted(self._reasons))) or "none"
            raise RunHalted(f"{reason}; the run has been rolled back enough (guard.max_roll_backs={self._most}; steps skipped: {known})")
        self._reasons[step] = reason
        from_rank_0(self._write)

    def _read(self) -> dict[int, str]:
        path = self._path if self._path.exists() else self._path.with_name(FORMER_NAME)
        if not path.exists():
            return {}
        try:
            return {int(step): str(reason) for step, reason in json.loads(path.read_text()).items()}
        except (OSError, ValueError, AttributeError) as error:
            raise AlignerError(f"{path}: not a list of steps that the run skips: {error}") from error

    def _write(self) -> None:
        record = {str(step): self._reasons[step] for step in sorted(self._reasons)}
        try:
            publish(self._path, lambda new: new.write_text(json.dumps(record, indent=2) + "\n"))
        except OSError as error:
            raise AlignerError(f"a step to skip could not be recorded: {describe_os_error(error, self._path)}") from error
