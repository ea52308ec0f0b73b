"""Graphs of decode steps: which sizes there are, what replay sees, and when they are recorded again. Recording is a fake that runs the step
again at every replay, on the addresses that it saw: what a CUDA graph does, on CPU."""

from __future__ import annotations

import weakref

import pytest
import torch

from aligner.rollout.builtin.attention import DecodeBatch, PagedKV
from aligner.rollout.builtin.graphs import DecodeGraphs, round_pages
from aligner.rollout.config import Kernels, RolloutConfig, graph_rows
from aligner.rollout.engine import ALL_MEMORY, GenRequest, GenResult, ListedWork
from aligner.types import SamplingConfig

PAGE, PAGES = 4, 12


class Graph:
    """What a recording leaves, as long as it lives."""

    def __init__(self, function) -> None:
        self.replay = function


class FakeCapture:
    """With the allocator's rule: a pool whose graphs are all gone takes no others."""

    def __init__(self) -> None:
        self.pools: list[list[weakref.ref]] = []

    @property
    def count(self) -> int:
        """How often something was recorded."""
        return sum(map(len, self.pools))

    def new(self):
        self.pools.append([])
        pool = self.pools[-1]

        def record(function):
            assert not pool or any(graph() for graph in pool), "use_count > 0 INTERNAL ASSERT FAILED"
            function()
            graph = Graph(function)
            pool.append(weakref.ref(graph))
            return lambda: graph.replay()

        return record


class Step:
    """Writes token * 10 to the row's slot and adds up what the row can see; `scale` is its only weight."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, batch: DecodeBatch, cache: PagedKV, out: torch.Tensor) -> None:
        self.shapes.append(tuple(batch.pages.shape))
        keys, _ = cache.slots(0)
        page = batch.pages.gather(1, (batch.positions // PAGE)[:, None])[:, 0].long()
        keys[page * PAGE + batch.positions % PAGE] = 10.0 * batch.tokens[:, None, None]
        seen = cache.keys[0][batch.pages].flatten(1, 2)[..., 0, 0]
        visible = torch.arange(seen.shape[1]) <= batch.positions[:, None]
        out.copy_((seen * visible).sum(-1, keepdim=True) * self.scale)


def new_cache() -> PagedKV:
    keys, values = (torch.zeros(1, PAGES + 1, PAGE, 1, 1) for _ in range(2))
    return PagedKV(keys=keys, values=values)


def batch_of(tokens: list[int], positions: list[int], pages: list[list[int]]) -> DecodeBatch:
    return DecodeBatch(tokens=torch.tensor(tokens), positions=torch.tensor(positions), pages=torch.tensor(pages, dtype=torch.int32))


def graphs_of(step: Step) -> tuple[DecodeGraphs, FakeCapture]:
    capture = FakeCapture()
    return DecodeGraphs(step, capture.new, max_pages=6, vocab_size=1), capture


def test_sizes():
    assert sorted({graph_rows(n) for n in range(1, 65)}) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert all(n <= graph_rows(n) <= 1.25 * n for n in range(1, 600))
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


def test_graphs_share_the_buffer_of_the_logits():
    """Not one for each size: with a vocabulary of 152k, a size of 256 rows takes 148 MiB."""
    cache = new_cache()
    graphs, capture = graphs_of(Step())
    sizes = [(8, 1), (8, 3), (5, 2), (1, 1)]
    found = [graphs(batch_of([1] * rows, [0] * rows, [[0] * width] * rows), cache, ()) for rows, width in sizes]
    assert capture.count == len(sizes) and {logits.untyped_storage().data_ptr() for logits in found} == {found[0].data_ptr()}
    assert found[0].untyped_storage().nbytes() == 8 * 4
    more = graphs(batch_of([1] * 9, [0] * 9, [[0]] * 9), cache, ())
    assert more.untyped_storage().nbytes() == 16 * 4  # doubled
    assert graphs(batch_of([3], [0], [[0]]), cache, ()).tolist() == [[30.0]] and capture.count == len(sizes) + 1


def test_what_is_released_is_recorded_again_in_another_pool():
    cache = new_cache()
    graphs, capture = graphs_of(Step())
    batch = batch_of([1, 2], [0, 0], [[3], [4]])
    held = weakref.ref(graphs(batch, cache, ()).untyped_storage())
    graphs.release()
    graphs.release()
    assert held() is None and [len(pool) for pool in capture.pools] == [1, 0]
    assert graphs(batch, cache, ()).tolist() == [[10.0], [20.0]] and capture.count == 2


@pytest.mark.parametrize("offload", [False, True])
def test_an_engine_records_once_per_size_while_its_cache_stays(topology, make_model, offload):
    """Three generations of the same requests, one of fewer, one that needs a larger cache. With `rollout.offload` memory is given back."""
    from aligner.rollout.builtin.megatron import MegatronEngine

    policy = make_model("policy")
    sampling = SamplingConfig(max_response_length=12)
    capture = FakeCapture()

    def engine_of(*, recorded: bool) -> MegatronEngine:
        engine = MegatronEngine(policy.chunks, RolloutConfig(kernels=Kernels.torch, offload=offload, max_batch_size=6), eos_id=2)
        if recorded:
            graphs = DecodeGraphs(engine.decoder._step, capture.new, max_pages=99, vocab_size=engine.decoder.architecture.vocab_size)
            engine.decoder._graphs = graphs
        return engine

    def generate(engine: MegatronEngine, count: int, length: int = 2) -> list[GenResult]:
        engine.wake(ALL_MEMORY)
        engine.refit(1)
        requests = [GenRequest(index=i, tokens=(3 + i, *[9] * (length - 1)), seed=i, limit=12 - i) for i in range(count)]
        results = [result for part in engine.generate(ListedWork(requests), sampling) for result in part]
        if offload:
            engine.sleep(ALL_MEMORY)
        return sorted(results, key=lambda result: result.index)

    plain, recorded = engine_of(recorded=False), engine_of(recorded=True)
    caches = []
    new_cache = recorded.decoder.new_cache
    recorded.decoder.new_cache = lambda pages: caches.append(pages) or new_cache(pages)
    expected = generate(plain, 6)
    assert generate(recorded, 6) == expected
    recorded_once = capture.count
    assert recorded_once > 2  # rows become fewer
    kept = recorded.generation._kept
    assert (kept is None) is offload
    assert generate(recorded, 6) == expected and generate(recorded, 4) == generate(plain, 4)
    if not offload:
        recorded.generation._kept.keys.fill_(torch.nan), recorded.generation._kept.values.fill_(torch.nan)
    assert generate(recorded, 6) == expected  # nothing of what was there before comes up
    assert caches == ([12] if not offload else [12, 12, 8, 12])
    if not offload:
        assert capture.count == recorded_once and recorded.generation._kept is kept
    assert generate(recorded, 6, length=30) == generate(plain, 6, length=30)
    assert len(caches) == (2 if not offload else 5) and caches[-1] > 12
