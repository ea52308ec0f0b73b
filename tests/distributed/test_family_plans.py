"""The planner runs layers of every family on fake tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from hf_models import HF_MODELS

JOB = Path(__file__).with_name("family_plan_job.py")


@pytest.fixture
def planned(run_distributed, tmp_path: Path):
    def plan(names: Iterable[str]) -> dict[str, list[int]]:
        run_distributed(JOB, 1, tmp_path / "plans.json", *names, timeout=300)
        return json.loads((tmp_path / "plans.json").read_text())

    return plan


def test_a_layer_of_each_kind_is_planned(planned):
    found = planned(["llama", "mixtral", "qwen3_next", "gpt_neox"])
    assert all(min(numbers) > 5000 for numbers in found.values())
    # By hand, gpt_neox untied: a rank of two has half of 64 rows (61 and padding to 128 make 128) of two embeddings, and of two layers half
    # of 3 x 32 x 32 + 96, of 32 x 32, of 2 x 32 x 48 + 48; whole are two biases of 32 and two norms of 64 in each, and the last norm.
    layer = (3 * 32 * 32 + 96 + 32 * 32 + 2 * 32 * 48 + 48) // 2 + 2 * 32 + 2 * 64
    assert found["gpt_neox"][2] == 2 * 64 * 32 + 2 * layer + 64


@pytest.mark.slow
def test_a_layer_of_every_family_is_planned(planned):
    found = planned(HF_MODELS)
    assert found.keys() == HF_MODELS.keys()
    assert all(min(numbers) > 5000 for numbers in found.values())
