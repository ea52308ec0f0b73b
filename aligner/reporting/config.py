"""Settings of the reporting (a module without heavy imports: the config root reads it)."""

from dataclasses import dataclass
from enum import Enum

from aligner.errors import ConfigError


class Progress(str, Enum):
    """What the terminal shows."""

    auto = "auto"  # live on a terminal, plain in a batch log
    live = "live"
    plain = "plain"  # one line a step
    off = "off"


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """`metrics.jsonl` is always written; the rest is chosen here. An empty string switches a logger off.

    `num_table_rows`: sample rollouts on the terminal and in the loggers (the file in `rollouts/` has all that were given).
    `max_cell_chars`: longer prompts and responses are cut in the tables (not in the file).
    """

    tensorboard: bool = True
    wandb_project: str = ""
    wandb_entity: str = ""
    wandb_run_name: str = ""
    mlflow_tracking_uri: str = ""
    mlflow_experiment: str = "aligner"
    progress: Progress = Progress.auto
    num_table_rows: int = 4
    max_cell_chars: int = 240
    diagnose: bool = True  # say where the metrics show a failure that ends no run (docs/diagnosis.md)

    def __post_init__(self) -> None:
        if not isinstance(self.progress, Progress):
            raise ConfigError(
                f"LoggingConfig.progress is {self.progress!r}; allowed: Progress.{', Progress.'.join(p.name for p in Progress)}"
            )
        if self.wandb_entity and not self.wandb_project:
            raise ConfigError(f"LoggingConfig.wandb_entity is {self.wandb_entity!r} without wandb_project; allowed: both or neither")
        if self.mlflow_tracking_uri and not self.mlflow_experiment:
            raise ConfigError("LoggingConfig.mlflow_experiment is empty; allowed: a name, where mlflow_tracking_uri is set")
        if self.num_table_rows < 0:
            raise ConfigError(f"LoggingConfig.num_table_rows is {self.num_table_rows}; allowed: >= 0")
        if self.max_cell_chars < 8:
            raise ConfigError(f"LoggingConfig.max_cell_chars is {self.max_cell_chars}; allowed: >= 8")
