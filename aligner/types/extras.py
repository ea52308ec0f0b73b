"""Tensors that travel with rows of tokens, of kinds that only their producer and their consumer know.

A class with a `name` is a *kind*: defining it registers it, and everything between producer and consumer (data, collation, micro-batches,
engines, episodes, servers, caches) carries its tensors by the rules of the class. The `extras` of a prompt, a supervised row, a request to
an engine, its result and a rollout hold one row's tensor by the kind's name, without padding; the `extras` of a batch hold an object of the
class. Define a kind in a module that every component imports, as it imports a recipe's.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

KINDS: dict[str, type[RowTensor]] = {}
MOST_IMAGES = 16  # in one row


@dataclass(frozen=True, eq=False)
class RowTensor:
    """The tensor of one kind for the B rows of a batch: `data` [B, *shape], or [B, S, *shape] if the kind is `per_token`.

    A subclass sets the class attributes and overrides a rule where its kind needs another.
    """

    data: Tensor
    name: ClassVar[str] = ""  # "": a base of kinds, not registered
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)  # that are allowed; a server decodes into the first
    shape: ClassVar[tuple[int, ...] | None] = ()  # of one row's or token's entry; None: any
    per_token: ClassVar[bool] = False
    field: ClassVar[str] = ""  # of data records, with the tensors of their rows; "": none
    is_sent: ClassVar[bool] = True  # with the tokens, in requests to servers

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not cls.name:
            return
        known, own = (f"{kind.__module__}.{kind.__qualname__}" for kind in (KINDS.get(cls.name, cls), cls))
        if known != own:
            raise ValueError(f"{own}: the name {cls.name!r} belongs to {known}")
        if cls.is_sent and (cls.shape is None or torch.float64 in cls.dtypes):
            raise ValueError(f"{cls.__qualname__}.is_sent: needs fixed sizes in `shape` and dtypes other than float64")
        KINDS[cls.name] = cls  # a module that is loaded again defines its kinds again

    @classmethod
    def read(cls, value: Any) -> Tensor:
        """The row's tensor from its `field` in a data record. Raises ValueError or TypeError for a bad value."""
        return torch.tensor(value, dtype=cls.dtypes[0])

    @classmethod
    def fill(cls, dtype: torch.dtype) -> float:
        """What padding holds, if the kind is `per_token`."""
        return 0

    @classmethod
    def row_length(cls, num_tokens: int) -> int:
        """Entries of a row of so many tokens, if the kind is `per_token`."""
        return num_tokens

    @classmethod
    def check_row(cls, row: Tensor, num_tokens: int) -> None:
        """Raise ValueError unless this can be the tensor of a row of `num_tokens` tokens."""
        lead = (cls.row_length(num_tokens),) if cls.per_token else ()
        cls._check(row, lead, f"extras[{cls.name!r}] of a row of {num_tokens} tokens")

    @classmethod
    def padded(cls, rows: Sequence[Tensor | None], width: int) -> Self | None:
        """A batch of these rows, `width` columns wide; None unless every row has a tensor."""
        given = [row for row in rows if row is not None]
        if not given or len(given) < len(rows):
            return None
        if not cls.per_token:
            return cls(torch.stack(given))
        first = given[0]
        data = torch.full((len(rows), width, *first.shape[1:]), cls.fill(first.dtype), dtype=first.dtype)
        for row, own in zip(data, given, strict=True):
            row[: len(own)] = own
        return cls(data)

    @classmethod
    def continued(cls, turns: Sequence[Tensor]) -> Tensor:
        """A row's tensor from the turns of its episode, each of which continues the row of the one before: every token's first entry."""
        if not cls.per_token:
            return turns[-1]
        return torch.cat([turn[start:] for turn, start in zip(turns, [0, *map(len, turns)], strict=False)])

    def check(self, num_rows: int, width: int) -> None:
        """Raise ValueError unless this belongs to a batch of tokens [num_rows, width]."""
        self._check(self.data, (num_rows, width) if self.per_token else (num_rows,), f"extras[{self.name!r}]")

    def take(self, rows: Tensor | slice) -> Self:
        """These rows, in this order."""
        return type(self)(self.data[rows])

    def trimmed(self, width: int) -> Self:
        """The first `width` columns, padded up to them."""
        missing = width - self.data.shape[1] if self.per_token else 0
        if missing > 0:
            padding = self.data.new_full((len(self.data), missing, *self.data.shape[2:]), self.fill(self.data.dtype))
            return type(self)(torch.cat([self.data, padding], dim=1))
        return type(self)(self.data[:, :width]) if self.per_token else self

    def prompt_key(self, row: int, num_shared: int) -> bytes:
        """Differs between rows whose first `num_shared` tokens cannot be computed once for both."""
        data = self.data[row : row + 1, :num_shared] if self.per_token else self.data[row : row + 1]
        return data.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()

    @classmethod
    def _check(cls, tensor: Tensor, lead: tuple[int, ...], what: str) -> None:
        expected = (*lead, *(tensor.shape[len(lead) :] if cls.shape is None else cls.shape))
        if tensor.dtype not in cls.dtypes or tuple(tensor.shape) != expected:
            dtypes = " or ".join(map(str, cls.dtypes))
            raise ValueError(f"{what} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtypes} {expected}")


class Routes(RowTensor):
    """The experts that the sampler chose for each token but the last, after which it computed nothing: [.., layers, k]. An entry of
    `no_expert` has no route (in a layer without experts it means nothing)."""

    name = "routes"
    dtypes = (torch.uint8, torch.int16)  # see `route_dtype`
    shape = None
    per_token = True
    is_sent = False  # they are those of the policy's routers

    @classmethod
    def fill(cls, dtype: torch.dtype) -> float:
        return no_expert(dtype)

    @classmethod
    def row_length(cls, num_tokens: int) -> int:
        return num_tokens - 1

    def prompt_key(self, row: int, num_shared: int) -> bytes:
        """The last shared token's hidden state is computed again in every row."""
        return super().prompt_key(row, max(num_shared - 1, 0))


class Images(RowTensor):
    """The images of a row, in the order of their slots: the SHA-256 digests of their files (`aligner.data.images`), then zeros."""

    name = "images"
    dtypes = (torch.int64,)
    shape = (MOST_IMAGES, 4)

    @classmethod
    def of(cls, digests: Sequence[str]) -> Tensor:
        """A row's tensor of these digests, in hexadecimal. Raises ValueError for more than MOST_IMAGES."""
        if len(digests) > MOST_IMAGES:
            raise ValueError(f"{len(digests)} images, allowed: at most {MOST_IMAGES} in one row")
        row = torch.zeros(cls.shape, dtype=torch.int64)
        for own, digest in zip(row, digests, strict=False):
            own[:] = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.int64)
        return row

    @staticmethod
    def digests(row: Tensor) -> list[str]:
        """The digests in a row's tensor."""
        return [own.numpy().tobytes().hex() for own in row.cpu() if bool(own.any())]

    @classmethod
    def padded(cls, rows: Sequence[Tensor | None], width: int) -> Self | None:
        """A batch of these rows, of which some may have none."""
        none = torch.zeros(cls.shape, dtype=torch.int64)
        return super().padded([none if row is None else row for row in rows], width) if any(row is not None for row in rows) else None


def route_dtype(num_experts: int) -> torch.dtype:
    """The dtype of routes among so many experts; `no_expert` is a number that none of them has."""
    return torch.uint8 if num_experts < 256 else torch.int16


def no_expert(dtype: torch.dtype) -> int:
    """In place of an expert where a token has no route."""
    return torch.iinfo(dtype).max


def kind_of(name: str) -> type[RowTensor]:
    """The registered kind of this name. Raises ValueError if there is none."""
    if name not in KINDS:
        raise ValueError(f"extras[{name!r}]: no such kind; registered: {', '.join(sorted(KINDS))}")
    return KINDS[name]


def read_from_records() -> list[type[RowTensor]]:
    """The kinds that data records have fields for."""
    return [kind for kind in KINDS.values() if kind.field]


def check_rows(extras: Mapping[str, Tensor], num_tokens: int) -> None:
    """Raise ValueError unless each of these can belong to a row of `num_tokens` tokens."""
    for name, row in extras.items():
        kind_of(name).check_row(row, num_tokens)


def padded(rows: Sequence[Mapping[str, Tensor]], width: int) -> dict[str, RowTensor]:
    """The extras of a batch, `width` columns wide, from those of its rows."""
    found = {name: kind_of(name).padded([row.get(name) for row in rows], width) for name in dict.fromkeys(n for row in rows for n in row)}
    return {name: extra for name, extra in found.items() if extra is not None}


def continued(turns: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The extras of an episode's row, from those of its turns."""
    names = dict.fromkeys(name for turn in turns for name in turn)
    return {name: kind_of(name).continued([turn[name] for turn in turns if name in turn]) for name in names}


def to_json(extras: Mapping[str, Tensor]) -> dict[str, Any]:
    """One row's tensors as JSON values, exactly: for caches of data and the state in checkpoints."""
    saved = {name: base64.b64encode(row.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()) for name, row in extras.items()}
    return {name: [str(row.dtype).removeprefix("torch."), list(row.shape), saved[name].decode()] for name, row in extras.items()}


def from_json(saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that `to_json` was given. Raises ValueError for a kind that is not registered, or a dtype that it does not have."""
    found = {}
    for name, (dtype_name, shape, text) in saved.items():
        dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in kind_of(name).dtypes}
        if dtype_name not in dtypes:
            raise ValueError(f"extras[{name!r}] is saved as {dtype_name}, expected {' or '.join(dtypes)}")
        data = bytearray(base64.b64decode(text)) or bytearray(8)
        found[name] = torch.frombuffer(data, dtype=dtypes[dtype_name])[: torch.Size(shape).numel()].view(shape)
    return found
