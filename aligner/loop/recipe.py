"""What a recipe is: a module of `aligner.algorithms`, or of another package, with a `RECIPE`. Launchers, `aligner plan`, the preflight and
the report know no recipe by name: they ask `aligner.algorithms.registry` for it, and its config for its traits.

`resolve` reads a setting that names one of ours (`algorithm.advantage_estimator=rloo`) or a function of the user's
(`algorithm.advantage_estimator=my_file.py:opo`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aligner.cluster.run_directory import POLICY
from aligner.errors import ConfigError
from aligner.files import conf_directory
from aligner.models.config import ModelConfig
from aligner.models.optimizer import OptimizerConfig
from aligner.parallel.topology import ParallelConfig
from aligner.planner.workload import Head, Work
from aligner.reporting.formats import Column
from aligner.rewards.load import FORMS, load_reward_function
from aligner.servers.config import ServerConfig

if TYPE_CHECKING:
    from aligner.loop.config import JobRun
    from aligner.loop.loop import Algorithm
    from aligner.models.trainable import TrainableModel

Options = TypeVar("Options", bound=Enum)


def text_of(value: str) -> str:
    """A member of an enum as the text that names it; any other text as it is. For fields that may be given either."""
    return value.value if isinstance(value, Enum) else value


def named(setting: str, value: str, options: type[Options]) -> Options | None:
    """Which of ours the value names; None for a function of the user's, which is not imported. Raises ConfigError for neither."""
    text = text_of(value)
    if ":" in text:
        return None
    if text not in [option.value for option in options]:
        raise ConfigError(f"{setting}={text}: allowed: {', '.join(option.value for option in options)}, or {FORMS.rpartition(' or ')[2]}")
    return options(text)


def resolve(setting: str, value: str, options: type[Options], parameters: Sequence[str]) -> Options | Callable[..., Any]:
    """As `named`, and imports the user's function. Raises ConfigError if it cannot be called with these parameters by position."""
    found = named(setting, value, options)
    if found is not None:
        return found
    function = load_reward_function(value, setting)
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        name = value.rpartition(":")[2]
        raise ConfigError(f"{setting}={value}: {error}; expected {name}({', '.join(parameters)})") from error
    return function


C = TypeVar("C", bound="JobRun")


@dataclass(frozen=True, kw_only=True, slots=True)
class UsedModel:
    """A model that a component loads."""

    component: str
    key: str  # of its settings
    config: ModelConfig
    is_scalar: bool = False  # has one number per token instead of logits
    needs_head: bool = False  # a scalar head that is not in the files would be random, and never be trained
    reads_text: bool = False  # it is sent texts, not token ids: its tokenizer may be another one


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A component that answers the one that trains, from an allocation of its own."""

    name: str
    num_ranks: int
    parallel: ParallelConfig
    settings: ServerConfig
    work: Work | None  # None: a function, which needs no model
    model: ModelConfig
    optimizer: OptimizerConfig | None = None  # None: frozen
    check: Callable[[ModelConfig, Any, int], None] | None = None  # (model, architecture, ranks): raises ConfigError for what it refuses


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What a run of these settings is, for everything that does not run it."""

    role: str  # of the component that trains or writes: actor, trainer, writer
    work: Work  # of one of its steps
    head: Head = Head.language
    has_reference: bool = False  # a frozen copy of what is trained
    has_engine: bool = False  # it samples, as `rollout` says
    checkpoints: Sequence[str] = (POLICY,)  # folders of a run directory's checkpoints that have to agree


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """What a recipe makes of its settings: an algorithm, and the model that it trains."""

    algorithm: Algorithm
    model: TrainableModel
    critic: Any = None  # saves and resumes with it
    checkpoint: str = POLICY  # folder of its checkpoints


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(Generic[C]):
    """`name` is what users type, and its config's. `build(job)` makes what is trained, or does all of the work of a job that writes.

    `config` is a subclass of TrainerRun, OnlineRun or WritingRun, which say what `job` is and what `build` returns.
    """

    name: str
    config: type[C]
    build: Callable[[Any], Any]
    columns: Sequence[Column]  # that the progress view and the final summary show
    component: str = ""  # what its files in the run directory are called by; "": its name
    conf: Path | None = None  # folder of its configs and presets; None: conf/<name>
    presets_of: Sequence[str] = ()  # other recipes, whose presets it takes too

    def folders(self) -> list[Path]:
        """Where its configs (in the first one) and presets are."""
        others = [conf_directory() / name for name in self.presets_of]
        return [self.conf or conf_directory() / self.name, *others, conf_directory()]

    def __post_init__(self) -> None:
        if missing := sorted(getattr(self.config, "__abstractmethods__", ())):
            raise TypeError(
                f"recipe {self.name}: {self.config.__name__} has no method {', '.join(missing)} (see aligner.loop.config.JobRun)"
            )

    def run(self, config: C) -> int:
        """Run it on this process, which is one rank. Returns the exit code: 0, or 75 if it stopped before its last step."""
        return config.start(self)
