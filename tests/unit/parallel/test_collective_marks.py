"""Every collective of a process is in its progress record, and `torch.distributed` is as it was afterwards."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from aligner.parallel import collectives
from aligner.parallel.progress import COLLECTIVES, POINT_TO_POINT, GroupInfo, Progress, marked

pytestmark = [pytest.mark.usefixtures("topology"), pytest.mark.cpu]  # whose tensors gloo takes
X = torch.ones(2)


@pytest.fixture
def seen(monkeypatch):
    """(name, group's size, sequence, peers) of all that was entered within `marked`."""
    progress, entered = Progress(), []
    enter = progress.enter

    def noting(name, group, peers=()) -> None:
        enter(name, group, peers)
        entered.append((name, len(group.members), progress.inside.sequence, progress.inside.peers))

    progress.enter = noting
    with marked(progress):
        yield entered
    assert progress.inside is None


def test_calls_are_counted_by_group(seen):
    pair = dist.new_group([0], group_desc="A_GROUP")
    dist.all_reduce(X.clone())
    dist.all_reduce(X.clone(), dist.ReduceOp.SUM, pair)  # by position
    dist.all_gather_into_tensor(torch.empty(2), X, group=pair)
    dist.all_reduce(X.clone(), async_op=True).wait()
    collectives.gather_objects("x", pair)  # a world of one needs no collective
    dist.all_gather_object([None], "x")  # the collectives that it is made of are its own
    assert seen == [
        ("all_reduce", 1, 1, ()),
        ("all_reduce", 1, 1, ()),
        ("all_gather_into_tensor", 1, 2, ()),
        ("all_reduce", 1, 2, ()),
        ("all_gather_object", 1, 3, ()),
    ]


def test_megatrons_own_names_are_marked(seen):
    from megatron.core.distributed import param_and_grad_buffer

    param_and_grad_buffer.dist_all_gather_func(torch.empty(2), X)
    assert [name for name, *_ in seen] == ["all_gather_into_tensor"]


def test_errors_leave_the_record_in_order(seen):
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        dist.all_reduce("no tensor")
    dist.barrier()
    assert [name for name, *_ in seen] == ["all_reduce", "barrier"]


def test_a_batch_of_point_to_point_operations_can_be_made(seen):
    operation = dist.P2POp(dist.isend, X, 0)  # compares with the names of torch's own module
    assert operation.op is distributed_c10d.isend


def test_everything_is_put_back():
    from megatron.core.tensor_parallel import mappings

    names = (*COLLECTIVES, *POINT_TO_POINT, "batch_isend_irecv")
    before = [vars(dist)[name] for name in names] + [distributed_c10d.isend, dist.Work.wait, mappings.dist_all_gather_func]
    with marked(Progress()):
        assert vars(dist)["all_reduce"] is not before[names.index("all_reduce")]
        assert mappings.dist_all_gather_func is not before[-1]
    assert before == [vars(dist)[name] for name in names] + [distributed_c10d.isend, dist.Work.wait, mappings.dist_all_gather_func]


def test_each_thread_has_its_own():
    """Two threads in collectives of different groups: neither hides the other's, and what lasts longer is what the rank is seen in."""
    progress = Progress()
    mine, others = (GroupInfo(key, key, (0, 1)) for key in "ab")
    entered, may_leave = threading.Event(), threading.Event()

    def sample() -> None:
        progress.enter("broadcast", others)
        entered.set()
        assert may_leave.wait(20)
        progress.leave(is_async=False)

    thread = threading.Thread(target=sample)
    thread.start()
    assert entered.wait(20) and progress.inside is None
    progress.enter("all_reduce", mine)
    assert progress.inside.name == "all_reduce" and progress.snapshot().inside.name == "broadcast"
    progress.leave(is_async=False)
    assert progress.inside is None and progress.snapshot().inside.name == "broadcast"
    may_leave.set()
    thread.join(20)
    assert progress.snapshot().inside is None and progress.snapshot().counts == {"a": 1, "b": 1}
