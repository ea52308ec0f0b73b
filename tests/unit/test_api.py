"""What `aligner.train` gives a script and a notebook to look at: a result's table and curve, errors in one sentence, a bar."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from aligner import api
from aligner.errors import ConfigError
from aligner.reporting.jsonl import MetricsFile


def result(folder: Path, steps: list[dict[str, float]]) -> api.Result:
    if steps:
        file = MetricsFile(folder / "metrics.jsonl")
        for number, metrics in enumerate(steps, 1):
            file.write(number, metrics)
        file.close()
    metrics = [{"step": number, **one} for number, one in enumerate(steps, 1)]
    return api.Result(directory=folder, metrics=metrics, checkpoint=None, export=None)


def test_a_result_is_short_and_has_a_summary(tmp_path: Path) -> None:
    found = result(tmp_path, [{"optim/lr": 1e-3, "sft/loss": loss} for loss in (2.0, 1.0, 0.5)])
    assert repr(found) == f"Result(steps=3, directory={str(tmp_path)!r}; summary() has its metrics)"
    lines = found.summary().splitlines()
    assert lines[0].startswith("steps 1 to 3 in ") and lines[1].split() == ["metric", "first", "last", "best", "course"]
    assert any(line.split()[:6] == ["loss", "2.0000", "0.5000", "0.5000", "@", "3"] for line in lines)
    assert "<td>loss</td><td>2.0000</td><td>0.5000</td><td>0.5000 @ 3</td><td>█▃▁</td>" in found._repr_html_()  # for a notebook


def test_a_recipe_that_writes_data_has_no_steps_to_show(tmp_path: Path) -> None:
    found = result(tmp_path / "<b>", [])
    assert "no steps" in found.summary() and "<b>" not in found._repr_html_() and repr(found).startswith("Result(steps=0")


def test_a_mistake_is_one_sentence_in_a_script_and_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(ConfigError) as raised:
        api.train("sft", max_stps=3)
    error = raised.value  # as a notebook asks, and then as a script ends
    assert error._render_traceback_() == [f"ConfigError: {error}"]
    sys.excepthook(type(error), error, error.__traceback__)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{__file__}:" in said and "did you mean loop.max_steps?" in said
    try:
        raise ValueError("of the user's own code")
    except ValueError as other:
        sys.excepthook(type(other), other, other.__traceback__)
    assert capsys.readouterr().err.startswith("Traceback")
    theirs = lambda *_: None  # noqa: E731
    monkeypatch.setattr(sys, "excepthook", theirs)
    with pytest.raises(ConfigError):
        api.train("sft", max_stps=3)
    assert sys.excepthook is theirs  # a hook of somebody else stays


def test_a_bar_follows_the_steps_in_a_notebook(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert not api._is_notebook()
    shown: list[str] = []
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: type("ZMQInteractiveShell", (), {})()
    display.HTML = str
    display.display = lambda html, display_id: SimpleNamespace(update=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    assert api._is_notebook()
    bar = api._Bar()
    bar.write("[trainer] 16 of 16 records used\n")
    bar.write("[trainer] step  7/40  loss 0.5 <  ETA 3 s\n")
    bar.flush()
    assert capsys.readouterr().out == "[trainer] 16 of 16 records used\n"
    assert shown == ['<progress value="7" max="40"></progress> <code>step  7/40  loss 0.5 &lt;  ETA 3 s</code>']
