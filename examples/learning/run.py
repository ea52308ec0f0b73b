"""Does every estimator learn? One run of each from one start, on small sums, offline; a table, and exit code 1 where one does not.

The start is a supervised model of the demo's size (sums of numbers up to 19, a third of them taught wrong), made once and kept. Every case
then gets the same number of sampled responses, the same prompts and the same seed, as a run of its own under the local launcher. The mean
reward of sampled responses to held-out prompts and the KL to the start are measured afterwards, by evaluate.py, on the exported models.
Results go to <directory>/learning.json and learning.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(EXAMPLES / "demo"))  # its task

from arithmetic import Task, TaskFiles, generate  # noqa: E402
from cases import CASES, COMMON, MAX_RESPONSE_LENGTH, Case  # noqa: E402
from launching import CaseFailed, Launch, launch, prepare, refuse_foreign  # noqa: E402

MARK = "made_by_examples_learning"
TASK = Task(
    first=range(20),
    second=range(20),
    carries=False,
    num_sft=160,
    noise=0.3,
    num_pairs=16000,
    num_prompts=320,
    num_validation=80,
    num_validation_pairs=400,
)
SFT_STEPS = 50  # so few that much is left to learn


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """`steps` replaces the number of steps of every case where it is not 0, `sft` adds settings to those of the start; `samples` are drawn
    for every held-out prompt when a model is measured, a quarter of them for those that were trained on."""

    seed: int = 1
    steps: int = 0
    sft: Sequence[str] = ()
    samples: int = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table. Rewards are means on held-out prompts, `train_*` on those that were trained on; `kl` in nats per token."""

    name: str
    reward_before: float
    reward_after: float
    train_before: float
    train_after: float
    kl: float
    rollouts: int
    cpu_seconds: float
    margin: float

    @property
    def passed(self) -> bool:
        """Whether the reward on held-out prompts rose by the margin."""
        return self.reward_after - self.reward_before >= self.margin


def main() -> int:
    arguments = _arguments()
    root = arguments.directory.absolute()
    if refuse_foreign(root, MARK):
        return 2
    chosen = [case for case in CASES if not arguments.only or case.name in arguments.only]
    if unknown := set(arguments.only) - {case.name for case in CASES}:
        print(f"error: --only {' '.join(sorted(unknown))}: known are {' '.join(case.name for case in CASES)}", file=sys.stderr)
        return 2
    try:
        return run(root, chosen, Options(seed=arguments.seed, steps=arguments.steps), launch)
    except CaseFailed as error:
        print(f"error: the start could not be made: {error}", file=sys.stderr)
        return 1


def run(root: Path, cases: Sequence[Case], options: Options, launch: Launch) -> int:
    """Make the start, run `cases` from it one after another, print and write the table; the exit code."""
    prepare(root, MARK)
    files = generate(options.seed, root / "data", TASK)
    start = make_start(root, files, options, launch)
    judge = Judge(start, files, options.samples)
    rows, failed = [], {}
    for case in cases:
        print(f"=== {case.name}", flush=True)
        try:
            rows.append(run_case(case, root / case.name, files, judge, options, launch))
            print(_line(rows[-1]), flush=True)
        except CaseFailed as error:
            failed[case.name] = str(error)
            print(f"failed: {error}", flush=True)
        write(root, rows, failed)
    print("\n" + (root / "learning.md").read_text())
    return int(bool(failed) or not all(row.passed for row in rows))


def make_start(root: Path, files: TaskFiles, options: Options, launch: Launch) -> Path:
    """The supervised model's export; a former one is used again where the settings, the data and this recipe are the same."""
    recipe = EXAMPLES.parent / "conf" / "sft" / "experiment" / "demo.yaml"
    own = [f"loop.max_steps={SFT_STEPS}", *options.sft]
    settings = [
        "+experiment=demo",
        f"model.tokenizer={files.tokenizer}",
        f"data.train={files.sft}",
        f"run.seed={options.seed}",
        *own,
    ]
    key = hashlib.sha256(recipe.read_bytes() + files.sft.read_bytes() + "\n".join(own).encode()).hexdigest()[:12]
    directory = root / f"start-{key}"
    if not (directory / "done.json").exists():
        print("=== start: supervised fine-tuning on a few, partly wrong sums", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        launch("sft", directory, settings)
    return directory / "export"


class Judge:
    """Measures models against the common start, whose own figures it takes once."""

    def __init__(self, start: Path, files: TaskFiles, samples: int) -> None:
        from evaluate import read_prompts

        from aligner.data.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(str(start))
        self.start = start
        self._samples = samples
        self._held_out, self._trained_on = (read_prompts(path, tokenizer) for path in (files.validation, files.prompts))
        self.before = self(start)

    def __call__(self, model: Path) -> tuple[float, float, float]:
        """Mean reward on held-out prompts, on those that were trained on, and the KL to the start on the held-out ones."""
        from evaluate import measure

        from aligner.rewards.builtin import exact_match

        settings = {"max_response_length": MAX_RESPONSE_LENGTH}
        held_out = measure(model, self.start, self._held_out, exact_match, samples=self._samples, **settings)
        trained_on = measure(model, self.start, self._trained_on, exact_match, samples=max(1, self._samples // 4), **settings)
        return held_out.reward, trained_on.reward, held_out.kl


def run_case(case: Case, directory: Path, files: TaskFiles, judge: Judge, options: Options, launch: Launch) -> Row:
    """Train and measure. Raises CaseFailed where the run does not end well."""
    shutil.rmtree(directory, ignore_errors=True)
    settings = [f"model.path={judge.start}", f"data.train={files.prompts}", f"run.seed={options.seed}", *COMMON, *case.settings]
    if case.recipe == "ppo":
        settings.append(f"critic.model.path={judge.start}")
    settings += [f"loop.max_steps={options.steps}"] if options.steps else []
    cpu_seconds = launch(case.recipe, directory, settings)
    held_out, trained_on, kl = judge(directory / "export")
    return Row(
        name=case.name,
        reward_before=judge.before[0],
        reward_after=held_out,
        train_before=judge.before[1],
        train_after=trained_on,
        kl=kl,
        rollouts=rollouts_of(directory, case.recipe),
        cpu_seconds=cpu_seconds,
        margin=case.margin,
    )


def rollouts_of(directory: Path, recipe: str) -> int:
    """How many responses a run sampled for training."""
    from aligner.algorithms.registry import recipes
    from aligner.reporting.jsonl import read_metrics
    from aligner.settings.compose import from_yaml

    config = from_yaml(recipes()[recipe].config, (directory / "config.yaml").read_text())
    rounds = sum(step.values.get("rollout/rounds", 1.0) for step in read_metrics(directory / "metrics.jsonl") if step.step)
    per_round = config.algorithm.rollouts_per_step + (config.algorithm.greedy_per_round if recipe == "grpo" else 0)
    return round(rounds * per_round)


def write(root: Path, rows: Sequence[Row], failed: Mapping[str, str]) -> None:
    """learning.json and learning.md below `root`."""
    records = [asdict(row) | {"passed": row.passed} for row in rows]
    (root / "learning.json").write_text(json.dumps({"cases": records, "failed": dict(failed)}, indent=2) + "\n")
    head = ["estimator", "reward before", "reward after", "needed", "on training prompts", "KL", "rollouts", "CPU seconds", ""]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 2) + "---|"]
    lines += [_line(row) for row in rows]
    lines += [f"| {name} | | | | | | | | failed: {message} |" for name, message in failed.items()]
    (root / "learning.md").write_text("\n".join(lines) + "\n")


def _line(row: Row) -> str:
    cells = [
        row.name,
        f"{row.reward_before:.3f}",
        f"{row.reward_after:.3f}",
        f"{row.reward_before + row.margin:.3f}",
        f"{row.train_before:.3f} to {row.train_after:.3f}",
        f"{row.kl:.3f}",
        f"{row.rollouts}",
        f"{row.cpu_seconds:.0f}",
        "learns" if row.passed else "MISSES",
    ]
    return "| " + " | ".join(cells) + " |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/learning"), help="where everything is written (default: runs/learning)"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help=f"some of {' '.join(case.name for case in CASES)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="of every case (default: its own)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
