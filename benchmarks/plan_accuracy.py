"""What `aligner plan` says of jobs whose step times others have published (published_steps.yaml), and by how much it is wrong.

python benchmarks/plan_accuracy.py [--json errors.json] [--write] [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from aligner.commands.calibrate import KINDS, STEP, error, median_and_worst, read

FILE = Path(__file__).with_name("published_steps.yaml")
PAGE = Path(__file__).parents[1] / "docs" / "plan_accuracy.md"


MOST = 0.01  # that an error may grow
TITLES = {"calibration": "fitted to", "held_out": "held out"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--write", action="store_true", help="write the figures into the file, for the test, and into the docs")
    parser.add_argument("--check", action="store_true", help="exit code 1 where an error is larger than the file has it")
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    for kind in KINDS:
        factors = {}
        print(f"{TITLES[kind]:<52} {'published, s':>13} {'planned, s':>11} {'planned / published':>20}")
        for job in read(FILE, kind):
            name = STEP if STEP in job.measured else next(iter(job.measured))
            published, planned = job.measured[name], job.planned(job.cluster)[name]
            factors[job.name] = planned / published
            found.append({"kind": kind, "name": job.name, "published": published, "planned": planned, "error": error(planned / published)})
            print(f"{job.name:<52} {published:>13.1f} {planned:>11.1f} {planned / published:>20.2f}")
        print("error: median {:.0%}, worst {:.0%}\n".format(*median_and_worst(factors)))
    faster = _speed_ups(found)
    print(f"{'asynchronous against synchronous':<52} {'published':>13} {'planned':>11} {'planned / published':>20}")
    for one in faster:
        print(f"{one['name']:<52} {one['published']:>13.2f} {one['planned']:>11.2f} {one['planned'] / one['published']:>20.2f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found + faster, indent=2) + "\n")
    if arguments.write:
        _record(found)
        _show(found, faster)
    return int(arguments.check and _grown(found))


def _speed_ups(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the asynchronous jobs gain over the synchronous ones that the file names beside them."""
    steps = {one["name"]: one for one in found}
    gained = []
    for row in yaml.safe_load(FILE.read_text())["held_out"]:
        if "synchronous" in row:
            ahead, alone = steps[row["name"]], steps[row["synchronous"]]
            published, planned = (alone[of] / ahead[of] for of in ("published", "planned"))
            gained.append(
                {"kind": "speed_up", "name": row["name"], "published": published, "planned": planned, "error": error(planned / published)}
            )
    return gained


def _grown(found: Sequence[dict[str, Any]]) -> bool:
    """Whether a job is planned otherwise than the file says, and worse; says which."""
    written = yaml.safe_load(FILE.read_text())
    recorded = {row["name"]: row["planned"] for kind in KINDS for row in written[kind]}
    grown = [one for one in found if one["error"] > error(recorded[one["name"]] / one["published"]) + MOST]
    for one in grown:
        print(f"{one['name']}: planned {one['planned']:.1f} s, before {recorded[one['name']]:.1f} s, published {one['published']:.1f} s")
    return bool(grown)


def _record(found: Sequence[dict[str, Any]]) -> None:
    text = FILE.read_text()
    for one in found:
        start = text.index(f"- name: {one['name']}\n")
        end = text.find("\n  - name: ", start) if "\n  - name: " in text[start:] else len(text)
        own = re.sub(r"\n    planned: .*", "", text[start:end])
        text = text[:start] + own.replace("\n    settings:", f"\n    planned: {one['planned']:.2f}\n    settings:") + text[end:]
    FILE.write_text(text)


def _show(found: Sequence[dict[str, Any]], faster: Sequence[dict[str, Any]]) -> None:
    parts = []
    for kind, title in TITLES.items():
        own = [one for one in found if one["kind"] == kind]
        rows = [f"| {title} | published, s | planned, s | planned / published |", "|---|---:|---:|---:|"]
        rows += [
            f"| {one['name']} | {one['published']:.1f} | {one['planned']:.1f} | {one['planned'] / one['published']:.2f} |" for one in own
        ]
        middle, worst = median_and_worst({one["name"]: one["planned"] / one["published"] for one in own})
        parts.append("\n".join(rows) + f"\n\nError of what was {title}: median {middle:.0%}, worst {worst:.0%}.")
    rows = ["| gain over the synchronous run | published | planned | planned / published |", "|---|---:|---:|---:|"]
    rows += [
        f"| {one['name']} | {one['published']:.2f} | {one['planned']:.2f} | {one['planned'] / one['published']:.2f} |" for one in faster
    ]
    parts.append("\n".join(rows))
    before, begin, rest = PAGE.read_text().partition("<!-- table: benchmarks/plan_accuracy.py -->\n")
    _, end, after = rest.partition("<!-- end of table -->")
    PAGE.write_text(before + begin + "\n" + "\n\n".join(parts) + "\n\n" + end + after)


if __name__ == "__main__":
    sys.exit(main())
