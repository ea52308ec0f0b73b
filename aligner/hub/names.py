"""Names of the Hub: ORG/NAME[@REVISION] in place of a directory, and the name of a directory of its cache."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_WORD = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_NAME = re.compile(rf"(?P<repo>{_WORD}/{_WORD})(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_CACHED = re.compile(r"(?P<kind>model|dataset)s--(?P<org>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})", re.ASCII)
DATASETS_PREFIX = "datasets:"  # of locations that the `datasets` package reads
# A missing file with such a suffix is not taken for a data set of the Hub.
_DATA_FILES = (".jsonl", ".json", ".parquet", ".arrow", ".csv", ".txt", ".gz", ".bz2", ".xz", ".zst")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Kind(str, Enum):
    """The type of a repository of the Hub."""

    model = "model"
    dataset = "dataset"


class Files(str, Enum):
    """Which files of a repository are needed."""

    settings = "settings"  # a model's config and tokenizer
    model = "model"  # a model's config, tokenizer and weights
    data = "data"  # all data files of a data set


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, and its revision: a branch, a tag or a commit; empty: its main branch."""

    repo: str
    revision: str = ""
    kind: Kind = Kind.model

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    @property
    def folder(self) -> str:
        return f"{self.kind.value}s--{self.repo.replace('/', '--')}"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a full commit hash, which never changes."""
        return _COMMIT.fullmatch(self.revision) is not None


def parse(text: str, kind: Kind = Kind.model) -> HubName | None:
    """The name in a setting; None if it names an existing file or directory, or cannot be a name of the Hub."""
    found = _NAME.fullmatch(text)
    if found is None or ".." in text or "--" in found["repo"] or Path(text).exists():
        return None
    return HubName(found["repo"], found["revision"] or "", kind)


def parse_data(location: str) -> tuple[HubName, str] | None:
    """The name in the location of a data set, and the rest: `:SPLIT` or `:CONFIG:SPLIT`. None as for `parse`."""
    text, colon, rest = location.removeprefix(DATASETS_PREFIX).partition(":")
    name = None if text.endswith(_DATA_FILES) else parse(text, Kind.dataset)
    return None if name is None else (name, colon + rest)


def name_of(directory: str | Path) -> HubName | None:
    """The name, with its commit, of a snapshot in the cache; None for any other directory."""
    found = _CACHED.fullmatch("/".join(Path(directory).parts[-3:]))
    return None if found is None else HubName(f"{found['org']}/{found['name']}", found["commit"], Kind(found["kind"]))
