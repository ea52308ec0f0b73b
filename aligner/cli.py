"""The `aligner` command: `plan`, `preflight`, `gap`, `data`, `report`, `diagnose`, `convert`, `launch`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from aligner.cluster import outcomes
from aligner.cluster.exit_codes import ExitCode
from aligner.errors import AlignerError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2 for a mistake in what was asked, with one line that says which)."""
    arguments, message = _parse(argv), ""
    try:
        with outcomes.unless_ended_early(os.environ):
            code = arguments.run(arguments)
    except AlignerError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code, message = ExitCode.refused, str(error)
    outcomes.record(os.environ, code, message)  # a command may be a step of a Slurm job
    return int(code)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, with settings wherever they stand: argparse itself takes none behind an option that follows other arguments."""
    parser = _parser()
    arguments, others = parser.parse_known_args(argv)
    if others and ("overrides" not in arguments or any(other.startswith("-") or "=" not in other for other in others)):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if others:
        arguments.overrides = [*arguments.overrides, *others]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aligner", description="LLM alignment on Megatron-Core, for Slurm and MPI clusters.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan = commands.add_parser("plan", help="memory and time of a job, before it is submitted; exit code 1 where it does not fit")
    plan.add_argument("config", help="file of conf/ without .yaml, such as ppo_70b")
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for the scripts in examples/nlp")
    plan.add_argument("--search", action="store_true", help="also show the fastest layouts of the same ranks that fit")
    plan.add_argument("--top", type=int, default=5, metavar="N", help="how many layouts of each component (default: 5)")
    plan.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE")
    plan.set_defaults(run=_plan)
    preflight = commands.add_parser(
        "preflight",
        help="check an allocation before the job starts; start it on every rank (srun, torchrun, mpiexec). Exit code 2: not ready",
    )
    preflight.add_argument("config", help="file of conf/ without .yaml, such as ppo_70b")
    preflight.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for the scripts in examples/nlp")
    preflight.add_argument("--only", default="", metavar="A,B", help="only these items (ranks and config always)")
    preflight.add_argument("--engine", action="store_true", help="also build the model and its rollout engine, refit it and generate")
    preflight.add_argument("--timeout", type=float, default=0.0, metavar="SECONDS", help="of every item, in place of each one's own")
    preflight.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE")
    preflight.set_defaults(run=_preflight)
    _add_gap(commands)
    _add_data(commands)
    _add_looks(commands)
    convert = commands.add_parser("convert", help="convert a model between Hugging Face and Megatron-Core checkpoints")
    source = convert.add_mutually_exclusive_group(required=True)
    source.add_argument("--from-hf", type=Path, metavar="DIR", help="Hugging Face directory to read")
    source.add_argument("--from-megatron", type=Path, metavar="DIR", help="checkpoint (or directory of checkpoints) to read")
    target = convert.add_mutually_exclusive_group(required=True)
    target.add_argument("--to-megatron", type=Path, metavar="DIR", help="where to write the checkpoint")
    target.add_argument("--to-hf", type=Path, metavar="DIR", help="where to write the Hugging Face model")
    convert.add_argument(
        "--tp", type=int, default=1, metavar="N", help="split every layer over N ranks (start as many: torchrun, srun, mpiexec)"
    )
    convert.add_argument("--pp", type=int, default=1, metavar="N", help="split the layers over N ranks")
    convert.set_defaults(run=_convert)
    launch = commands.add_parser("launch", help="start every component of a run")
    where = launch.add_subparsers(required=True, metavar="WHERE")
    local = where.add_parser("local", help="as processes on this machine")
    local.add_argument("recipe", help="file of conf/ without .yaml, such as grpo, ppo or sft")
    local.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for the scripts in examples/nlp")
    local.add_argument("--processes", type=int, default=0, metavar="N", help="ranks of the training component (default: the config's)")
    local.set_defaults(run=_launch_local)
    slurm = where.add_parser("slurm", help="as a job of a Slurm cluster: make the batch script from the config and submit it")
    slurm.add_argument("config", help="file of conf/ without .yaml, such as ppo_70b")
    slurm.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for the scripts in examples/nlp")
    slurm.add_argument("--dry-run", action="store_true", help="print the script instead of submitting it")
    slurm.add_argument("--test-only", action="store_true", help="ask Slurm whether and when it could run (sbatch --test-only)")
    slurm.add_argument("--output", type=Path, metavar="FILE", help="write the script to FILE instead of submitting it")
    slurm.set_defaults(run=_launch_slurm)
    return parser


def _add_looks(commands: argparse._SubParsersAction) -> None:
    """What is told of a run that has begun."""
    report = commands.add_parser("report", help="what a run did: its summary, and curves and samples before and after as one HTML file")
    report.add_argument("--output", type=Path, metavar="FILE", help="the HTML file (default: RUN_DIRECTORY/report.html)")
    report.set_defaults(run=_report)
    diagnose = commands.add_parser(
        "diagnose", help="what went wrong in a run without an error: evidence, likely cause, remedy; exit code 1 with findings"
    )
    diagnose.add_argument("--json", action="store_true", help="print everything as JSON")
    diagnose.set_defaults(run=_diagnose)
    for command in (report, diagnose):
        command.add_argument("directory", type=Path, metavar="RUN_DIRECTORY", help="run.directory of the run, which may be under way")


def _add_gap(commands: argparse._SubParsersAction) -> None:
    gap = commands.add_parser(
        "gap", help="where in the model engine and trainer part, on one batch; exit code 1 where by more than rounding"
    )
    gap.add_argument("config", help="file of conf/ without .yaml, such as grpo, or the directory of a run (its newest policy)")
    gap.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for the scripts in examples/nlp")
    gap.add_argument("--prompts", type=int, default=16, metavar="N", help="prompts of data.train (default: 16)")
    gap.add_argument("--random-prompts", action="store_true", help="prompts of random tokens instead")
    gap.add_argument("--tokens", type=int, default=32, metavar="N", help="tokens of a response at most (default: 32)")
    gap.add_argument("--traced", type=int, default=4, metavar="N", help="responses whose layers are compared (default: the 4 worst)")
    gap.add_argument("--greedy", action="store_true", help="greedy responses (temperature 1 for the log-probs)")
    gap.add_argument("--ulps", type=float, default=0.0, metavar="X", help="tolerance of an operation (default: 128 float32, 16 bfloat16)")
    gap.add_argument(
        "--gap", type=float, default=0.0, metavar="NATS", help="tolerance of the mean gap (default: 1e-4 float32, 0.05 bfloat16)"
    )
    gap.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE")
    gap.set_defaults(run=_gap)


def _add_data(commands: argparse._SubParsersAction) -> None:
    data = commands.add_parser("data", help="look at data before a job does")
    what = data.add_subparsers(required=True, metavar="WHAT")
    validate = what.add_parser(
        "validate", help="every bad line, lengths in tokens, duplicates, and samples as the model will see them; exit code 1 with bad lines"
    )
    validate.add_argument("target", metavar="CONFIG|FILE", help="file of conf/ without .yaml, such as sft; with --kind a data file")
    validate.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for the scripts in examples/nlp")
    validate.add_argument("--kind", default="", metavar="KIND", help="of the file: sft, preference, kto, prompts, ... (docs/data.md)")
    validate.add_argument("--tokenizer", default="", metavar="DIR", help="with --kind: directory of the model's tokenizer")
    validate.add_argument("--samples", type=int, default=3, metavar="N", help="how many are shown of each data set (default: 3)")
    validate.add_argument("--all", action="store_true", help="list every problem, not the first few of each kind")
    validate.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE")
    validate.set_defaults(run=_validate_data)


def _plan(arguments: argparse.Namespace) -> int:
    from aligner.jobs.plan import plan

    if arguments.top < 1:
        raise AlignerError(f"--top {arguments.top}: must be at least 1")
    return plan(arguments.config, arguments.overrides, searches=arguments.search, top=arguments.top, json_path=arguments.json)


def _preflight(arguments: argparse.Namespace) -> int:
    from aligner.jobs.preflight.command import Options, preflight

    options = Options(
        only=tuple(filter(None, arguments.only.split(","))),
        with_engine=arguments.engine,
        timeout_seconds=arguments.timeout,
        json_path=arguments.json,
    )
    return preflight(arguments.config, arguments.overrides, options)


def _gap(arguments: argparse.Namespace) -> int:
    from aligner.jobs.gap import Options, gap

    options = Options(
        num_prompts=arguments.prompts,
        num_tokens=arguments.tokens,
        num_traced=arguments.traced,
        random_prompts=arguments.random_prompts,
        greedy=arguments.greedy,
        ulps=arguments.ulps,
        gap=arguments.gap,
        json_path=arguments.json,
    )
    return gap(arguments.config, arguments.overrides, options)


def _validate_data(arguments: argparse.Namespace) -> int:
    from aligner.jobs.validate_data import Options, validate

    options = Options(
        kind=arguments.kind,
        tokenizer=arguments.tokenizer,
        num_samples=max(0, arguments.samples),
        lists_all=arguments.all,
        json_path=arguments.json,
    )
    return validate(arguments.target, arguments.overrides, options)


def _report(arguments: argparse.Namespace) -> int:
    from aligner.jobs.report import report

    return report(arguments.directory, arguments.output)


def _diagnose(arguments: argparse.Namespace) -> int:
    from aligner.jobs.report import diagnose

    return diagnose(arguments.directory, as_json=arguments.json)


def _convert(arguments: argparse.Namespace) -> int:
    from aligner.jobs import convert
    from aligner.parallel.topology import ParallelConfig

    parallel = ParallelConfig(tp=arguments.tp, pp=arguments.pp)
    if arguments.from_hf is not None and arguments.to_megatron is not None:
        convert.hf_to_megatron(arguments.from_hf, arguments.to_megatron, parallel)
    elif arguments.from_megatron is not None and arguments.to_hf is not None:
        convert.megatron_to_hf(arguments.from_megatron, arguments.to_hf, parallel)
    else:
        raise AlignerError("convert: use --from-hf with --to-megatron, or --from-megatron with --to-hf")
    return 0


def _launch_local(arguments: argparse.Namespace) -> int:
    from aligner.jobs.local import launch_local

    return launch_local(arguments.recipe, arguments.overrides, num_processes=arguments.processes)


def _launch_slurm(arguments: argparse.Namespace) -> int:
    from aligner.jobs.slurm import LaunchOptions, launch_slurm

    options = LaunchOptions(dry_run=arguments.dry_run, test_only=arguments.test_only, output=arguments.output)
    return launch_slurm(arguments.config, arguments.overrides, options)


if __name__ == "__main__":
    sys.exit(main())
