"""Constitutional AI (Bai et al. 2022, 2212.08073): a model answers, criticises and revises its answers by written principles, and says
which of two responses is better. The output is supervised records and preferences; no person judges.

A prompt's *chain*: a response; then in every round a principle by chance, a critique of the newest response by it, and a revision. If a
step goes wrong (cut at the longest length, empty, no text, no room for what it needs) the chain ends, under the name of what went wrong;
nothing of that step is used. Everything is a function of weights, records, settings and seeds: a part that is made again is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aligner.algorithms.chains import (
    PREFERENCES,
    ROWS,
    SUPERVISED,
    TOO_LONG,
    Chain,
    ConstitutionConfig,
    Judge,
    JudgeConfig,
    JudgeFraming,
    Judgement,
    Pair,
    Pairs,
    Round,
    check_constitution,
    comparison_of,
    judgement_metrics,
    pair_of,
    publish_feedback,
    trace_metrics,
    trace_of,
)
from aligner.data.config import ConstitutionDataConfig
from aligner.data.constitution import MARKS, Case, Constitution, Framing, Principle, Question, Turns, draw, load_cases, load_constitution
from aligner.data.report import LoadReport
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.loop.writing import Record, digest_of
from aligner.models.config import Architecture
from aligner.online.collect import SampleRequest, ScoredRollouts, Scorers, collect_all, sample_seeds
from aligner.planner.workload import Phase, Work
from aligner.protocols import RolloutEngine
from aligner.reporting.formats import Column
from aligner.rewards.local import NoReward
from aligner.rollout.config import RolloutConfig, check_engine, check_precision, check_untrained
from aligner.run import lengths
from aligner.run.recipe import Recipe
from aligner.run.settings import Traits, UsedModel, WritingRun, check_layout
from aligner.types import FinishReason, Prompt, SamplingConfig

if TYPE_CHECKING:
    from typing_extensions import Self

    from aligner.jobs.writes import WriterJob
    from aligner.models.training.policy import MegatronPolicy


@dataclass(slots=True)
class _Sampled:
    """Figures of a part's texts."""

    lengths: dict[str, list[int]] = field(default_factory=dict)  # by kind of text, in tokens
    truncated: int = 0

    def metrics(self) -> dict[str, float]:
        everything = [length for some in self.lengths.values() for length in some]
        found = {f"constitution/{kind}_length": sum(some) / len(some) for kind, some in self.lengths.items() if some}
        if everything:
            found["rollout/response_length"] = sum(everything) / len(everything)
            found["rollout/truncated_fraction"] = self.truncated / len(everything)
        return found


@dataclass(frozen=True, slots=True)
class Constitutional:
    """Makes the traces of cases: `make` for `aligner.loop.writing.Writing`. Every rank constructs one.

    `engine` None: nothing is sampled; `judge` None: nothing is compared. `max_history`: tokens that may precede a critique or a revision.
    """

    config: ConstitutionConfig
    constitution: Constitution
    framing: Framing
    engine: RolloutEngine | None
    scorers: Scorers
    sampling: SamplingConfig
    judge: Judge | None
    seed: int
    max_history: int

    def make(self, part: int, cases: Sequence[Case]) -> tuple[list[Record], dict[str, float]]:
        """One trace per chain of the part's cases, and metrics. Collective."""
        config, sampled = self.config, _Sampled()
        chains = [
            Chain(case=case, number=number, row=row * config.num_chains + number, principles=self._drawn(case, number, "revise"))
            for row, case in enumerate(cases)
            for number in range(config.num_chains)
        ]
        if config.pairs is not Pairs.given:
            self._sample(part, chains, sampled)
        traces = [trace_of(chain, config) for chain in chains]
        judgements = self._compare(self.judge, chains, traces) if self.judge is not None else []
        return list(traces), sampled.metrics() | judgement_metrics(judgements) | trace_metrics(traces)

    def _drawn(self, case: Case, number: int, purpose: str) -> list[Principle]:
        compares = purpose == "compare"
        among = self.constitution.comparing if compares else self.constitution.revising
        count = self.config.num_questions if compares else self.config.num_revisions
        return draw(among, count, f"{self.seed}/{case.prompt.id}/{number}/{purpose}")

    def _sample(self, part: int, chains: Sequence[Chain], sampled: _Sampled) -> None:
        def asked(chain: Chain) -> Sequence[int]:
            return chain.case.prompt.tokens

        stages = iter(range(part * self.config.samples_per_chain, (part + 1) * self.config.samples_per_chain))
        for chain, (text, fault) in self._ask("response", next(stages), chains, asked, sampled):
            chain.draft, chain.fault = text, fault
        if self.config.pairs is Pairs.sampled:
            whole = [chain for chain in chains if not chain.fault]
            for chain, (text, fault) in self._ask("response", next(stages), chains, asked, sampled, only=whole):
                chain.second, chain.second_fault = text, fault
        for number in range(self.config.num_revisions):
            self._round(number, (next(stages), next(stages)), chains, sampled)

    def _round(self, number: int, stages: tuple[int, int], chains: Sequence[Chain], sampled: _Sampled) -> None:
        critiques: dict[int, str] = {}

        def for_critique(chain: Chain) -> Sequence[int]:
            turns = Turns(response=chain.newest, critique_request=chain.principles[number].critique_request)
            return self.framing.turns(chain.case, turns)

        def for_revision(chain: Chain) -> Sequence[int]:
            principle = chain.principles[number]
            turns = Turns(
                response=chain.newest,
                critique_request=principle.critique_request,
                critique=critiques[chain.row],
                revision_request=principle.revision_request,
            )
            return self.framing.turns(chain.case, turns)

        whole = [chain for chain in chains if not chain.fault]
        for chain, (text, fault) in self._ask("critique", stages[0], chains, for_critique, sampled, only=whole):
            critiques[chain.row], chain.fault = text, fault
        whole = [chain for chain in whole if not chain.fault]
        for chain, (text, fault) in self._ask("revision", stages[1], chains, for_revision, sampled, only=whole):
            chain.fault = fault
            if not fault:
                chain.rounds.append(Round(principle=chain.principles[number].name, critique=critiques[chain.row], revision=text))

    def _ask(
        self,
        kind: str,
        stage: int,
        chains: Sequence[Chain],
        tokens_of: Callable[[Chain], Sequence[int]],
        sampled: _Sampled,
        *,
        only: Sequence[Chain] | None = None,
    ) -> list[tuple[Chain, tuple[str, str]]]:
        """Sample one text for every chain (of `only`): (chain, (its text, '' or `<kind>_<fault>`)).

        A chain's seed goes by its place among all, so that it does not depend on what became of the others.
        """
        seeds = sample_seeds(self.seed, stage, len(chains))
        found: list[tuple[Chain, tuple[str, str]]] = []
        asked: dict[bool, list[tuple[Chain, Prompt]]] = {}
        for chain in chains if only is None else only:
            tokens = tuple(tokens_of(chain))
            if kind != "response" and len(tokens) > self.max_history:
                found.append((chain, ("", f"{kind}_{TOO_LONG}")))
                continue
            prompt = Prompt(id=chain.case.prompt.id, tokens=tokens, source=chain.case.prompt.source)
            asked.setdefault(chain.case.messages is not None, []).append((chain, prompt))
        wanted = [
            SampleRequest(
                prompts=[prompt for _, prompt in some],
                seeds=[seeds[chain.row] for chain, _ in some],
                # Of plain text a model continues with the next turn unless it is stopped.
                sampling=self.sampling if chat else self.sampling.stopping_at(*MARKS),
            )
            for chat, some in asked.items()
        ]
        answers: Sequence[ScoredRollouts] = ()
        if wanted:
            assert self.engine is not None  # only given pairs need none
            answers = collect_all(self.engine, wanted, scorers=self.scorers)
        for (chat, some), collected in zip(asked.items(), answers, strict=True):
            for (chain, _), rollout in zip(some, collected.rollouts, strict=True):
                text, fault = self.framing.read(rollout.response, ended=rollout.finish_reason is FinishReason.stop, chat=chat)
                sampled.lengths.setdefault(kind, []).append(len(rollout.response))
                sampled.truncated += rollout.finish_reason is FinishReason.length
                found.append((chain, (text, fault and f"{kind}_{fault}")))
        return found

    def _compare(self, judge: Judge, chains: Sequence[Chain], traces: Sequence[dict[str, Any]]) -> list[Judgement]:
        """Put a comparison into the trace of every chain that has two responses; the judgements that were made."""
        pairs = [pair_of(chain, self.config) for chain in chains]
        compared: list[tuple[int, Pair]] = []
        asked, names = [], []
        for row, (chain, pair) in enumerate(zip(chains, pairs, strict=True)):
            if isinstance(pair, str):
                traces[row]["comparison"] = {"left_out": pair}
                continue
            principles = self._drawn(chain.case, chain.number, "compare")
            compared.append((row, pair))
            names.append([principle.name for principle in principles])
            asked.append(
                [
                    Question(dialogue=chain.case.dialogue, question=principle.question, first=pair.first, second=pair.second)
                    for principle in principles
                ]
            )
        sources = [chains[row].case.prompt.source for row, _ in compared]
        judgements = judge.compare(asked, sources) if compared else []
        for (row, pair), questions, judgement in zip(compared, names, judgements, strict=True):
            traces[row]["comparison"] = comparison_of(chains[row].case, pair, judgement, self.config) | {"questions": questions}
        return [one for one in judgements if one is not None]


COLUMNS = (
    Column("supervised", "constitution/supervised", ".0f"),
    Column("pairs", "preference/pairs", ".0f"),
    Column("length", "rollout/response_length", ".1f"),
    Column("truncated", "rollout/truncated_fraction", "percent"),
    Column("entropy", "preference/entropy", ".3f"),
    Column("revised", "preference/revision_chosen", "percent"),
    Column("position", "preference/position_bias", ".2f"),
)
USUAL_HISTORY_LENGTH = 2048


@dataclass(kw_only=True, slots=True)
class ConstitutionalAI(WritingRun):
    """Critiques, revisions and preferences by a model itself (conf/constitution/constitution.yaml)."""

    data: ConstitutionDataConfig = field(default_factory=ConstitutionDataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)  # the engine that samples responses, and how it draws them
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    algorithm: ConstitutionConfig = field(default_factory=ConstitutionConfig)

    @property
    def sampler(self) -> RolloutConfig:
        return self.rollout

    def __post_init__(self) -> None:
        WritingRun.__post_init__(self)
        check_untrained(self.rollout, "nothing is trained here")
        if self.judge.path and self.algorithm.pairs in (Pairs.none, Pairs.given):
            raise ConfigError(
                f"judge.path={self.judge.path}: with algorithm.pairs={self.algorithm.pairs.value} no second model is needed; allowed: ''"
            )

    def traits(self) -> Traits:
        """A model that samples and compares; a judge with weights of its own takes their place as a reference does."""
        algorithm, samples, has_judge = self.algorithm, self.algorithm.samples_per_chain, bool(self.judge.path)
        response = self.rollout.sampling.max_response_length
        phases = {
            Phase.generate: samples > 0,
            Phase.logprobs: algorithm.pairs is not Pairs.none and not has_judge,
            Phase.ref_logprobs: has_judge,
        }
        work = Work(
            phases=tuple(phase for phase, wanted in phases.items() if wanted),
            rows=algorithm.part_size * algorithm.num_chains * (samples or ROWS * algorithm.num_questions),
            length=max(self.data.max_prompt_length, self.data.max_history_length) + (response if samples else 0),
            response_length=response,
        )
        return Traits(role="writer", work=work, has_engine=samples > 0, has_reference=has_judge)

    def models(self) -> list[UsedModel]:
        found = WritingRun.models(self)
        if self.judge.path:
            judge = replace(self.model, path=self.judge.path, tokenizer="")
            found.append(UsedModel(component="judge", key="judge", config=judge, reads_text=True))
        return found

    def read(self, location: str, tokenizer: Tokenizer, *, first: int | None = None) -> tuple[Sequence[Any], LoadReport]:
        load_constitution(self.data.constitution)
        cases, report = load_cases(location, self.data, tokenizer, given=self.algorithm.pairs is Pairs.given, first=first)
        return [case.prompt for case in cases], report

    def with_lengths(self, context: lengths.Context) -> Self:
        data, response, samples = self.data, 0, self.algorithm.samples_per_chain
        if samples:
            response = context.response_length(self.rollout.sampling, max(data.max_prompt_length, data.max_history_length))
        history = data.max_history_length or min(USUAL_HISTORY_LENGTH, context.room - response)
        prompt = data.max_prompt_length or history
        sampled = {lengths.RESPONSE: response} if samples else {}
        context.check({"data.max_history_length": history, **sampled})
        context.check({"data.max_prompt_length": prompt, **sampled})
        config = replace(self, data=replace(data, max_prompt_length=prompt, max_history_length=history))
        return lengths.with_response(config, response) if samples else config

    def check(self, architecture: Architecture, num_ranks: int) -> None:
        check_layout(self.model, self.parallel, architecture, num_ranks)
        if self.algorithm.samples_per_chain:
            check_engine(self.rollout, architecture, tp=self.rollout.tp or self.parallel.tp, world_size=num_ranks)
            check_precision(self.rollout, self.model, self.parallel)


def build(job: WriterJob[ConstitutionalAI]) -> int:
    """Everything that a constitution makes of prompts, to `<run>/written`."""
    config, tokenizer = job.config, job.tokenizer
    constitution = load_constitution(config.data.constitution)
    check_constitution(constitution, config)
    cases = job.load(load_cases, given=config.algorithm.pairs is Pairs.given)
    policy = job.policy(temperature=config.rollout.sampling.temperature or 1.0)
    judge, judge_digest = _judge(job, constitution, policy)
    engine = job.engine(policy, config.rollout) if config.algorithm.samples_per_chain else None
    work = Constitutional(
        config.algorithm,
        constitution,
        Framing(tokenizer, constitution, add_bos=config.data.add_bos),
        engine=engine,
        scorers=Scorers(reward=NoReward(), pad_id=tokenizer.pad_id, heartbeat=job.session.progress.heartbeat),
        sampling=config.rollout.sampling,
        judge=judge,
        seed=config.run.seed,
        max_history=config.data.max_history_length,
    )
    algorithm, what = config.algorithm, [(case.prompt.id, case.prompt.tokens, case.said, case.pair) for case in cases]
    settings = (asdict(algorithm), asdict(config.rollout.sampling), config.judge.framing, config.data.max_history_length, config.run.seed)
    made_of = {"settings": repr(settings), "data": digest_of(what), "constitution": constitution.digest, "judge": judge_digest}
    wanted = [SUPERVISED] * (algorithm.num_revisions > 0) + [PREFERENCES] * (algorithm.pairs is not Pairs.none)
    code = job.write_parts(cases, work.make, made_of=made_of, finish=partial(publish_feedback, constitution=constitution, wanted=wanted))
    if engine is not None:
        engine.shutdown()
    return code


def _judge(job: WriterJob[ConstitutionalAI], constitution: Constitution, policy: MegatronPolicy) -> tuple[Judge | None, str]:
    """Who compares, and the digest of its weights, '' if they are the policy's."""
    config = job.config
    if config.algorithm.pairs is Pairs.none:
        return None, ""
    own = job.at_temperature_1(policy)  # whatever is sampled at
    logprobs, tokenizer, digest = own.logprobs, job.tokenizer, ""
    if config.judge.path:
        model, tokenizer = job.frozen_model(
            "judge",
            config.judge.path,
            setting=f"judge.path={config.judge.path}",
            whose="the model's",
            otherwise="A judge of another shape compares afterwards: algorithm.pairs=given with model.path=JUDGE",
        )
        logprobs, digest = job.frozen(own, model).logprobs, job.model_digest(model)
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
        heartbeat=job.session.progress.heartbeat,
    )
    return judge, digest


RECIPE = Recipe(name="constitution", config=ConstitutionalAI, build=build, columns=COLUMNS)
