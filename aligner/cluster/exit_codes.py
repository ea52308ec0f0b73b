"""The meaning of a run's exit code to its launcher. Standard library only: the conductor runs it on bare hosts."""

from __future__ import annotations

from enum import IntEnum

from aligner.errors import AlignerError, ConfigError, DataError, RunHalted


class ExitCode(IntEnum):
    """Codes of a component's processes, of the local launcher and of a Slurm job. Any other code is a crash: restart, within the limits."""

    done = 0
    failed = 1  # a crash, or an error that starting again may mend
    refused = 2  # a mistake in what was asked (settings, data, preflight): starting again would meet it again
    stopped = 75  # stopped in order before the last step, with a checkpoint: start again to go on
    halted = 78  # ended for good before the last step (numbers went bad, no progress): somebody has to look


# Starting the same again would end the same way.
FINAL = frozenset({ExitCode.done, ExitCode.refused, ExitCode.halted})


def exit_code_of(error: AlignerError) -> ExitCode:
    """The exit code of a program ended by this error."""
    if isinstance(error, (ConfigError, DataError)):
        return ExitCode.refused
    return ExitCode.halted if isinstance(error, RunHalted) else ExitCode.failed
