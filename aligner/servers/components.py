"""Settings of the components behind servers: the critic and the reward."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import Enum
from operator import attrgetter
from typing import Any

from aligner.errors import AT_LEAST_1, NOT_NEGATIVE, ConfigError, check_range
from aligner.models.config import ModelConfig
from aligner.models.modules.scalar_head import HeadGradient
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel.topology import ParallelConfig
from aligner.rewards.config import NamedRewardConfig, RewardFunctionConfig, check_parts
from aligner.servers.config import ServerConfig

SERVERS = ("critic", "reward")  # components that answer the one that trains, and the sections of their settings
_SECTIONS = {"model": ModelConfig, "parallel": ParallelConfig, "optimizer": OptimizerConfig, "server": ServerConfig}
_KEYS = {name: rf"{name}\.(?:{'|'.join(field.name for field in fields(section))})" for name, section in _SECTIONS.items()}


@contextmanager
def in_section(path: str, *, own_layout: bool = True) -> Iterator[None]:
    """A ConfigError from within names the settings of the component at `path` as they are typed: `critic.parallel.tp`, not `parallel.tp`.

    Checks of a model and its layout do not know the component. With an empty path the error stays unchanged. Without its `own_layout` the
    component has the trainer's `parallel`.
    """
    try:
        yield
    except ConfigError as error:
        if not path:
            raise
        keys = "|".join(key for name, key in _KEYS.items() if own_layout or name != "parallel")
        own_key = rf"(?<![\w./])(?=(?:{keys})\b)"  # not below another section, and no file's name
        raise ConfigError(re.sub(own_key, f"{path}.", str(error))) from error


@dataclass(kw_only=True, slots=True)
class ActorConfig:
    """What the launchers start the actor with. Its other settings have no section: `model`, `parallel`, `num_processes`, ..."""

    environment: str = ""  # virtual environment that the launchers start it in (folder or python); empty: their own


class CriticKind(str, Enum):
    """Where the critic of a PPO run computes."""

    server = "server"  # in a component of its own, behind a server
    model = "model"  # in the actor's processes, in the actor's layout: a run without servers
    head = "head"  # a head on the policy's own hidden states: no second model


@dataclass(kw_only=True, slots=True)
class CriticHeadConfig:
    """The critic as a head of values on the policy."""

    gradient: HeadGradient = HeadGradient.joint  # joint: the policy's trunk learns values too; detached: the head alone does
    coef: float = 0.1  # weight of the value loss beside the policy's, in the same update

    def __post_init__(self) -> None:
        if not 0 < self.coef < math.inf:
            raise ConfigError(f"critic.head.coef={self.coef}: must be finite and above 0")


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    """The critic of a PPO run: a value model behind a server or in the actor's processes, or a head on the policy."""

    kind: CriticKind = CriticKind.server  # a component of its own behind a server, a model in the actor's processes, a head on the policy
    head: CriticHeadConfig = field(default_factory=CriticHeadConfig)  # with kind=head
    model: ModelConfig = field(default_factory=ModelConfig)  # path: usually a reward model's checkpoint
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # how its model is split over ranks
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)  # how it listens, how long it waits and how much it accepts
    num_processes: int = 1  # ranks, however they are started
    environment: str = ""  # virtual environment that the launchers start it in (folder or python); empty: their own
    clip: float = 0.2  # of the value around the old value; 0: off
    mini_batch_size: int = 128  # rollouts per optimizer step
    num_epochs: int = 1  # passes over a step's rollouts
    with_reward: bool = False  # its ranks serve the reward too, in its layout; reward.num_processes, .parallel and .server are unused
    accept_gap: bool = False  # accept a critic that missed some of the policy's training; false: the run ends and lists what is missing

    def __post_init__(self) -> None:
        check_range(self, "critic", AT_LEAST_1, "num_processes", "mini_batch_size", "num_epochs")
        check_range(self, "critic", NOT_NEGATIVE, "clip", note=" (0 is off)")

    @property
    def is_served(self) -> bool:
        return self.kind is CriticKind.server

    def check_served(self, parallel: ParallelConfig, num_processes: int) -> None:
        """Raise ConfigError for settings of a component of its own, if the critic is in the actor's processes, of this layout."""
        if self.kind is not CriticKind.head and self.head != CriticHeadConfig():
            raise ConfigError(f"critic.head: critic.kind={self.kind.value} has no head on the policy; allowed: critic.kind=head")
        if self.is_served:
            return
        own: dict[str, tuple[Any, Sequence[Any]]] = {
            "num_processes": (self.num_processes, (1, num_processes)),
            "parallel": (self.parallel, (ParallelConfig(), parallel)),
            "environment": (self.environment, ("",)),
            "with_reward": (self.with_reward, (False,)),
            "accept_gap": (self.accept_gap, (False,)),
        }
        defaults = ServerConfig()
        own |= {f"server.{one.name}": (getattr(self.server, one.name), (getattr(defaults, one.name),)) for one in fields(self.server)}
        self._check(own, "has no component of its own: the critic is in the actor's processes and layout", "critic.kind=server")

    def check_head(self, model: ModelConfig, optimizer: OptimizerConfig, algorithm: Any) -> None:
        """Raise ConfigError for settings that a head on the policy does not have: it is trained with the policy, which has these."""
        defaults, own = CriticConfig(), {}
        for section, of_policy, names in (
            ("", algorithm, ("mini_batch_size", "num_epochs")),
            ("model.", model, [one.name for one in fields(model)]),
            ("optimizer.", optimizer, [one.name for one in fields(optimizer) if one.name not in ("lr", "min_lr")]),
        ):
            read = {section + name: (attrgetter(section + name), getattr(of_policy, name)) for name in names}
            own |= {name: (get(self), (get(defaults), value)) for name, (get, value) in read.items()}
        self._check(own, "is trained with the policy, in its updates", "the policy's")

    def _check(self, own: Mapping[str, tuple[Any, Sequence[Any]]], why: str, instead: str) -> None:
        for name, (value, allowed) in own.items():
            if value not in allowed:
                written = "" if name == "parallel" else f"={value}"
                raise ConfigError(
                    f"critic.{name}{written}: critic.kind={self.kind.value} {why}; allowed: {instead}, or leave critic.{name} out"
                )


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """Who scores responses: a Python function (`function.path`), the weighted sum of several (`functions`), or a reward model
    (`model.path`); behind a server with `serve`.
    """

    serve: bool = False  # a component of its own behind a server; else a function in the actor's processes
    function: RewardFunctionConfig = field(default_factory=RewardFunctionConfig)  # a Python function that scores responses
    functions: dict[str, NamedRewardConfig] = field(default_factory=dict)  # by name, instead of `function`
    model: ModelConfig = field(default_factory=ModelConfig)  # a reward model
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # how its model is split over ranks
    attribute_weights: list[float] = field(default_factory=list)  # of a reward model with several outputs: the reward is their weighted sum
    server: ServerConfig = field(default_factory=ServerConfig)  # how it listens, how long it waits and how much it accepts
    num_processes: int = 1  # ranks, however they are started
    environment: str = ""  # virtual environment that the launchers start its server in (folder or python); empty: their own

    def __post_init__(self) -> None:
        check_range(self, "reward", AT_LEAST_1, "num_processes")
        if not all(map(math.isfinite, self.attribute_weights)) or (self.attribute_weights and not any(self.attribute_weights)):
            raise ConfigError(f"reward.attribute_weights={self.attribute_weights}: must be finite, and not all of them 0")
        if self.functions and self.function.path:
            raise ConfigError(
                f"reward.function.path={self.function.path} and reward.functions.{', '.join(self.functions)}: give one of the two; "
                "a single function is one of reward.functions too"
            )
        check_parts(self.functions)
        served = [name for name, part in self.functions.items() if part.served]
        if served and not self.serve:
            raise ConfigError(f"reward.functions.{served[0]}.served=true: needs reward.serve=true, and reward.model.path")
        if self.functions and self.serve and not served:
            raise ConfigError(
                f"reward.serve=true: none of reward.functions ({', '.join(self.functions)}) is the reward model; add one with served=true"
            )

    def check_named(self) -> None:
        """Raise ConfigError if no setting determines how responses are scored (incomplete settings may be shown, but not run)."""
        if self.function.path or (self.functions and not self.serve):
            return
        if not self.serve:
            raise ConfigError(
                "reward.function.path='': name a reward function, or set reward.serve=true with reward.model.path to use a reward model"
            )
        if not self.model.path:
            raise ConfigError("reward.model.path='': name the reward model's checkpoint, or a function in reward.function.path")

    @property
    def has_functions(self) -> bool:
        """Whether Python functions or endpoints score responses, alone or beside a reward model."""
        return bool(self.function.path or self.functions)
