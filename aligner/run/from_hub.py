"""Settings that name models and data sets of the Hugging Face Hub.

A config class lists such settings in `from_hub`. `fetch_named` replaces each name by a directory of the local cache before anything else
reads the settings; `with_names` restores the name, with its commit, before settings are compared and recorded.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from aligner.cluster.outcomes import rank_of
from aligner.cluster.run_directory import RunDirectory
from aligner.errors import AlignerError, describe_os_error
from aligner.files import publish_first
from aligner.hub.names import DATASETS_PREFIX, Files, HubName, name_of, parse, parse_data

T = TypeVar("T")
WAIT_SECONDS = 3600.0  # of commands without a run's settings


@dataclass(frozen=True, slots=True)
class _Setting:
    """A setting that may name something of the Hub."""

    key: str
    section: Any  # a config, or a source of several in `data.train`
    field: str
    files: Files

    @property
    def value(self) -> str:
        return str(self.section[self.field] if isinstance(self.section, dict) else getattr(self.section, self.field))

    def put(self, value: str) -> None:
        if isinstance(self.section, dict):
            self.section[self.field] = value
        else:
            object.__setattr__(self.section, self.field, value)

    def name(self) -> tuple[HubName, str] | None:
        """The name, and the text behind it."""
        if self.files is Files.data:
            return parse_data(self.value)
        name = parse(self.value)
        return None if name is None else (name, "")


def fetch_named(
    config: Any,
    *,
    weights: bool = True,
    data: bool = True,
    records: bool = False,
    may_fail: Callable[[Any], bool] = lambda section: False,
    say: Callable[[str], object] = print,
) -> dict[str, Path]:
    """Put directories in place of all names of the Hub; returns the directories by setting.

    One process of the machine downloads what the local cache lacks. Without `weights` and `data` the configs and tokenizers of the models
    are enough. A run keeps the commits that it began with; with `records` this call may be its beginning. If a section `may_fail`, a name
    that cannot be fetched stays. Raises ConfigError or AlignerError as `aligner.hub.download.fetch` does, naming the setting.
    """
    found: dict[str, Path] = {}
    for setting in _settings(config):
        if (named := setting.name()) is None or (setting.files is Files.data and not data):
            continue
        name, rest = named
        files = setting.files if weights or setting.files is Files.data else Files.settings
        try:
            directory = _fetch(setting.key, name, files, getattr(config, "run", None), records=records, say=say)
        except AlignerError as error:
            if not may_fail(setting.section):
                raise
            say(f"{error}; planned with the sizes in the config")
            continue
        if records and rank_of(os.environ) == 0:
            say(f"{setting.key}={name}: commit {directory.name} in {directory}")
        found[setting.key] = directory
        setting.put(str(directory) if setting.files is not Files.data else f"{DATASETS_PREFIX}{directory}{rest}")
    return found


def fetch_one(key: str, text: str) -> Path:
    """The directory of a command's argument, which is a path or a name of the Hub. Raises as `fetch_named`."""
    name = parse(text)
    return Path(text) if name is None else _fetch(key, name, Files.model, None, records=False, say=print)


def with_names(config: T) -> T:
    """The config with names and commits instead of directories of the Hub's cache, whose place may change."""
    named = copy.deepcopy(config)
    for setting in _settings(named):
        location, rest = setting.value, ""
        if setting.files is Files.data:
            location, colon, rest = location.removeprefix(DATASETS_PREFIX).partition(":")
            rest = colon + rest
        if (name := name_of(location)) is not None:
            setting.put(f"{name}{rest}")
    return named


def meeting_seconds(config: Any) -> float:
    """How long the ranks of a run may take until they have met: longer if one of them may download first."""
    from_hub = any(before.value != after.value for before, after in zip(_settings(config), _settings(with_names(config)), strict=True))
    return float(config.run.start_timeout_seconds + (config.run.download_timeout_seconds if from_hub else 0.0))


def _settings(node: Any, path: str = "") -> Iterator[_Setting]:
    if not is_dataclass(node):
        return
    declared: Mapping[str, Files] = getattr(type(node), "from_hub", {})
    for field in fields(node):
        key = f"{path}.{field.name}" if path else field.name
        if field.name in declared and isinstance(several := getattr(node, field.name), list):
            yield from (_Setting(f"{key}[{place}].path", source, "path", declared[field.name]) for place, source in enumerate(several))
        elif field.name in declared:
            yield _Setting(key, node, field.name, declared[field.name])
        else:
            yield from _settings(getattr(node, field.name), key)


def _fetch(key: str, name: HubName, files: Files, run: Any, *, records: bool, say: Callable[[str], object]) -> Path:
    from aligner.hub.download import Wanted, fetch  # huggingface_hub, which a run without such names does not need

    wait = WAIT_SECONDS if run is None else run.download_timeout_seconds
    directory = None if run is None else RunDirectory(Path(run.directory))
    commit = "" if directory is None or name.is_pinned else _recorded(directory, name)
    found = fetch(Wanted(key=key, name=name, files=files, commit=commit, wait_seconds=wait), say)
    if records and directory is not None and not name.is_pinned and not commit:
        first = _record(directory, name, found.commit)
        if first != found.commit:  # another process of the run was first, and the branch has moved in between
            found = fetch(Wanted(key=key, name=name, files=files, commit=first, wait_seconds=wait), say)
    return found.directory


def _file(run: RunDirectory, name: HubName) -> Path:
    return run.hub / f"{name.folder}@{(name.revision or 'main').replace('/', '--')}.json"


def _recorded(run: RunDirectory, name: HubName) -> str:
    """The commit that the run began with; empty if it has not begun."""
    path = _file(run, name)
    try:
        return str(json.loads(path.read_text())["commit"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AlignerError(f"{path}: cannot read the commit of {name} that the run began with: {error}") from error


def _record(run: RunDirectory, name: HubName, commit: str) -> str:
    """Record the commit for the whole run. Of several processes the first to link its file wins; returns that one's."""
    path = _file(run, name)
    try:
        run.create()
        run.hub.mkdir(mode=0o700, exist_ok=True)
        publish_first(path, json.dumps({"name": str(name), "commit": commit}) + "\n")
    except OSError as error:
        raise AlignerError(f"the commit of {name} could not be recorded: {describe_os_error(error, path)}") from error
    return _recorded(run, name)
