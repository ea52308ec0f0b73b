"""`hub`: a Hub of tests/fakes on this machine, to which HF_ENDPOINT points, with an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub
from huggingface_hub import constants


@pytest.fixture
def hub(tmp_path: Path, monkeypatch) -> Iterator[FakeHub]:
    with FakeHub() as server:
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_TOKEN_PATH": str(tmp_path / "no-token"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server
