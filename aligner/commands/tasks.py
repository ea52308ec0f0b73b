"""`aligner data tasks`: prompts that an environment brings along, or prompts with the tools that it offers, as a file for `data.train`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aligner.agents.verifiers import verifiers_tasks
from aligner.data.sources import read_records
from aligner.environments.config import EnvironmentConfig, EnvironmentKind
from aligner.environments.environment import Environment
from aligner.environments.kinds import HasTasks, HasTools, build_environment
from aligner.errors import ConfigError
from aligner.files import publish
from aligner.settings.compose import from_yaml


@dataclass
class _Settings:
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)


def tasks(target: Path, overrides: Sequence[str], count: int, seed: int, prompts: str) -> int:
    """Write the file. Returns 0. Raises ConfigError if the environment has neither tasks nor tools."""
    config = from_yaml(_Settings, "", overrides).environment
    if target.suffix != ".jsonl":
        raise ConfigError(f"FILE is {target}, expected a name that ends in .jsonl")
    records = list(_records(config, count, seed, prompts))
    publish(target, lambda new: new.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records)))
    print(f"{target}: {len(records)} prompts of {config.title}", flush=True)
    return 0


def _records(config: EnvironmentConfig, count: int, seed: int, prompts: str) -> Iterator[dict[str, Any]]:
    if config.chosen is EnvironmentKind.verifiers:
        yield from verifiers_tasks(config, count, seed)
        return
    if config.asks_endpoint or not config.is_on:
        raise ConfigError(
            f"environment.kind={config.kind.value}: has no prompts of its own; allowed: a kind with `name` or `server`, or path"
        )
    environment = build_environment(config)
    try:
        if prompts:
            yield from _with_tools(config, environment, prompts)
        elif isinstance(environment, HasTasks):
            yield from environment.tasks(count, seed)
        else:
            raise ConfigError(f"{config.title}: has no method tasks(count, seed), so no prompts of its own")
    finally:
        if close := getattr(environment, "close", None):
            close()


def _with_tools(config: EnvironmentConfig, environment: Environment, prompts: str) -> Iterator[dict[str, Any]]:
    if not isinstance(environment, HasTools):
        raise ConfigError(f"--prompts {prompts}: {config.title} has no method tools(), so nothing is to be added")
    offered = environment.tools()
    for raw in read_records(prompts):
        record = dict(raw.value) if isinstance(raw.value, dict) else {}
        asked = record.get("prompt")
        if isinstance(asked, str):  # a chat template writes tools around messages
            record["prompt"] = [{"role": "user", "content": asked}]
        yield record | {"tools": offered}
