"""What code that does not run a recipe asks of its settings: which job it is, what a step computes, which models and servers it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from aligner.cluster.run_directory import POLICY
from aligner.models.config import ModelConfig
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel.topology import ParallelConfig
from aligner.planner.workload import Head, Work
from aligner.servers.config import ServerConfig


class Kind(str, Enum):
    """What a run does; `aligner.jobs.start` has the job of each."""

    trains = "trains"  # on existing data
    samples = "samples"  # and learns from its own samples
    writes = "writes"  # a data set, instead of training


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
    """A component that serves the trainer, from an allocation of its own."""

    name: str
    num_ranks: int
    parallel: ParallelConfig
    settings: ServerConfig
    work: Work | None  # None: a function, which needs no model
    model: ModelConfig
    optimizer: OptimizerConfig | None = None  # None: frozen
    check: Callable[[ModelConfig, Any, int], None] | None = None  # (model, architecture, ranks): raises ConfigError for what it refuses
    guest: Server | None = None  # another one, in its processes


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """Properties of a run with these settings, for code that does not run it."""

    role: str  # of the component that trains or writes: actor, trainer, writer
    work: Work  # of one of its steps
    head: Head = Head.language
    has_reference: bool = False  # a frozen copy of what is trained
    has_engine: bool = False  # it samples, as `rollout` says
    checkpoints: Sequence[str] = (POLICY,)  # folders of a run directory's checkpoints that have to agree
