"""A teacher's pass over supervised examples, for `distill.py`: no training, one step of the loop is one file of its log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aligner.data import distillation as files
from aligner.data.collate import SupervisedExample, supervised_batch
from aligner.data.config import SFTDataConfig
from aligner.data.distillation import DistilledExample, Manifest, distilled
from aligner.data.supervised import load_supervised
from aligner.errors import check_numbers
from aligner.loop.loop import Clock, StepResult
from aligner.loop.writing import FilesAlone
from aligner.parallel.collectives import from_rank_0
from aligner.planner.workload import Phase
from aligner.protocols import Teacher
from aligner.reporting.formats import Column
from aligner.run.recipe import Recipe
from aligner.run.settings import Traits, WritingRun, reading

if TYPE_CHECKING:
    from aligner.jobs.writes import WriterJob


@dataclass(kw_only=True, slots=True)
class TeacherPassConfig:
    """Settings of a teacher's pass."""

    top_k: int = 100  # of its likeliest tokens, those that are written
    shard_size: int = 1024  # examples per file: what a job that is killed computes again, at most
    batch_size: int = 64  # examples that are in memory together, over all replicas

    def __post_init__(self) -> None:
        check_numbers(self, "algorithm", at_least_1=("top_k", "shard_size", "batch_size"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherSet:
    """One data set: its examples, the manifest of its files, and how one is written (every rank calls it)."""

    examples: Sequence[SupervisedExample]
    manifest: Manifest
    write: Callable[[int, Sequence[DistilledExample]], None]  # shard, its examples


class TeacherPass(FilesAlone):
    """The pass over its parts. Every rank constructs one. `below`: one more than the largest id of the tokenizer."""

    def __init__(self, config: TeacherPassConfig, teacher: Teacher, sets: Sequence[TeacherSet], *, pad_id: int, below: int) -> None:
        self.config = config
        self.teacher = teacher
        self.files = [(one, shard) for one in sets for shard in range(one.manifest.num_shards)]  # to write
        self.pad_id = pad_id
        self.below = below

    @property
    def num_steps(self) -> int:
        return len(self.files)

    def step(self, step: int, clock: Clock) -> StepResult:
        one, shard = self.files[step - 1]
        first, size = shard * one.manifest.shard_size, self.config.batch_size
        examples = one.examples[first : first + one.manifest.shard_size]
        found: list[DistilledExample] = []
        with clock.phase("logprobs"):
            for start in range(0, len(examples), size):
                rows = examples[start : start + size]
                batch = supervised_batch(rows, self.pad_id)
                found += distilled(rows, batch.loss_mask, *self.teacher.topk(batch, self.config.top_k, below=self.below))
        with clock.phase("write"):
            one.write(shard, found)
        num_tokens = sum(len(example.tokens) for example in found)
        mass = sum(example.teacher_logprobs.double().exp().sum().item() for example in found)
        return StepResult(
            metrics={
                "teacher/mass": mass / sum(len(example.teacher_tokens) for example in found),  # of the K tokens together
                "data/tokens_per_second": num_tokens / clock.seconds["time/logprobs"],
            }
        )


COLUMNS = (Column("mass", "teacher/mass", "percent"), Column("speed", "data/tokens_per_second", "tokens/s"))


@dataclass(kw_only=True, slots=True)
class WriteTeacherLogprobs(WritingRun):
    """A teacher's log-probs of supervised records, for distillation; `model` is the teacher (conf/teacher_logprobs/)."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    algorithm: TeacherPassConfig = field(default_factory=TeacherPassConfig)
    read = reading(load_supervised)

    def traits(self) -> Traits:
        return self.pass_traits((Phase.logprobs,), rows=self.algorithm.shard_size)

    @property
    def locations(self) -> dict[str, str]:
        """Where the data sets are, by the name of the folder of their log-probs."""
        return {name: location for name, location in (("train", self.data.train), ("validation", self.data.validation)) if location}


def build(job: WriterJob[WriteTeacherLogprobs]) -> int:
    """To `<run>/teacher/{train,validation}`. Raises DataError if files that are there were made of something else."""
    tokenizer = job.tokenizer
    sets = [_set(job, name, location) for name, location in job.config.locations.items()]
    work = TeacherPass(job.config.algorithm, job.policy(), sets, pad_id=tokenizer.pad_id, below=tokenizer.max_token_id + 1)
    folders = [(job.session.directory.teacher / name, one.manifest) for name, one in zip(job.config.locations, sets, strict=True)]

    def count() -> int:
        """Files before the first missing one."""
        there = {folder: files.num_complete(folder, manifest) for folder, manifest in folders}
        missing = next((at for at, (folder, manifest) in enumerate(folders) if there[folder] < manifest.num_shards), len(folders))
        return sum(there[folder] for folder, _ in folders[: missing + 1])

    return job.conclude(work, count)


def _set(job: WriterJob[WriteTeacherLogprobs], name: str, location: str) -> TeacherSet:
    config, folder = job.config, job.session.directory.teacher / name
    examples, report = load_supervised(location, config.data, job.tokenizer)
    job.session.say(report.summary())
    manifest = Manifest(
        top_k=config.algorithm.top_k,
        num_examples=len(examples),
        shard_size=config.algorithm.shard_size,
        data=files.data_digest(examples),
        tokenizer=job.tokenizer.digest,
        model=job.model_digest(),
        made_of=f"{config.model.path} on {location}",
    )
    from_rank_0(lambda: files.begin(folder, manifest))

    vision = job.tokenizer.vision
    store = None if vision is None else vision.store

    def write(shard: int, found: Sequence[files.DistilledExample]) -> None:
        from_rank_0(lambda: files.write_shard(folder, shard, found, store))

    return TeacherSet(examples=examples, manifest=manifest, write=write)


RECIPE = Recipe(
    name="teacher_logprobs",
    config=WriteTeacherLogprobs,
    build=build,
    columns=COLUMNS,
    component="teacher",
)
