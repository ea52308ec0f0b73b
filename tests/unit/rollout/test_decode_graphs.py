"""Graphs of decode steps: which sizes there are, what replay sees, and when they are recorded again. Recording is a fake that runs the step
again at every replay, on the addresses that it saw: what a CUDA graph does, on CPU."""

from __future__ import annotations

import pytest
import torch

from aligner.rollout.attention import DecodeBatch, PagedKV
from aligner.rollout.graphs import DecodeGraphs, round_pages, round_rows

PAGE, PAGES = 4, 12


class FakeCapture:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, function):
        self.count += 1
        result = function()
        return lambda: result.copy_(function()), result


class Step:
    """Writes token * 10 to the row's slot and adds up what the row can see; `scale` is its only weight."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, batch: DecodeBatch, cache: PagedKV) -> torch.Tensor:
        self.shapes.append(tuple(batch.pages.shape))
        keys, _ = cache.slots(0)
        page = batch.pages.gather(1, (batch.positions // PAGE)[:, None])[:, 0].long()
        keys[page * PAGE + batch.positions % PAGE] = 10.0 * batch.tokens[:, None, None]
        seen = cache.keys[0][batch.pages].flatten(1, 2)[..., 0, 0]
        visible = torch.arange(seen.shape[1]) <= batch.positions[:, None]
        return (seen * visible).sum(-1, keepdim=True) * self.scale


def new_cache() -> PagedKV:
    keys, values = (torch.zeros(1, PAGES + 1, PAGE, 1, 1) for _ in range(2))
    return PagedKV(keys=keys, values=values)


def batch_of(tokens: list[int], positions: list[int], pages: list[list[int]]) -> DecodeBatch:
    return DecodeBatch(tokens=torch.tensor(tokens), positions=torch.tensor(positions), pages=torch.tensor(pages, dtype=torch.int32))


def graphs_of(step: Step) -> tuple[DecodeGraphs, FakeCapture]:
    capture = FakeCapture()
    return DecodeGraphs(step, capture, max_pages=6), capture


def test_sizes():
    assert sorted({round_rows(n) for n in range(1, 65)}) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert all(n <= round_rows(n) <= 1.25 * n for n in range(1, 600))
    assert [round_pages(n) for n in (1, 2, 3, 4, 5, 9)] == [1, 2, 4, 4, 8, 16]


def test_a_graph_serves_all_batches_of_its_size():
    step, cache = Step(), new_cache()
    graphs, capture = graphs_of(step)
    nine = batch_of(list(range(1, 10)), [0] * 9, [[n] for n in range(9)])
    assert graphs(nine, cache, (1,))[:, 0].tolist() == [10.0 * n for n in range(1, 10)]
    ten = batch_of([2] * 10, [1] * 10, [[n] for n in range(10)])
    assert graphs(ten, cache, (1,))[:, 0].tolist() == [10.0 * n + 20 for n in range(1, 10)] + [20.0]  # 10: nothing was there
    assert capture.count == 1 and set(step.shapes) == {(10, 1)}
    wide = batch_of([3], [9], [[0, 5, 6]])
    assert graphs(wide, cache, (1,)).tolist() == [[(10.0 + 20) + (60 + 20) + (70 + 30)]]  # page 0, page 5, two tokens of page 6
    assert graphs(batch_of([1], [20], [[0, 5, 6, 7, 8, 9]]), cache, (1,)).shape == (1, 1)
    assert capture.count == 3 and set(step.shapes) == {(10, 1), (1, 4), (1, 6)}  # never wider than the context


def test_filling_rows_write_to_the_scratch_page_only():
    cache = new_cache()
    graphs, _ = graphs_of(Step())
    graphs(batch_of(list(range(1, 11)), [3] * 10, [[n] for n in range(10)]), cache, ())
    before = cache.keys.clone()
    graphs(batch_of([7] * 9, [2] * 9, [[n] for n in range(9)]), cache, ())  # its tenth row was at page 9, position 3
    assert torch.equal(cache.keys[0, 9:PAGES], before[0, 9:PAGES])
    assert (cache.keys[0, :9, 2] == 70).all() and (cache.keys[0, :9, 3] == before[0, :9, 3]).all()


def test_recording_touches_no_page_of_a_sequence():
    step, cache = Step(), new_cache()
    cache.keys.fill_(5)
    graphs, capture = graphs_of(step)
    graphs(batch_of([1], [0], [[4]]), cache, ())
    cache.keys[0, 4, 0] = 5
    assert capture.count == 1 and (cache.keys[0, :PAGES] == 5).all()


@pytest.mark.parametrize("what", ["weights", "cache"])
def test_what_moved_is_recorded_again(what):
    step, cache = Step(), new_cache()
    graphs, capture = graphs_of(step)
    batch = batch_of([1, 2], [0, 0], [[3], [4]])
    for _ in range(3):
        assert graphs(batch, cache, (11, 12)).tolist() == [[10.0], [20.0]]
    assert capture.count == 1
    step.scale = 3.0
    if what == "weights":
        assert graphs(batch, cache, (11, 13)).tolist() == [[30.0], [60.0]]
    else:
        assert graphs(batch, new_cache(), (11, 12)).tolist() == [[30.0], [60.0]]
    assert capture.count == 2
