"""Calls of the stand-in, bound to the recorded contract."""

from __future__ import annotations

import os
from typing import Any

from aligner.rollout.tensorrt_llm.contract import Contract, Symbol


def bound(symbol: Symbol, what: str, contract: Contract, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name. Raises TypeError, naming what the contract does not list."""
    if symbol.fields is not None:
        extra = [name for name in kwargs if name not in symbol.fields]
        if args or extra:
            raise TypeError(f"{what}: " + (f"got unexpected keyword arguments {extra}" if extra else "takes keyword arguments only"))
        return dict(kwargs)
    given = symbol.parameters().bind(*args, **kwargs)
    values = dict(given.arguments)
    more = values.pop("kwargs", {})
    if symbol.extra is not None:
        allowed = {*contract.symbols[symbol.extra].fields, *symbol.also}
        if extra := [name for name in more if name not in allowed]:
            raise TypeError(f"{what}: got unexpected keyword arguments {extra}")
    return values | more


class Fields:
    """A dataclass or pydantic model of the package: exactly the recorded fields."""

    def __init__(self, symbol: Symbol, contract: Contract, kwargs: dict[str, Any]) -> None:
        self.given = bound(symbol, symbol.name, contract, (), kwargs)

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["given"].get(name)


class OnGpu:
    """Stands for a tensor on a GPU, of which other processes can only get a handle."""

    is_cuda = True


def handle_of(tensor: OnGpu) -> tuple[Any, tuple[Any, ...]]:
    """As torch's `reduce_tensor`: how it is opened, the sixth argument says on which GPU."""
    return open_handle, (OnGpu, (2, 3), (3, 1), 0, None, "bfloat16", 0, os.getpid())


def open_handle(*arguments: Any) -> dict[str, Any]:
    """As CUDA's cudaIpcOpenMemHandle: not in the process whose memory it is."""
    if arguments[7] == os.getpid():
        raise RuntimeError("CUDA error: invalid device context: the handle is of this process")
    return {"shape": arguments[1], "device": arguments[6]}
