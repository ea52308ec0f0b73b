"""aligner: LLM alignment for Slurm and MPI supercomputers on Megatron-Core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aligner.version import __version__

if TYPE_CHECKING:
    from aligner.api import Result, train

__all__ = ["PUBLIC", "Result", "__version__", "train"]

# The modules that outside code may build on; the reference on the site is generated from this list.
PUBLIC = (
    "aligner.algorithms.sft",  # the smallest recipe, to derive others from
    "aligner.api",
    "aligner.environments.environment",
    "aligner.errors",
    "aligner.loop.epochs",
    "aligner.loop.loop",
    "aligner.losses.policy",
    "aligner.losses.preference",
    "aligner.protocols",
    "aligner.reporting.jsonl",
    "aligner.rewards.forms",
    "aligner.rollout.engine",
    "aligner.run.recipe",
    "aligner.servers.wire",
    "aligner.telemetry.metrics",
    "aligner.types",
)


def __getattr__(name: str) -> Any:
    """Nothing is imported before it is asked for."""
    if name in ("Result", "train"):
        import importlib

        return getattr(importlib.import_module("aligner.api"), name)
    raise AttributeError(f"module 'aligner' has no attribute {name!r}")
