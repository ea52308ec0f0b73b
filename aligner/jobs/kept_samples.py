"""What a run keeps of its validations: the responses to the first few prompts, for `aligner report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aligner.errors import describe_os_error
from aligner.jobs.session import Session
from aligner.reporting.rollout_table import write_rows
from aligner.types import SampleRow


def validation_samples(here: Session) -> Callable[[Sequence[SampleRow]], None]:
    """Writes the rows of a validation to the run's `validation/step_%06d.jsonl`, on rank 0. A full disk costs the file, not the run."""
    directory = here.directory.validation

    def keep(rows: Sequence[SampleRow]) -> None:
        if not here.is_first:
            return
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            write_rows(directory, here.progress.step, rows)
        except OSError as error:
            here.say(f"warning: samples of a validation could not be written, the run goes on: {describe_os_error(error, directory)}")

    return keep
