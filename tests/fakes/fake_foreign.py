"""An inference package that keeps a copy of every weight, and can be told to fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from aligner.rollout.engine import ALL_MEMORY, Capabilities, GenResult, Memory, Work
from aligner.rollout.engine.manifest import Manifest
from aligner.types import FinishReason, LogprobKind, SamplingConfig


class FakeForeign:
    """`aligner.rollout.engine.ForeignEngine`: answers each request with one token, the number of its weights' version.

    `log` is what was called. `fails_at`: the name of a method that raises. `damages`: the name of a weight that is stored wrong.
    """

    capabilities = Capabilities(name="fake", logprobs=LogprobKind.raw)
    max_sequence_length = 32

    def __init__(self) -> None:
        self.log: list[str] = []
        self.weights: dict[str, Tensor] = {}
        self.version = -1
        self.fails_at = ""
        self.damages = ""
        self.can_read_back = True
        self.awake = frozenset()

    def _note(self, what: str) -> None:
        self.log.append(what)
        if what.split()[0] == self.fails_at:
            raise RuntimeError("the package says no")

    def start(self) -> None:
        self._note("start")
        self.awake = ALL_MEMORY

    def begin_refit(self, manifest: Manifest) -> None:
        assert Memory.weights in self.awake
        self._note("begin")
        self.weights = {}

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self._note(f"load {len(bucket)}")
        for name, tensor in bucket:
            self.weights[name] = tensor.clone() if name != self.damages else tensor.flip(0)

    def finish_refit(self, version: int) -> None:
        self._note(f"finish {version}")
        self.version = version

    def abort_refit(self) -> None:
        self._note("abort")

    def read_back(self, name: str) -> Tensor | None:
        return self.weights[name] if self.can_read_back else None

    def sleep(self, memory: frozenset[Memory]) -> None:
        self._note("sleep " + " ".join(sorted(memory)))
        self.awake -= memory
        if Memory.weights in memory:
            self.weights = {name: torch.empty(0) for name in self.weights}

    def wake(self, memory: frozenset[Memory]) -> None:
        self._note("wake " + " ".join(sorted(memory)))
        self.awake |= memory

    def generate(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        assert self.awake == ALL_MEMORY
        while requests := work.take(2):
            yield [
                GenResult(
                    index=request.index,
                    tokens=(self.version,),
                    logprobs=(-1.0,),
                    kind=LogprobKind.raw,
                    finish_reason=FinishReason.length,
                    weight_version=self.version,
                )
                for request in requests
            ]

    def shutdown(self) -> None:
        self._note("shutdown")
