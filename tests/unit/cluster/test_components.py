from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.cluster.component import Component, LocalLauncherConfig, check_components, rank_environment
from aligner.cluster.run_directory import RunDirectory, ServiceWatch
from aligner.errors import ConfigError, LaunchError


def _component(name: str, **settings) -> Component:
    return Component(name=name, command=("true",), **settings)


@pytest.mark.parametrize("name", ["", "a/b", "..", "run", "a b", "launcher"])
def test_names_must_be_usable_as_file_names(name: str) -> None:
    with pytest.raises(ConfigError, match="component name"):
        _component(name)


def test_what_cannot_form_a_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="each name once"):
        check_components([_component("a", main=True), _component("a")], ())
    with pytest.raises(ConfigError, match="is main"):
        check_components([_component("a")], ())
    with pytest.raises(ConfigError, match=r"'b'; allowed: one of \['a'\]"):
        check_components([_component("a", main=True)], ("b",))
    with pytest.raises(ConfigError, match="num_processes"):
        _component("a", num_processes=0)
    with pytest.raises(ConfigError, match="command"):
        Component(name="a", command=())


def test_rank_environment_is_torchruns() -> None:
    component = _component("a", num_processes=2, env={"X": "1", "OMP_NUM_THREADS": "3"})
    environment = rank_environment(component, 1, 2345, {"OMP_NUM_THREADS": "2", "RANK": "9"})
    assert environment == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "2345",
        "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "1",
        "X": "1",
    }
    assert rank_environment(_component("a"), 0, 1, {})["OMP_NUM_THREADS"] == "1"
    assert rank_environment(_component("a"), 0, 1, {"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "2"


def test_a_service_that_waits_for_its_turn_is_not_late(tmp_path: Path) -> None:
    """Nor does what an earlier start has left announce one."""
    run = RunDirectory(tmp_path / "run").create()
    run.service("critic").write_text('{"url": "http://dead"}')
    watch = ServiceWatch(run, ["critic"], ["critic"], 0.0)
    assert not run.service("critic").exists()
    run.service("critic").write_text(json.dumps({"state": "waiting"}))
    assert watch.poll() == []
    run.service("critic").write_text(json.dumps({"state": "loading"}))
    with pytest.raises(LaunchError, match=r"critic not ready: waited \d s for .*/services/critic.json"):
        watch.poll()


@pytest.mark.parametrize(
    "field, value",
    [
        ("grace_seconds", -1.0),
        ("shutdown_timeout_seconds", float("inf")),
        ("ready_timeout_seconds", 0.0),
        ("num_failure_lines", 0),
    ],
)
def test_settings_are_checked(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        LocalLauncherConfig(**{field: value})
