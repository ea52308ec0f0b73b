"""Distillation from stored log-probs: the teacher's job, which writes them, and the student's, which learns from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from aligner.algorithms.distillation import Distillation
from aligner.algorithms.loop import LoopConfig
from aligner.algorithms.teacher_pass import TeacherPass, TeacherSet
from aligner.data import teacher as files
from aligner.data.distillation import check_logprobs, load_distillation
from aligner.data.supervised import load_supervised
from aligner.data.teacher import Manifest
from aligner.data.tokenizer import Tokenizer
from aligner.jobs import columns
from aligner.jobs.checks import check_trainer, check_writer
from aligner.jobs.ending import conclude
from aligner.jobs.lengths import with_lengths
from aligner.jobs.parts import load_model_files, load_sets, run_loop, tokenizer_directory
from aligner.jobs.session import Session, session
from aligner.jobs.sources import model_digest, pinned, pinned_base
from aligner.jobs.training import train_to_end
from aligner.jobs.written_files import WrittenFiles
from aligner.models import create
from aligner.models.guard import Guard, GuardConfig
from aligner.parallel.collectives import from_rank_0
from aligner.schemas import TrainDistillation, WriteTeacherLogprobs


def train_distillation(config: TrainDistillation) -> int:
    """A student learns from a teacher's stored log-probs. Every rank calls it."""
    with session(config, config.run, config.parallel, component="distill") as here:
        config = with_lengths(replace(config, model=pinned_base(here, "model", config.model)))
        tokenizer, architecture = load_model_files(config.model)
        check_trainer(config, architecture, here.topology.world_size)
        train, validation = load_sets(here, load_distillation, config.data, tokenizer)
        if config.algorithm.tail_bucket:
            check_logprobs(train)
            check_logprobs(validation)
        training = create.training(config.model, config.optimizer, total_steps=config.loop.max_steps, guard=Guard(config.guard))
        policy = create.create_policy(config.model, architecture, config.parallel, here.topology, training)
        algorithm = Distillation(
            config.algorithm, policy, train=train, validation=validation, pad_id=tokenizer.pad_id, seed=config.run.seed
        )
        code = train_to_end(here, config, algorithm, policy.model, tokenizer=tokenizer_directory(config.model), shown=columns.DISTILLATION)
    return code


def write_teacher_logprobs(config: WriteTeacherLogprobs) -> int:
    """A frozen teacher's log-probs of supervised records, to `<run>/teacher/{train,validation}`. Every rank calls it.

    A job that is started again goes on behind the files that are there. Raises DataError where they were made of something else.
    """
    with session(config, config.run, config.parallel, component="teacher") as here:
        config = with_lengths(replace(config, model=pinned(here, "model", config.model)))
        tokenizer, architecture = load_model_files(config.model)
        check_writer(config, architecture, here.topology.world_size)
        sets = [_set(here, config, tokenizer, name, location) for name, location in _locations(config).items()]
        frozen = create.training(config.model, None)
        policy = create.create_policy(config.model, architecture, config.parallel, here.topology, frozen)
        work = TeacherPass(config.algorithm, policy, sets, pad_id=tokenizer.pad_id, below=tokenizer.max_token_id + 1)
        folders = [(_folder(here, name), one.manifest) for name, one in zip(_locations(config), sets, strict=True)]
        keeper = WrittenFiles(partial(_num_complete, folders))
        loop = LoopConfig(max_steps=work.num_steps, table_every=0)
        last = run_loop(here, work, keeper, loop, logging=config.logging, shown=columns.TEACHER, guard=GuardConfig())
        code = conclude(here, last, work.num_steps)
    return code


def _num_complete(sets: Sequence[tuple[Path, Manifest]]) -> int:
    """Files that are there before the first that is missing."""
    found = 0
    for folder, manifest in sets:
        there = files.num_complete(folder, manifest)
        found += there
        if there < manifest.num_shards:
            break
    return found


def _locations(config: WriteTeacherLogprobs) -> dict[str, str]:
    """Where the data sets are, by the name of their folder."""
    return {name: location for name, location in (("train", config.data.train), ("validation", config.data.validation)) if location}


def _folder(here: Session, name: str) -> Path:
    return here.directory.teacher / name


def _set(here: Session, config: WriteTeacherLogprobs, tokenizer: Tokenizer, name: str, location: str) -> TeacherSet:
    examples, report = load_supervised(location, config.data, tokenizer)
    here.say(report.summary())
    folder, source = _folder(here, name), create.source_directory(config.model)
    manifest = Manifest(
        top_k=config.algorithm.top_k,
        num_examples=len(examples),
        shard_size=config.algorithm.shard_size,
        data=files.data_digest(examples),
        tokenizer=tokenizer.digest,
        model=from_rank_0(lambda: model_digest(source)),
        made_of=f"{config.model.path} on {location}",
    )
    from_rank_0(lambda: files.begin(folder, manifest))

    def write(shard: int, found: Sequence[files.DistilledExample]) -> None:
        from_rank_0(lambda: files.write_shard(folder, shard, found))

    return TeacherSet(examples=examples, manifest=manifest, write=write)
