"""The job that a search has found, as a config and a Slurm script that run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from aligner.planner.search_report import Row

def write(folder, name, overrides, best, steps):
    yield ""
