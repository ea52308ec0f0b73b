"""Who is named as the slow rank, from hand-made records."""

from __future__ import annotations

from aligner.parallel.agreement import rank_list
from aligner.parallel.progress import Collective, GroupInfo, Snapshot
from aligner.parallel.watch import Place, RankState, diagnose

WORLD = GroupInfo("0", "world", (0, 1, 2, 3))
FIRST, SECOND = GroupInfo("5", "tensor model parallel", (0, 1)), GroupInfo("6", "tensor model parallel", (2, 3))
STAGES = GroupInfo("7", "pipeline model parallel", (1, 3))


def state(rank: int, inside: tuple | None = None, *, counts: dict | None = None, phase: str = "train", **fields) -> RankState:
    """`inside`: name, group, sequence, and peers for point-to-point."""
    entered = dict(counts or {})
    collective = None
    if inside is not None:
        name, group, sequence, *peers = inside
        collective = Collective(name, 100 + rank, group, sequence, tuple(peers), 0.0)
        if sequence:
            entered[group.key] = sequence
    snapshot = Snapshot(
        phase=phase,
        phase_since=0.0,
        step=12,
        last_progress=0.0,
        still_seconds=30.0,
        inside=collective,
        last_left=None,
        counts=entered,
    )
    place = Place(component="actor", rank=rank, world_size=4, host=f"n{rank // 2}", incarnation="")
    return RankState(place=place, snapshot=snapshot, **fields)


def verdict(*states: RankState, world_size: int = 4):
    return diagnose("actor", states, world_size=world_size, stall_seconds=30.0)


def test_the_rank_at_the_end_of_a_chain_of_waiting_ranks():
    """2 waits for 3 in their group; 3 waits for 1 between stages; 0 waits for 1 in theirs; 1 computes."""
    found = verdict(
        state(0, ("all_reduce", FIRST, 9)),
        state(1, counts={"5": 8}),
        state(2, ("all_gather", SECOND, 4)),
        state(3, ("batch_isend_irecv", STAGES, 0, 1), counts={"6": 3}),
    )
    assert found.culprits == (1,)
    lines = found.text.splitlines()
    assert lines[0] == "actor: no progress for 30 s"
    assert lines[1].startswith("rank 1 (n0) stalled: in phase train of step 12 outside any collective since ")
    waiting = "rank 0 in all_reduce #9 (tensor model parallel group of 2), rank 3 in batch_isend_irecv with rank 1"
    assert lines[1].endswith(f"; it is waited for by {waiting}")
    assert "  in phase train of step 12 in all_gather #4 (tensor model parallel group of 2), waiting for rank 3: rank 2" in lines


def test_a_process_that_does_not_run_explains_everything():
    """Rank 3 was stopped inside a collective that its record does not show yet."""
    found = verdict(
        *(state(rank, ("all_reduce", WORLD, 7)) for rank in range(3)),
        state(3, counts={"0": 7}, absence="process 41 is in state T (stopped)"),
    )
    assert found.culprits == (3,)
    assert "rank 3 (n1) does not run (process 41 is in state T (stopped)); it was last seen in phase train" in found.text


def test_a_rank_that_left_while_others_wait_for_it():
    found = verdict(*(state(rank, ("barrier", WORLD, 3)) for rank in range(3)), state(3, counts={"0": 2}, phase="failed", ended=True))
    assert found.culprits == (3,)
    assert "rank 3 (n1) has ended, in phase failed of step 12" in found.text
    assert "it is waited for by ranks 0-2 in barrier #3 (world group of 4)" in found.text


def test_several_ranks_may_be_slow():
    waiting = [state(rank, ("all_reduce", WORLD, 3)) for rank in (0, 2)]
    assert verdict(*waiting, *(state(rank, counts={"0": 2}) for rank in (1, 3))).culprits == (1, 3)


def test_where_collectives_return_at_once_the_counts_tell():
    """Nobody is seen inside one (NCCL): the world's counts are 9, 9, 8, 9."""
    states = [state(rank, counts={"0": count, f"own {rank}": 5 * rank}) for rank, count in enumerate((9, 9, 8, 9))]
    assert verdict(*states).culprits == (2,)
    level = [state(rank, counts={"0": 9}) for rank in range(4)]
    found = verdict(*level)
    assert found.culprits == () and "no single rank can be named" in found.text


def test_a_rank_alone_and_a_rank_without_a_record():
    assert verdict(state(0), world_size=1).culprits == (0,)
    found = verdict(*(state(rank, ("all_reduce", WORLD, 3)) for rank in range(3)))
    assert "rank 3: left no record in the health directory" in found.text


def test_lists_of_ranks():
    assert [rank_list(ranks) for ranks in ([3], [2, 0, 1, 5], [7, 9])] == ["rank 3", "ranks 0-2, 5", "ranks 7, 9"]
    assert rank_list(range(0, 4096, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 2040 more"
