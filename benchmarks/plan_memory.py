"""What `aligner plan` says of the memory of small runs on this machine, and what their ranks really had resident at their fullest.

python benchmarks/plan_memory.py [--model HF_DIRECTORY] [--directory DIRECTORY] [--only NAME ...] [--json FILE]

Runs the demo, and SFT and GRPO of a small model on one and on two ranks, a few steps each, and compares the peak resident memory of every
component's fullest rank (Linux: VmHWM) with the plan of the same settings. Exit code 1 where one is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from aligner.commands.plan.command import plan_job

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT / "examples" / "nlp" / "data" / "story_prompts.jsonl"
MOST = 0.1  # a ratio may be off by
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A rank: the settings that it was started with, and its peak resident memory in bytes."""

    component: str
    config: str
    overrides: tuple[str, ...]
    peak: int


def runs(model: Path, directory: Path) -> dict[str, list[str]]:
    """The arguments of the Python interpreter for each run, by name."""
    common = [f"model.path={model}", "loop.max_steps=4"]
    sft = [
        "sft",
        *common,
        f"data.train={stories(directory)}",
        "data.max_length=512",
        "model.micro_batch_size=16",
        "algorithm.batch_size=32",
    ]
    grpo = ["grpo", "+experiment=stories", *common, f"data.train={PROMPTS}", "loop.validate_every=0", "loop.validate_first=false"]
    launch = ["-m", "aligner.cli", "launch", "local"]
    found = {"demo": [str(ROOT / "examples" / "demo" / "run.py"), "--steps", "5", "--directory", str(directory / "demo")]}
    for name, arguments in (("sft", sft), ("grpo", grpo)):
        for ranks in (1, 2):
            where = [f"num_processes={ranks}", f"run.directory={directory / f'{name}{ranks}'}"]
            found[f"{name}, {ranks} rank{'s' * (ranks > 1)}"] = [*launch, *arguments, *where]
    return found


def stories(directory: Path) -> Path:
    """A file of records whose responses have 5 to 30 sentences."""
    sentences = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    generator, path = random.Random(1), directory / "stories.jsonl"
    records = [{"prompt": sentences[0], "response": " ".join(generator.choices(sentences, k=generator.randint(5, 30)))} for _ in range(200)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def measured(arguments: list[str], log: Path) -> list[Process]:
    """Run it, and the ranks that it had. Raises RuntimeError where it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    ranks: dict[int, Process] = {}
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, *arguments], stdout=file, stderr=subprocess.STDOUT, env=environment)
        while process.poll() is None:
            ranks |= {pid: found for pid in descendants(process.pid) if (found := look(pid)) is not None}
            time.sleep(0.1)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {log}")
    return list(ranks.values())


def descendants(root: int) -> list[int]:
    """Processes that `root` has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found, waiting = [], [root]
    while waiting:
        waiting += (own := children.get(waiting.pop(), []))
        found += own
    return found


def look(pid: int) -> Process | None:
    """A rank as it is now; None for another process, and for one that ends."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
        is_rank = b"\0RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except OSError:
        return None
    if not is_rank or "aligner.cli" not in words or "VmHWM" not in status:
        return None
    action, *rest = words[words.index("aligner.cli") + 1 :]
    component, config, *overrides = ("", *rest) if action == "train" else rest
    return Process(component=component, config=config, overrides=tuple(overrides), peak=int(status["VmHWM"].split()[0]) * 1024)


def vocabulary(overrides: tuple[str, ...]) -> list[str]:
    """The size that a run from scratch takes from its tokenizer, which a plan does not read."""
    given = dict(override.split("=", 1) for override in overrides if "=" in override)
    if "model.tokenizer" not in given:
        return []
    return [f"model.architecture.vocab_size={len(AutoTokenizer.from_pretrained(given['model.tokenizer']))}"]


def rows(name: str, ranks: list[Process]) -> list[tuple[str, float, float]]:
    """(run and component, planned bytes, measured bytes of the fullest rank)."""
    found = []
    for config, overrides in sorted({(rank.config, rank.overrides) for rank in ranks}):
        own = [rank for rank in ranks if (rank.config, rank.overrides) == (config, overrides)]
        for number, plan in enumerate(plan_job(config, [*overrides, *vocabulary(overrides)]).components):
            peaks = [rank.peak for rank in own if rank.component == ("" if number == 0 else plan.component.name)]
            found.append((f"{name}: {config} {plan.component.name}", plan.peak.total, max(peaks)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT.parent / "shared" / "data" / "stories260k", help="default: %(default)s")
    parser.add_argument("--directory", type=Path, default=Path("runs/plan_memory"), help="of all that is written (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="runs whose names begin so")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    directory = arguments.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    found = []
    print(f"{'rank':<36} {'planned, MiB':>13} {'measured, MiB':>14} {'planned / measured':>19}")
    for name, command in runs(arguments.model.absolute(), directory).items():
        if arguments.only and not name.startswith(tuple(arguments.only)):
            continue
        for label, planned, real in rows(name, measured(command, directory / "log.txt")):
            print(f"{label:<36} {planned / MIB:>13.0f} {real / MIB:>14.0f} {planned / real:>19.2f}", flush=True)
            found.append({"rank": label, "planned": planned, "measured": real, "ratio": planned / real})
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(any(abs(one["ratio"] - 1) > MOST for one in found))


if __name__ == "__main__":
    sys.exit(main())
