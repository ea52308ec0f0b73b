"""Jobs that write records: responses to prompts, and labels for responses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from aligner.algorithms.loop import LoopConfig
from aligner.algorithms.rollouts import Scorers, collect, sample_seeds
from aligner.algorithms.writing import Record, Writing
from aligner.cluster.run_directory import RunDirectory
from aligner.data.collate import token_batch
from aligner.data.labelled import TURN_START
from aligner.data.parts import Parts
from aligner.data.requests import Request, Unlabelled, load_requests, load_unlabelled, response_text
from aligner.errors import ConfigError
from aligner.jobs import columns
from aligner.jobs.checks import check_writer
from aligner.jobs.ending import conclude
from aligner.jobs.lengths import with_lengths
from aligner.jobs.parts import load_model_files, run_loop
from aligner.jobs.session import Session, session
from aligner.jobs.sources import model_digest, pinned
from aligner.jobs.written_files import WrittenFiles
from aligner.models import create
from aligner.models.guard import GuardConfig
from aligner.parallel.collectives import from_rank_0
from aligner.protocols import RolloutEngine
from aligner.reporting.formats import Column
from aligner.rewards.unjudged import Unjudged
from aligner.rollout.create import create_engine
from aligner.schemas import Annotate, Generate, WriteProposals, WritingRun
from aligner.servers.access import Access
from aligner.servers.client import RewardClient
from aligner.types import FinishReason

Read = Callable[[Sequence[int], Sequence[int]], str]  # tokens of a prompt and of the response to it -> the response's text
Score = Callable[[Sequence[Sequence[int]]], Tensor]  # token sequences -> float32 [B, K]; every rank calls it


def generate(config: Generate) -> int:
    """Responses to prompts, to `<run>/written/records.jsonl`. Every rank calls it; a job that is started again goes on."""
    with session(config, config.run, config.parallel, component="generate") as here:
        config = with_lengths(replace(config, model=pinned(here, "model", config.model)))
        tokenizer, architecture = load_model_files(config.model)
        check_writer(config, architecture, here.topology.world_size)
        requests, report = load_requests(config.data.train, config.data, tokenizer)
        here.say(report.summary())
        asks = any(request.label for request in requests)
        if config.algorithm.grouped and not asks:
            raise ConfigError("algorithm.grouped=true: SteerLM 2 is about attributes; allowed: with data.attributes, or labels in the data")
        sampling = config.rollout.sampling
        if asks and TURN_START not in sampling.stop_strings:
            sampling = replace(sampling, stop_strings=[*sampling.stop_strings, TURN_START])
        frozen = create.training(config.model, None, temperature=sampling.temperature)
        policy = create.create_policy(config.model, architecture, config.parallel, here.topology, frozen)
        decode = partial(tokenizer.decode, skip_special=False)
        engine = create_engine(policy, replace(config.rollout, sampling=sampling), eos_id=tokenizer.eos_id, decode=decode)
        scorers = Scorers(reward=Unjudged(), pad_id=tokenizer.pad_id, beat=here.progress.beat)

        def read(prompt: Sequence[int], response: Sequence[int]) -> str:
            whole = response[:-1] if response[-1] == tokenizer.eos_id else response  # else a mark is what ended it, or the length
            text = tokenizer.decode_after(prompt, whole, skip_special=not asks)
            return response_text(text) if asks else text

        make = partial(_answer, config, engine, scorers, read)
        what = [(request.prompt.tokens, request.label) for request in requests]
        made_of = {"settings": repr((asdict(config.algorithm), asdict(sampling), config.run.seed))}
        code = write_parts(here, config, requests, make, made_of=made_of | {"data": digest_of(what)})
        engine.shutdown()
    return code


def annotate(config: Annotate) -> int:
    """Conversations with labels, to `<run>/written/records.jsonl`. Every rank calls it; a job that is started again goes on."""
    with session(config, config.run, config.parallel, component="annotate") as here:
        config = with_lengths(replace(config, model=pinned(here, "model", config.model)))
        tokenizer, architecture = load_model_files(config.model)
        check_writer(config, architecture, here.topology.world_size)
        records, report = load_unlabelled(config.data.train, config.data, tokenizer)
        here.say(report.summary())
        made_of = {"settings": repr(asdict(config.algorithm)), "data": digest_of([record.rows for record in records])}
        with attribute_scorer(here, config, tokenizer.pad_id) as score:
            return write_parts(here, config, records, partial(_label, config, score), made_of=made_of)


def _answer(
    config: Generate, engine: RolloutEngine, scorers: Scorers, read: Read, part: int, requests: Sequence[Request]
) -> tuple[list[Record], dict[str, float]]:
    n = config.algorithm.num_samples
    prompts = [request.prompt for request in requests for _ in range(n)]
    rollouts = collect(engine, prompts, sample_seeds(config.run.seed, part, len(prompts)), scorers=scorers).rollouts
    answers = [
        {
            "value": read(rollout.prompt.tokens, rollout.response),
            "finish_reason": rollout.finish_reason.value,
            "logprob": sum(rollout.logprobs),
            "num_tokens": len(rollout.response),
        }
        for rollout in rollouts
    ]
    if config.algorithm.grouped:
        records = [request.proposed(answers[i * n : (i + 1) * n]) for i, request in enumerate(requests)]
    else:
        records = [requests[row // n].answered(**answer) for row, answer in enumerate(answers)]
    cut = sum(rollout.finish_reason is FinishReason.length for rollout in rollouts)
    length = sum(len(rollout.response) for rollout in rollouts)
    return records, {"rollout/response_length": length / len(rollouts), "rollout/truncated_fraction": cut / len(rollouts)}


def _label(config: Annotate, score: Score, part: int, records: Sequence[Unlabelled]) -> tuple[list[Record], dict[str, float]]:
    settings = config.algorithm
    rows = [row for record in records for row in record.rows]
    scores = [
        one for start in range(0, len(rows), settings.batch_size) for one in score(rows[start : start + settings.batch_size]).tolist()
    ]
    labels = iter([settings.label(one) for one in scores])
    means = {f"annotation/{name}": sum(one[k] for one in scores) / len(scores) for k, name in enumerate(settings.attributes)}
    return [record.labelled([next(labels) for _ in record.rows]) for record in records], means


@contextmanager
def attribute_scorer(here: Session, config: Annotate | WriteProposals, pad_id: int) -> Iterator[Score]:
    """Who scores: a server of another run, asked by rank 0, or the model of `model.path` in these processes."""
    attributes = tuple(config.algorithm.attributes)
    if config.algorithm.served_by:
        server = RunDirectory(Path(config.algorithm.served_by))
        client = RewardClient(server.services, config=config.client, access=Access.for_client(server.secret, config.client))
        try:
            if here.is_first:
                client.wait_until_ready()
            yield lambda rows: _of_width(from_rank_0(lambda: client.attributes(rows)), attributes)
        finally:
            client.close()
        return
    head = create.head_of(config.model)
    if head is None or head.outputs != attributes:
        has = "no head: it is a language model" if head is None else f"the outputs {', '.join(head.outputs)}"
        raise ConfigError(f"algorithm.attributes={list(attributes)}: model.path={config.model.path} has {has}; allowed: its outputs")
    _, architecture = load_model_files(config.model)
    model = create.create_reward_model(
        config.model, architecture, config.parallel, here.topology, create.training(config.model, None), head=head
    )
    yield lambda rows: model.scores(token_batch(rows, pad_id))


def _of_width(scores: Tensor, attributes: Sequence[str]) -> Tensor:
    if scores.shape[1] != len(attributes):
        raise ConfigError(f"algorithm.attributes={list(attributes)}: the server gives {scores.shape[1]} scores; allowed: as many names")
    return scores


def write_parts(
    here: Session,
    config: WritingRun,
    items: Sequence,
    make: Callable,
    *,
    made_of: dict[str, str],
    shown: Sequence[Column] = columns.WRITING,
    finish: Callable[[Parts, Path], str] | None = None,
) -> int:
    """Make and write every part that is missing, then all of them as one file. The exit code.

    `finish(parts, folder)`, on rank 0, does the latter in another way and returns what to say.
    """
    folder, source = here.directory.written, create.source_directory(config.model)
    parts = Parts(
        directory=folder / "parts",
        made_of=made_of | {"model": from_rank_0(lambda: model_digest(source))},
        num_items=len(items),
        part_size=config.algorithm.part_size,
    )
    from_rank_0(parts.begin)
    work = Writing(items, parts.part_size, make=make, write=lambda part, records: from_rank_0(lambda: parts.write(part, records)))
    loop = LoopConfig(max_steps=work.num_steps, table_every=0)
    last = run_loop(here, work, WrittenFiles(parts.num_complete), loop, logging=config.logging, shown=shown, guard=GuardConfig())
    if last == work.num_steps:
        here.say(from_rank_0(lambda: (finish or _join)(parts, folder)))
    return conclude(here, last, work.num_steps)


def _join(parts: Parts, folder: Path) -> str:
    parts.join(folder / "records.jsonl")
    return f"{parts.num_items} items written to {folder / 'records.jsonl'}"


def digest_of(what: object) -> str:
    """Changes with the data that a data set is made of."""
    return hashlib.sha256(repr(what).encode()).hexdigest()
