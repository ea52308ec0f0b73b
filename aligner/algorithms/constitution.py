"""Constitutional AI (Bai et al. 2022, 2212.08073): a model answers, criticises and revises its answers by written principles, and says
which of two responses is better. What comes of it are supervised records and preferences; no person judges.

A prompt's *chain*: a response; then in every round a principle by chance, a critique of the newest response by it, and a revision. Where a
step goes wrong (cut at the longest length, empty, no text, no room for what it needs) the chain ends, under the name of what went wrong;
nothing of that step is used. Everything is a function of weights, records, settings and seeds: a part that is made again is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aligner.algorithms.ai_feedback import Judge, Judgement, judgement_metrics
from aligner.algorithms.chains import TOO_LONG, Chain, ConstitutionConfig, Pairs, Round, comparison_of, pair_of, trace_metrics, trace_of
from aligner.algorithms.rollouts import Scorers, Wanted, collect_all, sample_seeds
from aligner.algorithms.writing import Record
from aligner.data.cases import Case
from aligner.data.constitution import Constitution, Principle, draw
from aligner.data.critiques import MARKS, Framing, Question, Turns
from aligner.protocols import RolloutEngine
from aligner.types import FinishReason, Prompt, SamplingConfig


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


class Constitutional:
    """Makes the traces of cases: `make` for `aligner.algorithms.writing.Writing`. Every rank constructs one.

    `engine` None: nothing is sampled; `judge` None: nothing is compared. `max_history`: tokens that may precede a critique or a revision.
    """

    def __init__(
        self,
        config: ConstitutionConfig,
        constitution: Constitution,
        framing: Framing,
        *,
        engine: RolloutEngine | None,
        scorers: Scorers,
        sampling: SamplingConfig,
        judge: Judge | None,
        seed: int,
        max_history: int,
    ) -> None:
        self.config = config
        self.constitution = constitution
        self.framing = framing
        self.engine = engine
        self.scorers = scorers
        self.sampling = {True: sampling, False: text_sampling(sampling)}
        self.judge = judge
        self.seed = seed
        self.max_history = max_history

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
        judgements = self._compare(chains, traces) if self.judge is not None else []
        return traces, sampled.metrics() | judgement_metrics(judgements) | trace_metrics(traces)

    def _drawn(self, case: Case, number: int, purpose: str) -> list[Principle]:
        compares = purpose == "compare"
        among = self.constitution.comparing if compares else self.constitution.revising
        count = self.config.num_questions if compares else self.config.num_revisions
        return draw(among, count, f"{self.seed}/{case.prompt.id}/{number}/{purpose}")

    def _sample(self, part: int, chains: Sequence[Chain], sampled: _Sampled) -> None:
        stages = iter(range(part * self.config.samples_per_chain, (part + 1) * self.config.samples_per_chain))
        for chain, (text, fault) in self._ask("response", next(stages), chains, _draft_tokens, sampled):
            chain.draft, chain.fault = text, fault
        if self.config.pairs is Pairs.sampled:
            whole = [chain for chain in chains if not chain.fault]
            for chain, (text, fault) in self._ask("response", next(stages), chains, _draft_tokens, sampled, only=whole):
                chain.second, chain.second_fault = text, fault
        for number in range(self.config.num_revisions):
            self._round(number, (next(stages), next(stages)), chains, sampled)

    def _round(self, number: int, stages: tuple[int, int], chains: Sequence[Chain], sampled: _Sampled) -> None:
        """A critique and a revision of every chain that is whole."""
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
            Wanted(prompts=[prompt for _, prompt in some], seeds=[seeds[chain.row] for chain, _ in some], sampling=self.sampling[chat])
            for chat, some in asked.items()
        ]
        answers = collect_all(self.engine, wanted, scorers=self.scorers) if wanted else []
        for (chat, some), collected in zip(asked.items(), answers, strict=True):
            for (chain, _), rollout in zip(some, collected.rollouts, strict=True):
                text, fault = self.framing.read(rollout.response, ended=rollout.finish_reason is FinishReason.stop, chat=chat)
                sampled.lengths.setdefault(kind, []).append(len(rollout.response))
                sampled.truncated += rollout.finish_reason is FinishReason.length
                found.append((chain, (text, fault and f"{kind}_{fault}")))
        return found

    def _compare(self, chains: Sequence[Chain], traces: Sequence[dict[str, Any]]) -> list[Judgement]:
        """Put a comparison into the trace of every chain that has two responses; the judgements that were made."""
        pairs = [pair_of(chain, self.config) for chain in chains]
        rows, asked, names = [], [], []
        for row, (chain, pair) in enumerate(zip(chains, pairs, strict=True)):
            if isinstance(pair, str):
                traces[row]["comparison"] = {"left_out": pair}
                continue
            principles = self._drawn(chain.case, chain.number, "compare")
            rows.append(row)
            names.append([principle.name for principle in principles])
            asked.append(
                [
                    Question(dialogue=chain.case.dialogue, question=principle.question, first=pair.first, second=pair.second)
                    for principle in principles
                ]
            )
        sources = [chains[row].case.prompt.source for row in rows]
        judgements = self.judge.compare(asked, sources) if rows else []
        for row, questions, judgement in zip(rows, names, judgements, strict=True):
            traces[row]["comparison"] = comparison_of(chains[row].case, pairs[row], judgement, self.config) | {"questions": questions}
        return [one for one in judgements if one is not None]


def text_sampling(sampling: SamplingConfig) -> SamplingConfig:
    """The settings for plain text, where a model goes on with the next turn unless it is stopped."""
    return replace(sampling, stop_strings=[*sampling.stop_strings, *(mark for mark in MARKS if mark not in sampling.stop_strings)])


def _draft_tokens(chain: Chain) -> Sequence[int]:
    return chain.case.prompt.tokens
