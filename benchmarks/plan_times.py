"""What `aligner plan` says of the step times of small runs on this machine, after it has been calibrated on others.

python benchmarks/plan_times.py [--model HF_DIRECTORY] [--directory DIRECTORY] [--only NAME ...]

Runs SFT and GRPO of a small model in other sizes than those that are compared, fits the parameters of a CPU to their metrics
(`aligner plan --calibrate`), and compares the demo, SFT, and GRPO on one and two ranks, on-policy and with rollouts ahead. Nothing else
should run meanwhile. A run that is there already is not run again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import yaml

from aligner.commands.calibrate import fit

sys.path.insert(0, str(Path(__file__).parent))

from plan_memory import PROMPTS, ROOT, stories

STEPS = 8
AHEAD = ("rollout.asynchronous.max_staleness=1", "algorithm.correction.kind=tis")


def runs(model: Path, directory: Path) -> dict[str, dict[str, list[str]]]:
    """The arguments of `aligner` for each run, by kind and name."""
    common = [f"model.path={model}", f"loop.max_steps={STEPS}"]

    def sft(ranks: int, batch: int, length: int, rows: int) -> list[str]:
        sizes = [f"data.max_length={length}", f"model.micro_batch_size={rows}", f"algorithm.batch_size={batch}"]
        return ["sft", *common, f"num_processes={ranks}", f"data.train={stories(directory)}", *sizes]

    def grpo(ranks: int, *changes: str) -> list[str]:
        quiet = ["loop.validate_every=0", "loop.validate_first=false"]
        return ["grpo", "+experiment=stories", *common, f"num_processes={ranks}", f"data.train={PROMPTS}", *quiet, *changes]

    def shorter(response: int, prompts: int) -> tuple[str, ...]:
        batch = prompts * 8
        return (
            f"rollout.sampling.max_response_length={response}",
            f"algorithm.prompts_per_step={prompts}",
            "algorithm.group_size=8",
            f"algorithm.mini_batch_size={batch}",
        )

    return {
        "calibration": {
            "SFT of 16 rows": sft(1, 16, 512, 8),
            "SFT of 64 rows, cut at 256": sft(1, 64, 256, 16),
            "SFT of 48 rows, cut at 448": sft(1, 48, 448, 16),
            "SFT of 64 rows, 2 ranks": sft(2, 64, 384, 16),
            "GRPO of 32 responses of 48 tokens": grpo(1, *shorter(48, 4)),
            "GRPO of 128 responses of 64 tokens": grpo(1, *shorter(64, 16)),
            "GRPO of 128 responses of 96 tokens, 2 ranks": grpo(2, *shorter(96, 16)),
            "GRPO of 32 responses, ahead": grpo(1, *shorter(64, 4), *AHEAD),
            "GRPO of 128 responses, ahead, 2 ranks": grpo(2, *shorter(64, 16), *AHEAD),
            "SFT of 64 sums": sums(directory / "demo", 64),
            "SFT of 512 sums": sums(directory / "demo", 512),
            "PPO of 128 sums": ppo_of_sums(directory / "demo", 128),
        },
        "held_out": {
            "SFT": sft(1, 32, 512, 16),
            "SFT, 2 ranks": sft(2, 32, 512, 16),
            "GRPO": grpo(1),
            "GRPO, 2 ranks": grpo(2),
            "GRPO ahead": grpo(1, *AHEAD),
            "GRPO ahead, 2 ranks": grpo(2, *AHEAD),
        },
    }


def sums(demo: Path, batch: int) -> list[str]:
    """SFT of the demo's model on the demo's data."""
    data = [f"model.tokenizer={demo / 'data' / 'tokenizer'}", f"data.train={demo / 'data' / 'sft.jsonl'}"]
    return ["sft", "+experiment=demo", *data, f"algorithm.batch_size={batch}", f"model.micro_batch_size={batch}", f"loop.max_steps={STEPS}"]


def ppo_of_sums(demo: Path, rollouts: int) -> list[str]:
    """The demo's PPO with fewer rollouts."""
    paths = {
        "": "sft/checkpoints/policy",
        "critic.": "reward_model/checkpoints/reward_model",
        "reward.": "reward_model/checkpoints/reward_model",
    }
    models = [f"{name}model.path={demo / path}" for name, path in paths.items()]
    sizes = [
        f"algorithm.rollouts_per_step={rollouts}",
        f"algorithm.mini_batch_size={rollouts // 2}",
        f"critic.mini_batch_size={rollouts // 2}",
    ]
    return ["ppo", "+experiment=demo", *models, f"data.train={demo / 'data' / 'prompts.jsonl'}", *sizes, f"loop.max_steps={STEPS}"]


def run(arguments: list[str], directory: Path) -> None:
    """Raises RuntimeError where it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    log = directory.with_suffix(".log")
    with log.open("w") as file:
        command = [sys.executable, *arguments]
        if subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False).returncode:
            raise RuntimeError(f"{directory.name} failed: {log}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT.parent / "shared" / "data" / "stories260k", help="default: %(default)s")
    parser.add_argument("--directory", type=Path, default=Path("runs/plan_times"), help="of all that is written (default: %(default)s)")
    arguments = parser.parse_args()
    directory = arguments.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    jobs: dict[str, list[dict[str, str]]] = {}
    demo = directory / "demo"
    if not demo.exists():
        print("demo", flush=True)
        run([str(ROOT / "examples" / "demo" / "run.py"), "--steps", str(STEPS), "--directory", str(demo)], demo)
    for kind, own in runs(arguments.model.absolute(), directory).items():
        for number, (name, settings) in enumerate(own.items()):
            place = directory / f"{kind}{number}"
            if not (place / "export").exists():
                print(name, flush=True)
                run(["-m", "aligner.cli", "launch", "local", *settings, f"run.directory={place}"], place)
            jobs.setdefault(kind, []).append({"name": name, "run": place.name})
    jobs["held_out"] += [{"name": f"demo, {part}", "run": f"demo/{part}"} for part in ("sft", "reward_model", "ppo")]
    (directory / "jobs.yaml").write_text(yaml.safe_dump(jobs, sort_keys=False))
    return fit(directory / "jobs.yaml")


if __name__ == "__main__":
    sys.exit(main())
