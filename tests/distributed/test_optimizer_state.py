"""The optimizer's state in a checkpoint is what the ranks hold, in layouts whose gradient buffers are padded between their buckets too; and
the weights that a distributed optimizer's ranks exchange while they compute are those of an exchange that is waited for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tiers import cases

JOB = Path(__file__).parent / "optimizer_state_job.py"
OVERLAP_JOB = Path(__file__).parent / "overlap_job.py"
# Sizes of which no parameter ends at a multiple of 128, and a vocabulary that no number of ranks divides.
TINY = {"num_layers": 4, "hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 56}
TINY |= {"vocab_size": 61, "max_position_embeddings": 32, "initializer_range": 0.2}
UNTIED, TIED = TINY | {"tied_embeddings": False}, TINY | {"tied_embeddings": True}
EXPERTS = UNTIED | {"family": "mixtral", "num_layers": 2, "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24}


@pytest.fixture
def run(run_distributed, tmp_path) -> Callable:
    """`run(num_ranks, **spec)`: (the folder of the checkpoint, the job's result)."""
    number = iter(range(100))

    def start(num_ranks: int, **spec) -> tuple[Path, dict]:
        output = tmp_path / f"job{next(number)}"
        output.mkdir()
        run_distributed(JOB, num_ranks, json.dumps(spec), output, timeout=300)
        return output / "saved" / "step_000003", json.loads((output / "result.json").read_text())

    return start


LORA = {"rank": 3, "targets": ["qkv", "proj", "fc1", "fc2"]}
MANY = {"bucket": 1}  # every parameter ends a bucket
READ_BACK = {"in_background": True, "read_back": True}
TP2_PP2, PP2_CP2, TP2_SP = {"tp": 2, "pp": 2}, {"pp": 2, "cp": 2}, {"tp": 2, "sequence_parallel": True}
UNEVEN = {"pp": 2, "first_stage_layers": 3}
LAYOUTS = {  # name: (ranks, spec, the layouts that go on: (ranks, fields of ParallelConfig))
    "dp2": (2, MANY | {"architecture": UNTIED}, [(1, {}), (3, {}), (4, TP2_PP2)]),
    "dp3_bfloat16": (3, MANY | {"architecture": UNTIED, "dtype": "bfloat16"} | READ_BACK, [(1, {}), (2, TP2_SP), (4, PP2_CP2)]),
    "dp4": (4, {"architecture": UNTIED, "bucket": 2000}, [(3, {})]),
    "cp2_dp3": (6, MANY | {"architecture": UNTIED, "parallel": {"cp": 2}}, [(2, {}), (3, {}), (2, {"pp": 2})]),
    "tied_pp2_dp2": (4, {"architecture": TIED, "parallel": {"pp": 2}}, [(1, {}), (3, {}), (4, {"tp": 2, "cp": 2})]),
    "tied_uneven_pp2_dp3": (6, MANY | {"architecture": TIED, "parallel": UNEVEN}, [(2, {"pp": 2}), (2, {"tp": 2}), (3, {})]),
    "tp2_pp2_cp2": (8, MANY | {"architecture": UNTIED, "parallel": {**TP2_PP2, "cp": 2}, "rows": 8}, [(1, {})]),
    "vpp2_dp2": (4, MANY | {"architecture": UNTIED, "parallel": {"pp": 2, "vpp": 2}}, [(3, {})]),
    "ep2_dp3": (6, MANY | {"architecture": EXPERTS, "parallel": {"ep": 2}}, [(1, {}), (3, {}), (4, {"ep": 4})]),
    "tp2_ep2": (4, MANY | {"architecture": EXPERTS, "parallel": {**TP2_SP, "ep": 2}}, [(3, {})]),
    "tp2_etp2": (4, MANY | {"architecture": EXPERTS, "parallel": {**TP2_SP, "etp": 2}}, [(1, {})]),
    "value_pp2_dp3": (6, MANY | {"kind": "value", "architecture": TIED, "parallel": {"pp": 2}}, [(1, {}), (2, {"tp": 2}), (2, {})]),
    "value_bfloat16_dp2": (2, MANY | {"kind": "value", "architecture": UNTIED, "dtype": "bfloat16"}, [(1, {}), (2, {"pp": 2})]),
    "lora_dp3": (3, MANY | {"architecture": UNTIED, "lora": LORA}, [(1, {}), (2, {"tp": 2}), (2, {"pp": 2})]),
}


@pytest.mark.parametrize("name", cases(LAYOUTS, fast=("dp2", "tied_pp2_dp2", "tp2_ep2", "value_bfloat16_dp2", "lora_dp3")))
def test_saved_state_is_the_state_in_memory_and_training_goes_on_the_same(name, run):
    ranks, spec, others = LAYOUTS[name]
    saved, result = run(ranks, **spec)
    if spec.get("bucket") == MANY["bucket"]:
        assert result["buckets"] >= (6 if "parallel" in spec else 24)
    assert_right(result)
    for number, parallel in others:
        goes_on(run, saved, result, number, parallel, spec)


@pytest.mark.parametrize("name", cases(["dp3_bfloat16", "value_pp2_dp3", "lora_dp3", "ep2_dp3"], fast=["dp3_bfloat16"]))
def test_an_optimizer_on_the_host_has_the_same_state_and_numbers(name, run):
    """And its ranks go on from the other one's checkpoint, and these from its, to the bit."""
    ranks, spec, _ = LAYOUTS[name]
    results = {part: run(ranks, **spec, cpu_offload=part) for part in (0.0, 0.6, 1.0)}
    wanted = results[0.0][1]["after"]
    for saved, result in results.values():
        assert_right(result)
        assert result["after"] == wanted
        fraction = 0.0 if saved != results[0.0][0] else 1.0
        _, found = run(ranks, **spec | {"source": str(saved)}, cpu_offload=fraction)
        assert found == {"differing": {}, "after": wanted}


def assert_right(result: dict) -> None:
    assert result["differing"] == {}
    assert result["differing_when_loaded"] == {}
    assert result["after_loading"] == result["after"]


def goes_on(run, saved: Path, result: dict, ranks: int, parallel: dict, spec: dict) -> None:
    """At another layout: the same state, and the same steps but for the order of sums."""
    model = {key: value for key, value in spec.items() if key not in ("parallel", "bucket", *READ_BACK)}
    _, found = run(ranks, **model, parallel=parallel, source=str(saved))
    assert found["differing"] == {}, parallel
    tolerance = 5e-2 if spec.get("dtype") == "bfloat16" else 2e-3
    for got, wanted in zip(found["after"], result["after"], strict=True):
        assert got == pytest.approx(wanted, rel=tolerance), parallel


@pytest.mark.parametrize("draw", [0, *(pytest.param(draw, marks=pytest.mark.slow) for draw in range(1, 4))])
def test_layouts_sizes_and_buckets_drawn_at_random(draw, run):
    """One in four is a mixture of experts, one in three has adapters; a rank may hold nothing but padding."""
    random = Random(f"{draw}")
    heads = random.choice((1, 2, 3))
    sizes = {"num_layers": random.choice((2, 4)), "hidden_size": heads * 2 * random.randint(2, 15), "num_attention_heads": heads * 2}
    sizes |= {"num_key_value_heads": random.choice((2, heads * 2)), "ffn_hidden_size": 2 * random.randint(3, 40)}
    sizes |= {"vocab_size": random.randint(20, 90), "max_position_embeddings": 32, "initializer_range": 0.2}
    sizes |= {"tied_embeddings": random.random() < 0.5}
    sizes["hidden_size"] *= 2  # an even number of dimensions of each head
    parallel = random.choice(({}, {"pp": 2}, {"cp": 2}, {"tp": 2}, TP2_SP))
    if random.random() < 0.25:
        sizes |= {"family": "mixtral", "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 2 * random.randint(2, 20)}
        sizes |= {"tied_embeddings": False}
    spec = {"architecture": sizes, "bucket": random.choice((0, 1, 300, 1000)), "dtype": random.choice(("float32", "bfloat16"))}
    spec["kind"] = random.choice(("policy", "value"))
    if random.random() < 0.33:
        spec["lora"] = {"rank": random.randint(1, 5), "targets": ["qkv", "proj"]}
    replicas = random.choice((1, 2, 3))
    ranks = replicas * math.prod(size for size in parallel.values() if size is not True)
    saved, result = run(ranks, **spec, parallel=parallel)
    assert_right(result)
    goes_on(run, saved, result, random.choice((1, 2, 3)), {}, spec)


OVERLAPPED = {  # name: (ranks, spec)
    "dp2": (2, MANY | {"architecture": UNTIED, "offload": True}),
    "dp3_bfloat16": (3, {"architecture": UNTIED, "bucket": 2000, "dtype": "bfloat16", "recompute": "full", "rows": 13}),
    "one_bucket_dp2": (2, {"architecture": TIED, "rows": 5}),
    "cp2_dp2": (4, MANY | {"architecture": UNTIED, "parallel": {"cp": 2}}),
    "tied_pp2_dp2": (4, MANY | {"architecture": TIED, "parallel": {"pp": 2}}),
    "vpp2_dp2": (4, MANY | {"architecture": UNTIED, "parallel": {"pp": 2, "vpp": 2}}),
    "ep2_dp2": (4, MANY | {"architecture": EXPERTS, "parallel": {"ep": 2}}),
    "value_bfloat16_dp2": (2, MANY | {"kind": "value", "architecture": UNTIED, "dtype": "bfloat16"}),
    "host_dp2_bfloat16": (2, MANY | {"architecture": UNTIED, "dtype": "bfloat16", "cpu_offload": 0.7}),
    "lora_dp2": (2, MANY | {"architecture": UNTIED, "lora": LORA}),
}


@pytest.mark.parametrize("name", cases(OVERLAPPED, fast=("dp2", "tied_pp2_dp2", "ep2_dp2", "host_dp2_bfloat16")))
def test_overlapped_exchange_of_weights_changes_no_bit_and_nothing_reads_early(name, run_distributed, tmp_path):
    ranks, spec = OVERLAPPED[name]
    run_distributed(OVERLAP_JOB, ranks, json.dumps(spec), tmp_path, timeout=300)
