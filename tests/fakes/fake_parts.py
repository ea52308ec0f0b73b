"""Parts for the algorithms that answer at once and write down what they were asked: engine, policy, reference, reward, critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from aligner.loop.loop import BY_TIME, Clock, StepResult, run
from aligner.protocols import Added, Loss, Replica
from aligner.run.settings import LoopConfig
from aligner.telemetry.metrics import Mean, Metric, Sum
from aligner.types import FinishReason, MaskedBatch, PolicyBatch, Prompt, Rollout, SampleRow, Scores, TokenBatch, ValueBatch

EOS = 0


def done(value: Any) -> Future:
    """A future that has its result."""
    future: Future = Future()
    future.set_result(value)
    return future


def failed(error: Exception) -> Future:
    """A future that has its error."""
    future: Future = Future()
    future.set_exception(error)
    return future


def prompt(number: int, *tokens: int, answer: str | None = None) -> Prompt:
    return Prompt(id=number, tokens=tokens or (number + 1,), source=f"test:{number}", text=f"p{number}", answer=answer)


def rollout(of: Prompt, *response: int, seed: int = 0) -> Rollout:
    """It stopped by itself where the last token is EOS."""
    reason = FinishReason.stop if response[-1] == EOS else FinishReason.length
    logprobs = tuple(-1.0 for _ in response)
    return Rollout(prompt=of, response=response, logprobs=logprobs, finish_reason=reason, policy_version=0, seed=seed)


def written(response: str, number: int = 0, *, version: int = 0, reward: float | None = None, **of_prompt: Any) -> Rollout:
    """A response of one token per character, to a prompt with these fields."""
    own = Prompt(**{"id": number, "tokens": (65,), "source": f"train.jsonl:{number + 1}"} | of_prompt)
    tokens = tuple(map(ord, response))
    logprobs, reason = (0.0,) * len(tokens), FinishReason.stop
    return Rollout(prompt=own, response=tokens, logprobs=logprobs, finish_reason=reason, policy_version=version, seed=number, reward=reward)


def characters(tokens: Sequence[int]) -> str:
    """What `written` has made tokens of."""
    return "".join(map(chr, tokens))


class FakeEngine:
    """Answers prompt `p` and seed `s` with (p's id + 1) tokens 7 and EOS; the last prompt first, two at a time.

    `share` are the positions of those that its replica takes; all of them unless given.
    """

    def __init__(self, log: list[str], replica: Replica | None = None, share: Sequence[int] | None = None) -> None:
        self.log = log
        self.replica = replica or Replica()
        self.share = share
        self.asked: list[tuple[list[int], list[int]]] = []
        self.sampling: list[Any] = []

    def refit(self, version: int) -> None:
        self.log.append(f"refit {version}")

    def sleep(self) -> None:
        self.log.append("engine sleeps")

    def wake(self) -> None:
        self.log.append("engine wakes")

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Any = None) -> Iterator[list[Rollout]]:
        self.log.append("generate")
        self.asked.append(([p.id for p in prompts], list(seeds)))
        self.sampling.append(sampling)
        rollouts = [rollout(p, *[7] * (p.id + 1), EOS, seed=seed) for p, seed in zip(prompts, seeds, strict=True)]
        rollouts = [rollouts[position] for position in (range(len(rollouts)) if self.share is None else self.share)][::-1]
        for start in range(0, len(rollouts), 2):
            yield rollouts[start : start + 2]


class FakePolicy:
    """Log-probs are `level` on every masked token; a train step adds 1 to the version."""

    temperature = 1.0

    def __init__(self, log: list[str], level: float = -1.0) -> None:
        self.log = log
        self.level = level
        self.version = 0
        self.trained: list[PolicyBatch] = []
        self.added: list[Sequence[Added]] = []

    def logprobs(self, batch: MaskedBatch) -> Tensor:
        self.log.append("logprobs")
        return self.level * batch.loss_mask.float()

    def per_token(self, batch: MaskedBatch, *names: str) -> dict[str, Tensor]:
        return {"logprobs": self.logprobs(batch), "entropy": 0.5 * batch.loss_mask.float()}

    def train_step(self, batch: PolicyBatch, loss: Loss, added: Sequence[Added] = ()) -> dict[str, Metric]:
        self.log.append("update")
        self.trained.append(batch)
        self.added.append(added)
        self.version += 1
        return {"optim/steps": Sum(total=1)}

    def sleep(self) -> None:
        self.log.append("policy sleeps")

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from ()


class TokenPolicy:
    """The log-prob of token t is -t / 10, whatever stands before it."""

    def __init__(self) -> None:
        self.num_passes = 0

    def logprobs(self, batch: MaskedBatch) -> Tensor:
        self.num_passes += 1
        return -batch.tokens / 10 * batch.loss_mask


class FakeMovingReference:
    """Log-probs are -1.5 on every masked token; it writes down what it was made of, and how often it was asked."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.num_passes = 0

    def logprobs(self, batch: MaskedBatch) -> Tensor:
        self.num_passes += 1
        return -1.5 * batch.loss_mask

    def renew(self, step: int) -> None:
        self.log.append(f"renewed {step}")

    def restore(self, step: int) -> None:
        self.log.append(f"restored {step}")


class FakeKept:
    """Files of an iteration in memory, by name and part."""

    def __init__(self, log: list[str], what: str = "") -> None:
        self.log = log
        self.what = what
        self.parts: dict[tuple[str, int], list] = {}

    def read(self, name: str, part: int) -> list | None:
        return self.parts.get((name, part))

    def write(self, name: str, part: int, items: Sequence) -> None:
        self.log.append(f"write {self.what or name[:14]} {part}")
        self.parts[name, part] = list(items)


class FakeReward:
    """A score per rollout."""

    def __init__(self, score: Callable[[Rollout], float]) -> None:
        self._score = score

    def score(self, rollouts: Sequence[Rollout]) -> Future[Scores]:
        try:
            return done(Scores.of(torch.tensor([self._score(r) for r in rollouts])))
        except Exception as error:
            return failed(error)

    def close(self) -> None: ...


def critic_metrics(loss: float) -> dict[str, float]:
    """Returns with variance 5 - 1^2 = 4, errors with variance 1.25 - 0.5^2 = 1: explained variance 1 - 1 / 4."""
    returns = {"value/return_mean": 1.0, "value/return_sq_mean": 5.0, "value/error_mean": 0.5, "value/error_sq_mean": 1.25}
    return {"value/loss": loss, "optim/lr": 0.5} | returns


def value_metrics(loss: float) -> dict[str, Metric]:
    """`critic_metrics` as a model's update has them."""
    found = critic_metrics(loss).items()
    return {name: Mean(total=torch.tensor(value), count=torch.tensor(1)) for name, value in found if name.startswith("value/")}


class FakeCritic:
    """The value of a state is its token / 10. `training` is what `train` answers with, one after the other. Its mark is the last step."""

    def __init__(self, log: list[str], training: Sequence[Future] = ()) -> None:
        self.log = log
        self.mark = "start"
        self.training = list(training)
        self.trained: list[tuple[int, ValueBatch]] = []

    def values(self, batch: TokenBatch) -> Future[Tensor]:
        self.log.append("values")
        return done(batch.tokens / 10)

    def train(self, batch: ValueBatch, step: int) -> Future[dict[str, float]]:
        self.log.append(f"critic trains {step}")
        self.trained.append((step, batch))
        self.mark = f"after {step}"
        return self.training.pop(0) if self.training else done(critic_metrics(float(step)))

    def resume(self, mark: str) -> None:
        self.log.append(f"critic resumes {mark}")

    def follow(self, mark: str) -> None:
        self.mark = mark

    def begin_save(self, step: int) -> Future[None]:
        self.log.append(f"critic begins to save {step}")
        return done(None)

    def checkpointed(self, step: int) -> None:
        self.log.append(f"critic has {step}")

    def save(self, step: int) -> Future[str]:
        self.log.append(f"critic saves {step}")
        return done(f"step {step}")

    def close(self) -> None: ...


ROW = SampleRow(prompt="p", response="r", reward=1.0, finish_reason=FinishReason.stop)


class Recorder:
    """Algorithm, checkpointer and reporter in one: `events` says what was called, in order. `on_step[step]` runs inside that step, whose
    number is its metric."""

    def __init__(self, *, start: tuple[int, dict] = (0, {}), on_step: Mapping[int, Callable[[], None]] | None = None) -> None:
        self.metric = "x"
        self.events: list[str] = []
        self.logged: dict[int, dict[str, float]] = {}
        self.notes: list[str] = []
        self.start = start
        self.on_step = on_step or {}
        self.updates = 0
        self.on_validate: Callable[[], None] | None = None
        self.on_save: Callable[[], None] | None = None
        self.on_finish: Callable[[], None] | None = None
        self.on_poll: Callable[[], None] | None = None
        self.validations: dict[int, dict[str, float]] = {}
        self.under_way: int | None = None  # the step of a save in the background
        self.background = False
        self.by_time: list[int] = []
        self.on_disk = start[0]

    def step(self, step: int, clock: Clock) -> StepResult:
        self.events.append(f"step {step}")
        with clock.phase("work"):
            self.on_step.get(step, lambda: None)()
        self.updates += 1
        return StepResult(metrics={self.metric: float(step)}, samples=[ROW])

    def validate(self) -> Mapping[str, float]:
        self.events.append("validate")
        if self.on_validate:
            self.on_validate()
        return {"validation/x": 0.5}

    def finish(self) -> None:
        self.events.append("finish")
        if self.on_finish:
            self.on_finish()

    def state(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.events.append(f"load {dict(state)}")

    def load(self) -> tuple[int, dict[str, Any]]:
        return self.start

    def save(self, step: int, state: dict[str, Any], validation: Mapping[str, float]) -> None:
        if self.on_save:
            self.on_save()
        self.validations[step] = dict(validation)
        self.events.append(f"save {step} {state['updates']}")
        self.by_time += [step] if BY_TIME in state else []
        self.under_way = step
        if not self.background:
            self.settle()

    def poll(self) -> bool:
        if self.on_poll:
            self.on_poll()
        return self.under_way is None

    def wait(self) -> None:
        if self.under_way:
            self.events.append(f"wait {self.under_way}")
            self.poll()
            self.settle()

    def settle(self) -> int:
        self.on_disk, self.under_way = self.under_way or self.on_disk, None
        return self.on_disk

    def rescue(self, step: int, state: dict[str, Any]) -> None:
        self.events.append(f"rescue {step} {state['updates']}")

    def version(self) -> int:
        return self.updates

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(f"log {step}")
        self.logged[step] = dict(metrics)

    def table(self, step: int, rows: list[SampleRow]) -> None:
        assert rows == [ROW]
        self.events.append(f"table {step}")

    def note(self, text: str) -> None:
        self.notes.append(text)

    def run(self, config: LoopConfig | None = None, parts: Mapping[str, Any] | None = None, **fields: Any) -> int:
        """With `parts` of the loop beside its own; `fields`: of the settings, where they are not given whole."""

        def open_reporter(start_step: int) -> Recorder:
            self.events.append(f"open {start_step}")
            return self

        config = config or LoopConfig(**({"table_every": 0} | fields))
        return run(self, config, checkpointer=self, open_reporter=open_reporter, **(parts or {}))


def raises(error: Exception) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action
