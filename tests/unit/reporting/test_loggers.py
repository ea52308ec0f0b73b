from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from aligner.errors import ConfigError
from aligner.reporting.config import LoggingConfig
from aligner.reporting.loggers import MetricLogger, NeverFatal, TensorBoardLogger, open_loggers
from aligner.reporting.rollout_table import SampleRow
from aligner.types import FinishReason

_ROW = SampleRow(prompt="p", response="r", reward=1.0, finish_reason=FinishReason.stop)


RUN_ID = "0123456789abcdef0123456789abcdef"


def _open(config: LoggingConfig, path: Path, warn=print) -> list[MetricLogger]:
    return open_loggers(
        config, directory=path, run_id=RUN_ID, tensorboard=path / "tensorboard", resumed_step=0, settings={"seed": 1}, warn=warn
    )


def test_tensorboard_has_scalars_and_samples_and_resume_hides_later_steps(tmp_path: Path) -> None:
    for resumed, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        logger = TensorBoardLogger(tmp_path, resumed_step=resumed, max_cell_chars=80)
        for step in steps:
            logger.log(step, {"reward/mean": step + resumed / 10})
        logger.table(steps[-1], [_ROW])
        logger.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("reward/mean")] == [(1, 1.0), (2, 2.0), (3, 3.2), (4, 4.2)]
    assert "samples/text_summary" in events.Tags()["tensors"]


class _Recorder:
    """A logger whose calls fail while `broken`."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.broken = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.broken:
            raise ConnectionError("no route")
        self.steps.append(step)

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        self.log(step, {})

    def close(self) -> None:
        self.log(-1, {})


def test_a_remote_logger_that_fails_warns_once_and_is_tried_again_later() -> None:
    inner, warnings, now = _Recorder(), [], [0.0]
    logger = NeverFatal(inner, "remote", warnings.append, clock=lambda: now[0])
    logger.log(1, {})
    inner.broken = True
    logger.log(2, {})  # fails: next attempt after 60 s
    now[0] = 59.0
    logger.log(3, {})  # not tried
    now[0] = 61.0
    logger.log(4, {})  # fails: next attempt 120 s later
    inner.broken = False
    now[0] = 180.0
    logger.log(5, {})  # not tried
    now[0] = 182.0
    logger.log(6, {})
    logger.log(7, {})
    assert inner.steps == [1, 6, 7]
    assert warnings == ["remote failed and is tried again later, the run continues: ConnectionError: no route"]
    logger.close()
    assert inner.steps[-1] == -1
    assert warnings[1:] == ["remote: 4 calls were lost; metrics.jsonl has all steps"]


@pytest.mark.parametrize("package, setting", [("wandb", {"wandb_project": "p"}), ("mlflow", {"mlflow_tracking_uri": "http://x"})])
def test_configured_but_not_installed(package: str, setting: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def missing(name: str, *arguments, **settings):
        if name.split(".")[0] == package:
            raise ImportError(f"No module named {package!r}")
        return real_import(name, *arguments, **settings)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=rf"{next(iter(setting))}=.* requires the package {package} .*pip install {package}"):
        _open(LoggingConfig(tensorboard=False, **setting), tmp_path)


def test_tensorboard_is_written_by_default_if_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (logger,) = _open(LoggingConfig(), tmp_path)
    logger.close()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # an import of it fails
    monkeypatch.setattr("aligner.reporting.loggers.find_spec", lambda name: None)
    assert _open(LoggingConfig(), tmp_path) == []
    with pytest.raises(ConfigError, match=r"logging\.tensorboard=True requires the package tensorboard"):
        _open(LoggingConfig(tensorboard=True), tmp_path)


class _FakeWandb(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.logged: list[dict] = []
        self.settings: dict = {}
        self.finished = False

    def init(self, **settings) -> _FakeWandb:
        self.settings = settings
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None: ...

    def log(self, values: dict) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True

    def Table(self, columns: list, data: list) -> tuple:
        return tuple(columns), data


def test_wandb_continues_the_run_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    identities = []
    for _ in range(2):
        (logger,) = _open(LoggingConfig(tensorboard=False, wandb_project="p"), tmp_path)
        identities.append(fake.settings["id"])
    logger.log(3, {"reward/mean": 0.5})
    logger.table(3, [_ROW])
    logger.close()
    assert identities == [RUN_ID] * 2 and fake.settings["resume"] == "allow"
    assert fake.settings["project"] == "p" and fake.settings["entity"] is None and fake.settings["config"] == {"seed": 1}
    assert fake.logged == [
        {"step": 3, "reward/mean": 0.5},
        {"step": 3, "samples": (("reward", "finish_reason", "prompt", "response"), [[1.0, "stop", "p", "r"]])},
    ]
    assert fake.finished


def test_a_logger_that_cannot_start_ends_the_run_at_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _FakeWandb()
    monkeypatch.setattr(fake, "init", lambda **_: 1 / 0)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(ConfigError, match="wandb_project='p' is set, but this logger cannot start: ZeroDivisionError"):
        _open(LoggingConfig(tensorboard=False, wandb_project="p"), tmp_path)


class _FakeMlflow:
    """What the logger asks of an MLflow client; as that does, it refuses another value of a parameter, and more than 100 at once."""

    parameters: dict[str, str]

    def __init__(self, tracking_uri: str) -> None: ...

    def get_experiment_by_name(self, name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(experiment_id="1")

    def create_run(self, experiment: str, run_name: str) -> types.SimpleNamespace:
        type(self).parameters = {}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="7"))

    def update_run(self, run_id: str, status: str) -> None: ...

    def log_dict(self, run_id: str, settings: dict, name: str) -> None: ...

    def get_run(self, run_id: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(data=types.SimpleNamespace(params=dict(self.parameters)))

    def log_batch(self, run_id: str, params: list[tuple[str, str]]) -> None:
        assert len(params) <= 100 and all(len(value) <= 500 for _, value in params)
        for name, value in params:
            assert self.parameters.setdefault(name, value) == value


def test_mlflow_gets_the_settings_as_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a start with other settings do not end the run: parameters of a run cannot be changed."""
    entities = types.SimpleNamespace(Metric=tuple, Param=lambda name, value: (name, value))
    modules = {"mlflow": None, "mlflow.entities": entities, "mlflow.tracking": types.SimpleNamespace(MlflowClient=_FakeMlflow)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module or types.ModuleType(name))
    settings = {"run": {"seed": 1, "directory": "d" * 600}, "reward": {"functions": {}, "arguments": {"é:x": [1, None]}}, "on": True}
    settings["many"] = {f"n{i}": i for i in range(150)}
    config = LoggingConfig(tensorboard=False, mlflow_tracking_uri="http://x")
    for seed in (1, 2):
        changed = settings | {"run": settings["run"] | {"seed": seed}, "new": seed}
        open_loggers(config, directory=tmp_path, run_id=RUN_ID, tensorboard=tmp_path, resumed_step=0, settings=changed, warn=pytest.fail)
    found = _FakeMlflow.parameters
    assert {name: found.pop(name) for name in ("run.seed", "on", "new", "reward.functions")} == {
        "run.seed": "1",
        "on": "true",
        "new": "1",
        "reward.functions": "{}",
    }
    assert found.pop("run.directory") == "d" * 500 and found.pop("reward.arguments.__x") == "[1, null]"
    assert found == {f"many.n{i}": str(i) for i in range(150)}


@pytest.mark.parametrize(
    "settings, field",
    [
        ({"progress": "live"}, "progress"),
        ({"wandb_entity": "me"}, "wandb_entity"),
        ({"mlflow_tracking_uri": "x", "mlflow_experiment": ""}, "mlflow_experiment"),
        ({"num_table_rows": -1}, "num_table_rows"),
        ({"max_cell_chars": 1}, "max_cell_chars"),
    ],
)
def test_settings_are_checked(settings: dict, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^logging.{field}="):
        LoggingConfig(**settings)
