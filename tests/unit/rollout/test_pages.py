"""Pages have as many users as sequences hold them, and a prefix is found by its tokens and by nothing else."""

from __future__ import annotations

import pytest

from aligner.rollout.builtin.scheduler import Counters, PagePool, Response, Scheduler
from aligner.rollout.engine import GenRequest


def test_pages_are_free_when_nobody_uses_them():
    pool = PagePool(4, page_size=3)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 3, 4, 12)] == [0, 1, 1, 2, 4]
    first = pool.allocate(3)
    assert len(set(first)) == 3 and pool.num_free == 1
    pool.share(first[:2])
    pool.release(first)
    assert pool.num_free == 2  # two of them have another user
    second = pool.allocate(2)
    assert not set(second) & set(first[:2])
    pool.release(first[:2])
    pool.release(second)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    with pytest.raises(AssertionError):
        pool.allocate(1)


def test_only_whole_pages_of_the_same_tokens_are_found():
    pool = PagePool(8, page_size=3)
    tokens = (1, 2, 3, 4, 5, 6, 7, 8)
    pages = pool.allocate(3)
    pool.publish(tokens, pages)
    assert pool.find(tokens) == pages[:2]  # 7, 8 do not fill a page
    assert pool.find((1, 2, 3, 4, 5, 6)) == pages[:1]  # something must be left to compute
    assert pool.find((1, 2, 3, 4, 5, 6, 9)) == pages[:2]
    assert pool.find((1, 2, 3, 4, 9, 6, 7)) == pages[:1]
    assert pool.find((4, 5, 6, 7)) == []  # the same tokens at another place
    assert pool.find((9, 2, 3, 4, 5, 6, 7)) == []


def test_a_page_is_not_found_once_it_is_free():
    pool = PagePool(3, page_size=2)
    pages = pool.allocate(2)
    pool.publish((1, 2, 3, 4), pages)
    pool.release(pages[1:])
    assert pool.find((1, 2, 3, 4, 5)) == pages[:1]
    pool.release(pages[:1])
    assert pool.find((1, 2, 3, 4, 5)) == []
    again = pool.allocate(2)  # the same pages with other tokens: the old second page must not be found behind the new first one
    pool.publish((7, 8, 9, 9), again)
    assert pool.find((7, 8, 3, 4, 5)) == again[:1]


def test_of_equal_pages_the_first_is_found():
    pool = PagePool(4, page_size=2)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.publish((1, 2, 3, 4), first)
    pool.publish((1, 2, 5, 6), second)
    assert pool.find((1, 2, 3, 4, 5)) == first and pool.find((1, 2, 5, 6, 7)) == first[:1]
    pool.release(second)
    assert pool.find((1, 2, 3, 4, 5)) == first


def test_more_pages_leave_those_that_are_used_alone():
    pool = PagePool(2, page_size=2)
    used = pool.allocate(2)
    pool.publish((1, 2), used)
    pool.extend(5)
    assert pool.num_pages == 5 and pool.num_free == 3 and sorted(pool.allocate(3)) == [2, 3, 4]
    assert pool.find((1, 2, 3)) == used[:1]
    pool.release(used)
    assert pool.num_free == 2


def test_after_new_weights_pages_in_use_are_not_found():
    """Who uses them goes on; others compute the same tokens anew, into pages that can be found again."""
    pool = PagePool(4, page_size=2)
    old = pool.allocate(2)
    pool.publish((1, 2, 3, 4), old)
    pool.unpublish()
    assert pool.find((1, 2, 3, 4, 5)) == []
    new = pool.allocate(2)
    assert pool.publish((1, 2, 3, 4), new) == 2 and pool.find((1, 2, 3, 4, 5)) == new
    pool.release(old)  # of the pages that nobody finds
    assert pool.find((1, 2, 3, 4, 5)) == new


@pytest.mark.parametrize(("versions", "kept"), [([(0, 1)], 2), ([(0, 1), (2, 2)], 0)])
def test_pages_of_a_turn_are_kept_for_the_next_one_unless_the_weights_changed_on_the_way(versions, kept):
    pool = PagePool(4, page_size=2)
    scheduler = Scheduler(pool, num_seats=1, chunk_tokens=8, counters=Counters())
    request = GenRequest(index=0, tokens=(1, 2, 3), seed=0)
    response = Response(arrival=0, request=request, limit=4, tokens=request.tokens, pages=pool.allocate(3), versions=versions)
    scheduler.keep(response, [4, 5])
    assert len(pool.find((1, 2, 3, 4, 6))) == kept
