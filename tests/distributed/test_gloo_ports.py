"""A rank listens on one port for all its gloo groups; one that is alone on none."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from aligner.parallel import gloo, launch


def many_groups() -> dict:
    """The ports and threads of a rank with many gloo groups, and what six collectives at once give; it checks how it ends."""
    world = launch.initialize("gloo", timeout_seconds=60, fingerprint="f", collective_timeout_seconds=60)
    groups = [dist.new_group(list(range(world.world_size)), backend="gloo") for _ in range(6)]
    tensors = [torch.full((50_000,), float(world.rank + number)) for number in range(len(groups))]
    pending = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)]
    for work in pending:
        work.wait()
    del pending, work
    own = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{name}").is_symlink()}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in own]
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    threads = names.count("pt_gloo_runloop")
    dist.barrier()
    found = {"sums": [tensor.unique().tolist() for tensor in tensors], "ports": listening, "threads": threads}
    settle, destroy, order = gloo.settle, dist.destroy_process_group, []
    with (
        mock.patch.object(gloo, "settle", lambda timeout: (settle(timeout), order.append("settled"))),
        mock.patch.object(dist, "destroy_process_group", lambda: (order.append("destroyed"), destroy())),
    ):
        launch.shutdown()
    assert order == ["settled", "destroyed"], order
    assert {tensor._use_count() for tensor in tensors} == {1}  # gloo's threads hold none of them
    return found


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_one_port_for_all_groups(on_ranks, num_ranks: int) -> None:
    found = on_ranks(many_groups, num_ranks)
    expected = [[float(num_ranks * number + sum(range(num_ranks)))] for number in range(6)]
    for rank in found:
        assert rank["sums"] == expected
        assert len(rank["ports"]) == (num_ranks > 1)  # the store is the launcher's here
        assert rank["threads"] == 7  # one for each group, which works in order: `gloo.settle` counts on it
    assert len({port for rank in found for port in rank["ports"]}) == (num_ranks if num_ranks > 1 else 0)


def test_the_store_of_ranks_on_one_machine_is_on_loopback() -> None:
    store = launch._bind("127.0.0.1", 0, 10.0)
    other = next(iter({entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}), None)
    with socket.create_connection(("127.0.0.1", store.port), timeout=10):
        pass
    if sys.platform == "linux":
        with pytest.raises(OSError):
            socket.create_connection((other or "127.0.0.2", store.port), timeout=10)
