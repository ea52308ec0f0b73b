"""What `aligner plan` says of jobs whose step times others have published (published_steps.yaml), and by how much it is wrong.

python benchmarks/plan_accuracy.py [--json errors.json] [--write]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aligner.jobs.calibrate import KINDS, read
from aligner.planner.calibration import STEP, error, median_and_worst

FILE = Path(__file__).with_name("published_steps.yaml")
PAGE = Path(__file__).parents[1] / "docs" / "planning.md"


TITLES = {"calibration": "fitted to", "held_out": "held out"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--write", action="store_true", help="write the figures into the file, for the test, and into the docs")
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
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    if arguments.write:
        _record(found)
        _show(found)


def _record(found: Sequence[dict[str, Any]]) -> None:
    text = FILE.read_text()
    for one in found:
        start = text.index(f"- name: {one['name']}\n")
        end = text.find("\n  - name: ", start) if "\n  - name: " in text[start:] else len(text)
        own = re.sub(r"\n    planned: .*", "", text[start:end])
        text = text[:start] + own.replace("\n    settings:", f"\n    planned: {one['planned']:.2f}\n    settings:") + text[end:]
    FILE.write_text(text)


def _show(found: Sequence[dict[str, Any]]) -> None:
    parts = []
    for kind, title in TITLES.items():
        own = [one for one in found if one["kind"] == kind]
        rows = [f"| {title} | published, s | planned, s | planned / published |", "|---|---:|---:|---:|"]
        rows += [
            f"| {one['name']} | {one['published']:.1f} | {one['planned']:.1f} | {one['planned'] / one['published']:.2f} |" for one in own
        ]
        middle, worst = median_and_worst({one["name"]: one["planned"] / one["published"] for one in own})
        parts.append("\n".join(rows) + f"\n\nError of what was {title}: median {middle:.0%}, worst {worst:.0%}.")
    before, begin, rest = PAGE.read_text().partition("<!-- table: benchmarks/plan_accuracy.py -->\n")
    _, end, after = rest.partition("<!-- end of table -->")
    PAGE.write_text(before + begin + "\n" + "\n\n".join(parts) + "\n\n" + end + after)


if __name__ == "__main__":
    main()
