"""Who has to leave a gateway when its seats are taken; test_servers_gateway.py has what clients see of it."""

from __future__ import annotations

import asyncio
import socket

from aligner.servers import gateway


def test_those_who_hold_most_are_shown_out_first() -> None:
    """Here every address is a number; the others' connections stay, though they are older."""
    places = gateway.Seats(10, None)
    cleared = []

    class Seat(gateway._Seat):
        __slots__ = ()

        def clear(self) -> None:
            cleared.append(self.connection)

    for number, address in enumerate(["node1", "flood", "flood", "node2", "flood"]):
        places._strangers[number] = Seat(address, number)
    for _ in range(3):
        places._show_out()
    assert cleared == [1, 2, 0]  # then all have one: the oldest
    assert places.trust(3) and not cleared.count(3)
    assert not places.trust(1) and places._trusted == {3}  # it has been shown out: nobody would tell when it ends


def test_a_stranger_that_is_shown_out_before_it_is_looked_after_is_closed() -> None:
    async def shown_out(ours: socket.socket) -> None:
        places = gateway.Seats(1, None)
        places._enter(object, ours, "flood")
        places._show_out()
        await asyncio.sleep(0.0)  # its task ends, which has not begun
        await asyncio.sleep(0.0)

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.sendall(b"G")
    asyncio.run(shown_out(ours))
    assert ours.fileno() == -1
    theirs.close()
