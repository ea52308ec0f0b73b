"""What the endpoint tells of its calls, and asks about them: the interface of sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web
from torch import Tensor

from aligner.errors import AlignerError
from aligner.rollout.engine import GenResult
from aligner.types import Images, SamplingConfig

SESSION = web.RequestKey("SESSION", str)  # of a request's key or header; "" for the endpoint's own key without the header


class SessionClosed(AlignerError):
    """The session takes no more calls: `gone` if it has ended (HTTP 410), else it cannot take this one now (409)."""

    def __init__(self, message: str, *, gone: bool = True) -> None:
        super().__init__(message)
        self.gone = gone


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One finished generation of one client's call. A call with `n` > 1 is recorded once for each of its choices."""

    session: str  # that the key or the header X-Session-ID names; "": none
    prompt: tuple[int, ...]
    result: GenResult  # its tokens include an end token and what completes a stop string
    seed: int  # of this choice
    sampling: SamplingConfig
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # the prompt's (`aligner.types.extras`)
    messages: Sequence[Mapping[str, Any]] | None = None  # as the client sent them, in its own interface's form; None: it sent none

    @property
    def images(self) -> list[str]:
        """The digests of the prompt's images, in their order."""
        return Images.digests(self.extras[Images.name]) if Images.name in self.extras else []


class Sessions(Protocol):
    """What the endpoint asks of sessions. Its methods are called in the endpoint's event loop and must not block."""

    def of_key(self, key: str) -> str | None:
        """The session that this bearer key names; None if it is no session's (the comparison takes as long for a near miss)."""

    def settings(self, session: str, asked: SamplingConfig) -> SamplingConfig:
        """How a call is sampled whose client asks for this."""

    def begin(self, session: str, prompt: Sequence[int]) -> int | None:
        """A call is about to be sampled; the seed of its first choice, or None where the client's counts. Raises SessionClosed."""

    def record(self, call: Call) -> None:
        """A choice has been sampled, whether or not its client still listens. Thread-safe."""

    def routes(self) -> list[web.RouteDef]:
        """Further routes, behind the endpoint's limits and keys: `request[SESSION]` is who asks."""
