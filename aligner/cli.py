"""The `aligner` command: `convert`, `launch`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from aligner.errors import AlignerError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2 for a mistake in what was asked, with one line that says which)."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except AlignerError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aligner", description="LLM alignment on Megatron-Core, for Slurm and MPI clusters.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    convert = commands.add_parser("convert", help="convert a model between Hugging Face and Megatron-Core checkpoints")
    source = convert.add_mutually_exclusive_group(required=True)
    source.add_argument("--from-hf", type=Path, metavar="DIR", help="Hugging Face directory to read")
    source.add_argument("--from-megatron", type=Path, metavar="DIR", help="checkpoint (or directory of checkpoints) to read")
    target = convert.add_mutually_exclusive_group(required=True)
    target.add_argument("--to-megatron", type=Path, metavar="DIR", help="where to write the checkpoint")
    target.add_argument("--to-hf", type=Path, metavar="DIR", help="where to write the Hugging Face model")
    convert.set_defaults(run=_convert)
    launch = commands.add_parser("launch", help="start every component of a run")
    where = launch.add_subparsers(required=True, metavar="WHERE")
    local = where.add_parser("local", help="as processes on this machine")
    local.add_argument("recipe", help="sft, reward_model, grpo or ppo")
    local.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for the scripts in examples/nlp")
    local.add_argument("--processes", type=int, default=0, metavar="N", help="ranks of the training component (default: the config's)")
    local.set_defaults(run=_launch_local)
    return parser


def _convert(arguments: argparse.Namespace) -> int:
    from aligner.jobs import convert

    if arguments.from_hf is not None and arguments.to_megatron is not None:
        convert.hf_to_megatron(arguments.from_hf, arguments.to_megatron)
    elif arguments.from_megatron is not None and arguments.to_hf is not None:
        convert.megatron_to_hf(arguments.from_megatron, arguments.to_hf)
    else:
        raise AlignerError("convert: use --from-hf with --to-megatron, or --from-megatron with --to-hf")
    return 0


def _launch_local(arguments: argparse.Namespace) -> int:
    from aligner.jobs.local import launch_local

    return launch_local(arguments.recipe, arguments.overrides, num_processes=arguments.processes)


if __name__ == "__main__":
    sys.exit(main())
