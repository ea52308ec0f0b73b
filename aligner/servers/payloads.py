"""What requests and replies are, once decoded: the typed side of `wire.py`.

A `TrainIdentity` identifies a training request by its place in the run, its tensors, and the request before it. A request's *mark* names it
together with all before it: `step.part.hash`, where the hash covers the run, the place, the tensors and the previous mark. Two critics with
the same mark were trained on the same requests in the same order. `START` is the mark of a critic that was not trained in this run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from aligner.types import TokenBatch, ValueBatch

START = "start"
_MARK = re.compile(r"(\d+)\.(\d+)\.([0-9a-f]{64})")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RUN = re.compile(r"[0-9A-Za-z._-]{1,64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainIdentity:
    """Request number `part` (from 0) of `step`; `digest` is that of its tensors, `previous` the mark before. Raises ValueError."""

    run: str
    step: int
    part: int
    digest: str
    previous: str

    def __post_init__(self) -> None:
        if not _RUN.fullmatch(self.run):
            raise ValueError(f"run: {self.run!r}; allowed are up to 64 letters, digits, dots, dashes and underscores")
        for name, number in (("step", self.step), ("part", self.part)):
            if number < 0:
                raise ValueError(f"{name}: {number}; it must be 0 or more")
        if not _DIGEST.fullmatch(self.digest):
            raise ValueError(f"digest: {self.digest[:80]!r}; it must be the 64 hexadecimal digits of a SHA-256")
        if position(self.previous) >= (self.step, self.part):
            raise ValueError(f"previous: {describe(self.previous)}; it must be before step {self.step} part {self.part}")

    @property
    def mark(self) -> str:
        """Names this request and all before it."""
        text = "\n".join((self.run, str(self.step), str(self.part), self.digest, self.previous))
        return f"{self.step}.{self.part}.{hashlib.sha256(text.encode()).hexdigest()}"


def check_mark(name: str, mark: str) -> str:
    """The mark itself. Raises ValueError, naming the tensor `name`, if it is not one."""
    if mark != START and not _MARK.fullmatch(mark):
        raise ValueError(f"{name}: {mark[:100]!r}; allowed are {START!r} and <step>.<part>.<64 hexadecimal digits>")
    return mark


def position(mark: str) -> tuple[int, int]:
    """(step, part) of a mark; (-1, 0) for `START`, which is before all others. Raises ValueError for anything else."""
    match = _MARK.fullmatch(check_mark("previous", mark))
    return (int(match[1]), int(match[2])) if match else (-1, 0)


def describe(mark: str) -> str:
    """For people: `step 7 part 0 (1a2b3c4d)`."""
    if mark == START:
        return "nothing of this run"
    step, part = position(mark)
    return f"step {step} part {part} ({mark.rpartition('.')[2][:8]})"


def digest_of(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of numeric tensors, whatever their order."""
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
        total.update(array.data.cast("B"))
    return total.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardTexts:
    """Texts to score, one entry per row; an answer of None (on the wire: empty) means that the prompt has no reference answer."""

    prompts: list[str]
    responses: list[str]
    answers: list[str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardRequest:
    """Rows to score, as tokens or as texts or as both."""

    batch: TokenBatch | None = None
    texts: RewardTexts | None = None

    def __post_init__(self) -> None:
        if self.batch is None and self.texts is None:
            raise ValueError("reward_model: send `tokens` with `sequence_lengths`, or `sentences`, or `prompts` with `responses`")

    @property
    def num_rows(self) -> int:
        return len(self.texts.responses) if self.batch is None else self.batch.tokens.shape[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRequest:
    """Train on these rollouts, once."""

    batch: ValueBatch
    identity: TrainIdentity


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReply:
    """`loss_mean` over the masked tokens of the whole request, and every metric by name."""

    loss_mean: float
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ValuesRequest:
    """Rows to value, by a critic that was trained last on the request of the mark `after` (None: by any critic)."""

    batch: TokenBatch
    after: str | None = None

    def __post_init__(self) -> None:
        check_mark("after", self.after or START)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """Write a checkpoint for `step`, of the critic that was trained last on `after`. With `wait` the answer comes when it is complete."""

    step: int
    after: str | None = None
    wait: bool = True

    def __post_init__(self) -> None:
        check_mark("after", self.after or START)
        if self.step < 0:
            raise ValueError(f"step: {self.step}; it must be 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusRequest:
    """Asks what has been applied, for a client of `run`. With `adopt`, a critic that accepts a gap counts as trained last on that mark."""

    run: str
    adopt: str | None = None

    def __post_init__(self) -> None:
        check_mark("adopt", self.adopt or START)


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticStatus:
    """A critic's training history: mark of the last request, number of requests, and step of its checkpoint (0: the first weights)."""

    run: str
    mark: str
    count: int
    checkpoint_step: int
    accepts_gap: bool


Payload = TokenBatch | ValuesRequest | TrainRequest | SaveRequest | StatusRequest | RewardRequest
Result = Tensor | TrainReply | CriticStatus | str
