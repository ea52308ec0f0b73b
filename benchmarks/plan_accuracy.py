"""What `aligner plan` says of jobs whose step times others have published (published_steps.yaml), and by how much it is wrong.

python benchmarks/plan_accuracy.py [--json errors.json]
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import yaml

from aligner.jobs.plan import plan_job

FILE = Path(__file__).with_name("published_steps.yaml")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A published job; times in seconds. `recorded` is what was planned when the file was written."""

    name: str
    published: float
    recorded: float
    config: str
    overrides: tuple[str, ...]
    response_length: float  # mean

    def planned(self) -> tuple[float, bool]:
        """(seconds of a step, whether it fits the machine) as planned now."""
        job = plan_job(self.config, self.overrides, response_length=self.response_length)
        return job.step_seconds, not job.problems


def rows(path: Path = FILE) -> list[Row]:
    """Those of the file."""
    written = yaml.safe_load(path.read_text())
    return [
        Row(
            name=one["name"],
            published=one["published"],
            recorded=one["planned"],
            config=one["config"],
            overrides=(*written["assumed"], *one["settings"]),
            response_length=one["response_length"],
        )
        for one in written["rows"]
    ]


def error(planned: float, published: float) -> float:
    """How far off, as a factor above 1 in either direction, less 1."""
    return math.exp(abs(math.log(planned / published))) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    found = []
    print(f"{'job':<36} {'published, s':>13} {'planned, s':>11} {'planned / published':>20}  fits")
    for row in rows():
        planned, fits = row.planned()
        found.append(
            {"name": row.name, "published": row.published, "planned": planned, "error": error(planned, row.published), "fits": fits}
        )
        print(f"{row.name:<36} {row.published:>13.1f} {planned:>11.1f} {planned / row.published:>20.2f}  {'yes' if fits else 'no'}")
    errors = [one["error"] for one in found]
    print(f"error, as a factor: median {1 + median(errors):.2f}, worst {1 + max(errors):.2f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
