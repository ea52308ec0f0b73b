"""The responses in decoding, one row each, and their sampled tokens.

The state of the rows is in arrays on the host, known in advance; only the tokens come from the device, in one transfer per step. In
Python a step handles only the rows that enter a new page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from aligner.rollout.builtin.attention import DecodeBatch, upload
from aligner.rollout.builtin.sampling import STOP, Draw
from aligner.rollout.builtin.scheduler import NO_SEAT, Response
from aligner.rollout.engine import Callers


class RunningBatch:
    """The rows, in the order in which they joined. Arrays that steps under way may still read are replaced, never changed in place."""

    def __init__(
        self, *, num_seats: int, max_length: int, max_pages: int, page_size: int, device: torch.device, sees: bool = False
    ) -> None:
        self.responses: list[Response] = []
        self._sees = sees  # positions that rotate are told apart
        self.seats = torch.zeros(0, dtype=torch.int64, device=device)
        self._positions = np.zeros(0, np.int64)  # of the tokens drawn last
        self._last_positions = np.zeros(0, np.int64)  # of the last possible token of each response
        self._offsets = np.zeros(0, np.int64)  # from a token's position to its place in the transcript
        self._seats = np.zeros(0, np.int64)
        self._shifts = np.zeros(0, np.int64)  # from positions to those that rotate
        self._tokens = torch.zeros(0, dtype=torch.int64, device=device)
        self._max_length = max_length
        self._tables = np.zeros((num_seats, max_pages), np.int32)  # pages by seat
        self._page_size = page_size
        self._device = device
        self._longest = 0  # the greatest position
        self._least_left = 0  # tokens until the first row reaches its limit

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def seat_numbers(self) -> list[int]:
        """`seats`, on the host."""
        return self._seats.tolist()

    def join(self, responses: Sequence[Response], seats: Tensor, draw: Draw) -> Fetch:
        """Rows for responses at `seats` int64 [N]; `draw` has one token for each, the first one or the first since it returned."""
        for response in responses:
            self._tables[response.seat, : len(response.pages)] = response.pages
        new = np.array([self._facts(response) for response in responses], np.int64).T
        old = np.stack([self._positions, self._last_positions, self._offsets, self._seats, self._shifts])
        self._positions, self._last_positions, self._offsets, self._seats, self._shifts = np.concatenate([old, new], axis=1)
        self.responses = [*self.responses, *responses]
        self._tokens = torch.cat([self._tokens, draw.tokens])
        self.seats = torch.cat([self.seats, seats])
        self._summarise()
        return Fetch(draw, list(responses), new[0] + new[2])

    def drop_exhausted(self) -> None:
        """Drop the rows that have reached their limit: their last draw ends them."""
        if self.responses and self._least_left == 0:
            self._keep((self._positions < self._last_positions).nonzero()[0])

    def drop_unseated(self) -> None:
        """Drop the rows whose responses have ended or must wait."""
        rows = [row for row, response in enumerate(self.responses) if response.seat != NO_SEAT]
        if len(rows) < len(self.responses):
            self._keep(np.array(rows, np.int64))

    def without_page(self) -> np.ndarray:
        """The rows whose tokens begin a page."""
        return (self._positions % self._page_size == 0).nonzero()[0]

    def extend(self, rows: np.ndarray, pages: Sequence[int]) -> None:
        for row, page in zip(rows.tolist(), pages, strict=True):
            self.responses[row].pages.append(page)
        self._tables[self._seats[rows], self._positions[rows] // self._page_size] = pages

    def inputs(self) -> DecodeBatch:
        tables = self._tables[self._seats, : self._longest // self._page_size + 1]
        positions, pages = upload(self._positions, self._device), upload(tables, self._device)
        rotary = upload(self._positions + self._shifts, self._device) if self._sees else None
        return DecodeBatch(tokens=self._tokens, positions=positions, pages=pages, seats=self.seats, rotary=rotary)

    def advance(self, draw: Draw) -> Fetch:
        self._tokens = draw.tokens
        self._positions = self._positions + 1
        self._longest += 1
        self._least_left -= 1
        return Fetch(draw, self.responses, self._positions + self._offsets)

    def num_drawn(self, response: Response) -> int:
        """Tokens of the response so far; 0 if it has no row."""
        if response not in self.responses:
            return 0
        return int(self._positions[self.responses.index(response)]) - len(response.request.tokens) + 1

    def _facts(self, response: Response) -> tuple[int, int, int, int, int]:
        """A new row's position, last position, offset, seat and shift."""
        prompt, shift = len(response.request.tokens), 0 if response.seen is None else response.seen.shift
        return len(response.tokens), prompt + response.limit - 1, response.seat * self._max_length - prompt, response.seat, shift

    def _keep(self, rows: np.ndarray) -> None:
        self.responses = [self.responses[row] for row in rows.tolist()]
        self._positions, self._last_positions = self._positions[rows], self._last_positions[rows]
        self._offsets, self._seats, self._shifts = self._offsets[rows], self._seats[rows], self._shifts[rows]
        index = upload(rows, self._device)
        self._tokens, self.seats = self._tokens[index], self.seats[index]
        self._summarise()

    def _summarise(self) -> None:
        self._longest = int(self._positions.max()) if self.responses else 0
        self._least_left = int((self._last_positions - self._positions).min()) if self.responses else 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A response that is complete."""

    response: Response
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...] | None
    stopped: bool


class Fetch:
    """One step's draws in transfer to the host, and their `places` int64 [rows] in the transcript."""

    def __init__(self, draw: Draw, responses: list[Response], places: np.ndarray) -> None:
        self.responses = responses
        self.places = places
        self.tops = draw.tops  # to be read after `wait`
        self._parts = [draw.tokens, draw.ended, draw.logprobs]
        if draw.raw_logprobs is not None:
            self._parts.append(draw.raw_logprobs)
        self._event = None
        if draw.tokens.is_cuda:
            packed = torch.stack([part.view(torch.int32) if part.is_floating_point() else part.int() for part in self._parts])
            host = _to_host(packed)
            if self.tops is not None:
                self.tops = replace(self.tops, ids=_to_host(self.tops.ids), logprobs=_to_host(self.tops.logprobs))
            self._parts = [row.view(part.dtype) if part.is_floating_point() else row for row, part in zip(host, self._parts, strict=True)]
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[np.ndarray]:
        """Tokens, ends (0 none, 1 stop, 2 length), log-probs, and raw log-probs if recorded."""
        if self._event is not None:
            self._event.synchronize()
        return [part.numpy() for part in self._parts]


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that is under way."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class Transcript:
    """The tokens of every seat's response so far, on the host. `raw`: results have raw log-probs, unless their request says otherwise."""

    def __init__(self, *, num_seats: int, max_length: int, raw: bool) -> None:
        self._max_length, self._raw = max_length, raw
        # Tokens, log-probs and raw log-probs of all seats, one seat after the other.
        self._rows = [np.zeros(num_seats * max_length, dtype) for dtype in (np.int64, np.float32, np.float32)]
        self._saved: dict[int, list[np.ndarray]] = {}  # sampled at seats that were lost, by arrival

    def interrupt(self, response: Response, length: int) -> None:
        """The response is about to lose its seat: its `length` tokens are recomputed before it continues."""
        self._saved[response.arrival] = sampled = [row.copy() for row in self._sampled(response, length)]
        response.tokens = (*response.prompt_keys, *sampled[0].tolist())

    def forget(self, response: Response) -> None:
        self._saved.pop(response.arrival, None)

    def record(self, fetch: Fetch, callers: Callers | None = None) -> list[Ended]:
        """Store a step's draws, and tell them to the `callers`; returns the responses that they ended.

        A row may belong to a response that ended while this step ran. Its entry after the end of that response is not read: the next
        response at that seat overwrites it, or had sampled as much before it came.
        """
        tokens, ended, *logprobs = fetch.wait()
        for row, new in zip(self._rows, (tokens, *logprobs), strict=False):  # not every step has raw log-probs
            row[fetch.places] = new
        if callers is not None:
            tops = {} if fetch.tops is None else fetch.tops.by_row()
            for row, (response, token, logprob) in enumerate(zip(fetch.responses, tokens.tolist(), logprobs[0].tolist(), strict=True)):
                if response.seat != NO_SEAT:
                    callers.hear(response.request.index, (token,), (logprob,), (tops[row],) if row in tops else ())
        if not ended.any():
            return []
        rows = [row for row in ended.nonzero()[0].tolist() if fetch.responses[row].seat != NO_SEAT]
        return [self._close(fetch.responses[row], int(fetch.places[row]), stopped=bool(ended[row] == STOP)) for row in rows]

    def _close(self, response: Response, last_place: int, *, stopped: bool) -> Ended:
        length = last_place - response.seat * self._max_length + 1
        tokens, logprobs, raw = (tuple(row.tolist()) for row in self._sampled(response, length))
        self._saved.pop(response.arrival, None)
        own = response.request.sampling
        return Ended(response, tokens, logprobs, raw if (self._raw if own is None else own.raw_logprobs) else None, stopped)

    def _sampled(self, response: Response, length: int) -> list[np.ndarray]:
        """The first `length` tokens of the response, and their log-probs."""
        start = response.seat * self._max_length
        saved = self._saved.get(response.arrival)
        if saved is None:
            return [row[start : start + length] for row in self._rows]
        return [np.concatenate([old, row[start + len(old) : start + length]]) for old, row in zip(saved, self._rows, strict=True)]
