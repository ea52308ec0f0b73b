"""What other threads want done in the event loop of the endpoint: now, or together at the end of a turn."""

from __future__ import annotations

import asyncio

from aligner.endpoint.generation import Inbox


def test_what_may_wait_comes_together_and_holds_up_nothing() -> None:
    async def told() -> list[str]:
        inbox, order, done = Inbox(), [], asyncio.Event()
        for name in "ab":
            inbox.put(lambda name=name: order.append(name), at_once=False)
        await asyncio.sleep(0)
        order.append("turn")  # the first begins one, with all that has come until then
        inbox.put(lambda: order.append("c"), at_once=False)
        inbox.put(done.set, at_once=False)
        inbox.put(lambda: order.append("now"))
        await asyncio.wait_for(done.wait(), 60)
        inbox.close()
        return order

    assert asyncio.run(told()) == ["a", "b", "turn", "now", "c"]
