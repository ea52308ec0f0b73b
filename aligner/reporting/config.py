"""Settings of the reporting. No heavy imports: the config root reads this module."""

from dataclasses import dataclass
from enum import Enum

from aligner.errors import ConfigError, check_numbers


class Progress(str, Enum):
    """What the terminal shows."""

    auto = "auto"  # live on a terminal, plain in a batch log
    live = "live"
    plain = "plain"  # one line a step
    off = "off"


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """`metrics.jsonl` is always written; the rest is chosen here. An empty string switches a logger off."""

    tensorboard: bool | None = None  # write <run>/tensorboard; null: if the package tensorboard is installed
    wandb_project: str = ""  # of Weights & Biases; empty: off
    wandb_entity: str = ""  # user or team of Weights & Biases; empty: your account's default
    wandb_run_name: str = ""  # name of the run there; empty: it chooses one
    mlflow_tracking_uri: str = ""  # of an MLflow server, or file:/path; empty: off
    mlflow_experiment: str = "aligner"  # name of the experiment there
    progress: Progress = Progress.auto  # on the terminal; auto: live on a terminal, plain (one line a step) in a batch log
    num_table_rows: int = 4  # sample rollouts on the terminal and in the loggers; 0: none (the file in rollouts/ has all of them)
    max_cell_chars: int = 240  # longer prompts and responses are cut in the tables (not in the file)
    diagnose: bool = True  # warn if the metrics show a failure that does not end the run (docs/diagnosis.md)

    def __post_init__(self) -> None:
        if not isinstance(self.progress, Progress):
            raise ConfigError(f"logging.progress={self.progress!r}: must be one of {', '.join(Progress.__members__)}")
        if self.wandb_entity and not self.wandb_project:
            raise ConfigError(f"logging.wandb_entity={self.wandb_entity}: needs logging.wandb_project; allowed: both or neither")
        if self.mlflow_tracking_uri and not self.mlflow_experiment:
            raise ConfigError("logging.mlflow_experiment='': logging.mlflow_tracking_uri needs one; allowed: a name")
        check_numbers(self, "logging", not_negative=("num_table_rows",))
        if self.max_cell_chars < 8:
            raise ConfigError(f"logging.max_cell_chars={self.max_cell_chars}: must be at least 8")
