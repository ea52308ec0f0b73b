"""What the studio reads of run folders, while they are written and however damaged."""

from __future__ import annotations

import json
import os
import shlex
import time
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("nicegui", reason="nicegui is not installed")
from aligner.algorithms.registry import composed
from aligner.cluster.lease import LeaseRecord
from aligner.cluster.run_directory import RunDirectory
from aligner.errors import DataError
from aligner.reporting.jsonl import MetricsFile, MetricsTail, read_metrics
from aligner.reporting.samples_report import differences
from aligner.studio import runs as module
from aligner.studio.run_page import command_line
from aligner.studio.runs import Run, Runs, State
from aligner.studio.runs_page import last_figures, main_metric, row


def _run(folder: Path, name: str, steps: int = 0, **files: str) -> RunDirectory:
    run = RunDirectory(folder / name).create()
    if steps:
        metrics = MetricsFile(run.metrics)
        for step in range(1, steps + 1):
            metrics.write(step, {"rollout/reward": step / 10, "time/step": 1.0})
        metrics.close()
    for attribute, text in files.items():
        getattr(run, attribute).write_text(text)
    return run


def _look(run: Run) -> Run:
    run._looked = -1e9
    run.look()
    return run


def test_a_growing_file_is_read_by_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    tail.follow()
    assert tail.records == []
    writer = MetricsFile(path)
    for step in range(1, 30):
        writer.write(step, {"loss": 1.0 / step})
        if step % 3 == 0:
            writer.write(step, {"validation/loss": 2.0})  # merged into the line
        tail.follow()
        assert tail.records == read_metrics(path)
    with path.open("ab") as file:
        file.write(b'{"step": 30, "ti')
    tail.follow()
    assert [record.step for record in tail.records] == list(range(1, 30))
    resumed = MetricsFile(path, resumed_step=10)  # another file in its place
    resumed.write(11, {"loss": 5.0})
    tail.follow()
    assert tail.records == read_metrics(path) and len(tail.records) == 11
    decoded = []
    monkeypatch.setattr(
        "aligner.reporting.jsonl._decode", lambda line, source: decoded.append(line) or (_ for _ in ()).throw(DataError("x"))
    )
    with pytest.raises(DataError):
        tail.follow()
    assert len(decoded) == 1  # the last line alone is read again


def test_runs_are_found_below_and_not_within_each_other(tmp_path: Path) -> None:
    for name in ("a", "group/b", "group/deep/c"):
        _run(tmp_path, name, 2)
    (tmp_path / "a" / "export" / "run.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "group")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "run.json").write_text("{}")
    assert {run.name for run in Runs(tmp_path).all()} == {"a", "group/b", "group/deep/c"}
    assert [run.name for run in Runs(tmp_path / "a").all()] == ["."]


@pytest.mark.parametrize("name", ["../outside", "/etc", "..", "group/../../outside", "nothing", "", "a/../..", "a\0b"])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    _run(tmp_path, "outside", 1)
    _run(tmp_path, "inside/a", 1)
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "outside")
    runs = Runs(tmp_path / "inside")
    assert runs.get(name) is None and runs.get("link") is None and runs.get("a") is not None


def test_states(tmp_path: Path) -> None:
    lease = LeaseRecord(job="local-1", attempt="local-1.0", host="n1", pid=1, valid_seconds=60.0)
    held = json.dumps(asdict(lease))
    runs = {
        "done": _run(tmp_path, "done", 3, done='{"step": 3}'),
        "running": _run(tmp_path, "running", 3, lease=held),
        "failed": _run(tmp_path, "failed", 3),
        "dead": _run(tmp_path, "dead", 3, lease=held),
        "stopped": _run(tmp_path, "stopped", 3),
        "queued": _run(tmp_path, "queued", attempts='{"event": "submitted", "job": "77"}\n'),
        "halted": _run(tmp_path, "halted", 3, attempts='{"event": "ended", "job": "7", "ending": "halted", "reason": "loss is NaN"}\nhalf'),
        "damaged": _run(tmp_path, "damaged", 3, lease="nonsense"),
    }
    old = time.time() - 600
    os.utime(runs["dead"].lease, (old, old))
    runs["failed"].log("actor", 0).write_text("step 1\nerror: model.path=x: does not exist\n")
    stalled = _run(tmp_path, "stalled", 3, lease=held)
    stalled.stacks.mkdir()
    (stalled.stacks / "actor.report.txt").write_text("actor: rank 1 holds up rank 0\nmore\n")
    found = {run.name: run.state for run in Runs(tmp_path).all()}
    kinds = {name: state.kind for name, state in found.items()}
    assert kinds == {name: name for name in ("done", "running", "failed", "stopped", "queued", "stalled")} | {
        "dead": "failed",
        "halted": "failed",
        "damaged": "unknown",
    }
    assert found["failed"].why == "model.path=x: does not exist" and "loss is NaN" in found["halted"].why
    assert "no sign of life for 6" in found["dead"].why and found["queued"].why == "Slurm job 77"
    assert found["stalled"].why == "actor: rank 1 holds up rank 0" and "not a lease" in found["damaged"].why


def test_a_run_that_has_just_begun_adds_its_recipe_to_its_id(tmp_path: Path) -> None:
    made = _run(tmp_path, "run", 1, identity='{"run_id": "a"}')
    (made.health / "actor.0.json").parent.mkdir(exist_ok=True)
    (made.health / "actor.0.json").write_text("{}")
    run = _look(Run(tmp_path, tmp_path / "run"))
    assert run.recipe == "actor"
    made.identity.write_text('{"run_id": "a", "recipe": "grpo"}')
    assert _look(run).recipe == "grpo"


def test_a_run_that_the_studio_started_is_queued_or_failed_before_it_begins(tmp_path: Path) -> None:
    log = tmp_path / "group" / "run" / "logs" / "launch.log"
    log.parent.mkdir(parents=True)
    log.write_text("")
    (run,) = Runs(tmp_path).all()
    assert (run.name, run.state) == ("group/run", State("queued", "has not begun"))
    log.write_text("checked\nSubmitted batch job 12\n")
    assert _look(run).state == State("queued", "Slurm job 12")
    log.write_text("error: sbatch refused the job\n")
    assert _look(run).state == State("failed", "sbatch refused the job")


def test_the_row_of_a_run(tmp_path: Path) -> None:
    held = json.dumps(asdict(LeaseRecord(job="12", attempt="12.0", host="n1", pid=1, valid_seconds=60.0)))
    _run(tmp_path, "a b/<i>x</i>", 30, lease=held, config="loop: {max_steps: 40}\n")
    run = Runs(tmp_path).all()[0]
    now = time.time()
    for number, record in enumerate(run.steps):
        object.__setattr__(record, "time", now - 300 + 10.0 * number)
    shown = row(run)
    assert shown["name"] == "a b/<i>x</i>" and shown["link"] == "run/a%20b/%3Ci%3Ex%3C/i%3E"
    assert shown["progress"] == "30 of 40, 1m40s left" and shown["share"] == 0.75 and shown["figure"] == "rollout/reward 3"
    points = [tuple(map(float, point.split(","))) for point in shown["spark"].split()]
    assert len(points) == 30 and points[0] == (1.0, 22.0) and points[-1] == (119.0, 2.0)
    assert main_metric([]) == ("", "")


def test_damage_is_shown_and_does_not_hide_other_runs(tmp_path: Path) -> None:
    _run(tmp_path, "good", 2)
    _run(tmp_path, "bad", 2, config="a: [")
    (tmp_path / "bad" / "metrics.jsonl").write_text("nonsense\n")
    found = {run.name: run for run in Runs(tmp_path).all()}
    assert "not a line of metrics" in row(found["bad"])["why"] and not found["good"].problem and found["bad"].config == {}
    (tmp_path / "bad" / "metrics.jsonl").write_text('{"step": 1, "time": 1.0}\n')
    assert not _look(found["bad"]).problem


def test_what_differs_between_runs(tmp_path: Path) -> None:
    _run(tmp_path, "a", 2, config="optimizer: {lr: 0.1}\nmodel: {path: x}\n")
    _run(tmp_path, "b", 3, config="optimizer: {lr: 0.2}\nmodel: {path: x}\nextra: [1]\n")
    runs = [run for name in "ab" if (run := Runs(tmp_path).get(name)) is not None]
    assert differences({run.name: run.config for run in runs})[1:] == [("optimizer.lr", "0.1", "0.2"), ("extra", "", "[1]")]
    assert last_figures(runs)[:2] == [("metric", *(run.name for run in runs)), ("rollout/reward", "0.2", "0.3")]


def test_long_runs_are_judged_in_part(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a").create()
    lines = [json.dumps({"step": step, "time": float(step), "rollout/reward": 1.0, "rollout/reward_std": 0.0}) for step in range(1, 2001)]
    run.metrics.write_text("\n".join(lines) + "\n")
    found = Runs(tmp_path).get("a")
    assert found is not None
    diagnosis = found.diagnosis()
    assert 500 <= diagnosis.num_steps <= 1000 and diagnosis.last_step == 2000
    assert all(finding.steps[-1] == 2000 for finding in diagnosis.findings)
    assert found.diagnosis() is diagnosis


def test_the_command_that_continues_has_the_run_s_settings() -> None:
    settings = {"run.directory": "/a b/c", "model.path": "true", "optimizer.lr": 0.2, "data.train": [{"path": "x.jsonl", "weight": 2}]}
    settings |= {"model.tokenizer": "/t/k", "logging.progress": "plain", "loop.max_steps": 7}
    settings["logging.wandb_run_name"] = "{prompt} it''s $(rm) `x`"
    words = shlex.split(command_line("sft", settings))
    assert words[:4] == ["aligner", "launch", "local", "sft"] and {"model.tokenizer=/t/k", "logging.progress=plain"} <= set(words)
    config = composed("sft", words[4:])
    assert config.run.directory == "/a b/c" and config.model.path == "true" and config.optimizer.lr == 0.2 and config.loop.max_steps == 7
    assert config.logging.wandb_run_name == settings["logging.wandb_run_name"] and list(config.data.train)[0]["path"] == "x.jsonl"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config", "- a list\n"),
        ("config", "loop: {max_steps: many}\n"),
        ("config", "loop: none\n"),
        ("attempts", '5\n"text"\n'),
        ("identity", "[]"),
        ("learnt_nothing", b"\xff\xfe"),
        ("done", "[]"),
        ("metrics", b"\xff\n"),
    ],
)
def test_no_file_of_one_run_hides_the_others(tmp_path: Path, file: str, text: str | bytes) -> None:
    run = _run(tmp_path, "odd", 2)
    _run(tmp_path, "good", 2)
    if file == "learnt_nothing":
        run.done.write_text("{}")
    getattr(run, file).write_bytes(text.encode() if isinstance(text, str) else text)
    runs = Runs(tmp_path)
    assert {row(one)["name"] for one in runs.all()} == {"odd", "good"}


def test_archived_runs_are_in_a_file(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    assert runs.archived == set()
    runs.archive({"b", "a"})
    assert json.loads((tmp_path / module.ARCHIVE).read_text()) == {"archived": ["a", "b"]} and Runs(tmp_path).archived == {"a", "b"}
    for damaged in ("[]", '{"archived": [["odd"], 5]}'):
        (tmp_path / module.ARCHIVE).write_text(damaged)
        assert runs.archived == set()
