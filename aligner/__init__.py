"""aligner: LLM alignment for Slurm and MPI supercomputers on Megatron-Core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aligner.version import __version__

if TYPE_CHECKING:
    from aligner.api import Result, train

# What code outside may build on; the site's reference documents it. Nothing is imported before it is asked for.
__all__ = ["Result", "__version__", "data", "losses", "protocols", "rewards", "rollout", "servers", "train", "types"]


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("Result", "train"):
        return getattr(importlib.import_module("aligner.api"), name)
    if name in __all__:
        return importlib.import_module(f"aligner.{name}")
    raise AttributeError(f"module 'aligner' has no attribute {name!r}")
