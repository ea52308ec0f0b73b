"""Text from outside in a whole run: names of fields, a reward function's prints and a rank's own bytes reach terminal and logs harmless."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from terminals import COLOUR, DRAWN, HOSTILE_NAMES, LIVE, on_a_terminal
from training_jobs import ROOT, grpo_settings, write_task

REWARD = """
import os, sys
def reward(prompts, responses, answers):
    print("printed \\x1b[\\x002J\\x1b]0;T\\x07\\x9b2J\\u202e \\x1b[31mred\\x1b[0m", flush=True)
    sys.stderr.write("erred \\x1b[\\x1b[2J2J\\x1b[8m\\n")
    os.write(1, b"bytes \\x1b[2J\\x1b]0;T\\x07\\xc2\\x9b2J\\n")
    return [float(len(response)) for response in responses]
"""


def job(task: Path, progress: str) -> list[str]:
    (task / "hostile.py").write_text(REWARD)
    records = (task / "prompts.jsonl").read_text().splitlines()
    hostile = [line[:-1] + f', "{name}": 1}}' for line, name in zip(records, HOSTILE_NAMES, strict=False)]
    (task / "prompts.jsonl").write_text("\n".join([*hostile, *records[len(hostile) :]]) + "\n")
    settings = [one for one in grpo_settings(task) if not one.startswith("logging.progress")]
    return [
        *("launch", "local", "grpo", *settings, f"logging.progress={progress}", "loop.max_steps=1"),
        *(f"run.directory={task / 'run'}", f"reward.function.path={task / 'hostile.py'}:reward"),
    ]


@pytest.mark.parametrize("progress", ["auto", "plain"])
def test_a_run_on_a_terminal(progress: str, tmp_path: Path) -> None:
    write_task(tmp_path)
    code, shown = on_a_terminal(job(tmp_path, progress), ROOT)
    assert code == 0, shown[-3000:]
    assert not LIVE.search((DRAWN if progress == "auto" else COLOUR).sub("", shown)), shown
    assert "\\x1b[2J\\x1b]0;T\\x07 (1 records)" in shown and "printed [2J2J \x1b[31mred" in shown and "erred [2J" in shown
    assert "\n[run]" not in shown.replace("\\n[run]", "") or progress == "plain"  # where the launcher speaks itself
    log = (tmp_path / "run" / "logs" / "actor.0.log").read_bytes().replace(b"bytes \x1b[2J\x1b]0;T\x07\xc2\x9b2J\n", b"")
    assert not LIVE.search(DRAWN.sub("", log.decode())) and json.loads((tmp_path / "run" / "done.json").read_text())
