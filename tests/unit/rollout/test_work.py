"""Sharing one generation's requests between replicas: who begins with what, who takes what, and what happens when one fails."""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Sequence

import pytest
from torch.distributed import HashStore

from aligner.errors import EngineError
from aligner.protocols import Replica
from aligner.rollout.engine import GenRequest, Work
from aligner.rollout.engine.work import MOST_PARTS, Queue, SharedWork, WorkSharing, divide


def requests(*groups: tuple[int, int]) -> list[GenRequest]:
    """A group of requests per (length of its prompt, number of responses); every prompt is another one."""
    made: list[GenRequest] = []
    for number, (length, count) in enumerate(groups):
        made += [GenRequest(index=len(made) + i, tokens=(number,) * length, seed=i) for i in range(count)]
    return made


def indices(part: Sequence[GenRequest]) -> list[int]:
    return [request.index for request in part]


def shared(wanted: list[GenRequest], num_replicas: int) -> list[SharedWork]:
    """The work of every replica; one store between them."""
    division, store = divide(wanted, num_replicas), HashStore()
    return [
        SharedWork(division, Replica(index=index, count=num_replicas), Queue(store, "1", num_replicas), None)
        for index in range(num_replicas)
    ]


class FakeReplica:
    """An engine with `seats`: a step gives every running sequence a token. `prompts` are those that it had to compute."""

    def __init__(self, work: Work, seats: int, lengths: Sequence[int]) -> None:
        self.work, self.seats, self.lengths = work, seats, lengths
        self.running: dict[int, int] = {}
        self.done: list[int] = []
        self.prompts: set[tuple[int, ...]] = set()
        self.tokens = 0

    def step(self) -> bool:
        """Whether there was anything to do."""
        if room := self.seats - len(self.running):
            for request in self.work.take(room):
                self.running[request.index] = self.lengths[request.index]
                self.prompts.add(request.tokens)
        assert len(self.running) <= self.seats
        self.tokens += len(self.running)
        was_busy = bool(self.running)
        self.running = {index: left - 1 for index, left in self.running.items()}
        self.done += [index for index, left in self.running.items() if not left]
        self.running = {index: left for index, left in self.running.items() if left}
        return was_busy


def run(replicas: list[FakeReplica], step_times: Sequence[int]) -> int:
    """Step them by a common clock until all are idle; when the last step ends."""
    clock = [(0, number) for number in range(len(replicas))]
    ended = 0
    while clock:
        now, number = heapq.heappop(clock)
        if replicas[number].step():
            ended = max(ended, now + step_times[number])
            heapq.heappush(clock, (now + step_times[number], number))
    return ended


def test_half_is_dealt_out_and_the_longest_prompts_come_first() -> None:
    # By length: 6 [11 12 13], 5 [2 3], 5 [6], 4 [4 5], 3 [0 1], 2 [9 10], 2 [14], 1 [7 8]. Eight groups: 8 / (2 * 2) each to begin with.
    division = divide(requests((3, 2), (5, 2), (4, 2), (5, 1), (1, 2), (2, 2), (6, 3), (2, 1)), 2)
    assert [indices(part) for part in division.opening] == [[11, 12, 13, 6], [2, 3, 4, 5]]
    assert indices(division.queue) == [0, 1, 9, 10, 14, 7, 8] and division.ends == (2, 4, 5, 7)
    assert division.claim(0, room=8) == 2  # 4 / (2 * 2): one group, whatever the room
    assert division.claim(0, room=1) == 2  # a group that has begun is kept while others remain for all
    assert division.claim(2, room=1) == 2 and division.claim(3, room=1) == 1
    assert division.claim(4, room=1) == 1
    assert division.claim(5, room=1) == 1  # of the last group as much as there is room for
    assert division.claim(5, room=9) == 2
    assert division.claim(7, room=9) == 0


def test_a_replica_takes_its_part_of_what_is_left() -> None:
    division = divide(requests(*[(1, 1)] * 40), 2)  # 10 each are dealt out
    assert [len(part) for part in division.opening] == [10, 10] and len(division.queue) == 20
    assert [division.claim(start, room=10) for start in (0, 10, 19)] == [5, 2, 1]
    assert division.claim(0, room=3) == 3


def test_a_group_at_the_end_is_cut_into_four_at_most() -> None:
    division = divide(requests(*[(2, 16)] * 2, (1, 16)), 2)
    assert indices(division.queue) == list(range(32, 48))
    assert division.claim(0, room=1) == 4 and division.claim(0, room=6) == 6 and division.claim(14, room=1) == 2


def test_fewer_prompts_than_replicas() -> None:
    division = divide(requests((2, 8), (1, 4)), 4)  # 12 / (2 * 4): parts of 2
    assert [indices(part) for part in division.opening] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert indices(division.queue) == [8, 9, 10, 11] and division.ends == (2, 4)
    assert [indices(part) for part in divide(requests((5, 1)), 3).opening] == [[0], [], []]
    assert divide([], 2).opening == ((), ())


def test_fixed_shares_leave_nothing_to_take() -> None:
    division = divide(requests(*[(1, 2)] * 5), 2, fixed=True)
    assert [indices(part) for part in division.opening] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]] and division.queue == ()


def test_a_slow_replica_takes_less() -> None:
    """16 groups of 4 responses of 10 tokens. A quarter is dealt to each; while the slow one does its four (3 * 10 each), the other one does
    its own four and, in the remaining time of 80, eight more. With equal shares it would take 8 * 30."""
    wanted = requests(*[(3, 4)] * 16)
    fast, slow = (FakeReplica(work, 4, [10] * 64) for work in shared(wanted, 2))
    assert run([fast, slow], [1, 3]) == 120
    assert (fast.tokens, slow.tokens) == (480, 160)
    assert len(fast.prompts) + len(slow.prompts) == 16  # no prompt twice
    assert sorted(fast.done + slow.done) == list(range(64))


@pytest.mark.parametrize("seed", range(6))
def test_every_request_is_done_once_by_whoever_has_room(seed: int) -> None:
    chance = random.Random(seed)
    num_replicas, groups = chance.randint(2, 5), [(chance.randint(1, 9), chance.choice((1, 4, 16))) for _ in range(chance.randint(1, 30))]
    wanted = requests(*groups)
    lengths = [chance.randint(1, 30) for _ in wanted]
    replicas = [FakeReplica(work, chance.randint(1, 20), lengths) for work in shared(wanted, num_replicas)]
    run(replicas, [chance.randint(1, 3) for _ in replicas])
    assert sorted(sum((replica.done for replica in replicas), [])) == list(range(len(wanted)))
    if len(groups) >= num_replicas:  # only the last groups, of which there is one for each replica, were cut
        assert sum(len(replica.prompts) for replica in replicas) <= len(groups) + num_replicas * (MOST_PARTS - 1)


def test_two_that_take_at_the_same_time_get_different_parts() -> None:
    """The other one takes 6 of 7 after this one has looked: this one gets what follows, as far as there is any."""

    class Overtaken(Queue):
        def add(self, count: int) -> int:
            if count:
                super().add(6)
            return super().add(count)

    division = divide(requests((3, 2), (5, 2), (4, 2), (5, 1), (1, 2), (2, 2), (6, 3), (2, 1)), 2)
    work = SharedWork(division, Replica(index=1, count=2), Overtaken(HashStore(), "1", 2), None)
    assert indices(work.take(3)) == [2, 3, 4] and indices(work.take(3)) == [5]  # its own first
    assert indices(work.take(3)) == [8]
    assert work.take(3) == [] and work.take(1) == []
    with pytest.raises(ValueError, match="room=0"):
        work.take(0)


def test_where_one_replica_fails_the_others_begin_nothing_more() -> None:
    store = HashStore()
    broken, whole = (WorkSharing(Replica(index=index, count=2), None, store=store) for index in range(2))
    wanted = requests(*[(2, 1)] * 8)
    with whole.open(wanted) as work:
        with pytest.raises(EngineError, match="out of memory"), broken.open(wanted) as other:
            other.take(1)
            raise EngineError("out of memory")
        assert indices(work.take(8)) == [1, 3]  # what was dealt to it
        assert work.take(8) == []
    assert store.num_keys() == 0
    with whole.open(wanted) as work, broken.open(wanted) as other:  # and the next generation is whole again
        replicas = [FakeReplica(part, 8, [1] * 8) for part in (work, other)]
        run(replicas, [1, 1])
    assert sorted(replicas[0].done + replicas[1].done) == list(range(8))


def test_one_replica_and_fixed_shares_need_no_store() -> None:
    class NoStore(HashStore):
        def add(self, key: str, amount: int) -> int:
            pytest.fail("asked")

    wanted = requests((1, 2), (4, 2))
    with WorkSharing(Replica(), None, store=NoStore()).open(wanted) as work:
        assert indices(work.take(3)) == [2, 3, 0] and indices(work.take(3)) == [1] and not work.take(3)
    with WorkSharing(Replica(index=1, count=2), None, fixed=True, store=NoStore()).open(wanted) as work:
        assert indices(work.take(3)) == [0, 1] and not work.take(3)


def test_a_store_that_fails_or_hangs_is_named() -> None:
    never = threading.Event()

    class Gone(HashStore):
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Connection reset by peer")

    class Hanging(HashStore):
        def add(self, key: str, amount: int) -> int:
            never.wait(60)
            return 0

    with pytest.raises(EngineError, match=r"aligner/rollout/work/7/taken in .* rank 0: it did not answer \(Connection reset by peer\)"):
        Queue(Gone(), "7", 2).add(1)
    with pytest.raises(EngineError, match=r"aligner/rollout/work/7/left in .* rank 0: it did not answer within 0.05 s"):
        Queue(Hanging(), "7", 2, timeout_seconds=0.05).leave()
    never.set()
