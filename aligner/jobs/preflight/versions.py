"""The same software on every rank."""

from __future__ import annotations

import platform as interpreter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import torch

from aligner import __version__
from aligner.jobs.preflight.items import Context, Finding, Item, Level, Where, who

PACKAGES = (
    "megatron-core",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "nvidia-pytriton",
    "transformer-engine",
    "tensorrt-llm",
    "mpi4py",
)
ABSENT = "absent"


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """Name -> version, as one rank sees it."""

    of: dict[str, str] = field(default_factory=dict)


def own_versions() -> dict[str, str]:
    """The versions in this process; packages are asked for theirs without being imported."""
    found = {"python": interpreter.python_version(), "aligner": __version__, "torch": torch.__version__}
    found |= {name: _installed(name) for name in PACKAGES}
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["cuda"] = str(torch.version.cuda)
    return found


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ABSENT


def _observe(_: Context) -> Versions:
    return Versions(of=own_versions())


def judge(context: Context, seen: Mapping[int, Versions]) -> Finding:
    """Fatal where a rank differs from rank 0 in anything, or has no Megatron-Core."""
    ours = seen[0].of
    differing: dict[str, list[int]] = {}
    for rank, versions in seen.items():
        for name in sorted(ours.keys() | versions.of.keys()):
            theirs = versions.of.get(name, ABSENT)
            if theirs != ours.get(name, ABSENT):
                differing.setdefault(f"{name} is {theirs} and not {ours.get(name, ABSENT)}", []).append(rank)
    if differing:
        text = "; ".join(f"{who(context.allocation, ranks)}: {what}" for what, ranks in differing.items())
        return Finding(
            level=Level.fatal, found=text, advice="one container or environment for all nodes, on a file system that all of them see"
        )
    if ours["megatron-core"] == ABSENT:
        return Finding(level=Level.fatal, found="megatron-core is not installed", advice="pip install aligner, or use the container")
    shown = ", ".join(f"{name} {number}" for name, number in ours.items() if number != ABSENT and name not in ("tokenizers", "safetensors"))
    return Finding(level=Level.ok, found=shown)


VERSIONS = Item(
    name="versions", where=Where.every_rank, kind=Versions, observe=_observe, judge=judge, timeout_seconds=60.0, needs=("ranks",)
)
