"""131,072 tokens in one sequence over four context-parallel ranks, within the memory that the planner said."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "long_context_job.py"
# One layer with two narrow heads: attention is quadratic. Hidden states are wide enough to weigh.
ARCHITECTURE = {"num_layers": 1, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
ARCHITECTURE |= {"ffn_hidden_size": 256, "vocab_size": 512, "max_position_embeddings": 131072}
ONE_HEAD = ARCHITECTURE | {"num_attention_heads": 1}


def run(run_distributed, folder: Path, length: int, cp: int, architecture: dict) -> tuple[dict, list[dict]]:
    """(predicted activation bytes by phase, what each rank measured)."""
    spec = json.dumps({"length": length, "parallel": {"cp": cp}, "architecture": architecture})
    run_distributed(JOB, 1, "predict", spec, folder, timeout=300)
    run_distributed(JOB, cp, "measure", spec, folder, timeout=1500)
    return json.loads((folder / "plan.json").read_text()), [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(cp)]


def assert_as_predicted(predicted: dict, ranks: list[dict]) -> None:
    for phase in ("logprobs", "train"):
        most = max(rank["peak_bytes"][phase] for rank in ranks)
        assert most == pytest.approx(predicted[phase], rel=0.2), f"{phase}: ranks held {[r['peak_bytes'][phase] for r in ranks]}"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("length", [32768, pytest.param(131072, marks=pytest.mark.slow)])
def test_a_long_context_over_four_ranks(length: int, run_distributed, tmp_path: Path) -> None:
    predicted, ranks = run(run_distributed, tmp_path, length, 4, ONE_HEAD)
    assert_as_predicted(predicted, ranks)
    first = ranks[0]
    assert first["loss"] == pytest.approx(math.log(512), rel=0.02)  # random weights
    assert first["loss"] == pytest.approx(first["loss_before"], rel=1e-5) and first["grad_norm"] > 0
    assert all(rank["loss"] == first["loss"] and rank["grad_norm"] == first["grad_norm"] for rank in ranks)


def test_the_same_numbers_over_one_rank_and_four(run_distributed, tmp_path: Path) -> None:
    """Where one rank can still hold the sequence; heads share their keys."""
    found = []
    for cp in (1, 4):
        folder = tmp_path / str(cp)
        folder.mkdir()
        predicted, ranks = run(run_distributed, folder, 16384, cp, ARCHITECTURE)
        found.append(ranks[0])
    assert_as_predicted(predicted, ranks)
    one, four = found
    assert four["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert four["loss_before"] == pytest.approx(one["loss_before"], rel=1e-6)
    assert four["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
