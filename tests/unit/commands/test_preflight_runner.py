"""The runner in one process: what depends on what, failures, and checks that do not come back."""

import threading

import pytest

from aligner.commands.preflight import framework
from aligner.commands.preflight.allocation import Abandoned
from aligner.commands.preflight.framework import Finding, Item, Level, Where
from aligner.errors import ConfigError, LaunchError


def item(name, observe=lambda context: "x", *, needs=(), level=Level.ok, timeout=5.0):
    def observed(context) -> str:
        return observe(context)

    return Item(name, Where.every_rank, observed, timeout, needs, judge=lambda context, seen: Finding(level=level, found=seen[0]))


def failing(error):
    def observe(context):
        raise error

    return observe


def test_what_needs_a_fatal_item_is_not_run_and_the_rest_is(context_of):
    shown = []
    run = framework.Runner(context_of(), progress=lambda name, finding: shown.append((name, finding.level)))
    run.run(
        [
            item("a", failing(ConfigError("model.path=x: no such directory"))),
            item("b", needs=("a",)),
            item("c", needs=("b",)),
            item("d", level=Level.warning),
            item("e", needs=("d", "not chosen")),
            item("f", failing(RuntimeError("odd"))),
        ]
    )
    assert shown == [("a", Level.fatal), ("b", Level.not_run), ("c", Level.not_run), ("d", Level.warning), ("e", Level.ok)] + [
        ("f", Level.fatal)
    ]
    assert run.context.findings["a"].found == "model.path=x: no such directory"
    assert run.context.findings["c"].found == "needs b"
    unexpected = run.context.findings["f"].found  # with its place
    assert unexpected.startswith("RuntimeError: odd (at ") and "test_preflight_runner.py" in unexpected
    assert not run.has_hung and not run.lost


def test_a_check_that_hangs_is_left_behind_and_named(context_of, monkeypatch):
    monkeypatch.setattr(framework, "THREAD_MARGIN_SECONDS", 0.0)
    release = threading.Event()
    run = framework.Runner(context_of(), timeout_seconds=0.2)
    findings = run.run([item("a", lambda context: release.wait(60)), item("b")])
    release.set()
    assert findings["a"].level is Level.fatal and findings["b"].level is Level.ok
    assert findings["a"].found.startswith("did not finish within") and "(wait)" in findings["a"].found
    assert run.has_hung


def test_a_rank_that_does_not_answer_is_lost(context_of, monkeypatch):
    monkeypatch.setattr(framework, "THREAD_MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(framework, "ANSWER_MARGIN_SECONDS", 0.1)
    run = framework.Runner(context_of(nodes=("n0", "n1")), timeout_seconds=0.1)
    findings = run.run([item("a"), item("b")])
    assert findings["a"].level is Level.fatal and findings["a"].found.startswith("rank 1 on n1: no answer")
    assert run.lost == [1]
    assert findings["b"] == Finding(level=Level.not_run, found="a rank was lost")


def test_a_wait_says_what_it_waited_for_and_ends_when_another_rank_failed(context_of):
    here = context_of(nodes=("n0", "n1")).allocation
    here.begin("files", 0.05)
    with pytest.raises(LaunchError, match=r"rank 0 waited for a word: rank 1 of 2 did not come \(on n1\)"):
        here.exchange("word", 1, what="a word")
    here.put("failed", 1)
    with pytest.raises(Abandoned):
        here.get("never", deadline=float("inf"), what="nothing")
