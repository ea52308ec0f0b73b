"""The demo: supervised fine-tuning, a reward model, then PPO with a critic server and a reward server, on this machine, offline.

The task is made here (sums of small numbers, one token per character), the models have a quarter of a million parameters, and every stage
is one of the programs in examples/nlp under the local launcher: the code path of a large run. `make demo` takes two to five minutes on two
cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from arithmetic import TaskFiles, generate

from aligner.algorithms import ppo as ppo_recipe
from aligner.jobs.local import launch_local
from aligner.reporting.formats import seconds
from aligner.reporting.jsonl import read_metrics
from aligner.reporting.summary import summary

MARK = "made_by_the_demo"


def main() -> int:
    arguments = _arguments()
    root = arguments.directory.absolute()
    if not _prepare(root):
        print(f"error: --directory {root} exists and was not made by the demo; name another, or remove it", file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # four processes share the cores
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    files = generate(arguments.seed, root / "data")
    stages = [
        ("1/3 supervised fine-tuning on a few, partly wrong answers", "sft", _sft(root, files)),
        ("2/3 reward model: right answers against wrong ones", "reward_model", _reward_model(root, files)),
        ("3/3 PPO: policy here, critic and reward model as servers of their own", "ppo", _ppo(root, files, arguments.steps)),
    ]
    started, took = time.monotonic(), []
    for title, recipe, overrides in stages:
        print(f"\n=== {title}", flush=True)
        stage_started = time.monotonic()
        code = launch_local(recipe, [*overrides, f"run.seed={arguments.seed}"])
        if code:
            print(f"\nthe demo stopped: stage {recipe} ended with exit code {code}; see {root / recipe / 'logs'}", file=sys.stderr)
            return code
        took.append(f"{recipe} {seconds(time.monotonic() - stage_started)}")
    print(f"\n=== done in {seconds(time.monotonic() - started)} ({', '.join(took)})\n")
    return _conclude(root)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/demo"), help="where everything is written (default: runs/demo)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="PPO steps (default: conf/experiment/demo_ppo.yaml's)")
    return parser.parse_args()


def _prepare(root: Path) -> bool:
    """An empty directory, where there was none or only a former demo's; False where it belongs to something else."""
    if root.exists() and any(root.iterdir()):
        if not (root / MARK).exists():
            return False
        shutil.rmtree(root)
    root.mkdir(parents=True, exist_ok=True)
    (root / MARK).touch()
    return True


def _sft(root: Path, files: TaskFiles) -> list[str]:
    return [
        "+experiment=demo_sft",
        f"model.tokenizer={files.tokenizer}",
        f"data.train={files.sft}",
        f"run.directory={root / 'sft'}",
    ]


def _reward_model(root: Path, files: TaskFiles) -> list[str]:
    return [
        "+experiment=demo_reward_model",
        f"model.path={root / 'sft' / 'checkpoints' / 'policy'}",
        f"data.train={files.pairs}",
        f"data.validation={files.validation_pairs}",
        f"run.directory={root / 'reward_model'}",
    ]


def _ppo(root: Path, files: TaskFiles, steps: int) -> list[str]:
    reward_model = root / "reward_model" / "checkpoints" / "reward_model"
    return [
        "+experiment=demo_ppo",
        f"model.path={root / 'sft' / 'checkpoints' / 'policy'}",
        f"critic.model.path={reward_model}",
        f"reward.model.path={reward_model}",
        f"data.train={files.prompts}",
        f"data.validation={files.validation}",
        f"run.directory={root / 'ppo'}",
        *([f"loop.max_steps={steps}"] if steps else []),
    ]


def _conclude(root: Path) -> int:
    """Print what came out; 1 where the accuracy did not rise."""
    ppo = root / "ppo"
    accuracies = _series(ppo, "validation/accuracy")
    pairs = _series(root / "reward_model", "validation/accuracy")
    print(summary(ppo / "metrics.jsonl", ppo_recipe.COLUMNS))
    print("\nanswers to problems of the last PPO step:")
    for prompt, response, reward in _samples(ppo):
        print(f"  {prompt}{response:<6} reward {reward:+.2f}")
    print(f"\nreward model: picks the right one of {pairs[-1]:.1%} of held-out pairs")
    print(f"accuracy on held-out sums (exact match, greedy): {accuracies[0]:.1%} before PPO, {accuracies[-1]:.1%} after")
    print(f"""
checkpoints   {ppo / "checkpoints"}  (policy and critic, paired by step)
Hugging Face  {ppo / "export"}
metrics       {ppo / "metrics.jsonl"}
TensorBoard   tensorboard --logdir {ppo / "tensorboard"}

next, on a model of yours (see README.md):
  {sys.executable} examples/nlp/train_grpo.py model.path=HF_DIRECTORY data.train=PROMPTS.jsonl \\
      reward.function.path=my_rewards.py:reward run.directory=runs/mine""")
    if accuracies[-1] > accuracies[0]:
        return 0
    print("\nthe accuracy did not rise: something is wrong", file=sys.stderr)
    return 1


def _series(run: Path, metric: str) -> list[float]:
    return [step.values[metric] for step in read_metrics(run / "metrics.jsonl") if metric in step.values]


def _samples(run: Path) -> Sequence[tuple[str, str, float]]:
    newest = max((run / "rollouts").glob("step_*.jsonl"))
    rows = [json.loads(line) for line in newest.read_text().splitlines()]
    return [(row["prompt"], row["response"], row["reward"]) for row in rows]


if __name__ == "__main__":
    sys.exit(main())
