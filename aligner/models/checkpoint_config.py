"""How a run writes, checks and keeps its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from aligner.errors import ConfigError


class BestMode(str, Enum):
    """Which values of the best metric are better."""

    max = "max"
    min = "min"


class DamagedCheckpoint(str, Enum):
    """What a run does whose newest checkpoint is damaged."""

    fall_back = "fall_back"
    stop = "stop"


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Applies to the actor and the critic alike; what is kept of one is kept of the other."""

    asynchronous: bool = False  # go on training while a thread writes the files; costs host memory for one copy of the saved state
    verify: bool = True  # compare every file with its SHA-256 before a checkpoint is loaded
    read_back: bool = False  # read a checkpoint back before it becomes `latest`; costs host memory for one copy of what a rank writes
    keep: int = 0  # newest checkpoints that stay; 0: all
    best_metric: str = ""  # of validation, e.g. validation/accuracy: the best checkpoints stay, `best` names the first; empty: off
    best_mode: BestMode = BestMode.max  # which values of best_metric are better: the largest or the smallest
    keep_best: int = 1  # how many stay for their best_metric
    write_timeout_seconds: float = 1200.0  # for writing the files of one checkpoint

    def __post_init__(self) -> None:
        if self.keep < 0:
            raise ConfigError(f"checkpoint.keep={self.keep}: must not be negative (0 keeps all)")
        if self.keep_best < 1:
            raise ConfigError(f"checkpoint.keep_best={self.keep_best}: must be at least 1")
        if self.write_timeout_seconds <= 0:
            raise ConfigError(f"checkpoint.write_timeout_seconds={self.write_timeout_seconds}: must be above 0")
