"""Do the supervised and preference recipes learn? Each of them once, through the local launcher, from a real pretrained model; a table.

The model is stories260k, the data are human preferences (HH-RLHF), GSM8K's answers, and the model's own stories, labelled by a rule
(stories.py). What is measured is measured on exported models, with transformers, on data that no run has seen, with 95 % intervals. Exit
code 1 where the worse end of an interval is not beyond what is needed. Results: <directory>/supervised.json and supervised.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import policy_cases
import reward_cases
import steerlm_cases
from bench import Bench, Options, Row
from launching import CaseFailed, launch, prepare, refuse_foreign

ROOT = Path(__file__).resolve().parents[2]
MARK = "made_by_examples_learning_supervised"
HEAD = ("case", "metric", "before", "after", "95 % interval", "needed", "CPU seconds", "", "")

Case = Callable[[Bench], list[Row]]
CASES: Mapping[str, Case] = {
    "reward_model": reward_cases.reward_model,
    "regression_reward_model": reward_cases.regression_reward_model,
    "process_reward_model": reward_cases.process_reward_model,
    **policy_cases.CASES,
    "steerlm": steerlm_cases.steerlm,
}


def main() -> int:
    arguments = _arguments()
    root = arguments.directory.absolute()
    if refuse_foreign(root, MARK):
        return 2
    if unknown := set(arguments.only) - set(CASES):
        print(f"error: --only {' '.join(sorted(unknown))}: known are {' '.join(CASES)}", file=sys.stderr)
        return 2
    model = arguments.model or arguments.data / "stories260k"
    if missing := [path for path in (model, arguments.data) if not path.is_dir()]:
        print(f"error: {missing[0]} is no directory; see --model and --data", file=sys.stderr)
        return 2
    prepare(root, MARK)
    bench = Bench(root, model.absolute(), arguments.data.absolute(), Options(seed=arguments.seed, steps=arguments.steps), launch)
    return run(bench, [name for name in CASES if not arguments.only or name in arguments.only])


def run(bench: Bench, names: Sequence[str]) -> int:
    """Run these cases one after another, print and write the table; the exit code."""
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for name in names:
        print(f"=== {name}", flush=True)
        try:
            found = CASES[name](bench)
            rows += found
            print("\n".join(map(_line, found)), flush=True)
        except CaseFailed as error:
            failed[name] = str(error)
            print(f"failed: {error}", flush=True)
        write(bench.root, rows, failed)
    print("\n" + (bench.root / "supervised.md").read_text())
    return int(bool(failed) or not all(row.passed for row in rows))


def write(root: Path, rows: Sequence[Row], failed: Mapping[str, str]) -> None:
    """supervised.json and supervised.md below `root`."""
    records = [asdict(row) | {"passed": row.passed} for row in rows]
    (root / "supervised.json").write_text(json.dumps({"rows": records, "failed": dict(failed)}, indent=2) + "\n")
    lines = ["| " + " | ".join(HEAD) + " |", "|---|---|" + "---:|" * (len(HEAD) - 4) + "---|---|", *map(_line, rows)]
    lines += [f"| {name} " + "| " * (len(HEAD) - 2) + f"| failed: {message} |" for name, message in failed.items()]
    (root / "supervised.md").write_text("\n".join(lines) + "\n")


def _line(row: Row) -> str:
    cells = [
        *(row.case, row.metric.replace("|", r"\|"), f"{row.before:.3f}", f"{row.after:.3f}", f"{row.low:.3f} to {row.high:.3f}"),
        f"{'above' if row.rises else 'below'} {row.needed:.3f}",
        f"{row.cpu_seconds:.0f}" if row.cpu_seconds else "",
        "learns" if row.passed else "MISSES",
        row.note,
    ]
    return "| " + " | ".join(cells) + " |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/supervised"), help="of all that is written (default: runs/supervised)")
    parser.add_argument(
        "--data", type=Path, default=ROOT.parent / "shared" / "data", help="has hh_harmless/ and gsm8k/ (default: %(default)s)"
    )
    parser.add_argument("--model", type=Path, help="Hugging Face directory to start from (default: stories260k in --data)")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help=f"some of {' '.join(CASES)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="of every run that trains (default: its own)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
