"""Responses to prompts, to `<run>/written/records.jsonl`; with labels in the data, SteerLM's: those are asked for in the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aligner.data.config import RequestDataConfig
from aligner.data.labelled import TURN_START, Request, load_requests, response_text
from aligner.errors import ConfigError, check_numbers
from aligner.loop.writing import COLUMNS, Record, digest_of
from aligner.models.config import Architecture
from aligner.online.collect import Scorers, collect, sample_seeds
from aligner.planner.workload import Phase, Work
from aligner.protocols import RolloutEngine
from aligner.rewards.local import NoReward
from aligner.rollout.config import RolloutConfig, check_engine, check_precision, check_untrained
from aligner.run import lengths
from aligner.run.recipe import Recipe
from aligner.run.settings import Traits, WritingRun, check_layout, reading
from aligner.types import FinishReason

if TYPE_CHECKING:
    from typing_extensions import Self

    from aligner.jobs.writes import WriterJob

Read = Callable[[Sequence[int], Sequence[int]], str]  # tokens of a prompt and of the response to it -> the response's text


@dataclass(kw_only=True, slots=True)
class GenerateConfig:
    """Settings of generation."""

    num_samples: int = 1  # responses per prompt
    grouped: bool = False  # one record per prompt with all of its responses, as SteerLM 2 has them; else one per response
    part_size: int = 256  # prompts per file: what a job that is killed does again, at most

    def __post_init__(self) -> None:
        check_numbers(self, "algorithm", at_least_1=("num_samples", "part_size"))
        if self.grouped and self.num_samples < 2:
            raise ConfigError(f"algorithm.num_samples={self.num_samples}: responses are compared with algorithm.grouped=true; at least 2")


@dataclass(kw_only=True, slots=True)
class Generate(WritingRun):
    """Responses to prompts (conf/generate/generate.yaml)."""

    data: RequestDataConfig = field(default_factory=RequestDataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)  # the engine that samples responses, and how it draws them
    algorithm: GenerateConfig = field(default_factory=GenerateConfig)
    read = reading(load_requests)

    @property
    def sampler(self) -> RolloutConfig:
        return self.rollout

    def __post_init__(self) -> None:
        WritingRun.__post_init__(self)
        check_untrained(self.rollout, "nothing is trained here")

    def traits(self) -> Traits:
        response = self.rollout.sampling.max_response_length
        length = self.data.max_prompt_length + response
        work = Work(phases=(Phase.generate,), rows=self.algorithm.part_size, length=length, response_length=response)
        return Traits(role="writer", work=work, has_engine=True)

    def with_lengths(self, context: lengths.Context) -> Self:
        return lengths.sampled(self, context)

    def check(self, architecture: Architecture, num_ranks: int) -> None:
        check_layout(self.model, self.parallel, architecture, num_ranks)
        check_engine(self.rollout, architecture, tp=self.rollout.tp or self.parallel.tp, world_size=num_ranks)
        check_precision(self.rollout, self.model, self.parallel)


def build(job: WriterJob[Generate]) -> int:
    config, tokenizer = job.config, job.tokenizer
    requests = job.load(load_requests)
    asks = any(request.label for request in requests)
    if config.algorithm.grouped and not asks:
        raise ConfigError("algorithm.grouped=true: SteerLM 2 is about attributes; allowed: with data.attributes, or labels in the data")
    sampling = config.rollout.sampling.stopping_at(TURN_START) if asks else config.rollout.sampling
    engine = job.engine(job.policy(temperature=sampling.temperature or 1.0), replace(config.rollout, sampling=sampling))
    scorers = Scorers(reward=NoReward(), pad_id=tokenizer.pad_id, heartbeat=job.session.progress.heartbeat)

    def read(prompt: Sequence[int], response: Sequence[int]) -> str:
        whole = response[:-1] if response[-1] in tokenizer.end_ids else response  # else a mark is what ended it, or the length
        text = tokenizer.decode_after(prompt, whole, skip_special=not asks)
        return response_text(text) if asks else text

    make = partial(_answer, config, engine, scorers, read)
    what = [(request.prompt.tokens, request.label, *request.digests) for request in requests]
    made_of = {"settings": repr((asdict(config.algorithm), asdict(sampling), config.run.seed)), "data": digest_of(what)}
    code = job.write_parts(requests, make, made_of=made_of)
    engine.shutdown()
    return code


def _answer(
    config: Generate, engine: RolloutEngine, scorers: Scorers, read: Read, part: int, requests: Sequence[Request]
) -> tuple[list[Record], dict[str, float]]:
    n = config.algorithm.num_samples
    prompts = [request.prompt for request in requests for _ in range(n)]
    rollouts = collect(engine, prompts, sample_seeds(config.run.seed, part, len(prompts)), scorers=scorers).rollouts
    answers: list[dict[str, Any]] = [
        {
            "value": read(rollout.prompt.tokens, rollout.response),
            "finish_reason": rollout.finish_reason.value,
            "logprob": sum(rollout.logprobs),
            "num_tokens": len(rollout.response),
        }
        for rollout in rollouts
    ]
    if config.algorithm.grouped:
        records: list[Record] = [request.proposed(answers[i * n : (i + 1) * n]) for i, request in enumerate(requests)]
    else:
        records = [requests[row // n].answered(**answer) for row, answer in enumerate(answers)]
    cut = sum(rollout.finish_reason is FinishReason.length for rollout in rollouts)
    length = sum(len(rollout.response) for rollout in rollouts)
    return records, {"rollout/response_length": length / len(rollouts), "rollout/truncated_fraction": cut / len(rollouts)}


RECIPE = Recipe(name="generate", config=Generate, build=build, columns=COLUMNS)
