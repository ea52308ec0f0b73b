"""Training in iterations on pairs of the policy's own responses: what SPIN (`spin.py`) and self-rewarding (`self_rewarding.py`) share.

Iteration i: the current policy becomes the reference and answers the iteration's prompts; pairs are made of what it wrote; then
`epochs_per_iteration` passes over them with a loss of `aligner.losses.preference`. An iteration has as many steps as all of its prompts
would need, so that `loop.max_steps` says how many iterations there are, whatever becomes of the pairs.

Whatever is made for an iteration is kept in files, a part at a time, and is a function of weights, prompts, settings and seeds alone: a run
that is killed continues with the parts that it had, in the middle of an iteration or of what comes before it.

`SampleFiles` holds what a run samples, part by part.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from aligner.algorithms.dpo import PairLossConfig
from aligner.algorithms.online_dpo import MovingReference
from aligner.data.collate import PreferencePair, preference_batch
from aligner.data.order import order_of
from aligner.errors import NOT_NEGATIVE, CheckpointError, ConfigError, check_numbers, check_range
from aligner.files import publish
from aligner.loop.epochs import Stateless
from aligner.loop.loop import Clock, StepResult
from aligner.losses.preference import dpo_loss
from aligner.online.collect import collect, sample_rows, sample_seeds
from aligner.online.selection import updates_of
from aligner.online.task import OnlineTask
from aligner.parallel.collectives import from_rank_0
from aligner.protocols import Policy
from aligner.reporting.summary import TOKENS
from aligner.telemetry.metrics import merge, values
from aligner.types import FinishReason, Prompt, SampleRow

Item = TypeVar("Item")


@dataclass(frozen=True)
class SampleFiles(Generic[Item]):
    """What an iteration samples, in parts: <name>/<stem>_000000.json in a directory, each with its name once it is complete. Collective.

    `kind`: the dataclass of the items; its fields are numbers, texts, and tuples of them. Those that are None are not written.
    """

    directory: Path
    kind: type[Item]
    stem: str = "part"

    def read(self, name: str, part: int) -> list[Item] | None:
        """None if there is no such file, or not one that was written here."""

        def read() -> list[Item] | None:
            try:
                records = json.loads(self._path(name, part).read_text())
                return [self.kind(**{key: tuple(one) if isinstance(one, list) else one for key, one in own.items()}) for own in records]
            except (FileNotFoundError, ValueError, AttributeError, TypeError):
                return None

        return from_rank_0(read)

    def write(self, name: str, part: int, items: Sequence[Item]) -> None:
        """Atomically."""
        names = [field.name for field in fields(cast(Any, self.kind))]
        text = json.dumps([{key: value for key in names if (value := getattr(item, key)) is not None} for item in items])
        from_rank_0(lambda: publish(self._path(name, part), lambda new: new.write_text(text)))

    def _path(self, name: str, part: int) -> Path:
        return self.directory / name / f"{self.stem}_{part:06d}.json"


@dataclass(kw_only=True, slots=True)
class IterationConfig(PairLossConfig):
    """Settings of an iteration's sampling and training, under `algorithm.`."""

    batch_size: int = 64  # pairs per update
    prompts_per_iteration: int = 0  # 0: all of them
    epochs_per_iteration: int = 1  # passes over an iteration's pairs
    sampled_together: int = 1024  # prompts per file of what is sampled: what a run that is killed while it samples does again, at most

    def __post_init__(self) -> None:
        PairLossConfig.__post_init__(self)
        check_numbers(self, "algorithm", at_least_1=("batch_size", "epochs_per_iteration", "sampled_together"))
        check_range(self, "algorithm", NOT_NEGATIVE, "prompts_per_iteration", note=" (0: all prompts)")

    @property
    def mini_batch_size(self) -> int:
        """Pairs per update."""
        return self.batch_size

    @property
    def rollouts_per_step(self) -> int:
        """Mean number of responses sampled per training step over an iteration, if each prompt gets one."""
        return -(-self.batch_size // self.epochs_per_iteration)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in one training step."""
        return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the policy wrote; `ended`: it stopped by itself. `reward`: None without one."""

    tokens: tuple[int, ...]
    ended: bool
    reward: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One of them: `number` from 1, the `name` of its files, and its prompts (positions in the data) as they are sampled together."""

    number: int
    name: str
    parts: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> list[int]:
        """All of its prompts."""
        return [row for part in self.parts for row in part]


Config = TypeVar("Config", bound=IterationConfig)


@dataclass(eq=False)
class PairIterations(Stateless, ABC, Generic[Config]):
    """The algorithm over its parts, but for how pairs are made of responses. Every rank constructs one.

    `prompts` are those of data.train; `group_size` responses are sampled to each. `settings`: text that says how; files of other settings
    are ignored. `rewarded`: the task's reward judges the responses, and is kept with them.
    """

    area: ClassVar[str]  # of the metric that says which iteration it is

    config: Config
    policy: Policy
    task: OnlineTask
    reference: MovingReference
    answers: SampleFiles[Answer]
    _: KW_ONLY
    prompts: Sequence[Prompt]
    settings: str
    group_size: int = 1
    rewarded: bool = False

    def __post_init__(self) -> None:
        config, prompts = self.config, self.prompts
        if config.prompts_per_iteration > len(prompts):
            raise ConfigError(
                f"algorithm.prompts_per_iteration={config.prompts_per_iteration}: data.train has {len(prompts)} usable prompts"
            )
        self.num_prompts = config.prompts_per_iteration or len(prompts)
        self.steps_per_iteration = -(-self.num_prompts * config.epochs_per_iteration // config.batch_size)
        self.loss = partial(dpo_loss, **config.settings())
        self.iteration = 0  # that is under way: all that it needs has been made
        self.name = ""  # of its files
        self.reference_step = 0  # after which the reference was the policy
        self._sampler = order_of(prompts, self.num_prompts, self.task.seed)

    @abstractmethod
    def prepare(self, iteration: Iteration, answers: Sequence[Answer], clock: Clock) -> tuple[dict[str, float], Sequence[SampleRow]]:
        """Make the training pairs from the iteration's responses; returns metrics, and rows to show (none: the responses as sampled)."""

    @abstractmethod
    def recall(self, iteration: Iteration, answers: Sequence[Answer]) -> None:
        """The same from files alone. Raises CheckpointError if they are no longer there."""

    @abstractmethod
    def pairs(self, iteration: int, position: int) -> tuple[list[PreferencePair], dict[str, float]]:
        """The pairs for step number `position` (from 0) of this iteration, and their metrics."""

    def step(self, step: int, clock: Clock) -> StepResult:
        iteration, position = divmod(step - 1, self.steps_per_iteration)
        metrics: dict[str, float] = {f"{self.area}/iteration": float(iteration + 1)}
        samples: Sequence[SampleRow] = ()
        if iteration + 1 != self.iteration:
            found, samples = self._begin(iteration + 1, step - 1, clock)
            metrics |= found
        pairs, found = self.pairs(self.iteration, position)
        metrics |= found | {TOKENS: float(sum(sum(row.loss_mask) for pair in pairs for row in (pair.chosen, pair.rejected)))}
        if pairs:
            metrics |= self._update(pairs, step, clock)
        return StepResult(metrics=metrics, samples=samples)

    def state(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "name": self.name, "reference_step": self.reference_step}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the iteration's files are no longer there."""
        self.iteration, self.name, self.reference_step = state["iteration"], state["name"], state["reference_step"]
        if self.reference_step:
            self.reference.restore(self.reference_step)
        if self.iteration:
            iteration = Iteration(number=self.iteration, name=self.name, parts=self._parts(self.iteration))
            self.recall(iteration, self.read(self.answers, iteration, "responses"))

    def summary(self) -> str:
        """How long an iteration is, for the log."""
        return f"an iteration is {self.steps_per_iteration} steps on {self.num_prompts} prompts"

    def kept(self, files: SampleFiles[Item], iteration: Iteration, make: Callable[[int, Sequence[int]], list[Item]]) -> list[Item]:
        """The items of all parts: those that are there are read, `make(number, prompts)` gives the others, which are written."""
        found: list[Item] = []
        for number, rows in enumerate(iteration.parts):
            part = files.read(iteration.name, number)
            if part is None:
                part = make(number, rows)
                files.write(iteration.name, number, part)
            found += part
        return found

    def read(self, files: SampleFiles[Item], iteration: Iteration, what: str) -> list[Item]:
        """The items of all parts. Raises CheckpointError if one is missing, or damaged."""
        parts = [files.read(iteration.name, number) for number in range(len(iteration.parts))]
        found: list[Item] = []
        for number, items in enumerate(parts):
            if items is None:
                raise CheckpointError(f"part {number} of the {what} {iteration.name} of this run is no longer there, or damaged")
            found += items
        return found

    def _begin(self, number: int, finished: int, clock: Clock) -> tuple[dict[str, float], Sequence[SampleRow]]:
        """The policy of now becomes the reference, and answers the prompts of iteration `number`.

        `state` changes last, so a failed iteration is repeated from its start.
        """
        if finished:
            with clock.phase("reference"):
                self.reference.renew(finished)
        iteration = Iteration(number=number, name=self._name(number, finished), parts=self._parts(number))
        self.policy.sleep()
        with clock.phase("generate"):
            self.task.engine.refit(self.policy.version)
            answers, samples = self._answers(iteration)
        found, rows = self.prepare(iteration, answers, clock)
        self.iteration, self.name = number, iteration.name
        self.reference_step = finished
        return answer_metrics(answers) | self._sampler.shares(number) | found, rows or samples

    def _answers(self, iteration: Iteration) -> tuple[list[Answer], list[SampleRow]]:
        """The responses to the prompts of the iteration, those to one prompt side by side; and some as text, where any were sampled now."""
        size = self.group_size
        samples: list[SampleRow] = []
        seeds = sample_seeds(self.task.seed, iteration.number, self.num_prompts * size)

        def sample(number: int, rows: Sequence[int]) -> list[Answer]:
            first = number * self.config.sampled_together * size
            prompts = [self.prompts[row] for row in rows for _ in range(size)]
            collected = collect(self.task.engine, prompts, seeds[first : first + len(prompts)], scorers=self.task.scorers())
            samples.extend([] if samples else sample_rows(collected, self.task.decode))
            rewards = [
                reward if valid and self.rewarded else None
                for reward, valid in zip(collected.rewards.tolist(), collected.valid.tolist(), strict=True)
            ]
            return [
                Answer(tokens=one.response, ended=one.finish_reason is FinishReason.stop, reward=reward)
                for one, reward in zip(collected.rollouts, rewards, strict=True)
            ]

        return self.kept(self.answers, iteration, sample), samples

    def _update(self, pairs: Sequence[PreferencePair], step: int, clock: Clock) -> dict[str, float]:
        task = self.task
        (batch,) = updates_of(
            preference_batch(pairs, task.pad_id), self.config.batch_size, 1, key=f"{task.seed}/{step}", least=task.topology.dp_size
        )
        with clock.phase("ref_logprobs"):
            batch = replace(batch, ref_logprobs=self.reference.logprobs(batch))
        with clock.phase("train"):
            metrics = values(merge([self.policy.train_step(batch, self.loss)]))
        seconds = clock.seconds["time/ref_logprobs"] + clock.seconds["time/train"]
        return metrics | {"data/tokens_per_second": int(batch.lengths.sum()) / seconds}

    def _parts(self, number: int) -> tuple[tuple[int, ...], ...]:
        """The prompts of an iteration, positions in `prompts`, as they are sampled together."""
        rows, size = self._sampler.indices(number - 1), self.config.sampled_together
        return tuple(tuple(rows[start : start + size]) for start in range(0, len(rows), size))

    def _name(self, number: int, finished: int) -> str:
        """Of what the policy that has finished this step makes: other weights, prompts or settings make another name."""
        prompts = [self.prompts[row].tokens for part in self._parts(number) for row in part]
        content = hashlib.sha256(repr((self.task.seed, self.settings, self.config.sampled_together, prompts)).encode()).hexdigest()
        return f"iteration_{number:04d}_step_{finished:06d}_version_{self.policy.version:06d}_{content[:12]}"


def answer_metrics(answers: Sequence[Answer]) -> dict[str, float]:
    """Metrics of an iteration's responses."""
    ended = sum(answer.ended for answer in answers)
    return {
        "rollout/response_length": sum(len(answer.tokens) for answer in answers) / len(answers),
        "rollout/truncated_fraction": 1 - ended / len(answers),
    }
