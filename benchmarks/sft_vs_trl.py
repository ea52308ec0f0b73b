"""SFT train steps of this stack against TRL's `SFTTrainer` on HF's Trainer: same weights, rows, micro-batches, threads and optimizer.

    python benchmarks/sft_vs_trl.py [--sizes small large] [--rounds 3] [--steps 4] [--trl-python PATH]

Padded and packed, the sides in turn (ours, TRL, ours, ...), each in a process of its own. A round's figure is the median over its steps;
the table shows the median over the rounds in tokens (without padding) per second, and ratios ours / TRL (above 1: this stack is faster).
The run ends with an error where loss or gradient norm differ at any step. How to read it: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from random_model import SIZES, Size, random_prompts, write_model
from sides import HERE, Mismatch, check_close, run_side
from trl_environment import EnvironmentFailed, trl_python

MODES = ("padded", "packed")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", choices=list(SIZES), nargs="+", default=["small"], help="of models (large: minutes a step)")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (default 3)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a run (default 4), after one that warms up")
    parser.add_argument("--rows", type=int, default=32, help="sequences of a step")
    parser.add_argument("--shortest", type=int, default=24, help="tokens of the shortest sequence")
    parser.add_argument("--longest", type=int, default=256, help="of the longest; lengths between are log-uniform, as of real responses")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="sequences per forward pass where they are padded")
    parser.add_argument("--pack-tokens", type=int, default=512, help="tokens per forward pass where they are packed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trl-python", type=Path, help="an interpreter that can import trl (default: .venv-trl is made)")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="where the figures are written, as JSON")
    chosen = parser.parse_args(arguments)
    if min(chosen.rounds, chosen.steps, chosen.rows, chosen.micro_batch_size, chosen.threads) < 1:
        parser.error("rounds, steps, rows, micro-batch-size and threads must be at least 1")
    if not 2 <= chosen.shortest <= chosen.longest <= chosen.pack_tokens or chosen.rows % chosen.micro_batch_size:
        parser.error("need 2 <= shortest <= longest <= pack-tokens, and a micro-batch-size that divides the rows")
    return chosen


def make_rows(size: Size, chosen: argparse.Namespace) -> tuple[list[list[int]], list[int]]:
    """Random token rows, and how many tokens at the beginning of each (a quarter) are its prompt."""
    draw = random.Random(1)
    lengths = [round(chosen.shortest * (chosen.longest / chosen.shortest) ** draw.random()) for _ in range(chosen.rows)]
    rows = [
        row[:length] for row, length in zip(random_prompts(size, count=chosen.rows, length=chosen.longest, seed=1), lengths, strict=True)
    ]
    return rows, [max(1, length // 4) for length in lengths]


def check_same_work(ours: dict, trl: dict) -> None:
    """Raise Mismatch where loss or gradient norm differ at any step."""
    for name in ("losses", "grad_norms"):
        for step, (a, b) in enumerate(zip(ours[name], trl[name], strict=True), start=1):
            check_close(f"{name} of step {step}", a, b)


def compare(size_name: str, chosen: argparse.Namespace, trl: Path, folder: Path) -> dict:
    """Run the rounds on one model; prints its table and returns everything measured."""
    size = SIZES[size_name]
    model, spec_file, result_file = folder / size_name, folder / "spec.json", folder / "result.json"
    parameters = write_model(size, model, positions=chosen.pack_tokens, seed=0)
    rows, prompts = make_rows(size, chosen)
    tokens = sum(map(len, rows))
    groups = [rows[i : i + chosen.micro_batch_size] for i in range(0, len(rows), chosen.micro_batch_size)]
    padding = 1 - tokens / sum(len(group) * max(map(len, group)) for group in groups)
    shortest, longest = min(map(len, rows)), max(map(len, rows))
    print(
        f"\n{size_name}: {parameters / 1e6:.2f}M parameters, {len(rows)} sequences of {shortest} to {longest} tokens a step, "
        f"{tokens} together,\n  {chosen.threads} thread(s); padded: micro-batches of {chosen.micro_batch_size} sequences, "
        f"{padding:.0%} of what is computed is padding; packed: of {chosen.pack_tokens} tokens",
        flush=True,
    )
    measured: dict[str, dict[str, list[dict]]] = {mode: {"ours": [], "trl": []} for mode in MODES}
    for number in range(1, chosen.rounds + 1):
        for mode, sides in measured.items():
            spec = {"model": str(model), "rows": rows, "prompt_lengths": prompts, "steps": chosen.steps, "threads": chosen.threads}
            spec |= {"micro_batch_size": chosen.micro_batch_size, "pack_tokens": chosen.pack_tokens if mode == "packed" else 0}
            spec_file.write_text(json.dumps(spec))
            sides["ours"].append(run_side(Path(sys.executable), "sft_ours.py", spec_file, result_file, threads=chosen.threads))
            sides["trl"].append(run_side(trl, "trl_sft_reference.py", spec_file, result_file, threads=chosen.threads))
            check_same_work(sides["ours"][-1], sides["trl"][-1])
            a, b = (sides[side][-1]["median"]["cpu_seconds"] for side in ("ours", "trl"))
            print(f"  round {number} of {chosen.rounds}, {mode}: CPU seconds a step, ours {a:.3f}, TRL {b:.3f}, {b / a:.2f}x", flush=True)
    print("\n".join(table(measured, tokens)), flush=True)
    return {"model": size_name, "parameters": parameters, "tokens_per_step": tokens, "padding": padding, "modes": measured}


def speed(results: list[dict], tokens: int, unit: str) -> float:
    """Tokens per second, the median over the rounds."""
    return tokens / statistics.median(result["median"][unit] for result in results)


def table(measured: dict[str, dict[str, list[dict]]], tokens: int) -> list[str]:
    """A line per mode, and one for what packing does to TRL's padded speed on our side."""
    lines = [f"  {'tokens per CPU second':<28}{'ours':>10}{'TRL':>10}{'ours / TRL':>13}{'by wall':>10}{'peak, MiB':>16}"]
    for mode, sides in measured.items():
        ours, trl = (speed(sides[side], tokens, "cpu_seconds") for side in ("ours", "trl"))
        wall = speed(sides["ours"], tokens, "wall_seconds") / speed(sides["trl"], tokens, "wall_seconds")
        peaks = " / ".join(f"{max(result['peak_memory_bytes'] for result in sides[side]) / 2**20:.0f}" for side in ("ours", "trl"))
        lines.append(f"  {mode:<28}{ours:>10.0f}{trl:>10.0f}{ours / trl:>12.2f}x{wall:>9.2f}x{peaks:>16}")
    ours, trl = speed(measured["packed"]["ours"], tokens, "cpu_seconds"), speed(measured["padded"]["trl"], tokens, "cpu_seconds")
    return [*lines, f"  {'ours packed, TRL padded':<28}{ours:>10.0f}{trl:>10.0f}{ours / trl:>12.2f}x"]


def main() -> int:
    chosen = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # an exception: the running side is ended with us
    try:
        trl = chosen.trl_python or trl_python(HERE.parent / ".venv-trl")
        with tempfile.TemporaryDirectory() as folder:
            measured = [compare(name, chosen, trl, Path(folder)) for name in chosen.sizes]
    except (EnvironmentFailed, Mismatch, RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    chosen.output.mkdir(parents=True, exist_ok=True)
    path = chosen.output / time.strftime("sft_vs_trl-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(measured, indent=2) + "\n")
    print(f"figures: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
