"""Every shipped recipe's models built of Transformer Engine's modules, by its own Python code; see `fakes/transformer_engine_source.py`.

They must have the parameters of torch's layers: the same names, shapes, splits and marks, and the same places in checkpoints. Then weights
of files, checkpoints, other layouts and engines fit, whoever's the layers are. No kernel is run: what one returns is for a GPU to show.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cpu  # stand-ins are in the place of what is compiled
ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build"
JOB = ROOT / "tests" / "fakes" / "transformer_engine_job.py"
# (Transformer Engine, Megatron-Core; empty: the installed one). The Python code of 0.19.2 runs on every Python that this project does.
VERSIONS = [("2.9.0", ""), ("2.20.2", "0.19.2")]

TOKENIZER = ["model.tokenizer=not-read"]
SMALL = [*TOKENIZER, "parallel.pp=1", "model.architecture.num_layers=2"]
EXPERTS = [*SMALL, "model=qwen3_30b_a3b", "model.architecture.num_experts=8", "parallel.tp=2", "parallel.etp=2", "parallel.ep=4"]


def gpu_recipes() -> list[str]:
    """The configs under conf/ that are for GPUs."""
    found = []
    for path in sorted((ROOT / "conf").glob("*/*.yaml")):
        text = path.read_text()
        if "cluster: dgx" in text or path.stem == "ppo_long_context":  # which has its cluster from ppo_70b
            found.append(path.stem)
    return found


def named(pair: tuple[str, str]) -> str:
    return f"te{pair[0]}-core{pair[1] or '-installed'}"


@pytest.fixture(params=VERSIONS, ids=named)
def built(request) -> Callable[..., list[dict[str, Any]]]:
    """`built([(config, overrides)])`: what the job says of each component. In a process of its own: Megatron-Core looks for Transformer
    Engine when it is imported."""
    engine, core = request.param
    wheels = [BUILD / f"transformer_engine-{engine}", *([BUILD / f"megatron_core-{core}"] if core else [])]
    if missing := [wheel.name for wheel in wheels if not wheel.is_dir()]:
        pytest.skip(f"no {missing[0]}: make transformer-engine")

    def build(wanted: list[Any], *options: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-W", "ignore", str(JOB), str(wheels[0]), *options, json.dumps(wanted)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*wheels[1:], ROOT]))}
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        versions = {(one["versions"][1], one["versions"][0].partition("+")[0]) for one in found}
        assert versions == {(engine, core or metadata.version("megatron-core"))}
        return found

    return build


@pytest.mark.parametrize("built", [VERSIONS[0], pytest.param(VERSIONS[1], marks=pytest.mark.slow)], indirect=True, ids=named)
def test_every_gpu_recipe_has_the_parameters_of_torchs_layers(built):
    recipes = gpu_recipes()
    assert {"sft_70b", "dpo_70b", "rm_70b", "grpo_70b", "ppo_8b", "ppo_70b", "ppo_175b", "ppo_long_context"} <= set(recipes)
    components = built([(name, TOKENIZER) for name in recipes])
    assert {one["config"][0] for one in components} == set(recipes)
    assert {one["component"] for one in components} >= {"trainer", "actor", "critic", "reward"}
    assert {one["cp"] for one in components if one["config"][0] == "ppo_long_context"} == {8}
    for one in components:
        for stage in one["stages"]:
            assert stage["differences"] == [] and stage["parameters"] > 100, one["config"]
            assert set(stage["attention"]) == {"TEDotProductAttention"}
            # Each rank hands keys and values on to the next while it attends to the last ones.
            assert stage["context"] == [[one["cp"], "p2p"] if one["cp"] > 1 else [1, ""]]
            assert stage["adding_weight_gradients"] == (APART if one["config"][0].endswith("_lora") else PLAIN)
            assert stage["not_adding"] == [] and not stage["options"]["gradient_accumulation_fusion"]
            assert stage["options"]["apply_rope_fusion"] == (one["config"][0] not in UNFUSED)


UNFUSED = ("ppo_175b", "grpo_qwen3_vl_8b", "ppo_qwen2_5_vl_72b")  # whose positions are learned, or have three axes
PLAIN = ["TELayerNormColumnParallelLinear", "TERowParallelLinear"]
APART = ["TEColumnParallelLinear", "TERowParallelLinear"]  # an adapter reads the input of each product
GROUPED = ["TEColumnParallelGroupedLinear", "TELayerNormColumnParallelLinear", "TERowParallelGroupedLinear", "TERowParallelLinear"]
OTHERS = {
    "experts": (EXPERTS, GROUPED, "TEDotProductAttention"),
    "experts with adapters": ([*EXPERTS, "model.lora.rank=4"], APART, "TEDotProductAttention"),
    "adapters": ([*SMALL, "model.lora.rank=4"], APART, "TEDotProductAttention"),
    "Nemotron": ([*SMALL, "model=nemotron_340b", "data.max_length=2048"], PLAIN, "TEDotProductAttention"),
    "biases": ([*SMALL, "model=qwen2_5_7b", "parallel.tp=4"], PLAIN, "TEDotProductAttention"),
    "shared prompts": ([*SMALL, "model.share_prompts=true"], PLAIN, "CoreAttention"),
}


def test_models_that_no_recipe_names(built):
    plain = ["parallel.vpp=1", "parallel.tp_comm_overlap=false"]
    found = built([("sft_70b", [*plain, *overrides]) for overrides, _, _ in OTHERS.values()])
    for one, (name, (_, modules, attention)) in zip(found, OTHERS.items(), strict=True):
        (stage,) = one["stages"]
        assert stage["differences"] == [], name
        assert stage["adding_weight_gradients"] == modules and stage["not_adding"] == [] and stage["attention"] == [attention], name
        options = stage["options"]
        assert options["moe_grouped_gemm"] == (modules == GROUPED) and options["moe_permute_fusion"] == name.startswith("experts"), name


HOPPER, BLACKWELL, ADA, OFFICE = [9, 0], [10, 0], [8, 9], [12, 0]
BLOCKS = ("Float8BlockScaling", "E4M3")
MICRO = ("MXFP8BlockScaling", "E4M3")
TENSORS = ("Float8CurrentScaling", "HYBRID")
SPLIT = {"tp": 2, "sequence_parallel": True}
RECIPES: list[tuple[list[int], dict[str, Any], dict[str, Any], tuple[str, str], int]] = [
    (HOPPER, {}, {}, BLOCKS, 16),
    (HOPPER, {}, SPLIT, BLOCKS, 128),  # what ranks gather are whole blocks
    (BLACKWELL, {}, SPLIT, MICRO, 32),
    ([10, 3], {}, {}, MICRO, 32),
    (ADA, {}, {}, TENSORS, 16),
    (OFFICE, {}, {}, TENSORS, 16),
    (HOPPER, {"fp8_recipe": "tensorwise"}, SPLIT, TENSORS, 16),
    (BLACKWELL, {"fp8_recipe": "tensorwise"}, {}, TENSORS, 16),
    (BLACKWELL, {"fp8_recipe": "mxfp8", "packing": True, "micro_batch_tokens": 256}, SPLIT | {"tp_comm_overlap": True}, MICRO, 128),
    (HOPPER, {"fp8_recipe": "tensorwise", "packing": True, "micro_batch_tokens": 256}, SPLIT | {"tp_comm_overlap": True}, TENSORS, 16),
]


def test_transformer_engine_is_told_a_recipe_without_a_past(built):
    """Of no recipe the scales are those of passes before: replicas that make different numbers of passes never wait for each other's, and a
    pass without gradients has some. The weights themselves stay in 16 bits."""
    found = built([[capability, "12.9", model, {}, parallel] for capability, model, parallel, _, _ in RECIPES], "eight bits")
    for one, (capability, model, parallel, recipe, tokens) in zip(found, RECIPES, strict=True):
        case = (capability, model, parallel)
        assert (one.get("recipe"), one.get("format")) == recipe, (case, one)
        assert one["enabled"] and one["stateless"] and not one["weights"], case
        assert one["tokens"] == tokens, case
        if recipe == BLOCKS:
            assert one["scales"] == "power of two", case


REFUSED: list[tuple[list[int], str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    (ADA, "12.9", {"fp8_recipe": "blockwise"}, {}, {}, "model.fp8_recipe=blockwise: transformer-engine"),
    (HOPPER, "12.8", {}, {}, {}, "CUDA >= 12.9"),
    (HOPPER, "12.9", {"fp8_recipe": "mxfp8"}, {}, {}, "compute capability 10.0 or higher"),
    (OFFICE, "12.9", {"fp8_recipe": "mxfp8"}, {}, {}, "model.fp8_recipe=mxfp8: transformer-engine"),
    ([8, 0], "12.9", {}, {}, {}, "compute capability 8.9 or higher"),
    (HOPPER, "12.9", {}, {"hidden_size": 96}, {}, "hidden_size on a rank is 96"),
]


def test_what_transformer_engine_cannot_compute_is_refused(built):
    found = built([list(case[:-1]) for case in REFUSED], "eight bits")
    for one, (*case, message) in zip(found, REFUSED, strict=True):
        assert message in one.get("error", ""), (case, one)
