"""A rank listens on one port for all its gloo groups; one that is alone on none."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "gloo_ports_job.py"


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_one_port_for_all_groups(run_distributed, num_ranks: int) -> None:
    found = [json.loads(output.splitlines()[-1]) for output in run_distributed(JOB, num_ranks)]
    expected = [[float(num_ranks * number + sum(range(num_ranks)))] for number in range(6)]
    for rank in found:
        assert rank["sums"] == expected
        assert len(rank["ports"]) == (num_ranks > 1)  # the store is the launcher's here
        assert rank["threads"] == 7  # one for each group, which works in order: `gloo.settle` counts on it
    assert len({port for rank in found for port in rank["ports"]}) == (num_ranks if num_ranks > 1 else 0)


def test_the_store_of_ranks_on_one_machine_is_on_loopback() -> None:
    from aligner.parallel.launch import _bind

    store = _bind("127.0.0.1", 0, 10.0)
    other = next(iter({entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}), None)
    with socket.create_connection(("127.0.0.1", store.port), timeout=10):
        pass
    if sys.platform == "linux":
        with pytest.raises(OSError):
            socket.create_connection((other or "127.0.0.2", store.port), timeout=10)
