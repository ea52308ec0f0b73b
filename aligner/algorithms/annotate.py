"""Labels for responses by a regression reward model (SteerLM, 2310.05344): conversations with labels, to `<run>/written/records.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from aligner.data.config import STEERLM_ATTRIBUTES, AnnotateDataConfig
from aligner.data.labelled import Unlabelled, load_unlabelled
from aligner.errors import ConfigError, check_numbers
from aligner.loop.writing import COLUMNS, Record, digest_of
from aligner.planner.workload import Head, Phase
from aligner.run.recipe import Recipe
from aligner.run.settings import Traits, WritingRun, reading
from aligner.servers.config import ClientConfig

if TYPE_CHECKING:
    from aligner.jobs.writes import WriterJob

Score = Callable[[Sequence[Sequence[int]]], Tensor]  # token sequences -> float32 [B, K]; every rank calls it


@dataclass(kw_only=True, slots=True)
class AnnotateConfig:
    """Settings of annotation. Scores are rounded to whole numbers from `lowest` to `highest`, as labels are."""

    attributes: list[str] = field(default_factory=lambda: list(STEERLM_ATTRIBUTES))  # what the model's outputs are, in their order
    lowest: int = 0  # smallest label; scores below it become it
    highest: int = 4  # largest label; scores above it become it
    part_size: int = 1024  # records per file: what a job that is killed does again, at most
    batch_size: int = 64  # rows that are scored together
    served_by: str = ""  # run directory of a reward server, which scores in place of model.path

    def __post_init__(self) -> None:
        check_numbers(self, "algorithm", at_least_1=("part_size", "batch_size"))
        if self.lowest >= self.highest:
            raise ConfigError(f"algorithm.lowest={self.lowest}: must be below highest={self.highest}")
        if not self.attributes or len(set(self.attributes)) < len(self.attributes):
            raise ConfigError(f"algorithm.attributes={self.attributes}: must be names, each once")

    def label(self, scores: Sequence[float]) -> str:
        """`quality:4,toxicity:0`. Halves go up; raises ValueError for another number of scores."""
        levels = [min(max(math.floor(score + 0.5), self.lowest), self.highest) for score in scores]
        return ",".join(f"{name}:{level}" for name, level in zip(self.attributes, levels, strict=True))


@dataclass(kw_only=True, slots=True)
class Annotate(WritingRun):
    """Labels for responses by a regression reward model (conf/annotate/annotate.yaml)."""

    data: AnnotateDataConfig = field(default_factory=AnnotateDataConfig)
    algorithm: AnnotateConfig = field(default_factory=AnnotateConfig)
    read = reading(load_unlabelled)
    server_client: ClientConfig = field(default_factory=ClientConfig)

    def traits(self) -> Traits:
        return self.pass_traits((Phase.scores,), rows=self.algorithm.part_size, head=Head.scalar)


def build(job: WriterJob[Annotate]) -> int:
    config = job.config
    records = job.load(load_unlabelled)
    made_of = {"settings": repr(asdict(config.algorithm)), "data": digest_of([record.rows for record in records])}
    with job.attribute_scorer() as score:
        return job.write_parts(records, partial(_label, config, score), made_of=made_of)


def _label(config: Annotate, score: Score, part: int, records: Sequence[Unlabelled]) -> tuple[list[Record], dict[str, float]]:
    settings = config.algorithm
    rows = [row for record in records for row in record.rows]
    scores = [
        one for start in range(0, len(rows), settings.batch_size) for one in score(rows[start : start + settings.batch_size]).tolist()
    ]
    labels = iter([settings.label(one) for one in scores])
    means = {f"annotation/{name}": sum(one[k] for one in scores) / len(scores) for k, name in enumerate(settings.attributes)}
    return [record.labelled([next(labels) for _ in record.rows]) for record in records], means


RECIPE = Recipe(name="annotate", config=Annotate, build=build, columns=COLUMNS)
