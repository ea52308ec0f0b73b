"""Which correction keeps training stable at which precision of the rollouts? GRPO on three tasks, for each a table.

The tasks: the sums of run.py, with its dense start and with a start that is a mixture of experts, and the happy words of stories260k
(`--data`, skipped without). Weights and cache of the built-in engine are in the model's own precision (float32), FP8 and INT8, emulated on
a CPU. Corrections are those of `algorithm.correction.kind` with their default limits, and on the mixture `rollout.routing_replay=replay`.
Every case is run with each seed; in the model's own precision, where the gap is rounding, without a correction alone. A run counts as
diverged if it ends with an error, or if its last ten steps have less than four fifths of the reward of its first ten. Results go to
<directory>/precision.json and precision.md; whatever is there is not run again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent
sys.path.append(str(EXAMPLES / "demo"))  # behind this folder, which has a run.py too

from arithmetic import generate  # noqa: E402
from cases import COMMON  # noqa: E402
from launching import CaseFailed, prepare, refuse_foreign  # noqa: E402
from run import TASK, Options, make_start  # noqa: E402

MARK = "made_by_examples_learning_precision"
ENDS = 10  # steps at the beginning and the end of a run whose rewards are compared
LOST = 0.8  # part of the first reward below which the last one is that of a policy that diverged
PRECISIONS = ("model", "fp8", "int8")
CORRECTIONS = ("none", "tis", "mis", "icepop")
REPLAY = "routing replay"
MIXTURE = (
    *("model.architecture.family=mixtral", "model.architecture.num_experts=4", "model.architecture.experts_per_token=2"),
    *("model.architecture.expert_ffn_hidden_size=128", "model.architecture.ffn_hidden_size=128"),
)
# Two updates on a batch, and no KL term: nothing but the clip and the correction holds the policy.
SUMS = (
    *COMMON,
    "algorithm.kl_coef=0",
    "loop.max_steps=100",
    "algorithm.prompts_per_step=16",
    "algorithm.group_size=8",
    "algorithm.mini_batch_size=64",
)
STORIES = (
    *("+experiment=stories", "algorithm.kl_coef=0", "loop.max_steps=30", "loop.validate_first=false", "loop.validate_every=0"),
    *("rollout.sampling.max_response_length=32", "algorithm.mini_batch_size=32", "logging.tensorboard=false"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Runs from one start: `settings` are common to them, `corrections` what is compared."""

    name: str
    settings: tuple[str, ...]
    corrections: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One run. Rewards are means over its first and last steps, gaps `rollout/logprob_gap` there (nats); NaN where it failed."""

    task: str
    precision: str
    correction: str
    seed: int
    first_reward: float = math.nan
    last_reward: float = math.nan
    first_gap: float = math.nan
    last_gap: float = math.nan

    @property
    def diverged(self) -> bool:
        return not self.last_reward >= LOST * self.first_reward


def main() -> int:
    arguments = _arguments()
    root = arguments.directory.absolute()
    if refuse_foreign(root, MARK):
        return 2
    prepare(root, MARK)
    for module in ("aligner.algorithms.sft", "aligner.algorithms.grpo"):  # once: runs are forks
        importlib.import_module(module)
    stored = root / "precision.json"
    outcomes = [Outcome(**record) for record in json.loads(stored.read_text())] if stored.exists() else []
    known = {(one.task, one.precision, one.correction, one.seed) for one in outcomes}
    for seed in arguments.seeds:  # a table of few seeds comes first
        for task in _tasks(root, arguments.data):
            for precision in arguments.precisions:
                for correction in task.corrections if precision != PRECISIONS[0] else task.corrections[:1]:
                    if (task.name, precision, correction, seed) in known:
                        continue
                    outcomes.append(run_case(root, task, precision, correction, seed))
                    stored.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
                    (root / "precision.md").write_text(table(outcomes))
    print(table(outcomes))
    return 0


def _tasks(root: Path, data: Path) -> Iterator[Task]:
    files = generate(1, root / "data", TASK)
    for name, sft, corrections in (("sums", (), CORRECTIONS), ("sums, mixture of 4 experts", MIXTURE, ("none", "tis", REPLAY))):
        start = make_start(root, files, Options(sft=sft), forked)
        yield Task(name=name, settings=(f"model.path={start}", f"data.train={files.prompts}", *SUMS), corrections=corrections)
    model, prompts = data / "stories260k", EXAMPLES / "nlp" / "data" / "story_prompts.jsonl"
    if model.is_dir():
        yield Task(name="stories260k", settings=(f"model.path={model}", f"data.train={prompts}", *STORIES), corrections=CORRECTIONS)
    else:
        print(f"skipped: stories260k, which is not in {data} (--data)", flush=True)


def run_case(root: Path, task: Task, precision: str, correction: str, seed: int) -> Outcome:
    """Train, and read what the run reported."""
    name = f"{task.name}-{precision}-{correction}-{seed}".replace(" ", "_").replace(",", "")
    settings = [*task.settings, f"run.seed={seed}", "run.export_hf=false", f"rollout.precision={precision}"]
    settings += [f"rollout.cache_precision={precision}"]
    settings += ["rollout.routing_replay=replay"] if correction == REPLAY else [f"algorithm.correction.kind={correction}"]
    case = {"task": task.name, "precision": precision, "correction": correction, "seed": seed}
    started = time.monotonic()
    try:
        forked("grpo", root / name, settings)
        outcome = Outcome(**case, **_ends(root / name / "metrics.jsonl"))
    except CaseFailed as error:
        print(f"failed: {error}", flush=True)
        outcome = Outcome(**case)
    print(f"{name}: {outcome.first_reward:.3f} to {outcome.last_reward:.3f}, {time.monotonic() - started:.0f} s", flush=True)
    return outcome


def _ends(metrics: Path) -> dict[str, float]:
    from aligner.reporting.jsonl import read_metrics

    steps = [step.values for step in read_metrics(metrics) if "rollout/reward" in step.values]
    return {
        f"{end}_{kind}": statistics.fmean(step[f"rollout/{name}"] for step in part)
        for end, part in (("first", steps[:ENDS]), ("last", steps[-ENDS:]))
        for kind, name in (("reward", "reward"), ("gap", "logprob_gap"))
    }


def forked(recipe: str, directory: Path, settings: Sequence[str]) -> float:
    """As `launching.launch`, in a fork of this process, which has the imports; returns seconds of the wall. Raises CaseFailed."""
    started, log = time.monotonic(), directory.with_suffix(".log")
    process = multiprocessing.get_context("fork").Process(target=_train, args=(recipe, [*settings, f"run.directory={directory}"], log))
    process.start()
    process.join()
    if process.exitcode:
        raise CaseFailed(f"exit code {process.exitcode}: {log}")
    return time.monotonic() - started


def _train(recipe: str, settings: Sequence[str], log: Path) -> None:
    from aligner.jobs.start import program

    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    program(recipe)(settings)


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: a row for each task, precision and correction."""
    cases: dict[tuple[str, str, str], list[Outcome]] = {}
    for one in outcomes:
        cases.setdefault((one.task, one.precision, one.correction), []).append(one)
    lines = [
        "| task | precision | correction | first reward | last reward | first gap | last gap | diverged |",
        "|---|---|---|" + "---:|" * 5,
    ]
    order = sorted(cases, key=lambda case: (list(dict.fromkeys(one.task for one in outcomes)).index(case[0]), PRECISIONS.index(case[1])))
    for case in order:
        runs = cases[case]
        ended = [one for one in runs if not math.isnan(one.last_reward)]
        cells = [_mean([one.first_reward for one in ended]), _mean([one.last_reward for one in ended])]
        cells += [f"{statistics.fmean(gaps):.1e}" if (gaps := [getattr(one, name) for one in ended]) else "" for name in _GAPS]
        lines.append("| " + " | ".join([*case, *cells, f"{sum(one.diverged for one in runs)} of {len(runs)}"]) + " |")
    return "\n".join(lines) + "\n"


_GAPS = ("first_gap", "last_gap")


def _mean(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.fmean(values):.3f}" + (f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else "")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("build/precision"), help="for the runs and the table (build/precision)")
    parser.add_argument("--data", type=Path, default=EXAMPLES.parent.parent / "shared" / "data", help="folder with stories260k")
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
