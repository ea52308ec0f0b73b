"""vLLM itself where several ranks share a replica, over gloo: each hands its own worker full tensors, and all schedule the same."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("vllm_job.py")


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_two_ranks_sample_as_one_does(run_distributed, tmp_path):
    found = {count: run_distributed(JOB, count, tmp_path, timeout=400, fresh=True) for count in (1, 2)}
    sampled = [[line for line in output.splitlines() if line.startswith("sampled")] for outputs in found.values() for output in outputs]
    assert len(sampled[0]) == 8 and sampled[0] == sampled[1] == sampled[2]
    assert sampled[0][:4] != [line.replace("sampled 2", "sampled 1") for line in sampled[0][4:]]
