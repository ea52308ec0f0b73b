"""The settings of a run's environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from aligner.errors import AT_LEAST_1, FINITE, NOT_NEGATIVE, POSITIVE, ConfigError, check_range


class EnvironmentKind(str, Enum):
    """Whose interface an environment has."""

    auto = "auto"  # python where `path` is set, else none
    none = "none"  # a response is one turn
    python = "python"  # this package's: `path` names a class with reset(prompt) and step(state, turn)
    gymnasium = "gymnasium"  # Farama's: `name` is registered there; actions and observations are texts, or are written as texts
    reasoning_gym = "reasoning_gym"  # `name` is one of its data sets, whose score of the response is the reward
    openenv = "openenv"  # a server of OpenEnv: `server`
    verifiers = "verifiers"  # `name` is a task set, in `python`'s environment; its programs play against the policy's endpoint
    command = "command"  # any program that asks the policy's endpoint


class OnEnvironmentError(str, Enum):
    """Reaction to an environment that raises, hangs or does not return an observation."""

    stop = "stop"  # the run ends, naming the episode
    invalid = "invalid"  # the episode ends without a reward: it is counted and not trained on


class OnSessionFailure(str, Enum):
    """Reaction to a session whose agent failed, was late, asked the policy nothing or gave no reward."""

    drop = "drop"  # it has no reward: it is counted, said, and not trained on
    retry = "retry"  # it is played again, with the same seed, up to `retries` times, and then dropped
    stop = "stop"  # the run ends, naming it


@dataclass(kw_only=True, slots=True)
class SessionsConfig:
    """Sessions that programs play against the policy's endpoint."""

    on_failure: OnSessionFailure = OnSessionFailure.drop  # of a session that failed, was late, or gave no reward; never a reward of 0
    retries: int = 2  # of on_failure=retry: how often a session is played again
    timeout_seconds: float = 600.0  # limit of one session, which is then ended with all that its agent started; 0: waited for
    host: str = "127.0.0.1"  # the address that the endpoint listens on; 0.0.0.0: every one of this machine, for agents on others
    max_calls: int = 256  # calls that one session may make; further ones are refused
    pass_environment: list[str] = field(default_factory=list)  # variables that agents get though their names look like those of secrets

    def __post_init__(self) -> None:
        check_range(self, "environment.sessions", AT_LEAST_1, "max_calls")
        check_range(self, "environment.sessions", NOT_NEGATIVE, "retries")
        check_range(self, "environment.sessions", FINITE, "timeout_seconds", note=" (0: no limit)")


class ObservationForm(str, Enum):
    """What surrounds the text of an observation."""

    auto = "auto"  # chat where the prompts end as the tokenizer's chat template ends a user's message, else plain
    chat = "chat"  # what the chat template puts between the turns, with the observation as a message of `role`
    plain = "plain"  # `prefix` and `suffix`


@dataclass(kw_only=True, slots=True)
class EnvironmentConfig:
    """`path` is `package.module:Class`, `package.module.Class` or `path/to/file.py:Class` (or a function that returns an environment),
    called once in each process with `arguments`; empty: responses of one turn, unless `kind` names another environment.
    """

    kind: EnvironmentKind = EnvironmentKind.auto  # whose interface it has; auto: python where `path` is set, else none
    path: str = ""  # kind=python: package.module:Class or path/to/file.py:Class of an environment
    name: str = ""  # kind=gymnasium: [module:]ID-v0; reasoning_gym: a data set; verifiers: a task set
    arguments: dict[str, Any] = field(default_factory=dict)  # keyword arguments of what `path` or `name` names; openenv: of each reset
    actions: list[str] = field(
        default_factory=list
    )  # kind=gymnasium: the actions 0, 1, ... as the policy writes them; empty: their numbers
    server: str = ""  # kind=openenv: a URL, or the command of a server on port {port}; verifiers: tcp://HOST:PORT; empty: a free port here
    action_field: str = ""  # kind=openenv: the field of an action that gets the policy's text; empty: its only field that is needed
    python: str = ""  # kind=verifiers: the interpreter that has it, or its folder; a command may precede it (srun ...)
    command: list[str] = field(default_factory=list)  # kind=command: the program and its arguments, started once for each session
    sessions: SessionsConfig = field(default_factory=SessionsConfig)  # kind=command, verifiers: when a session fails, and what is done
    max_turns: int = 8  # turns of the policy in an episode; an episode that is not done by then counts as truncated
    timeout_seconds: float = 30.0  # limit of one step, including the reset before the first
    on_error: OnEnvironmentError = (
        OnEnvironmentError.stop
    )  # after a failure: stop: the run ends; invalid: the episode gets no reward and is counted
    num_workers: int = 32  # concurrent steps in each sampling process
    num_processes: int = 0  # steps are made in so many processes beside each sampling one; 0: in its threads; verifiers: of its server
    process_memory_gib: float = 0.0  # most memory of each of these processes; 0: no limit
    form: ObservationForm = ObservationForm.auto  # put around an observation: turns of the chat template, or prefix and suffix
    role: str = "user"  # role of observations in a chat: user, or tool if the template supports it
    prefix: str = ""  # form=plain: before the text of an observation; special tokens may be spelled out
    suffix: str = ""  # form=plain: after the text of an observation

    def __post_init__(self) -> None:
        check_range(self, "environment", AT_LEAST_1, "max_turns", "num_workers")
        check_range(self, "environment", POSITIVE, "timeout_seconds")
        check_range(self, "environment", NOT_NEGATIVE, "num_processes", note=" (0: threads)")
        check_range(self, "environment", FINITE, "process_memory_gib", note=" (0: no limit)")
        if self.process_memory_gib and not self.num_processes:
            raise ConfigError(f"environment.process_memory_gib={self.process_memory_gib}: needs environment.num_processes above 0")
        self._check_kind()
        if self.form is not ObservationForm.plain and (self.prefix or self.suffix):
            raise ConfigError(
                f"environment.form={self.form.value}: prefix and suffix are used with form=plain only; allowed: plain, or neither"
            )
        if self.role not in ("user", "tool"):
            raise ConfigError(f"environment.role={self.role!r}: must be user or tool")

    @property
    def chosen(self) -> EnvironmentKind:
        """`kind`, with what auto means."""
        if self.kind is not EnvironmentKind.auto:
            return self.kind
        return EnvironmentKind.python if self.path else EnvironmentKind.none

    @property
    def is_on(self) -> bool:
        """Whether a response is an episode of an environment."""
        return self.chosen is not EnvironmentKind.none

    @property
    def asks_endpoint(self) -> bool:
        """Whether programs play the episodes against the policy's endpoint; else the engine talks with an object of this process."""
        return self.chosen in (EnvironmentKind.verifiers, EnvironmentKind.command)

    @property
    def title(self) -> str:
        """The environment's name in messages: the setting that names it."""
        named = ("path", "name", "server", "command")
        return next((f"environment.{name}={value}" for name in named if (value := getattr(self, name))), "environment")

    def _check_kind(self) -> None:
        kind = self.chosen.value
        for name in _NEEDED.get(kind, "").split():
            if not any(getattr(self, one) for one in name.split("|")):
                raise ConfigError(f"environment.{name.partition('|')[0]}='': kind={kind} needs it; allowed: {_ALLOWED[name]}")
        for name, kinds in _READ_BY.items():
            if (value := getattr(self, name)) and kind not in kinds.split():
                shown = dict(value) if isinstance(value, Mapping) else value
                read = f"environment.kind={self.kind.value} with path={self.path!r} does not read it"
                raise ConfigError(f"environment.{name}={shown}: {read}; allowed: with kind={kinds.replace(' ', ', ')}")


_NEEDED = {"python": "path", "gymnasium": "name", "reasoning_gym": "name", "openenv": "server", "verifiers": "name python|server"}
_NEEDED |= {"command": "command"}
_ALLOWED = {
    "path": "package.module:Class or path/to/file.py:Class",
    "name": "[module:]ID of Gymnasium, a data set of reasoning-gym, a task set of verifiers",
    "server": "a URL, or a command that listens on {port}",
    "command": "a program and its arguments, such as [python,agent.py]",
    "python|server": "an interpreter that has verifiers, or the server of one",
}
_READ_BY = {
    "path": "python",
    "name": "gymnasium reasoning_gym verifiers",
    "arguments": "python gymnasium reasoning_gym openenv verifiers",
    "actions": "gymnasium",
    "server": "openenv verifiers",
    "action_field": "openenv",
    "python": "verifiers",
    "command": "command",
    "num_processes": "python gymnasium reasoning_gym verifiers",
}
