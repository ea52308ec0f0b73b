"""What `aligner plan` says of jobs whose step times others have published (published_steps.yaml), and by how much it is wrong.

python benchmarks/plan_accuracy.py [--json errors.json] [--write]
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from aligner.jobs.calibrate import KINDS, read
from aligner.planner.calibration import STEP, error, median_and_worst

FILE = Path(__file__).with_name("published_steps.yaml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument(
        "--write", action="store_true", help="write what is planned into the file, where a test compares later plans with it"
    )
    arguments = parser.parse_args()
    found = []
    for kind in KINDS:
        factors = {}
        print(f"{kind:<52} {'published, s':>13} {'planned, s':>11} {'planned / published':>20}")
        for job in read(FILE, kind):
            name = STEP if STEP in job.measured else next(iter(job.measured))
            published, planned = job.measured[name], job.planned(job.cluster)[name]
            factors[job.name] = planned / published
            found.append({"kind": kind, "name": job.name, "published": published, "planned": planned, "error": error(planned / published)})
            print(f"{job.name:<52} {published:>13.1f} {planned:>11.1f} {planned / published:>20.2f}")
        middle, worst = median_and_worst(factors)
        print(f"error: median {middle:.0%}, worst {worst:.0%}\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    if arguments.write:
        text = FILE.read_text()
        for one in found:
            start = text.index(f"- name: {one['name']}\n")
            end = text.find("\n  - name: ", start) if "\n  - name: " in text[start:] else len(text)
            own = re.sub(r"\n    planned: .*", "", text[start:end])
            own = own.replace("\n    settings:", f"\n    planned: {one['planned']:.2f}\n    settings:")
            text = text[:start] + own + text[end:]
        FILE.write_text(text)


if __name__ == "__main__":
    main()
