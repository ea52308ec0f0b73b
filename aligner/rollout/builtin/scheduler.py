"""Continuous batching without tensors: which sequences wait, which have a seat and pages, and which tokens enter the cache next.

Decisions depend on the calls alone, so all ranks of a replica decide the same. Sequences are seated in the order of their arrival, and the
last to arrive is the first to lose its seat if pages run out: the oldest always continues, and in the end all finish.

A `PagePool` records which pages of the key-value cache are free, how many users the others have, and which hold a prefix that sequences can
share.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from aligner.rollout.engine import GenRequest

_ROOT = -1  # the page before a sequence's first

_Key = tuple[int, tuple[int, ...]]  # the page before, and the tokens of the whole page


class PagePool:
    """`num_pages` pages of `page_size` tokens each, counted by their users; a page without users is free.

    Whole pages of tokens may be published: a sequence that begins with the same tokens finds them. The tokens themselves are compared, not
    hashes; for images, what `aligner.rollout.builtin.seeing` puts in their places. The key of a published page is the page before it, which
    cannot be reused meanwhile: a user of a page uses all pages before it.
    """

    def __init__(self, num_pages: int, page_size: int, *, shares: bool = True) -> None:
        self.shares = shares  # false: publish nothing, since the model remembers parts of a prefix outside pages
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._users = [0] * num_pages
        self._published: dict[_Key, int] = {}
        self._key_of: dict[int, _Key] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def extend(self, num_pages: int) -> None:
        """Add pages, up to `num_pages` in all."""
        self._free = list(range(num_pages - 1, self.num_pages - 1, -1)) + self._free
        self._users += [0] * (num_pages - self.num_pages)
        self.num_pages = num_pages

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Free pages, with one user each; the caller has checked `num_free`."""
        assert count <= len(self._free)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a user to each page."""
        for page in pages:
            assert self._users[page] > 0
            self._users[page] += 1

    def is_alone_in(self, pages: Sequence[int]) -> bool:
        """Whether each page has one user."""
        return all(self._users[page] == 1 for page in pages)

    def release(self, pages: Sequence[int]) -> None:
        """Remove a user from each page; a page without users is free."""
        for page in reversed(pages):
            self._users[page] -= 1
            assert self._users[page] >= 0
            if not self._users[page]:
                self._free.append(page)
                if page in self._key_of:
                    del self._published[self._key_of.pop(page)]

    def publish(self, tokens: Sequence[int], pages: Sequence[int]) -> int:
        """Let other sequences find the whole pages of `tokens`, filled before they are read. Returns how many of them can be found."""
        if not self.shares:
            return 0
        before = _ROOT
        for number in range(len(tokens) // self.page_size):
            key = (before, tuple(tokens[number * self.page_size : (number + 1) * self.page_size]))
            page = pages[number]
            if self._published.setdefault(key, page) != page:
                return number  # the same tokens are in two pages: later pages could not be found through this one
            self._key_of[page] = key
            before = page
        return len(tokens) // self.page_size

    def unpublish(self) -> None:
        """Other sequences no longer find the pages' contents; current users continue."""
        self._published.clear()
        self._key_of.clear()

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The published pages with the beginning of `tokens`, never with all of them: the last token must be computed."""
        pages: list[int] = []
        before = _ROOT
        for number in range((len(tokens) - 1) // self.page_size):
            page = self._published.get((before, tuple(tokens[number * self.page_size : (number + 1) * self.page_size])))
            if page is None:
                break
            pages.append(page)
            before = page
        return pages


NO_SEAT = -1
KEPT_PREFIXES = 4  # for later sequences to start from: requests of one prompt arrive together


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SeenPrompt:
    """The images of a prompt."""

    keys: tuple[int, ...]  # its tokens; in slots of images numbers below zero
    digests: tuple[str, ...]
    feature_of: np.ndarray  # int64 [tokens]: the feature of all images that stands there; -1: none
    axes: np.ndarray  # int64 [3, tokens]: positions
    shift: int  # from a later token's number to its position

    def axes_of(self, start: int, end: int) -> np.ndarray:
        """Positions int64 [3, end - start] of tokens of the prompt and what follows it."""
        behind = np.arange(self.axes.shape[1], max(end, self.axes.shape[1])) + self.shift
        return np.concatenate([self.axes, np.broadcast_to(behind, (3, len(behind)))], axis=1)[:, start:end]


@dataclass(slots=True, eq=False)
class Response:
    """An unfinished response."""

    arrival: int
    request: GenRequest
    limit: int  # its most tokens
    tokens: tuple[
        int, ...
    ]  # keys of what must be in the cache before it continues: the prompt, and what it sampled before it lost its seat
    pages: list[int] = field(default_factory=list)
    seat: int = NO_SEAT
    versions: list[tuple[int, int]] = field(default_factory=list)  # (first token, version) of each stretch from the same weights
    routes: Tensor | None = None  # [tokens, layers, k] of the first tokens, if recorded: from before it lost its seat, or from its end
    seen: SeenPrompt | None = None  # the images of its prompt

    @property
    def prompt_keys(self) -> tuple[int, ...]:
        """The prompt as the cache knows it."""
        return self.request.tokens if self.seen is None else self.seen.keys

    def sampled_by(self, version: int, start: int) -> None:
        """`version` samples the response from token `start` on."""
        if self.versions and self.versions[-1][0] == start:  # the previous version sampled nothing
            self.versions.pop()
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((start, version))


@dataclass(slots=True, eq=False)
class Prefix:
    """Tokens that enter the cache for one or several responses; later responses with the same tokens start from them.

    A last page that is not full belongs to the first response, which continues to write after these tokens. The others get copies.
    """

    tokens: tuple[int, ...]
    pages: list[int]
    computed: int  # tokens in the cache, or in the planned pass
    seen: SeenPrompt | None = None  # their images
    waiting: list[Response] = field(default_factory=list)
    is_claimed: bool = False  # some response writes into the last page
    logits: Tensor | None = None  # float32 [V], after the last token


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` to `end` of a prefix, to be computed in the next pass."""

    prefix: Prefix
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == len(self.prefix.tokens)


@dataclass(slots=True)
class Counters:
    """Counts of one generation, on one replica."""

    prefilled_tokens: int = 0  # computed in prefill passes, also for responses that returned to a seat
    shared_tokens: int = 0  # of prompts and of responses that returned, already in the cache or on the way there
    preemptions: int = 0
    prefill_passes: int = 0
    decode_steps: int = 0
    decoded_tokens: int = 0  # rows of all decode steps
    refits: int = 0  # new weights during the generation


class Scheduler:
    """Seats and pages of one generation."""

    def __init__(self, pool: PagePool, *, num_seats: int, chunk_tokens: int, counters: Counters) -> None:
        self.pool = pool
        self.chunk_tokens = chunk_tokens
        self.counters = counters
        self.waiting: deque[Response] = deque()  # each arrived after all seated ones
        self.seated: dict[int, Response] = {}  # by arrival, in that order
        self.prefilling: deque[Prefix] = deque()
        self._prefixes: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()  # being computed or kept, the last used at the end
        self._turns: OrderedDict[int, list[int]] = OrderedDict()  # pages of turns that may be followed by a next one, by the last page
        self._free_seats = list(range(num_seats - 1, -1, -1))
        self.num_arrived = 0

    @property
    def num_free_seats(self) -> int:
        return len(self._free_seats)

    @property
    def num_turns(self) -> int:
        """Turns whose pages are kept."""
        return len(self._turns)

    def arrive(self, request: GenRequest, limit: int, seen: SeenPrompt | None = None) -> None:
        keys = request.tokens if seen is None else seen.keys
        self.waiting.append(Response(arrival=self.num_arrived, request=request, limit=limit, tokens=keys, seen=seen))
        self.num_arrived += 1

    def admit(self) -> list[tuple[Prefix, Response]]:
        """Seat waiting responses while there is room; returns those with all tokens in the cache already, with their prefixes."""
        ready: list[tuple[Prefix, Response]] = []
        while self.waiting and self._free_seats and self._make_room(self.waiting[0]):
            response = self.waiting.popleft()
            prefix = self._join(response)
            response.seat = self._free_seats.pop()
            self.seated[response.arrival] = response
            if prefix.logits is None:
                prefix.waiting.append(response)
            else:
                ready.append((prefix, response))
        return ready

    def next_pieces(self) -> list[Piece]:
        """The pieces of the next prefill pass: the oldest prefixes, as far as they fit. They count as computed from now on."""
        pieces: list[Piece] = []
        room = self.chunk_tokens
        for prefix in self.prefilling:
            if not room:
                break
            start, end = prefix.computed, min(len(prefix.tokens), prefix.computed + room)
            pieces.append(Piece(prefix, start, end))
            prefix.computed = end
            room -= end - start
        self.counters.prefilled_tokens += self.chunk_tokens - room
        return pieces

    def computed(self, prefix: Prefix, logits: Tensor) -> list[Response]:
        """The prefix's last piece is in the cache; returns the responses that waited for it. It is kept for others while there is room."""
        assert self.prefilling[0] is prefix  # they end in the order in which they began
        self.prefilling.popleft()
        prefix.logits = logits
        responses, prefix.waiting = prefix.waiting, []
        return responses

    def forget_surplus(self) -> None:
        """Keep at most `KEPT_PREFIXES`; none if a prefix's state is continued by its first response."""
        while len(self._prefixes) - len(self.prefilling) > (KEPT_PREFIXES if self.pool.shares else 0):
            self.forget_oldest()

    def forget_everything(self) -> None:
        """The weights have changed: nothing in the cache may be found any more. Called while no prefix is being computed."""
        assert not self.prefilling
        while self.forget_oldest():
            pass
        self.pool.unpublish()

    def find_pages(self, count: int) -> bool:
        """Whether `count` pages are free, after kept prefixes are forgotten as needed."""
        while self.pool.num_free < count:
            if not self.forget_oldest():
                return False
        return True

    def forget_oldest(self) -> bool:
        """Release the pages of the least recently used kept prefix, else of a turn; False if none is kept."""
        for prefix in self._prefixes.values():
            if prefix.logits is not None:
                self._forget(prefix)
                return True
        if self._turns:
            self.pool.release(self._turns.popitem(last=False)[1])
            return True
        return False

    @property
    def youngest(self) -> Response:
        return next(reversed(self.seated.values()))

    def preempt(self, response: Response) -> None:
        """Take its seat and its pages from the youngest response, and let it wait for others."""
        self.leave(response)
        self.waiting.appendleft(response)
        self.counters.preemptions += 1
        self._stop_waiting(response)

    def drop(self, response: Response) -> None:
        """Nobody waits for the response any more; it may be anywhere."""
        if response.seat == NO_SEAT:
            self.waiting.remove(response)
            return
        for prefix in self.prefilling:
            if prefix.waiting[:1] == [response] and len(prefix.waiting) > 1:  # states are computed at the first one's seat
                heir = prefix.waiting[1]
                response.seat, heir.seat = heir.seat, response.seat
        self.leave(response)
        self._stop_waiting(response)

    def _stop_waiting(self, response: Response) -> None:
        for prefix in reversed(list(self.prefilling)):
            if response in prefix.waiting:
                prefix.waiting.remove(response)
            # A younger prefix that begins alike may count on pages that this one has still to fill.
            if not prefix.waiting and self.pool.is_alone_in(prefix.pages[prefix.computed // self.pool.page_size :]):
                self.prefilling.remove(prefix)
                self._forget(prefix)

    def keep(self, response: Response, sampled: Sequence[int]) -> None:
        """Before a response leaves: keep its whole pages for the episode's next turn, while there is room and the weights are the same."""
        if len(response.versions) > 1:
            return
        in_cache = (*response.prompt_keys, *sampled[:-1])  # the last token was never computed
        if count := self.pool.publish(in_cache, response.pages):
            last = response.pages[count - 1]
            if last not in self._turns:
                self._turns[last] = response.pages[:count]
                self.pool.share(self._turns[last])
            self._turns.move_to_end(last)

    def leave(self, response: Response) -> None:
        self.pool.release(response.pages)
        self._free_seats.append(response.seat)
        response.pages, response.seat = [], NO_SEAT
        del self.seated[response.arrival]

    def _make_room(self, response: Response) -> bool:
        """Whether the response can get its pages, with one more page for every seated one. Alone it always can."""
        while True:
            prefix = self._prefixes.get(response.tokens)
            if prefix is None:
                needed = self.pool.pages_for(len(response.tokens)) - len(self.pool.find(response.tokens))
            else:
                needed = int(self._wants_copy(prefix))
            if self.pool.num_free - needed >= len(self.seated):
                return True
            if not self.forget_oldest():
                assert self.seated, "a response that does not fit into the cache alone was let in"
                return False

    def _wants_copy(self, prefix: Prefix) -> bool:
        return prefix.is_claimed and len(prefix.tokens) % self.pool.page_size > 0

    def _join(self, response: Response) -> Prefix:
        """Give the response the pages of a prefix with the same tokens, which is made if needed."""
        prefix = self._prefixes.get(response.tokens)
        if prefix is None:
            prefix = self._begin(response.tokens, response.seen)
        else:
            self._prefixes.move_to_end(response.tokens)
            self.counters.shared_tokens += len(response.tokens)
        if self._wants_copy(prefix):
            shared = prefix.pages[:-1]
            response.pages = shared + self.pool.allocate(1)
        else:
            shared = prefix.pages
            response.pages = list(shared)
        self.pool.share(shared)
        prefix.is_claimed = True
        return prefix

    def _begin(self, tokens: tuple[int, ...], seen: SeenPrompt | None) -> Prefix:
        """Pages for these tokens. Others find them from now on, and come later in the queue for the computation."""
        shared = self.pool.find(tokens)
        self.pool.share(shared)
        pages = shared + self.pool.allocate(self.pool.pages_for(len(tokens)) - len(shared))
        self.pool.publish(tokens, pages)
        self.counters.shared_tokens += len(shared) * self.pool.page_size
        prefix = Prefix(tokens=tokens, pages=pages, computed=len(shared) * self.pool.page_size, seen=seen)
        self._prefixes[tokens] = prefix
        self.prefilling.append(prefix)
        return prefix

    def _forget(self, prefix: Prefix) -> None:
        del self._prefixes[prefix.tokens]
        self.pool.release(prefix.pages)


def copies(pairs: Sequence[tuple[Prefix, Response]]) -> tuple[list[int], list[int]]:
    """(source pages, target pages) of the copies for responses that start from a computed prefix."""
    return _different((prefix.pages[-1], response.pages[-1]) for prefix, response in pairs)


def seat_copies(pairs: Sequence[tuple[Prefix, Response]]) -> tuple[list[int], list[int]]:
    """(source seats, target seats) of the states of prefixes that have just been computed, each at the seat of its first response."""
    first: dict[Prefix, int] = {}
    return _different((first.setdefault(prefix, response.seat), response.seat) for prefix, response in pairs)


def _different(pairs: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    wanted = [(source, target) for source, target in pairs if source != target]
    return [source for source, _ in wanted], [target for _, target in wanted]
