"""One GRPO step of this stack against TRL's `GRPOTrainer`: same weights, prompts, batch, lengths, threads, learning rate and loss.

    python benchmarks/grpo_vs_trl.py [--sizes small large] [--rounds 3] [--steps 4] [--micro-batch-size 4] [--trl-python PATH]

The sides run in turn (ours, TRL, ours, TRL, ...), each in a process of its own, so that a change of the machine's load meets both. A
round's figure is the median over its steps; the table shows the median over the rounds, and ratios TRL / ours (above 1: this stack is
faster). What is measured and how to read it: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from random_model import SIZES, random_prompts, write_model
from sides import HERE, Mismatch, check_close, run_side
from trl_environment import EnvironmentFailed, trl_python

MEAN_SHARE = 3  # varied responses have a mean of about a third of the allowed length
PHASES = ("generation", "logprobs", "train", "other", "total")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--lengths", choices=("fixed", "varied"), nargs="+", default=["fixed", "varied"], help="of responses (default: both)"
    )
    parser.add_argument("--sizes", choices=list(SIZES), nargs="+", default=["small"], help="of models (large: minutes a step)")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (default 3)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a run (default 4), after one that warms up")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=4, help="responses per prompt")
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--response-length", type=int, default=128)
    parser.add_argument("--micro-batch-size", type=int, default=4, help="sequences per forward pass, on both sides; 0: all at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trl-python", type=Path, help="an interpreter that can import trl (default: .venv-trl is made)")
    parser.add_argument("--ours-only", action="store_true", help="time this stack alone")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="where the figures are written, as JSON")
    chosen = parser.parse_args(arguments)
    if min(chosen.rounds, chosen.steps, chosen.prompts, chosen.prompt_length, chosen.response_length, chosen.threads) < 1:
        parser.error("rounds, steps, prompts, lengths and threads must be at least 1")
    return chosen


def check_same_work(ours: dict, trl: dict) -> None:
    """Raise Mismatch where tokens, passes, loss or gradient differ."""
    # Where the model ends responses the two sides draw different ones: then seconds are by the token.
    for name in ("num_logprob_passes",) if ours["spec"]["varied"] else ("generated_tokens_per_step", "num_logprob_passes"):
        if ours[name] != trl[name]:
            raise Mismatch(f"{name}: ours {ours[name]}, TRL {trl[name]}")
    for name in ("loss", "grad_norm"):
        check_close(name, ours["check"][name], trl["check"][name])


def middle(results: list[dict], phase: str, unit: str) -> float:
    """Median over the rounds."""
    return statistics.median(result["median"][phase][unit] for result in results)


def table(name: str, ours: list[dict], trl: list[dict]) -> list[str]:
    """The lines of one model's table."""
    heads = ["ours, s", "TRL, s", "TRL / ours"] if trl else ["ours, s"]
    units = "wall     CPU"
    lines = [name, f"  {'phase':<12}" + "".join(f"{head:>20}" for head in heads), f"  {'':<12}" + f"{units:>20}" * len(heads)]
    for phase in PHASES:
        cells = [[middle(side, phase, unit) for unit in ("wall_seconds", "cpu_seconds")] for side in (ours, trl) if side]
        line = f"  {phase:<12}" + "".join(f"{wall:>12.3f}{cpu:>8.3f}" for wall, cpu in cells)
        if trl and phase != "other":
            line += "".join(f"{b / a:>{width}.2f}x" for a, b, width in zip(*cells, (11, 7), strict=True) if a)
        lines.append(line)
    peaks = [max(result["peak_memory_bytes"] for result in side) / 2**20 for side in (ours, trl) if side]
    return [*lines, f"  {'peak, MiB':<12}" + "".join(f"{peak:>20.0f}" for peak in peaks)]


def compare(size_name: str, lengths: str, chosen: argparse.Namespace, trl: Path | None, folder: Path) -> dict:
    """Run the rounds on one model; prints its table and returns everything measured."""
    size, varied = SIZES[size_name], lengths == "varied"
    model, spec_file, result_file = folder / f"{size_name}_{lengths}", folder / "spec.json", folder / "result.json"
    mean_length = chosen.response_length // MEAN_SHARE if varied else 0
    parameters = write_model(size, model, positions=chosen.prompt_length + chosen.response_length, seed=0, mean_length=mean_length)
    spec = {
        "model": str(model),
        "prompts": random_prompts(size, count=chosen.prompts, length=chosen.prompt_length, seed=1),
        "group_size": chosen.group_size,
        "max_new_tokens": chosen.response_length,
        "steps": chosen.steps,
        "micro_batch_size": chosen.micro_batch_size,
        "threads": chosen.threads,
        "varied": varied,
    }
    spec_file.write_text(json.dumps(spec))
    sides: dict[str, list[dict]] = {"ours": [], "trl": []}
    unit = "for 1,000 response tokens" if varied else "a step"
    for number in range(1, chosen.rounds + 1):
        sides["ours"].append(run_side(Path(sys.executable), "grpo_ours.py", spec_file, result_file, threads=chosen.threads))
        if trl is not None:
            sides["trl"].append(run_side(trl, "trl_grpo_reference.py", spec_file, result_file, threads=chosen.threads))
            check_same_work(sides["ours"][-1], sides["trl"][-1])
            a, b = (sides[side][-1]["median"]["total"]["cpu_seconds"] for side in ("ours", "trl"))
            print(
                f"{size_name}, {lengths}, round {number} of {chosen.rounds}: CPU seconds {unit}, ours {a:.2f}, TRL {b:.2f}, {b / a:.2f}x",
                flush=True,
            )
    rows = chosen.prompts * chosen.group_size
    responses = f"{'up to ' if varied else ''}{chosen.response_length}"
    title = (
        f"\n{size_name}, {lengths} lengths: {parameters / 1e6:.2f}M parameters, {chosen.prompts} prompts x {chosen.group_size} responses = "
        f"{rows} sequences of {chosen.prompt_length} + {responses} tokens,\n  {chosen.threads} thread(s), micro-batches of "
        f"{chosen.micro_batch_size or rows}; seconds {unit}"
    )
    if varied:
        means = [statistics.mean(r["generated_tokens_per_step"] for r in side) / rows for side in sides.values() if side]
        title += "; mean length " + " and ".join(f"{mean:.0f}" for mean in means)
    print("\n".join(table(title, sides["ours"], sides["trl"])), flush=True)
    return {"model": size_name, "lengths": lengths, "parameters": parameters, "rounds": sides}


def main() -> int:
    chosen = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # an exception: the running side is ended with us
    try:
        trl = None if chosen.ours_only else chosen.trl_python or trl_python(HERE.parent / ".venv-trl")
        with tempfile.TemporaryDirectory() as folder:
            measured = [compare(name, lengths, chosen, trl, Path(folder)) for name in chosen.sizes for lengths in chosen.lengths]
    except (EnvironmentFailed, Mismatch, RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    chosen.output.mkdir(parents=True, exist_ok=True)
    path = chosen.output / time.strftime("grpo_vs_trl-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(measured, indent=2) + "\n")
    if trl is not None:
        ratios = {
            f"{entry['model']} {entry['lengths']}": middle(entry["rounds"]["trl"], "total", "cpu_seconds")
            / middle(entry["rounds"]["ours"], "total", "cpu_seconds")
            for entry in measured
        }
        print("\nend to end, CPU time, TRL / ours: " + ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items()))
    print(f"figures: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
