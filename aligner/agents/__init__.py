"""Episodes that programs of others play against the policy's endpoint: commands, and task sets of verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from aligner.errors import AlignerError
from aligner.types import Prompt, SamplingConfig


class ServerGone(AlignerError):
    """The server that played a session has ended, or does not answer: no fault of the session, which is played again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionAccess:
    """Where and as whom one session of an agent asks the policy."""

    root_url: str  # http://host:port
    session: str
    key: str = field(repr=False)  # a bearer token of this session alone: calls that carry it are this session's
    model: str  # the name that requests give
    seed: int  # of the session: a pure function of the run's seed, the round and the session's place in it
    sampling: SamplingConfig  # of the run, or of its validation
    tokenizer_path: str  # a directory in the form of transformers

    @property
    def base_url(self) -> str:
        """With /v1, as clients of OpenAI's API expect it."""
        return f"{self.root_url}/v1"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentOutcome:
    """What an agent says of a session that it has played.

    Without a `reward`, the session has the one that was posted, or that of the run's reward functions and models. Where it `failed` (why),
    it has none at all. `said`: what the agent gave in place of a reward, for messages.
    """

    reward: float | None = None
    said: str = ""
    counts: Mapping[str, float] = field(default_factory=dict)  # added up, as those of environments
    failed: str = ""


class Agents(Protocol):
    """The programs that play sessions, of one process of the job. The calls of a session reach the trace by its key, not by this."""

    def play(self, prompt: Prompt, access: SessionAccess) -> AgentOutcome:
        """Play one session to its end; called by many threads at once. Anything that it raises makes the session a failed one.

        It need not watch the time: after `environment.sessions.timeout_seconds`, `stop` ends it from outside.
        """

    def stop(self, session: str) -> None:
        """The session is late: make its `play` return soon, with whatever it has started ended. From another thread."""

    def close(self) -> None:
        """End whatever still runs."""
