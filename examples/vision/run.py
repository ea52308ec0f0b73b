"""The vision demo: a tiny model that sees two handwritten digits and says their sum, supervised, then improved by GRPO.

Everything is that of a large run: PNG files and JSON lines, a LLaVA directory of `transformers`' own format (its weights are random, and
made here), and the recipes `sft` and `grpo` with `+experiment=vision` under the local launcher. `make demo-vision` takes two and
a half minutes of CPU time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from digits import NoDigits, Task, TaskFiles, load, write_data, write_model

from aligner.commands.programs import launch_local
from aligner.commands.report import all_columns, planned
from aligner.reporting.formats import seconds
from aligner.reporting.run_view import RunView
from aligner.reporting.samples_report import write_report

ACCURACY = "validation/accuracy"
MARK = "made_by_the_demo"
NUM_SHOWN = 6


def main() -> int:
    arguments = _arguments()
    root = arguments.directory.absolute()
    if not _prepare(root):
        print(f"error: --directory {root} exists and was not made by the demo; name another, or remove it", file=sys.stderr)
        return 2
    for name, value in {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
        os.environ.setdefault(name, value)
    started = time.monotonic()
    try:
        files = write_data(arguments.seed, root / "data", load(root / "data", arguments.wheel), Task())
    except NoDigits as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    write_model(arguments.seed, root / "model")
    stages = {
        "sft": ("supervised fine-tuning on answers of which half are one too many", _sft(root, files)),
        "grpo": ("GRPO, rewarded where the answer is exactly right", _grpo(root, files)),
    }
    for number, (recipe, (title, settings)) in enumerate(stages.items(), 1):
        print(f"\n=== {number}/{len(stages)} {title}", flush=True)
        if code := launch_local(recipe, [*settings, f"run.seed={arguments.seed}"]):
            print(f"\nthe demo stopped: stage {recipe} ended with exit code {code}; see {root / recipe / 'logs'}", file=sys.stderr)
            return code
    return _conclude(RunView(root / "grpo"), time.monotonic() - started)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = Path("runs/demo_vision")
    parser.add_argument("--directory", type=Path, default=where, help=f"where everything is written (default: {where})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wheel", type=Path, help="scikit-learn's wheel, for its digits (default: the installed one, or pip downloads it)")
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
    return ["+experiment=vision", f"model.path={root / 'model'}", f"data.train={files.sft}", f"run.directory={root / 'sft'}"]


def _grpo(root: Path, files: TaskFiles) -> list[str]:
    return [
        "+experiment=vision",
        f"model.path={root / 'sft' / 'export'}",
        f"data.train={files.prompts}",
        f"data.validation={files.validation}",
        f"run.directory={root / 'grpo'}",
    ]


def _conclude(run: RunView, took: float) -> int:
    """Print what came out and write the report; 1 where the accuracy did not rise."""
    accuracies = [step.values[ACCURACY] for step in run.metrics() if ACCURACY in step.values]
    report = run.files.path / "report.html"
    write_report([run], report, all_columns(), planned)
    print(f"\nexact answers on pictures of digits that are in no training picture, in {seconds(took)}:")
    print(f"  after SFT {accuracies[0]:.1%}, after GRPO {accuracies[-1]:.1%}")
    before, after = run.before_and_after()
    if before is not None and after is not None:
        for old, new in list(zip(before.rows, after.rows, strict=False))[:NUM_SHOWN]:
            print(f"  {old.response:<8}{'right' if old.reward else 'wrong'}  ->  {new.response:<8}{'right' if new.reward else 'wrong'}")
    print(f"the pictures with these answers: {report}")
    print(f"the model: {run.files.export} (for transformers: AutoModelForImageTextToText, AutoProcessor)")
    if accuracies[-1] > accuracies[0]:
        return 0
    print("the accuracy did not rise: something is wrong", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
