"""Packages of environments that do not install beside this project: each gets a folder under build/, where tests ask for it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "build" / "environments"
ASKED = "ALIGNER_TEST_ENVIRONMENTS"
PACKAGES = {  # what was tried; `reasoning_gym` sees this project's packages too, since it runs in the trainer's process
    "openenv": ["openenv==0.10.0"],
    "reasoning_gym": ["reasoning-gym==0.1.25"],
    "verifiers": ["verifiers[openenv]==0.4.0", "uv"],
}


def interpreter(name: str) -> Path:
    """The Python that has it. Skips the test unless ALIGNER_TEST_ENVIRONMENTS=1; the first time takes minutes."""
    if not os.environ.get(ASKED):
        pytest.skip(f"needs {PACKAGES[name][0]}, which has an environment of its own: {ASKED}=1 makes it under build/")
    folder = FOLDER / name
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        if name == "reasoning_gym":
            inside = subprocess.run(
                [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, capture_output=True, text=True
            )
            Path(inside.stdout.strip(), "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[name]], check=True)
        ready.touch()
    return python


def echo_server(folder: Path) -> str:
    """The command of the environment that OpenEnv's own `openenv init` writes, unmodified, for many sessions at a time."""
    python = interpreter("openenv")
    if not (folder / "story").exists():
        subprocess.run([python.with_name("openenv"), "init", "story"], cwd=folder, check=True, capture_output=True)
    (folder / "serve.py").write_text(
        "import sys\n\nimport uvicorn\nfrom openenv.core.env_server import create_app\n"
        "from story.models import StoryAction, StoryObservation\n"
        "from story.server.story_environment import StoryEnvironment\n\n"
        "app = create_app(StoryEnvironment, StoryAction, StoryObservation, env_name='story', max_concurrent_envs=256)\n"
        "uvicorn.run(app, host='127.0.0.1', port=int(sys.argv[1]), log_level='warning')\n"
    )
    return f"env PYTHONPATH={folder} {python} {folder / 'serve.py'} {{port}}"
