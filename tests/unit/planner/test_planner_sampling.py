"""The queue of a replica of the engine, worked out by hand, and lengths of responses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aligner.errors import ConfigError
from aligner.jobs.plan import plan_job
from aligner.planner.sampling import ResponseLengths, decode_seconds, slowest_replica

SIZES = ["cluster=dgx_h100", "num_processes=8", "model=llama3_8b", "data.max_prompt_length=100", "rollout.sampling.max_response_length=900"]


def test_steps_and_tokens_in_the_cache():
    """Prompts of 10 tokens, responses of 2 and 4. Side by side two steps read 22 tokens on average, and two more 13; one behind the other
    two steps read 11, and four 12."""

    def count(active: int, cached: float) -> float:
        return 1.0

    def cache(active: int, cached: float) -> float:
        return cached

    assert decode_seconds([2, 4], 2, 10, count) == 4 and decode_seconds([2, 4], 1, 10, count) == 6
    assert decode_seconds([2, 4], 2, 10, cache) == 2 * 22 + 2 * 13 and decode_seconds([2, 4], 1, 10, cache) == 2 * 11 + 4 * 12
    # a seat that becomes free is taken at once: 3 runs from step 1 to step 4
    assert decode_seconds([1, 2, 3], 2, 10, lambda active, cached: active) == 2 + 2 + 1 + 1
    assert slowest_replica([5, 1, 1, 1], 2, sum) == 6


def test_lengths_have_their_mean_after_the_cut():
    for mean, longest in ((869, 3946), (3101, 3946), (10, 1000)):
        found = ResponseLengths(mean=mean).drawn(2048, longest)
        assert sum(found) / len(found) == pytest.approx(mean, rel=0.002) and max(found) <= longest and min(found) >= 1
        assert found == ResponseLengths(mean=mean).drawn(2048, longest)
    assert set(ResponseLengths(mean=900).drawn(16, 900)) == {900}


def planned(path: Path, *options: str) -> dict[str, Any]:
    """In a process of its own, since a plan has a torch.distributed world."""
    command = [sys.executable, "-m", "aligner.cli", "plan", "grpo", *SIZES, "--json", str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert path.exists(), done.stderr
    return json.loads(path.read_text())


def test_a_mean_changes_times_and_no_memory(tmp_path: Path):
    plain, shorter = planned(tmp_path / "plain.json"), planned(tmp_path / "shorter.json", "--response-length", "300")
    assert shorter["step_seconds"] < 0.7 * plain["step_seconds"]
    assert shorter["components"]["actor"]["memory"] == plain["components"]["actor"]["memory"]
    in_full, mixed = (job["components"]["actor"]["seconds"]["generate"]["parts"]["decoding"] for job in (plain, shorter))
    assert mixed > in_full / 3  # the longest responses take longer than the mean


def test_lengths_that_no_response_has():
    with pytest.raises(ConfigError, match="--response-length 901: allowed: 1 to rollout.sampling.max_response_length=900"):
        plan_job("grpo", SIZES, response_length=901)
    with pytest.raises(ConfigError, match="--response-length 5: this recipe samples no responses"):
        plan_job("sft", SIZES[:3], response_length=5)
