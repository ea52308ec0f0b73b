"""SteerLM in the table of supervised.py: the chain of steerlm.py, with intervals of what it measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import steerlm as chain
import torch
from bench import Bench, Row
from intervals import bootstrap, ratio_change
from torch import Tensor

LEAST_GAP = 1.0  # of SteerLM 1, at the worse end of the interval; chain.GAP is of the mean


def steerlm(bench: Bench) -> list[Row]:
    """What a request for all joy and one for none make of a difference with SteerLM 1; how far off SteerLM 2 is in comparison."""
    seconds: list[float] = []

    def launch(recipe: str, directory: Path, settings: Sequence[str]) -> None:
        seconds.append(bench.launch(recipe, directory, settings))

    directory = bench.fresh("steerlm")
    found = chain.run(directory, launch, seed=bench.options.seed)
    first, second = (told(directory / f"{name}_measured" / chain.WRITTEN) for name in ("steerlm", "steerlm2"))
    change, low, high = bootstrap(torch.cat([second[:, 4:], first[:, 4:]], dim=1), ratio_change)  # the same requests, in the same order
    error = tuple(found.first.error + one for one in (change, low, high))
    note = f"KL to the aimed-at weights, held-out prompts: {found.kl_before:.3f} to {found.kl_after:.3f}"
    gap, distance = "joy asked for all of it less joy asked for none, 0 to 4", "distance of a story's joy from the level asked for"
    return [
        Row.of("steerlm", gap, bootstrap(first[:, :4], ratio_change), before=0.0, needed=LEAST_GAP, cpu_seconds=sum(seconds)),
        Row.of("steerlm2", distance, error, before=found.first.error, needed=found.first.error, rises=False, note=note),
    ]


def told(records: Path) -> Tensor:
    """Of every story [N, 6]: joy and 1 where all of it was asked for; the same where none was; its distance from what was asked, and 1."""
    rows = []
    for record in chain.read(records):
        answer = record["conversations"][-1]
        level, joy = int(answer["label"].removeprefix("joy:")), float(chain.joy(answer["value"]))
        ends = [one for asked in (max(chain.LEVELS), min(chain.LEVELS)) for one in (joy * (level == asked), float(level == asked))]
        rows.append([*ends, abs(joy - level), 1.0])
    return torch.tensor(rows)
