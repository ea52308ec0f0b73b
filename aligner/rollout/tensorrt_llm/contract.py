"""The recorded assumptions about each TensorRT-LLM version, taken from its sources, and the list of known versions.

A contract (`contracts/tensorrt_llm-<version>.json`) lists the functions with their signatures and the classes with their fields or members
that the engine uses, the source of each (repository, commit, whether at the version's own tag), and the rules that signatures do not
express; or a similar version, its `base`, and the differences. The engine looks up a version's abilities in it, the tests' stand-in of the
package binds every call to it, and `tools/tensorrt_llm_diff.py` compares it with an installed package. Nothing of the package is imported
here, since the import starts MPI.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from aligner.errors import EngineError
from aligner.rollout.config import CudaGraphs
from aligner.types import LogprobKind

PACKAGE = "tensorrt_llm"
FOLDER = Path(__file__).parent / "contracts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Symbol:
    """A function with its signature, or a class with its fields (keyword arguments) or members, or an attribute that is assigned.

    `open`: the real one may accept more arguments. `extra`: the symbol whose fields `**kwargs` accepts, besides `also`.
    """

    file: str
    name: str
    read: str
    signature: str | None = None
    fields: tuple[str, ...] | None = None
    members: Mapping[str, Any] | None = None
    assigned: bool = False
    open: bool = False
    extra: str | None = None
    also: tuple[str, ...] = ()

    def parameters(self) -> inspect.Signature:
        """The recorded signature, without `self`."""
        found = inspect.signature(eval(f"lambda {(self.signature or '()')[1:-1]}: None"))  # the package's own file
        return found.replace(parameters=[one for name, one in found.parameters.items() if name != "self"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Rules that signatures do not express."""

    cuda_graphs_with_sleep: bool  # whether graphs survive a release of memory
    logprobs: Mapping[str, LogprobKind]  # by sampler
    memory_tags: Mapping[str, tuple[str, ...]]  # for weights and kv_cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """The contract of one version. Symbols by `file:name`."""

    version: str
    commit: str | None
    draft: bool
    rules: Rules
    sources: Mapping[str, Mapping[str, Any]]  # where the symbols were read: repository, commit (if known), at_tag, note
    symbols: Mapping[str, Symbol]

    def find(self, name: str) -> Symbol | None:
        return next((symbol for symbol in self.symbols.values() if symbol.name == name), None)

    def accepts(self, name: str, argument: str) -> bool:
        """Whether a recorded function or class accepts an argument of this name."""
        symbol = self.find(name)
        if symbol is None:
            return False
        return argument in symbol.fields if symbol.fields is not None else argument in symbol.parameters().parameters


def known_versions() -> list[str]:
    """The versions with a contract, oldest first."""
    names = [path.stem.removeprefix(f"{PACKAGE}-") for path in FOLDER.glob(f"{PACKAGE}-*.json")]
    return sorted(names, key=_order)


def _order(name: str) -> tuple[list[int], float]:
    release, _, candidate = name.partition("rc")
    return [int(part) for part in release.split(".")], float(candidate or "inf")


def load(name: str) -> Contract:
    data = _read(name)
    rules = data["rules"]
    kinds = {sampler: LogprobKind(kind) for sampler, kind in rules["logprobs"].items()}
    tags = {memory: tuple(own) for memory, own in rules["memory_tags"].items()}
    return Contract(
        version=data["version"],
        commit=data.get("commit"),
        draft=data["draft"],
        rules=Rules(**rules | {"logprobs": kinds, "memory_tags": tags}),
        sources=data["sources"],
        symbols={key: _symbol(key, entry) for key, entry in data["symbols"].items()},
    )


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{PACKAGE}-{name}.json").read_text())
    return _changed(_read(found.pop("base")), found) if "base" in found else found


def _changed(base: Any, change: Any) -> Any:
    """`base` with a JSON merge patch (RFC 7396): null removes a key."""
    if not isinstance(change, dict):
        return change
    kept = base if isinstance(base, dict) else {}
    return {key: value for key, value in kept.items() if key not in change} | {
        key: _changed(kept.get(key), value) for key, value in change.items() if value is not None
    }


def _symbol(key: str, entry: Mapping[str, Any]) -> Symbol:
    file, name = key.split(":")
    lists = {field: tuple(entry[field]) for field in ("fields", "also") if field in entry}
    return Symbol(file=file, name=name, **(dict(entry) | lists))


def gate(*, allow_drafts: bool) -> Contract:
    """The installed version's contract, found without importing it. Raises EngineError if it is missing, unknown or a refused draft."""
    known = [load(name) for name in known_versions()]
    shown = ", ".join(one.version + (" (draft)" if one.draft else "") for one in known)
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError as error:
        raise EngineError(
            f"rollout.engine=tensorrt_llm: {PACKAGE} is not installed; use the image of the Dockerfile, or rollout.engine=megatron. "
            f"Known versions: {shown}"
        ) from error
    found = next((one for one in known if one.version == installed), None)
    if found is None:
        raise EngineError(
            f"rollout.engine=tensorrt_llm: version {installed} of {PACKAGE} is not known; known are {shown}. The engine uses parts of it "
            "that change between versions: docs/tensorrt_llm.md says how to record another one"
        )
    if found.draft and not allow_drafts:
        raise EngineError(
            f"rollout.engine=tensorrt_llm: the contract of version {installed} is a draft, mostly of other versions' sources; known are "
            f"{shown}. To try it: tools/tensorrt_llm_diff.py (docs/tensorrt_llm.md), then rollout.tensorrt_llm.allow_drafts=true"
        )
    return found


@cache
def graphs_lost(kind: CudaGraphs, *, offload: bool) -> str:
    """A sentence on the cost of `rollout.offload` in the newest version that is not a draft; empty if it keeps CUDA graphs."""
    contract = [one for name in known_versions() if not (one := load(name)).draft][-1]
    if not offload or kind is CudaGraphs.never or contract.rules.cuda_graphs_with_sleep:
        return ""
    return (
        f"rollout.offload=true with rollout.engine=tensorrt_llm ({contract.version}) decodes without CUDA graphs, each kernel launched by "
        "itself; with them: rollout.offload=false, or rollout.engine=megatron"
    )
