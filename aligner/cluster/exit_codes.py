"""The meaning of a run's exit code to its launcher. Standard library only: the conductor runs it on bare hosts."""

from __future__ import annotations

from enum import IntEnum

from aligner.errors import AlignerError, ConfigError, DataError, RunHalted


class ExitCode(IntEnum):
    """Codes of a component's processes, of the local launcher and of a Slurm job. Any other code is a crash: restart, within the limits."""

    done = 0
    failed = 1  # a crash, or an error that a restart may fix
    refused = 2  # a mistake in the request (settings, data, preflight): a restart would meet it again
    stopped = 75  # stopped in order before the last step, with a checkpoint: start again to continue
    halted = 78  # ended for good before the last step (numbers went bad, no progress): a person has to look


def exit_code_of(error: AlignerError) -> ExitCode:
    """The exit code of a program ended by this error."""
    if isinstance(error, (ConfigError, DataError)):
        return ExitCode.refused
    return ExitCode.halted if isinstance(error, RunHalted) else ExitCode.failed
