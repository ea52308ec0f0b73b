"""Which pages of the key-value cache are free, who uses the others, and which of them hold a prefix that sequences can share."""

from __future__ import annotations

from collections.abc import Sequence

_ROOT = -1  # stands for the page before a sequence's first

_Key = tuple[int, tuple[int, ...]]  # the page before, and the tokens of the whole page


class PagePool:
    """`num_pages` pages of `page_size` tokens each, counted by their users; a page without users is free.

    Whole pages of tokens may be published: a sequence that begins with the same tokens finds them. The comparison is of the tokens
    themselves, not of hashes. A published page is known by the page before it, which cannot be given to other tokens meanwhile: whoever
    uses a page uses all the pages before it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
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
        """There are more pages now, `num_pages` in all."""
        self._free = list(range(num_pages - 1, self.num_pages - 1, -1)) + self._free
        self._users += [0] * (num_pages - self.num_pages)
        self.num_pages = num_pages

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Free pages, with one user each; the caller has asked for `num_free` before."""
        assert count <= len(self._free)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Each gets one more user."""
        for page in pages:
            assert self._users[page] > 0
            self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Each has one user less; the last one's frees it."""
        for page in reversed(pages):
            self._users[page] -= 1
            assert self._users[page] >= 0
            if not self._users[page]:
                self._free.append(page)
                if page in self._key_of:
                    del self._published[self._key_of.pop(page)]

    def publish(self, tokens: Sequence[int], pages: Sequence[int]) -> int:
        """Let other sequences find the whole pages of `tokens`; their contents must be there before anybody reads them.

        Returns how many of these pages can be found.
        """
        before = _ROOT
        for number in range(len(tokens) // self.page_size):
            key = (before, tuple(tokens[number * self.page_size : (number + 1) * self.page_size]))
            page = pages[number]
            if self._published.setdefault(key, page) != page:
                return number  # the same tokens were put into two pages: what follows could not be found through this one
            self._key_of[page] = key
            before = page
        return len(tokens) // self.page_size

    def unpublish(self) -> None:
        """Other sequences no longer find the pages' contents; current users continue."""
        self._published.clear()
        self._key_of.clear()

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The published pages that hold the beginning of `tokens`, never all of them: after the last token something is to be computed."""
        pages: list[int] = []
        before = _ROOT
        for number in range((len(tokens) - 1) // self.page_size):
            page = self._published.get((before, tuple(tokens[number * self.page_size : (number + 1) * self.page_size])))
            if page is None:
                break
            pages.append(page)
            before = page
        return pages
