"""One answer for all ranks: an action that fails on any rank of the component fails on all of them, with the same message."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from aligner.errors import AlignerError, ConfigError
from aligner.parallel import platform
from aligner.parallel.collectives import all_ranks, gather_objects

T = TypeVar("T")


def together(action: Callable[[], T], what: str, *, error: type[AlignerError]) -> T:
    """Do something on every rank; where it fails on any, every rank raises `error` with what the first of them said.

    A ConfigError that all of them raise stays one. Collective. The action must not communicate after a point where it may fail on one rank
    alone: the others would wait for it there.
    """
    failure: Exception | None = None
    try:
        result = action()
    except Exception as failed:  # raised below, when all ranks know
        failure = failed
    if all_ranks(failure is None, platform.device()):
        return result
    said = gather_objects("" if failure is None else _describe(failure))
    if all(gather_objects(isinstance(failure, ConfigError))):
        raise failure
    rank, message = next((rank, one) for rank, one in enumerate(said) if one)
    where = f" on rank {rank}" if dist.get_world_size() > 1 and not all(said) else ""
    raise error(f"{what} failed{where}: {message}") from failure


def _describe(error: Exception) -> str:
    """The message of an error that is for people, else with the error's name."""
    message = str(error)
    return message if message and isinstance(error, AlignerError) else f"{type(error).__name__}: {message}"
