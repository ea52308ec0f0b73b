"""JSON files of a model's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError


def model_settings(path: Path) -> dict[str, Any]:
    """The settings in a model's JSON file, including its text part's; empty if there is no such file. Raises ConfigError."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    settings = settings if isinstance(settings, dict) else {}
    text = settings.get("text_config")
    return (text if isinstance(text, dict) else {}) | {name: value for name, value in settings.items() if value is not None}
