"""What tests of whole runs share."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_jobs import write_task


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a module's runs, with the task of `write_task`."""
    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    return folder
