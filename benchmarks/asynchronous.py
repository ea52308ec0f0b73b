"""Asynchronous rollouts against on-policy ones: the same GRPO job, at equal numbers of steps, in seconds of the wall and in reward.

    python benchmarks/asynchronous.py [--steps 32] [--size small] [--reward-seconds 0.3] [--staleness 1 2] [--batch 8] [--recompute]

Four runs, one after the other, each in a process of its own: on-policy on one thread (a core is idle), on-policy on two threads (the fair
comparison: as many cores as the others use), asynchronous with each staleness, one thread for the sampler and one for the trainer. All of
it twice: with a reward function that answers at once, and with one that takes `--reward-seconds` per call. The prompts, the seeds, the
model and the number of updates are the same. Few sequences are decoded at a time (`--batch`), so that sampling takes about as long as
training: on accelerators it is the longer part. Wall times need two idle cores: the load before each run is printed beside its figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from random_model import SIZES, Size, random_prompts, write_model
from sides import run_side

MEDIUM = Size(  # 5.2 million parameters: what the interpreter does is small beside the arithmetic
    num_layers=6,
    hidden_size=256,
    ffn_hidden_size=704,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=2048,
    tied_embeddings=True,
)
ALL_SIZES = {"medium": MEDIUM} | SIZES
LEAST_CORES = 2
REST = ("staleness", "versions", "waited_per_step", "trainer_cpu_seconds_per_step", "sampler_cpu_seconds_per_step", "load")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """One run."""

    model: str
    prompts: list[list[int]]
    prompts_per_step: int
    group_size: int
    response_length: int
    learning_rate: float
    steps: int
    warmup_steps: int  # first ones, not timed
    threads: int
    max_staleness: int  # 0: on-policy
    recompute: bool
    batch: int  # sequences decoded at a time
    reward_seconds: float  # that the reward function takes besides
    seed: int = 1


def modes(chosen: argparse.Namespace) -> dict[str, dict[str, int]]:
    """What is compared: name -> fields of the spec."""
    found = {f"on-policy, {threads} thread{'s' * (threads > 1)}": {"threads": threads, "max_staleness": 0} for threads in (1, 2)}
    return found | {f"asynchronous, staleness {n}": {"threads": 1, "max_staleness": n} for n in chosen.staleness}


def compare(spec: Spec, chosen: argparse.Namespace, folder: Path) -> dict[str, dict]:
    """The result of every mode."""
    results = {}
    for name, fields in modes(chosen).items():
        own = replace(spec, **fields)
        spec_file, result_file = folder / "spec.json", folder / "result.json"
        spec_file.write_text(json.dumps(asdict(own)))
        load = os.getloadavg()[0]
        results[name] = run_side(Path(sys.executable), "asynchronous_ours.py", spec_file, result_file, threads=own.threads) | {"load": load}
    return results


def show(title: str, results: dict[str, dict]) -> None:
    """A table. The ratios are of the first row's and the second row's wall seconds over the row's: above 1, the row is faster. Trainer and
    sampler are CPU seconds of the two threads: on two idle cores a step takes about the greater of them, and what is waited for besides.
    """
    print(f"\n{title}")
    columns = ("s/step", "x 1 thread", "x 2 threads", "reward from", "to", "staleness", "versions", "waited", "trainer", "sampler", "load")
    print(f"{'':28}" + "".join(f"{column:>13}" for column in columns))
    one, two = list(results.values())[:2]
    for name, result in results.items():
        seconds = result["seconds_per_step"]
        row = [f"{seconds:.3f}", *(f"{base['seconds_per_step'] / seconds:.2f}" for base in (one, two))]
        row += [f"{result[key]:.3f}" for key in ("first_reward", "last_reward")]
        row += [f"{result[key]:.2f}" for key in REST]
        print(f"{name:28}" + "".join(f"{value:>13}" for value in row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(ALL_SIZES), default="small")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--warmup-steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8, help="per step")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--prompt-length", type=int, default=16)
    parser.add_argument("--response-length", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--batch", type=int, default=8, help="sequences decoded at a time")
    parser.add_argument("--reward-seconds", type=float, default=0.3)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--output", type=Path, help="a directory for the figures as JSON")
    chosen = parser.parse_args()
    size = ALL_SIZES[chosen.size]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        parameters = write_model(size, path / "model", positions=chosen.prompt_length + chosen.response_length, seed=0)
        spec = Spec(
            model=str(path / "model"),
            prompts=random_prompts(size, count=8 * chosen.prompts, length=chosen.prompt_length, seed=1),
            prompts_per_step=chosen.prompts,
            group_size=chosen.group_size,
            response_length=chosen.response_length,
            learning_rate=chosen.learning_rate,
            steps=chosen.steps,
            warmup_steps=chosen.warmup_steps,
            threads=1,
            max_staleness=0,
            recompute=chosen.recompute,
            batch=chosen.batch,
            reward_seconds=0.0,
        )
        cores = os.cpu_count() or 1
        work = f"{chosen.steps} steps of {chosen.prompts} x {chosen.group_size} responses of {chosen.response_length} tokens"
        print(f"{parameters / 1e6:.1f}M parameters, {work}, {cores} cores")
        if cores < LEAST_CORES:
            print("warning: sampler and trainer share one core: nothing can be gained here")
        results = {}
        for seconds in (0.0, chosen.reward_seconds):
            title = f"a reward function that takes {seconds:g} s" if seconds else "a reward function that answers at once"
            results[title] = compare(replace(spec, reward_seconds=seconds), chosen, path)
            show(title, results[title])
    if chosen.output is not None:
        chosen.output.mkdir(parents=True, exist_ok=True)
        (chosen.output / "asynchronous.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
