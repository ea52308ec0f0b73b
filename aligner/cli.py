"""The `aligner` command: train, chat, generate, eval, serve, launch, plan, preflight, gap, data, report, diagnose, trace, studio,
convert, migrate, demo.

Commands with many options declare them as dataclasses in `aligner.commands.parts`. A command imports its work when it runs, so that
`aligner --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click

from aligner.commands import parts
from aligner.commands.parts import CONFIG, CONFIG_HELP, COUNT, DIRECTORY, FILE, NOT_NEGATIVE, RUN, SETTINGS, Argument, Command, add
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
    from aligner.cluster.outcomes import ExitCode
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


@commands.command(cls=_ProgramCommand, context_settings=_AS_TYPED, epilog=CONFIG_HELP)
@click.argument("config", shell_complete=parts.config_names)
@_settings
def train(config: str, settings: tuple[str, ...]) -> None:
    """Train, or write data, with a recipe on this rank (start it on every rank: srun, torchrun, mpiexec, aligner launch)."""
    from aligner.cluster.outcomes import ExitCode
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


SERVERS = ("critic", "reward")


@click.command("serve", cls=_ProgramCommand, context_settings=_AS_TYPED, epilog=f"{CONFIG_HELP} Without one: ppo.")
@click.argument("server", type=click.Choice(SERVERS))
@_settings
def _serve_for_run(server: str, settings: tuple[str, ...]) -> None:
    """Serve the critic or the reward model of a run, with the same settings as the run: critic|reward [CONFIG] KEY=VALUE..."""
    from aligner.jobs.start import server_program

    has_config = bool(settings) and "=" not in settings[0] and not settings[0].startswith("-")
    chosen = [f"config={settings[0]}", *settings[1:]] if has_config else list(settings)
    server_program(server)(chosen, program=f"aligner serve {server}")


class _ServeCommand(Command):
    """Of a model, unless the name of one of a run's servers comes first."""

    def make_context(self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any) -> click.Context:
        if args[:1] and args[0] in SERVERS:
            return _serve_for_run.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


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


_data = _Group("data", help="Check and inspect data before a job reads it.", no_args_is_help=False)
_launch = _Group("launch", help="Start every component of a run.", no_args_is_help=False)
for _group in (_data, _launch):
    commands.add_command(_group)

add(
    commands,
    "plan = plan.search:run",
    Argument(
        "name",
        "[CONFIG]",
        f"{CONFIG_HELP[:-1]}, or the directory of a run.",
        required=False,
        default="",
        shell_complete=parts.config_names,
    ),
    *SETTINGS,
    options=parts.PlanOptions,
    help="Memory and time of a job, before it is submitted; exit code 1 if it does not fit.",
)
add(
    commands,
    "trace = report:trace",
    RUN,
    click.Option(["--output"], type=FILE, metavar="FILE", help="The trace (default: RUN_DIRECTORY/trace.json)."),
    click.Option(["--steps"], type=NOT_NEGATIVE, default=0, metavar="N", help="Only the last N training steps (default: all recorded)."),
    help="What every process of a run did when, as one trace for ui.perfetto.dev or chrome://tracing.",
)
add(
    commands,
    "preflight = preflight.command:preflight",
    CONFIG,
    *SETTINGS,
    options=parts.PreflightOptions,
    help="Check an allocation before the job starts; start it on every rank (srun, torchrun, mpiexec). Exit code 2: not ready.",
)
_or_run = f"{CONFIG_HELP[:-1]}, or the directory of a run (its newest policy)."
add(
    commands,
    "gap = gap:gap",
    Argument("name", "CONFIG", _or_run, shell_complete=partial(parts.configs_or, "dir")),
    *SETTINGS,
    options=parts.GapOptions,
    help="Find the first layer where engine and trainer diverge on one batch; exits 1 if beyond rounding.",
)
_model = "MODEL: a model's or checkpoint's directory, an adapter's, a run's (its newest policy), or ORG/NAME[@REV] of the Hub."
add(
    commands,
    "serve = serve:serve",
    Argument("model", "MODEL", f"{_model} `aligner serve critic|reward [CONFIG] KEY=VALUE...`: a server of a run."),
    options=parts.ServeOptions,
    kind=_ServeCommand,
    help="Serve a policy to any client of OpenAI's or Anthropic's interfaces, or the critic or reward model of a run.",
)
_or_file = "CONFIG|FILE: a recipe or one of its configs, such as sft; with --kind a data file."
add(
    _data,
    "validate = validate_data:validate",
    Argument("target", "CONFIG|FILE", _or_file, shell_complete=partial(parts.configs_or, "file")),
    *SETTINGS,
    options=parts.ValidateOptions,
    help="Report bad lines, lengths in tokens, duplicates, and samples as the model will see them; exits 1 if lines are bad.",
)
_or_id = "FILE|ID: a data file, a directory of them, or ORG/NAME[@REV][:SPLIT] of the Hub."
add(
    _data,
    "inspect = validate_data:inspect_data",
    Argument("target", "FILE|ID", _or_id, type=click.Path()),
    *SETTINGS,
    options=parts.InspectOptions,
    help="Report the form of the records, the use of each field, and samples as the model will see them; exits 1 if lines are bad.",
)
add(
    _data,
    "tasks = validate_data:tasks",
    Argument("target", "FILE", "FILE: the .jsonl file to write, for data.train or data.validation.", type=FILE),
    Argument("overrides", "[KEY=VALUE]...", "KEY=VALUE: settings of environment., as for `aligner train`.", nargs=-1),
    click.Option(["--count"], type=COUNT, default=1000, metavar="N", help="Number of prompts (default: 1000)."),
    click.Option(["--seed"], type=NOT_NEGATIVE, default=0, metavar="N", help="Seed, or number, of the first task (default: 0)."),
    click.Option(["--prompts"], default="", metavar="FILE", help="Instead add the environment's tools to the prompts of FILE."),
    help="Write the prompts that an environment brings along: first observations, questions, tasks.",
)
add(
    commands,
    "report = report:report",
    Argument("directories", "RUN_DIRECTORY...", RUN.about, type=DIRECTORY, nargs=-1, required=True),
    click.Option(["-o", "--output"], type=FILE, metavar="FILE", help="The HTML file (default: report.html in the first RUN_DIRECTORY)."),
    help="Summarise runs, and write their curves, differences and samples before and after as one HTML file.",
)
add(
    commands,
    "diagnose = report:diagnose",
    RUN,
    click.Option(["--json", "as_json"], is_flag=True, help="Print all results as JSON."),
    help="Find what went wrong in a run without an error: evidence, likely cause, remedy; exits 1 with findings.",
)
add(
    commands,
    "convert = convert:convert",
    options=parts.ConvertOptions,
    help="Convert a model between Hugging Face and Megatron-Core checkpoints; upload one to the Hugging Face Hub.",
)
_inputs = "FILE|COMMAND: YAML, a shell script, or a launch line in quotes (actor and critic: both); -: standard input."
add(
    commands,
    "migrate = migrate.command:migrate",
    Argument("inputs", "FILE|COMMAND...", _inputs, nargs=-1, required=True),
    options=parts.MigrateOptions,
    help="Translate a config or command of NeMo-Aligner, TRL, OpenRLHF, verl, DeepSpeed-Chat or LLaMA-Factory, key by key.\n\n"
    "Exit code 3: the printed command cannot run unchanged, or is a different experiment; its first two lists explain why.",
)
_model = Argument(
    "model",
    "MODEL",
    "MODEL: a run's directory (its newest policy), a model's or PEFT adapter's directory, or ORG/NAME of the Hub.",
    type=click.Path(),
)
add(
    commands,
    "chat = chat:chat",
    _model,
    options=parts.ChatOptions,
    help="Talk with a model in the terminal, or with lines of standard input.",
)
add(
    commands,
    "generate = generate:generate",
    _model,
    Argument("prompts", "[PROMPT]...", nargs=-1),
    options=parts.GenerateOptions,
    help="Print responses to prompts, or write those to the records of a file.",
)
add(
    commands,
    "studio = aligner.studio.app:studio",
    Argument(
        "folder", "[FOLDER]", "FOLDER: every run below it is shown (default: this folder).", required=False, default=".", type=DIRECTORY
    ),
    options=parts.StudioOptions,
    help="Show, compare and start runs in a browser.",
)
add(
    commands,
    "eval = evaluate:evaluate",
    _model,
    options=parts.EvalOptions,
    help="Accuracy and pass@k, a reward model's accuracy on pairs, wins under a judge, tasks of lm-eval; with confidence intervals.",
)
_ranks = "Number of ranks of the training component (default: the config's)."
add(
    _launch,
    "local = programs:launch_local",
    CONFIG,
    *SETTINGS,
    click.Option(["--processes", "num_processes"], default=0, metavar="N", help=_ranks),
    help="Start it as processes on this machine.",
)
add(
    _launch,
    "slurm = slurm:launch_slurm",
    CONFIG,
    *SETTINGS,
    options=parts.LaunchOptions,
    help="Submit it as a job of a Slurm cluster, with a batch script made from the config.",
)


if __name__ == "__main__":
    sys.exit(main())
