"""The `aligner` command: train, serve, launch, plan, preflight, gap, data, report, diagnose, trace, convert, migrate, demo.

Commands with many options declare them as dataclasses in `aligner.commands.parts`; `plan` and `trace` are in
`aligner.commands.plan.options`. A command imports its work when it runs, so that `aligner --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from aligner.commands.parts import (
    CONFIG,
    DIRECTORY,
    FILE,
    RUN_DIRECTORY,
    SETTINGS,
    Command,
    GapOptions,
    InspectOptions,
    LaunchOptions,
    MigrateOptions,
    PreflightOptions,
    ValidateOptions,
    config_argument,
    config_dir,
    configs_or,
    options_of,
    overrides_argument,
    run_directory,
)
from aligner.commands.plan import options as plan_commands
from aligner.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2 for a wrong request, with one line on stderr).

    Raises SystemExit after `--help` and `--version`, and (2, with the usage and one line on stderr) if the command line itself is wrong.
    """
    command = _parse(argv)
    from aligner.telemetry import terminal

    terminal.guard()
    if isinstance(command, _Program):
        command()
        return 0
    import os

    from aligner.cluster import outcomes
    from aligner.cluster.exit_codes import ExitCode
    from aligner.errors import AlignerError, describe_os_error

    try:
        with outcomes.unless_ended_early(os.environ):
            code = command()
    except AlignerError as error:
        outcomes.fail(os.environ, ExitCode.refused, str(error))
        return int(ExitCode.refused)
    except OSError as error:
        if error.filename is None:
            raise
        outcomes.fail(os.environ, ExitCode.refused, describe_os_error(error, error.filename))  # a path that was asked for
        return int(ExitCode.refused)
    outcomes.record(os.environ, code)  # a command may be a step of a Slurm job
    return int(code)


def _parse(argv: Sequence[str] | None) -> Callable[[], int]:
    """The requested command, ready to run. Raises SystemExit as `main` does."""
    try:
        command = commands.main(argv, prog_name="aligner", standalone_mode=False)
    except click.UsageError as error:
        from aligner.telemetry.terminal import clean

        usage = f"{error.ctx.get_usage()}\n" if error.ctx else ""
        is_option = isinstance(error, click.NoSuchOption) and "KEY=VALUE" in usage
        more = " Settings are written key=value: `aligner train CONFIG --help` lists them." if is_option else ""
        print(clean(f"{usage}error: {error.format_message()}{more}"), file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None
    if isinstance(command, int):  # --help, --version
        raise SystemExit(command)
    return command


class _Program(partial[None]):
    """A program with settings, which raises SystemExit and records its outcome itself (`aligner.run.program.entrypoint`)."""


class _ProgramCommand(Command):
    """Arguments after the name of the config belong to the program."""

    def invoke(self, ctx: click.Context) -> Callable[[], int]:
        return _Program(self.callback, **ctx.params)  # type: ignore[arg-type]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] in (["--help"], ["-h"]):
            click.echo(self.get_help(ctx))
            ctx.exit()
        return super().parse_args(ctx, args)


class _Group(click.Group):
    command_class = Command
    group_class = type


_settings = click.argument(
    "settings", nargs=-1, metavar="[KEY=VALUE]... [--help [SECTION]] [--cfg job] [--multirun]", type=click.UNPROCESSED
)
_AS_TYPED = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}


# 80 columns: click would import half a dozen modules to measure the terminal.
@click.group(cls=_Group, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"], "terminal_width": 80})
@click.version_option(__version__, message="%(prog)s %(version)s")
def commands() -> None:
    """LLM alignment on Megatron-Core, for Slurm and MPI clusters."""


for _command in plan_commands.COMMANDS:
    commands.add_command(_command)


@commands.command(cls=_ProgramCommand, context_settings=_AS_TYPED, epilog=CONFIG)
@config_argument
@_settings
def train(config: str, settings: tuple[str, ...]) -> None:
    """Train, or write data, with a recipe on this rank (start it on every rank: srun, torchrun, mpiexec, aligner launch)."""
    from aligner.cluster.exit_codes import ExitCode
    from aligner.errors import ConfigError
    from aligner.settings import explain
    from aligner.settings.command_line import read

    program = f"aligner train {config}"
    try:
        command = read(settings)
        if command.asks_for_help_only and (text := explain.of_shipped(config, command.topic, program=program)) is not None:
            print(text, flush=True)
            return
        from aligner.algorithms.registry import recipe_of
        from aligner.jobs import start

        recipe = recipe_of(config, command.overrides)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(ExitCode.refused) from None
    command.config = command.config or config
    start.program(recipe.name)(command, program=program)


@commands.command(cls=_ProgramCommand, context_settings=_AS_TYPED, epilog=f"{CONFIG} Without one: ppo.")
@click.argument("server", type=click.Choice(["critic", "reward"]))
@_settings
def serve(server: str, settings: tuple[str, ...]) -> None:
    """Serve the critic or the reward model of a run, with the same settings as the run: critic|reward [CONFIG] KEY=VALUE..."""
    from aligner.jobs.start import server_program

    has_config = bool(settings) and "=" not in settings[0] and not settings[0].startswith("-")
    chosen = [f"config={settings[0]}", *settings[1:]] if has_config else list(settings)
    server_program(server)(chosen, program=f"aligner serve {server}")


@commands.command()
@click.argument("folder", type=click.Choice(["conf", "examples", "slurm"]))
def where(folder: str) -> int:
    """Print the folder of the configs, examples or Slurm scripts of this installation."""
    from aligner.files import shipped

    print(shipped(folder))
    return 0


@commands.command(context_settings=_AS_TYPED)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> int:
    """Run SFT, a reward model and PPO with two servers on this machine, offline, in a few minutes."""
    import runpy

    from aligner.files import shipped

    script = shipped("examples") / "demo" / "run.py"
    sys.path.insert(0, str(script.parent))
    sys.argv = ["aligner demo", *arguments]
    try:
        return int(runpy.run_path(str(script))["main"]())
    except SystemExit as end:  # of --help, or a wrong argument
        return int(end.code or 0)


@commands.command(epilog=f"{CONFIG} {SETTINGS}")
@config_argument
@overrides_argument
@config_dir
@options_of(PreflightOptions)
def preflight(config: str, overrides: tuple[str, ...], options: PreflightOptions) -> int:
    """Check an allocation before the job starts; start it on every rank (srun, torchrun, mpiexec). Exit code 2: not ready."""
    from aligner.commands.preflight.command import preflight

    return preflight(config, overrides, options)


@commands.command(epilog=f"{CONFIG[:-1]}, or the directory of a run (its newest policy). {SETTINGS}")
@click.argument("config", shell_complete=partial(configs_or, "dir"))
@overrides_argument
@config_dir
@options_of(GapOptions)
def gap(config: str, overrides: tuple[str, ...], options: GapOptions) -> int:
    """Find the first layer where engine and trainer diverge on one batch; exits 1 if beyond rounding."""
    from aligner.commands.gap import gap

    return gap(config, overrides, options)


@commands.group(no_args_is_help=False)
def data() -> None:
    """Check and inspect data before a job reads it."""


@data.command(epilog=f"CONFIG|FILE: a recipe or one of its configs, such as sft; with --kind a data file. {SETTINGS}")
@click.argument("target", metavar="CONFIG|FILE", shell_complete=partial(configs_or, "file"))
@overrides_argument
@config_dir
@options_of(ValidateOptions)
def validate(target: str, overrides: tuple[str, ...], options: ValidateOptions) -> int:
    """Report bad lines, lengths in tokens, duplicates, and samples as the model will see them; exits 1 if lines are bad."""
    from aligner.commands.validate_data import validate

    return validate(target, overrides, options)


@data.command("inspect", epilog=f"FILE|ID: a data file, a directory of them, or ORG/NAME[@REV][:SPLIT] of the Hub. {SETTINGS}")
@click.argument("target", metavar="FILE|ID", type=click.Path())
@overrides_argument
@config_dir
@options_of(InspectOptions)
def inspect_data(target: str, overrides: tuple[str, ...], options: InspectOptions) -> int:
    """Report the form of the records, the use of each field, and samples as the model will see them; exits 1 if lines are bad."""
    from aligner.commands.validate_data import inspect_data

    return inspect_data(target, overrides, options)


@commands.command(epilog=RUN_DIRECTORY)
@run_directory
@click.option("--output", type=FILE, metavar="FILE", help="The HTML file (default: RUN_DIRECTORY/report.html).")
def report(directory: Path, output: Path | None) -> int:
    """Summarise a run, and write its curves and samples before and after as one HTML file."""
    from aligner.commands.report import report

    return report(directory, output)


@commands.command(epilog=RUN_DIRECTORY)
@run_directory
@click.option("--json", "as_json", is_flag=True, help="Print all results as JSON.")
def diagnose(directory: Path, as_json: bool) -> int:
    """Find what went wrong in a run without an error: evidence, likely cause, remedy; exits 1 with findings."""
    from aligner.commands.report import diagnose

    return diagnose(directory, as_json=as_json)


@commands.command()
@click.option("--from-hf", type=DIRECTORY, metavar="DIR", help="Hugging Face directory to read, or ORG/NAME[@REV] of the Hub.")
@click.option(
    "--from-megatron", type=FILE, metavar="PATH", help="Checkpoint to read, or a folder with some; also Megatron-LM's and NeMo's."
)
@click.option("--to-megatron", type=DIRECTORY, metavar="DIR", help="Directory for the checkpoint.")
@click.option("--to-hf", type=DIRECTORY, metavar="DIR", help="Directory for the Hugging Face model.")
@click.option("--push-to-hub", "push_to", default="", metavar="ORG/NAME", help="Upload the Hugging Face model, with a card.")
@click.option("--tokenizer", type=DIRECTORY, metavar="DIR", help="Tokenizer for a model of Megatron-LM or NeMo without one.")
@click.option("--tp", default=1, metavar="N", help="Split every layer over N ranks (start as many: torchrun, srun, mpiexec).")
@click.option("--pp", default=1, metavar="N", help="Split the layers over N ranks.")
def convert(tp: int, pp: int, **options: Any) -> int:
    """Convert a model between Hugging Face and Megatron-Core checkpoints; upload one to the Hugging Face Hub."""
    from aligner.commands.convert import convert
    from aligner.parallel.topology import ParallelConfig

    return convert(**options, parallel=ParallelConfig(tp=tp, pp=pp))


@commands.command(epilog="FILE|COMMAND: YAML, a shell script, or a launch line in quotes (actor and critic: both); -: standard input.")
@click.argument("inputs", nargs=-1, required=True, metavar="FILE|COMMAND...")
@options_of(MigrateOptions)
def migrate(inputs: tuple[str, ...], options: MigrateOptions) -> int:
    """Translate a config or command of NeMo-Aligner, TRL, OpenRLHF, verl, DeepSpeed-Chat or LLaMA-Factory, key by key.

    Exit code 3: the printed command cannot run unchanged, or is a different experiment; its first two lists explain why.
    """
    from aligner.commands.migrate import command

    return command.migrate(inputs, options)


@commands.group(no_args_is_help=False)
def launch() -> None:
    """Start every component of a run."""


@launch.command(epilog=f"{CONFIG} {SETTINGS}")
@config_argument
@overrides_argument
@config_dir
@click.option("--processes", default=0, metavar="N", help="Number of ranks of the training component (default: the config's).")
def local(config: str, overrides: tuple[str, ...], processes: int) -> int:
    """Start it as processes on this machine."""
    from aligner.commands.local import launch_local

    return launch_local(config, overrides, num_processes=processes)


@launch.command(epilog=f"{CONFIG} {SETTINGS}")
@config_argument
@overrides_argument
@config_dir
@options_of(LaunchOptions)
def slurm(config: str, overrides: tuple[str, ...], options: LaunchOptions) -> int:
    """Submit it as a job of a Slurm cluster, with a batch script made from the config."""
    from aligner.commands.slurm import launch_slurm

    return launch_slurm(config, overrides, options)


if __name__ == "__main__":
    sys.exit(main())
