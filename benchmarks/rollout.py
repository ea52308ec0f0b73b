"""Generation by this stack's engine against transformers and vLLM: same weights, prompts, response lengths, sampling and threads.

    python benchmarks/rollout.py [--sizes small large] [--batches 1 8 32 64] [--lengths fixed varied] [--against dynamic static vllm]

Every competitor runs in a process of its own, one after the other, so that a change of the machine's load meets all of them when there are
several rounds. What is measured and how to read it: benchmarks/README.md.
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
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from random_model import GPU_SIZES, SIZES, Size, random_prompts, write_model
from rollout_work import response_limits
from sides import HERE, Mismatch, run_side
from trl_environment import EnvironmentFailed
from vllm_environment import find_vllm, openmp

MEAN_SHARE = 3  # varied responses have a mean of about a third of the allowed length
WAVES = 4  # varied requests for each sequence that is decoded at a time
LOGPROB_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
GREEDY_PROMPTS, GREEDY_LENGTH = 4, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Competitor:
    """A side: its script and the mode that the script runs in."""

    script: str
    mode: str = ""


OURS = "ours"
COMPETITORS = {
    OURS: Competitor(script="rollout_ours.py"),
    "ours (torch)": Competitor(script="rollout_ours.py", mode="torch"),
    "dynamic": Competitor(script="transformers_rollout_reference.py", mode="dynamic"),
    "static": Competitor(script="transformers_rollout_reference.py", mode="static"),
    "continuous": Competitor(script="transformers_rollout_reference.py", mode="continuous"),
    "vllm": Competitor(script="vllm_rollout_reference.py"),
}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", choices=[*SIZES, *GPU_SIZES], nargs="+", default=["small"])
    parser.add_argument("--batches", type=int, nargs="+", default=[32], help="sequences decoded at a time")
    parser.add_argument("--lengths", choices=("fixed", "varied"), nargs="+", default=["fixed", "varied"], help="of responses")
    parser.add_argument("--against", choices=[name for name in COMPETITORS if name != OURS], nargs="*", default=["dynamic", "vllm"])
    parser.add_argument("--rounds", type=int, default=1, help="how often all competitors run in turn")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of a competitor in a round, after one that warms up")
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--response-length", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(LOGPROB_TOLERANCE), default="float32")
    parser.add_argument("--vllm-python", type=Path, help="an interpreter that can import vllm (default: .venv-vllm, where it is)")
    parser.add_argument("--make-vllm", action="store_true", help="make .venv-vllm where it is missing (3.5 GB)")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="where the figures are written, as JSON and as a table")
    chosen = parser.parse_args(arguments)
    numbers = (chosen.rounds, chosen.repeats, chosen.prompt_length, chosen.response_length, chosen.threads, *chosen.batches)
    if min(numbers) < 1:
        parser.error("rounds, repeats, lengths, threads and batches must be at least 1")
    return chosen


def make_cases(size: Size, chosen: argparse.Namespace) -> list[dict]:
    """`rollout_work.Case`s. Fixed lengths: one full batch; varied: several batches' worth."""
    cases, longest = [], chosen.response_length
    for batch, lengths in product(chosen.batches, chosen.lengths):
        count = batch if lengths == "fixed" else WAVES * batch
        limits = response_limits(lengths, count=count, longest=longest, mean=max(1, longest // MEAN_SHARE), seed=batch)
        prompts = random_prompts(size, count=count, length=chosen.prompt_length, seed=1)
        cases.append({"lengths": lengths, "batch": batch, "prompts": prompts, "limits": limits})
    return cases


def make_spec(model: Path, size: Size, cases: list[dict], chosen: argparse.Namespace) -> dict:
    """The fields of `rollout_work.Spec`, but for the mode."""
    return {
        "model": str(model),
        "cases": cases,
        "greedy": random_prompts(size, count=GREEDY_PROMPTS, length=chosen.prompt_length, seed=2),
        "greedy_length": min(GREEDY_LENGTH, chosen.response_length),
        "threads": chosen.threads,
        "repeats": chosen.repeats,
        "device": chosen.device,
        "dtype": chosen.dtype,
    }


def check_same(name: str, ours: dict, theirs: dict) -> None:
    """Raise Mismatch where a competitor made another number of tokens, or other greedy tokens or log-probs (float32: the same tokens)."""
    if [case["num_tokens"] for case in ours["cases"]] != [case["num_tokens"] for case in theirs["cases"]]:
        raise Mismatch(f"{name}: not as many tokens as ours")
    dtype = ours["dtype"]
    for number, ((tokens, logprobs), (other, its)) in enumerate(zip(ours["greedy"], theirs["greedy"], strict=True)):
        same = next((i for i, pair in enumerate(zip(tokens, other, strict=True)) if pair[0] != pair[1]), len(tokens))
        if dtype == "float32" and same < len(tokens):
            raise Mismatch(f"{name}: greedy response {number} differs from token {same} on: {other}, ours {tokens}")
        gap = max((abs(a - b) for a, b in zip(logprobs[:same], (its or logprobs)[:same], strict=True)), default=0.0)
        if not gap <= LOGPROB_TOLERANCE[dtype]:
            raise Mismatch(f"{name}: log-probs of greedy response {number} differ by {gap:.2g}, more than {LOGPROB_TOLERANCE[dtype]}")


def middle(results: list[dict], unit: str) -> float:
    """Median over the rounds."""
    return statistics.median(result["median"][unit] for result in results)


def limit_seconds(case: dict, dtype: str, model: Path, parameters: int, bandwidth: float) -> float:
    """What reading the weights once a step, and each token's cache, would take at this bandwidth: full batches cannot be faster."""
    config = json.loads((model / "config.json").read_text())
    size = {"float32": 4, "bfloat16": 2}[dtype]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * size
    steps = max(max(case["limits"]), -(-sum(case["limits"]) // case["batch"]))
    read = sum(limit * len(prompt) + limit * (limit - 1) // 2 for prompt, limit in zip(case["prompts"], case["limits"], strict=True))
    return (steps * parameters * size + read * per_token) / bandwidth


def run_all(spec: dict, names: list[str], chosen: argparse.Namespace, vllm: Path | None, folder: Path) -> dict[str, list[dict]]:
    """All competitors in turn, round by round: what each measured."""
    measured: dict[str, list[dict]] = {name: [] for name in names}
    spec_file, result_file = folder / "spec.json", folder / "result.json"
    for number, name in product(range(chosen.rounds), names):
        side = COMPETITORS[name]
        spec_file.write_text(json.dumps(spec | {"mode": side.mode}))
        python, preload = (vllm, openmp(vllm)) if name == "vllm" else (Path(sys.executable), None)
        print(f"round {number + 1} of {chosen.rounds}: {name}", file=sys.stderr, flush=True)
        measured[name].append(
            run_side(python, side.script, spec_file, result_file, threads=chosen.threads, device=chosen.device, preload=preload)
        )
        cases = measured[name][-1]["cases"]
        rates = ", ".join(f"{case['num_tokens'] / case['median']['cpu_seconds']:,.0f}" for case in cases)
        print(f"  tokens / CPU s, case by case: {rates}", file=sys.stderr, flush=True)  # kept where the run is ended early
        check_same(name, measured[OURS][-1], measured[name][-1])
    return measured


def compare(size_name: str, names: list[str], chosen: argparse.Namespace, vllm: Path | None, folder: Path) -> list[dict]:
    """One model: what was measured, by case; prints its part of the table."""
    size, model = (SIZES | GPU_SIZES)[size_name], folder / size_name
    parameters = write_model(size, model, positions=chosen.prompt_length + chosen.response_length, seed=0, dtype=chosen.dtype)
    cases = make_cases(size, chosen)
    results = run_all(make_spec(model, size, cases, chosen), names, chosen, vllm, folder)
    bandwidth = float(results[OURS][0]["versions"].get("copy_bytes_per_second", 0))
    found = []
    for number, case in enumerate(cases):
        found.append(
            {
                "size": size_name,
                "parameters": parameters,
                "batch": case["batch"],
                "lengths": case["lengths"],
                "device": chosen.device,
                "num_tokens": sum(case["limits"]),
                "limit_seconds": limit_seconds(case, chosen.dtype, model, parameters, bandwidth) if bandwidth else 0.0,
                "versions": {name: of[0]["versions"] for name, of in results.items()},
                "measured": {name: [result["cases"][number] for result in of] for name, of in results.items()},
            }
        )
        print("\n".join(table(found[-1])), flush=True)
    return found


def table(case: dict) -> list[str]:
    """One case as lines of a Markdown table."""
    unit = "cpu_seconds" if case["device"] == "cpu" else "wall_seconds"
    ours = middle(case["measured"][OURS], unit)
    lines = []
    for name, results in case["measured"].items():
        seconds, other = middle(results, unit), middle(results, "wall_seconds" if unit == "cpu_seconds" else "cpu_seconds")
        peak = max(result["peak_memory_bytes"] for result in results) / 2**20
        share = f"{case['limit_seconds'] / seconds:.0%}" if case["limit_seconds"] else ""
        cells = (case["size"], case["batch"], case["lengths"], name, f"{case['num_tokens'] / seconds:,.0f}", f"{seconds / ours:.2f}x")
        lines.append("| " + " | ".join(map(str, (*cells, f"{seconds:.2f} / {other:.2f}", f"{peak:.0f}", share))) + " |")
    return lines


def heading(device: str) -> list[str]:
    unit, other = ("CPU", "wall") if device == "cpu" else ("wall", "CPU")
    return [
        f"| model | batch | lengths | engine | tokens / {unit} s | time / ours | {unit} / {other} s | peak, MiB | of the limit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]


def main() -> int:
    chosen = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # an exception: the running side is ended with us
    try:
        vllm = None
        if "vllm" in chosen.against:
            vllm = chosen.vllm_python or find_vllm(HERE.parent / ".venv-vllm", make=chosen.make_vllm)
            if vllm is None:
                print("vllm is left out: there is no .venv-vllm (--make-vllm makes it, --vllm-python names another)", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            names = [OURS, *(name for name in chosen.against if name != "vllm" or vllm is not None)]
            print("\n".join(heading(chosen.device)), flush=True)
            cases = [case for size in chosen.sizes for case in compare(size, names, chosen, vllm, Path(folder))]
    except (EnvironmentFailed, Mismatch, RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    chosen.output.mkdir(parents=True, exist_ok=True)
    path = chosen.output / time.strftime("rollout-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(cases, indent=2) + "\n")
    lines = [*heading(chosen.device), *(line for case in cases for line in table(case))]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print(f"figures: {path} and .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
