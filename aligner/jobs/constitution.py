"""Constitutional AI: supervised records of revisions, and preferences, from a model's own critiques and judgements."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from aligner.algorithms.ai_feedback import Judge, JudgeFraming
from aligner.algorithms.chains import Pairs, losses_of, preference_records, supervised_records
from aligner.algorithms.constitution import Constitutional
from aligner.algorithms.rollouts import Scorers
from aligner.data.cases import Case, load_cases
from aligner.data.constitution import Constitution, load_constitution
from aligner.data.critiques import Framing
from aligner.data.parts import Parts
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError, DataError
from aligner.files import publish
from aligner.jobs import columns
from aligner.jobs.checks import check_writer
from aligner.jobs.lengths import with_lengths
from aligner.jobs.parts import load_model_files
from aligner.jobs.same_shape import check_same_shape
from aligner.jobs.session import Session, session
from aligner.jobs.sources import model_digest, pinned
from aligner.jobs.writing import digest_of, write_parts
from aligner.models import create
from aligner.models.config import ModelConfig
from aligner.models.policy import MegatronPolicy, ReferencePolicy
from aligner.parallel.collectives import from_rank_0
from aligner.rewards.unjudged import Unjudged
from aligner.rollout.create import create_engine
from aligner.schemas import ConstitutionalAI
from aligner.types import LabeledBatch

SUPERVISED, PREFERENCES, TRACES = "records.jsonl", "preferences.jsonl", "traces.jsonl"
Logprobs = Callable[[LabeledBatch], Tensor]


def write_feedback(config: ConstitutionalAI) -> int:
    """Everything that a constitution makes of prompts, to `<run>/written`. Every rank calls it; a job that is started again goes on."""
    with session(config, config.run, config.parallel, component="constitution") as here:
        config = with_lengths(replace(config, model=pinned(here, "model", config.model)))
        tokenizer, architecture = load_model_files(config.model)
        samples = config.algorithm.samples_per_chain > 0
        check_writer(config, architecture, here.topology.world_size)
        constitution = load_constitution(config.data.constitution)
        check_constitution(constitution, config)
        cases, report = load_cases(config.data.train, config.data, tokenizer, given=config.algorithm.pairs is Pairs.given)
        here.say(report.summary())
        frozen = create.training(config.model, None, temperature=config.rollout.sampling.temperature)
        policy = create.create_policy(config.model, architecture, config.parallel, here.topology, frozen)
        judge, judge_digest = _judge(here, config, constitution, policy, tokenizer)
        engine = None
        if samples:
            decode = partial(tokenizer.decode, skip_special=False)
            engine = create_engine(policy, config.rollout, eos_id=tokenizer.eos_id, decode=decode)
        work = Constitutional(
            config.algorithm,
            constitution,
            Framing(tokenizer, constitution, add_bos=config.data.add_bos),
            engine=engine,
            scorers=Scorers(reward=Unjudged(), pad_id=tokenizer.pad_id, beat=here.progress.beat),
            sampling=config.rollout.sampling,
            judge=judge,
            seed=config.run.seed,
            max_history=config.data.max_history_length,
        )
        made_of = _made_of(config, cases, constitution) | {"judge": judge_digest}
        finish = partial(publish_feedback, constitution=constitution, wanted=_wanted(config))
        code = write_parts(here, config, cases, work.make, made_of=made_of, shown=columns.CONSTITUTION, finish=finish)
        if engine is not None:
            engine.shutdown()
    return code


def check_constitution(constitution: Constitution, config: ConstitutionalAI) -> None:
    """Raise DataError where no principle asks for what the job does."""
    where = config.data.constitution
    if config.algorithm.num_revisions and not constitution.revising:
        raise DataError(f"{where}: no principle has critique_request and revision_request (algorithm.num_revisions=0 needs none)")
    if config.algorithm.pairs is not Pairs.none and not constitution.comparing:
        raise DataError(f"{where}: no principle has a question (algorithm.pairs=none needs none)")


def publish_feedback(parts: Parts, folder: Path, *, constitution: Constitution, wanted: Sequence[str]) -> str:
    """Write the parts as the files that training reads, and a report of what was left out. What to say of it.

    Raises DataError where a file that was wanted has no record; all files are there nevertheless.
    """
    counts: Counter[str] = Counter()
    for part in range(parts.num_parts):
        for trace in parts.read(part):
            counts.update(losses_of(trace))
            counts.update({SUPERVISED: len(supervised_records(trace)), PREFERENCES: len(preference_records(trace)), TRACES: 1})
    parts.join(folder / TRACES)
    for name, select in ((SUPERVISED, supervised_records), (PREFERENCES, preference_records)):
        if name in wanted:
            parts.join(folder / name, select)
    publish(folder / "constitution.json", lambda new: new.write_text(constitution.to_json()))
    files = (TRACES, *wanted)
    losses = {name: counts[name] for name in sorted(counts) if "/" in name}
    report = {"records": {name: counts[name] for name in files}, "not used": losses}
    publish(folder / "report.json", lambda new: new.write_text(json.dumps(report, indent=2) + "\n"))
    told = ", ".join(f"{counts[name]} {name}" for name in files)
    lost = ", ".join(f"{count} {name}" for name, count in losses.items())
    said = f"in {folder}: {told}; {f'not used: {lost}' if lost else 'everything was used'}"
    if empty := [name for name in wanted if not counts[name]]:
        raise DataError(f"{folder / empty[0]} has no record: {said}; {folder / TRACES} has every text")
    return said


def _judge(
    here: Session, config: ConstitutionalAI, constitution: Constitution, policy: MegatronPolicy, tokenizer: Tokenizer
) -> tuple[Judge | None, str]:
    """Who compares, and the digest of its weights, '' where they are the policy's."""
    if config.algorithm.pairs is Pairs.none:
        return None, ""
    own = MegatronPolicy(policy.model)  # at temperature 1, whatever is sampled at
    logprobs: Logprobs = own.logprobs
    digest = ""
    if config.judge.path:
        tokenizer, model = _judge_model(here, config)
        frozen = ReferencePolicy(own, whole=True)
        frozen.restore(lambda chunks: create.load_source(chunks, model))
        logprobs, source = frozen.logprobs, create.source_directory(model)
        digest = from_rank_0(lambda: model_digest(source))
    framing = config.judge.framing
    chat = config.data.apply_chat_template if framing is JudgeFraming.data else framing is JudgeFraming.chat
    if chat and not tokenizer.has_chat_template:
        raise ConfigError(f"judge.framing={framing.value}: the tokenizer {tokenizer.path} has no chat template; allowed: text")
    judge = Judge(
        logprobs=logprobs,
        framing=Framing(tokenizer, constitution, add_bos=config.data.add_bos),
        chat=chat,
        pad_id=tokenizer.pad_id,
        max_length=config.data.max_history_length,
        batch_size=config.algorithm.batch_size,
        beat=here.progress.beat,
    )
    return judge, digest


def _judge_model(here: Session, config: ConstitutionalAI) -> tuple[Tokenizer, ModelConfig]:
    """The model of `judge.path`, the same one at every start of the run."""
    model = pinned(here, "judge", replace(config.model, path=config.judge.path, tokenizer=""))
    tokenizer = check_same_shape(
        config.model,
        model,
        setting=f"judge.path={config.judge.path}",
        whose="the model's",
        otherwise="A judge of another shape compares afterwards: algorithm.pairs=given with model.path=JUDGE",
    )
    return tokenizer, model


def _wanted(config: ConstitutionalAI) -> list[str]:
    algorithm = config.algorithm
    return [SUPERVISED] * (algorithm.num_revisions > 0) + [PREFERENCES] * (algorithm.pairs is not Pairs.none)


def _made_of(config: ConstitutionalAI, cases: Sequence[Case], constitution: Constitution) -> dict[str, str]:
    what = [(case.prompt.id, case.prompt.tokens, case.said, case.pair) for case in cases]
    settings = (asdict(config.algorithm), asdict(config.rollout.sampling), config.judge.framing, config.data.max_history_length)
    return {"settings": repr((*settings, config.run.seed)), "data": digest_of(what), "constitution": constitution.digest}
