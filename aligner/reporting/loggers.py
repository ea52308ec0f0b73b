"""TensorBoard, Weights & Biases and MLflow behind one protocol; each is imported only if configured.

A configured logger that is not installed, or cannot start, ends the run before it begins. Later errors never end it: they are reported
once, the logger is retried after 1, 2, 4, ... minutes, and the number of lost calls is reported at the end. `metrics.jsonl` has every step.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from aligner.errors import ConfigError
from aligner.reporting.config import LoggingConfig
from aligner.reporting.rollout_table import SampleRow, cell, markdown_table
from aligner.settings.schema import flat

_RETRY_SECONDS = 60.0
_BATCH_PARAMETERS, _VALUE_CHARS, _NAME_CHARS = 100, 500, 250  # MLflow's limits


class MetricLogger(Protocol):
    """Receives what a run reports, on rank 0."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def table(self, step: int, rows: Sequence[SampleRow]) -> None: ...

    def close(self) -> None: ...


class TensorBoardLogger:
    """Event files; on resume, existing events of later steps are hidden."""

    def __init__(self, directory: Path, *, resumed_step: int, max_cell_chars: int) -> None:
        summaries = _imported("torch.utils.tensorboard", "tensorboard=True", "tensorboard")
        self._writer = summaries.SummaryWriter(str(directory), purge_step=resumed_step + 1 if resumed_step else None)
        self._max_cell_chars = max_cell_chars

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._writer.add_text("samples", markdown_table(rows, self._max_cell_chars), step)

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """The W&B run with the run's own id, which a resumed or moved run continues. Steps are a separate metric, and may repeat."""

    def __init__(self, config: LoggingConfig, directory: Path, run_id: str, settings: Mapping[str, Any]) -> None:
        self._wandb = wandb = _imported("wandb", f"wandb_project={config.wandb_project!r}", "wandb")
        self._max_cell_chars = config.max_cell_chars
        self._run = wandb.init(
            project=config.wandb_project,
            entity=config.wandb_entity or None,
            name=config.wandb_run_name or directory.name,
            id=run_id,
            resume="allow",
            dir=str(directory),
            config=dict(settings),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        most = self._max_cell_chars
        data = [[row.reward, row.finish_reason.value, cell(row.prompt, most), cell(row.response, most)] for row in rows]
        self._run.log({"step": step, "samples": self._wandb.Table(columns=["reward", "finish_reason", "prompt", "response"], data=data)})

    def close(self) -> None:
        self._run.finish()


class MLflowLogger:
    """One MLflow run per run directory (its id is kept there); the settings are its parameters, and the artifact `config.json`."""

    def __init__(self, config: LoggingConfig, directory: Path, settings: Mapping[str, Any]) -> None:
        setting = f"mlflow_tracking_uri={config.mlflow_tracking_uri!r}"
        entities, tracking = (_imported(f"mlflow.{name}", setting, "mlflow") for name in ("entities", "tracking"))
        self._metric = entities.Metric
        self._max_cell_chars = config.max_cell_chars
        self._client = tracking.MlflowClient(tracking_uri=config.mlflow_tracking_uri)
        known = directory / "mlflow_run_id"
        if not known.exists():
            experiment = self._client.get_experiment_by_name(config.mlflow_experiment)
            number = experiment.experiment_id if experiment else self._client.create_experiment(config.mlflow_experiment)
            run = self._client.create_run(number, run_name=directory.name)
            known.write_text(run.info.run_id)
        self._run_id = known.read_text().strip()
        self._client.update_run(self._run_id, status="RUNNING")
        self._client.log_dict(self._run_id, dict(settings), "config.json")
        known_parameters = self._client.get_run(self._run_id).data.params  # they cannot be changed: those of the first start stay
        new = [entities.Param(name, value) for name, value in parameters(settings).items() if name not in known_parameters]
        for start in range(0, len(new), _BATCH_PARAMETERS):
            self._client.log_batch(self._run_id, params=new[start : start + _BATCH_PARAMETERS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._run_id, metrics=[self._metric(name, float(value), now, step) for name, value in metrics.items()])

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._client.log_text(self._run_id, markdown_table(rows, self._max_cell_chars), f"samples/step_{step:06d}.md")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class NeverFatal:
    """A remote logger whose errors are reported once and never end the run."""

    def __init__(self, logger: MetricLogger, name: str, warn: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._name, self._warn, self._clock = logger, name, warn, clock
        self._pause = self._again_at = 0.0
        self._num_lost = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._try(lambda: self._logger.log(step, metrics))

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._try(lambda: self._logger.table(step, rows))

    def close(self) -> None:
        self._again_at = 0.0
        self._try(self._logger.close)
        if self._num_lost:
            self._warn(f"{self._name}: {self._num_lost} calls were lost; metrics.jsonl has all steps")

    def _try(self, call: Callable[[], None]) -> None:
        if self._pause and self._clock() < self._again_at:
            self._num_lost += 1
            return
        try:
            call()
        except Exception as error:  # whatever a third-party client raises: training matters more than its chart
            if not self._num_lost:
                self._warn(f"{self._name} failed and is tried again later, the run continues: {type(error).__name__}: {error}")
            self._num_lost += 1
            self._pause = 2 * self._pause or _RETRY_SECONDS
            self._again_at = self._clock() + self._pause
        else:
            self._pause = 0.0


def open_loggers(
    config: LoggingConfig,
    *,
    directory: Path,
    run_id: str,
    tensorboard: Path,
    resumed_step: int,
    settings: Mapping[str, Any],
    warn: Callable[[str], None],
) -> list[MetricLogger]:
    """The loggers that `config` selects. Raises ConfigError for one that is not installed or cannot start (wrong address, no login)."""
    starts: dict[str, tuple[str, Callable[[], MetricLogger]]] = {}
    if find_spec("tensorboard") if config.tensorboard is None else config.tensorboard:
        make = partial(TensorBoardLogger, tensorboard, resumed_step=resumed_step, max_cell_chars=config.max_cell_chars)
        starts["TensorBoard"] = f"tensorboard={config.tensorboard}", make
    if config.wandb_project:
        starts["W&B"] = f"wandb_project={config.wandb_project!r}", partial(WandbLogger, config, directory, run_id, settings)
    if config.mlflow_tracking_uri:
        starts["MLflow"] = f"mlflow_tracking_uri={config.mlflow_tracking_uri!r}", partial(MLflowLogger, config, directory, settings)
    loggers: list[MetricLogger] = []
    for name, (setting, start) in starts.items():
        try:
            loggers.append(NeverFatal(start(), name, warn))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"logging.{setting} is set, but this logger cannot start: {type(error).__name__}: {error}") from error
    return loggers


def parameters(settings: Mapping[str, Any]) -> dict[str, str]:
    """Nested settings as MLflow's parameters: dotted names in its alphabet, values as text, both cut to its limits."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in flat(settings)}
    return {re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)[:_NAME_CHARS]: text[:_VALUE_CHARS] for name, text in texts.items()}


def _imported(module: str, setting: str, package: str) -> Any:
    """The module. Raises ConfigError, naming the setting that requires its package, if that is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"logging.{setting} requires the package {package} ({error}): pip install {package}, or switch it off") from error
