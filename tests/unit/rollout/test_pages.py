"""Pages of a turn, which the next turn of its session finds; those of prompts are in test_generation.py."""

from __future__ import annotations

import pytest

from aligner.rollout.builtin.scheduler import Counters, PagePool, Response, Scheduler
from aligner.rollout.engine import GenRequest


@pytest.mark.parametrize(("versions", "kept"), [([(0, 1)], 2), ([(0, 1), (2, 2)], 0)])
def test_pages_of_a_turn_are_kept_for_the_next_one_unless_the_weights_changed_on_the_way(versions, kept):
    pool = PagePool(4, page_size=2)
    scheduler = Scheduler(pool, num_seats=1, chunk_tokens=8, counters=Counters())
    request = GenRequest(index=0, tokens=(1, 2, 3), seed=0)
    response = Response(arrival=0, request=request, limit=4, tokens=request.tokens, pages=pool.allocate(3), versions=versions)
    scheduler.keep(response, [4, 5])
    assert len(pool.find((1, 2, 3, 4, 6))) == kept
