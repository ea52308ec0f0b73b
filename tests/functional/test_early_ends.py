"""User code that ends a run's processes with exit code 0 has not finished the run, however it was started."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_jobs import Job, grpo_settings, launcher, train, write_task

pytestmark = pytest.mark.timeout(300)
REWARDS = {
    "exits": "import os\n\ndef reward(prompts, responses, answers):\n    os._exit(0)\n",
    "import": "import sys\n\nsys.exit(0)\n",
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Of GRPO with each of the rewards."""
    folder = tmp_path_factory.mktemp("early_ends")
    write_task(folder)
    for name, text in REWARDS.items():
        (folder / f"{name}.py").write_text(text)
    base = [*grpo_settings(folder), "loop.max_steps=2"]
    return {name: [*base, f"reward.function.path={folder / name}.py:reward"] for name in REWARDS}


@pytest.mark.parametrize("command", [train("grpo"), launcher("grpo")], ids=["directly", "launcher"])
def test_a_reward_function_that_calls_exit(command: tuple[str, ...], settings, tmp_path: Path) -> None:
    with Job(command, tmp_path / "run", settings["exits"]) as job:
        output = job.finish(1)
    assert "error: rank 0 was ended with exit code 0 before its work was done, by os._exit in " in output
    assert "exits.py:4 (reward)" in output and "finished" not in output
    assert not (tmp_path / "run" / "done.json").exists()


def test_a_reward_file_that_ends_the_program_when_it_is_imported(settings, tmp_path: Path) -> None:
    with Job(train("grpo"), tmp_path / "run", settings["import"]) as job:
        output = job.finish(2)
    assert "import.py: SystemExit: it ended the program (sys.exit(0) at " in output
    assert not (tmp_path / "run" / "done.json").exists()
