"""The demo: supervised fine-tuning, a reward model, then PPO with a critic server and a reward server, on this machine, offline.

The task is made here (sums of small numbers, one token per character), the models have a third of a million parameters, and every stage
is one of the programs in examples/nlp under the local launcher: the code path of a large run. `make demo` takes about two minutes on
two cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

from arithmetic import TaskFiles, generate
from rich.console import Console
from screen import WIDTH, Stage, last_screen, outcome, picture

from aligner.commands.programs import launch_local

STAGES = (
    Stage(recipe="sft", title="supervised fine-tuning", about="on answers that mostly forget to carry"),
    Stage(recipe="reward_model", title="reward model", about="of pairs: right answers against wrong ones"),
    Stage(recipe="ppo", title="PPO, two servers", about="the policy here, critic and reward model as servers of their own"),
)
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
    settings = {"sft": _sft(root, files), "reward_model": _reward_model(root, files), "ppo": _ppo(root, files, arguments.steps)}
    done = []
    for number, stage in enumerate(STAGES, 1):
        print(f"\n=== {number}/{len(STAGES)} {stage.title}: {stage.about}", flush=True)
        started = time.monotonic()
        code = launch_local(stage.recipe, [*settings[stage.recipe], f"run.seed={arguments.seed}"])
        if code:
            logs = root / stage.recipe / "logs"
            print(f"\nthe demo stopped: stage {stage.recipe} ended with exit code {code}; see {logs}", file=sys.stderr)
            return code
        done.append(replace(stage, took=time.monotonic() - started))
    return _conclude(root, done, files, arguments.picture)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/demo"), help="where everything is written (default: runs/demo)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="PPO steps (default: conf/ppo/experiment/demo.yaml's)")
    parser.add_argument(
        "--picture", type=Path, help="also write what was seen into this SVG file (for a terminal that shows the live view)"
    )
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
        "+experiment=demo",
        f"model.tokenizer={files.tokenizer}",
        f"data.train={files.sft}",
        f"run.directory={root / 'sft'}",
    ]


def _reward_model(root: Path, files: TaskFiles) -> list[str]:
    return [
        "+experiment=demo",
        f"model.path={root / 'sft' / 'checkpoints' / 'policy'}",
        f"data.train={files.pairs}",
        f"data.validation={files.validation_pairs}",
        f"run.directory={root / 'reward_model'}",
    ]


def _ppo(root: Path, files: TaskFiles, steps: int) -> list[str]:
    reward_model = root / "reward_model" / "checkpoints" / "reward_model"
    return [
        "+experiment=demo",
        f"model.path={root / 'sft' / 'checkpoints' / 'policy'}",
        f"critic.model.path={reward_model}",
        f"reward.model.path={reward_model}",
        f"data.train={files.prompts}",
        f"data.validation={files.validation}",
        f"run.directory={root / 'ppo'}",
        *([f"loop.max_steps={steps}"] if steps else []),
    ]


def _conclude(root: Path, done: list[Stage], files: TaskFiles, picture_file: Path | None) -> int:
    """Print what came out; 1 where the accuracy did not rise."""
    found = outcome(root, done, files.validation)
    screen = last_screen(found, root, sys.executable)
    console = Console(highlight=False)
    console.print()
    console.print(screen, width=min(WIDTH, console.width))
    if picture_file is not None:
        picture(picture_file, root / "ppo" / "logs" / "actor.0.log", screen)
    if found.rose:
        return 0
    print("the accuracy did not rise: something is wrong", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
