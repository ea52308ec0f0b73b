"""Planning of what moves between two splits of a model: shardings and pieces by hand, whole plans carried out on plain tensors."""

from __future__ import annotations

import math

import pytest
import torch

from aligner.errors import ConfigError
from aligner.parallel.reshard import Move, Piece, Sharding, even, grouped, padded, pieces, plan, replicated


def test_parts_of_a_plain_and_of_a_fused_matrix():
    assert even(8, 4).shards == (((0, 2),), ((2, 4),), ((4, 6),), ((6, 8),))
    # [gate 0..3; up 4..7] over two ranks: each holds half of both.
    assert even(8, 2, blocks=2).shards == (((0, 2), (4, 6)), ((2, 4), (6, 8)))
    assert even(6, 3, dim=1).dim == 1
    assert replicated(5).shards == (((0, 5),),)
    assert [even(8, 2, blocks=2).size(rank) for rank in (0, 1)] == [4, 4]


def test_parts_of_query_key_value_groups():
    """Two groups of two query heads, k and v, of one row each: q0 q1 k v | q2 q3 k v are rows 0 to 7."""
    assert grouped(2, 2, 1, 1).shards == (((0, 8),),)
    assert grouped(2, 2, 1, 2).shards == (((0, 4),), ((4, 8),))
    # Two ranks per group: one query head each, and both hold the group's k and v.
    assert grouped(2, 2, 1, 4).shards == (((0, 1), (2, 4)), ((1, 2), (2, 4)), ((4, 5), (6, 8)), ((5, 6), (6, 8)))
    # One group of four query heads of three rows, over two ranks.
    assert grouped(1, 4, 3, 2).shards == (((0, 6), (12, 18)), ((6, 12), (12, 18)))


def test_parts_of_a_padded_vocabulary():
    assert padded(5, 8, 2).shards == (((0, 4),), ((4, 5),))
    assert padded(5, 12, 3).shards == (((0, 4),), ((4, 5),), ((5, 5),))
    assert [padded(5, 12, 3).size(rank) for rank in range(3)] == [4, 1, 0]


@pytest.mark.parametrize(
    "impossible", [lambda: even(9, 2), lambda: even(6, 2, blocks=2), lambda: grouped(3, 2, 4, 2), lambda: grouped(2, 3, 4, 4)]
)
def test_splits_that_do_not_come_out_even_are_refused(impossible):
    with pytest.raises(ConfigError, match="cannot be split over"):
        impossible()


def test_pieces_of_a_fused_matrix_on_fewer_ranks():
    """Two ranks hold [g0 g1 u0 u1] and [g2 g3 u2 u3]; the one rank of the new split wants [g0..g3 u0..u3]."""
    source, target = even(8, 2, blocks=2), even(8, 1, blocks=2)
    assert pieces(source, target, 0, peers=(0, 1)) == [
        Piece(peer=0, start=0, target=0, length=2),
        Piece(peer=0, start=2, target=4, length=2),
        Piece(peer=1, start=0, target=2, length=2),
        Piece(peer=1, start=2, target=6, length=2),
    ]
    # Of each shard's own indices 1 and 2 alone: g1 u0 of the first, g3 u2 of the second.
    assert pieces(source, target, 0, peers=(0, 1), window=(1, 3)) == [
        Piece(peer=0, start=1, target=1, length=1),
        Piece(peer=0, start=2, target=4, length=1),
        Piece(peer=1, start=1, target=3, length=1),
        Piece(peer=1, start=2, target=6, length=1),
    ]


def test_pieces_of_a_vocabulary_leave_the_padding_behind():
    """5 rows padded to 8 over two ranks, wanted whole: 4 of the first, 1 of the second."""
    assert pieces(even(8, 2), padded(5, 8, 1), 0, peers=(0, 1)) == [
        Piece(peer=0, start=0, target=0, length=4),
        Piece(peer=1, start=0, target=4, length=1),
    ]


def move(name: str, source: Sharding, target: Sharding, *, width: int = 3, dtype: torch.dtype = torch.float32, **owner) -> Move:
    """A matrix with `width` indices in the dimension that is not split."""
    size = source.size(0)
    shape = (size, width) if source.dim == 0 else (width, size)
    return Move(name=name, shape=shape, dtype=dtype, source=source, target=target, **({"stage": 0} | owner))


def test_only_a_changed_split_is_gathered():
    assert not move("same", even(8, 2), even(8, 2)).gathered
    assert not move("padded alike", even(8, 2), padded(5, 8, 2)).gathered
    assert not move("from one", even(8, 1), even(8, 4)).gathered  # every rank has all of it
    assert not move("norm", replicated(7), replicated(7)).gathered
    assert move("fewer", even(8, 4), even(8, 2)).gathered
    assert move("more", even(8, 2), even(8, 4)).gathered
    assert move("padded otherwise", even(8, 2), padded(5, 6, 2)).gathered
    assert move("shared groups", even(16, 4), grouped(2, 2, 2, 4)).gathered  # the old split cut through k and v


def test_buckets_are_bounded_and_of_one_kind():
    """Rows of 3 float32 are 12 bytes; gathered from two ranks 36 with the own one. 100 bytes hold 8 rows, or 2 gathered ones."""
    moves = [
        move("a", even(5, 1), even(5, 1)),
        move("b", even(10, 2), even(10, 1)),  # gathered: 5 rows on each rank
        move("c", even(6, 1), even(6, 1)),
        move("half", even(4, 1), even(4, 1), dtype=torch.bfloat16),
        move("later", even(4, 1), even(4, 1), stage=1),
        move("expert", even(4, 1), even(4, 1), expert_rank=1),
    ]
    buckets = plan(moves, bucket_bytes=100)
    assert [[(p.move.name, p.window) for p in bucket.portions] for bucket in buckets] == [
        [("b", (0, 2))],
        [("b", (2, 4))],
        [("a", (0, 5)), ("c", (0, 3))],
        [("c", (3, 6))],
        [("b", (4, 5))],
        [("half", (0, 4))],
        [("later", (0, 4))],
        [("expert", (0, 4))],
    ]
    for bucket in buckets:
        assert bucket.num_bytes * (1 + len(bucket.first.source.shards) * bucket.first.gathered) <= 100


def test_a_row_larger_than_the_limit_travels_alone():
    buckets = plan([move("wide", even(2, 1), even(2, 1), width=100), move("small", even(2, 1), even(2, 1), width=1)], bucket_bytes=64)
    assert [[p.window for p in bucket.portions] for bucket in buckets] == [[(0, 1)], [(1, 2)], [(0, 2)]]


def cut(full: torch.Tensor, sharding: Sharding, index: int) -> torch.Tensor:
    """What rank `index` holds; rows beyond the tensor's end are padding."""
    rows = torch.cat([torch.arange(*interval) for interval in sharding.held_by(index)])
    beyond = max(int(rows.max()) + 1 - full.shape[sharding.dim], 0) if len(rows) else 0
    filler = full.new_full([beyond if d == sharding.dim else n for d, n in enumerate(full.shape)], -1.0)
    return torch.cat([full, filler], dim=sharding.dim).index_select(sharding.dim, rows)


@pytest.mark.parametrize("bucket_bytes", [1, 150, 10**6])
@pytest.mark.parametrize("new", [1, 2, 4])
@pytest.mark.parametrize("old", [1, 2, 4])
def test_every_rank_of_the_new_split_gets_its_part(old, new, bucket_bytes):
    """A plan carried out on plain tensors; a rank that does not gather may take from its own shard only."""
    generator = torch.Generator().manual_seed(0)
    full = {
        "qkv": (torch.randn(16, 3, generator=generator), even(16, old), grouped(2, 2, 2, new)),
        "gate_up": (torch.randn(16, 3, generator=generator), even(16, old, blocks=2), even(16, new, blocks=2)),
        "down": (torch.randn(3, 8, generator=generator), even(8, old, dim=1), even(8, new, dim=1)),
        "norm": (torch.randn(7, 3, generator=generator), replicated(7), replicated(7)),
        "vocabulary": (torch.randn(9, 3, generator=generator), even(16, old), padded(9, 16 if new == 2 else 12, new)),
    }
    moves = [move(name, source, target) for name, (_, source, target) in full.items()]
    wanted = {name: [cut(tensor, target, rank) for rank in range(new)] for name, (tensor, _, target) in full.items()}
    got = {name: [torch.full_like(part, math.nan) for part in parts] for name, parts in wanted.items()}
    for rank in range(math.lcm(old, new)):  # consecutive ranks: number rank % old in the old split, rank % new in the new one
        for bucket in plan(moves, bucket_bytes=bucket_bytes):
            for portion in bucket.portions:
                one = portion.move
                tensor, source, target = full[one.name]
                peers = range(old) if one.gathered else [rank % old]
                index = rank % new
                for piece in pieces(source, target, index, peers=peers, window=portion.window):
                    assert portion.window[0] <= piece.start and piece.start + piece.length <= portion.window[1]
                    taken = cut(tensor, source, piece.peer).narrow(one.dim, piece.start, piece.length)
                    got[one.name][index].narrow(one.dim, piece.target, piece.length).copy_(taken)
    for name, parts in wanted.items():
        for rank, part in enumerate(parts):
            assert torch.equal(got[name][rank], part), (name, rank)
