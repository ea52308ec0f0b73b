"""Every shipped recipe's models built of Transformer Engine's modules, by its own Python code; see `fakes/transformer_engine_source.py`.

They must have the parameters of torch's layers: the same names, shapes, splits and marks, and the same places in checkpoints. Then weights
of files, checkpoints, other layouts and engines fit, whoever's the layers are. No kernel is run: what one returns is for a GPU to show.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
WHEEL = ROOT / "build" / "transformer_engine-2.9.0"
LATER = ROOT / "build" / "megatron_core-0.19.2"  # its Python code runs on every Python that this project does
JOB = ROOT / "tests" / "fakes" / "transformer_engine_job.py"

pytestmark = pytest.mark.skipif(not (WHEEL / "transformer_engine").is_dir(), reason="no Transformer Engine code: make transformer-engine")

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


@pytest.fixture(params=["installed", "0.19.2"])
def megatron_core(request) -> list[str]:
    """Where to look for Megatron-Core first."""
    if request.param == "installed":
        return []
    if metadata.version("megatron-core") == request.param:
        pytest.skip("it is the installed one")
    if not (LATER / "megatron").is_dir():
        pytest.skip("no Megatron-Core 0.19.2: make transformer-engine")
    return [str(LATER)]


def built(wanted: list[tuple[str, list[str]]], megatron_core: list[str]) -> list[dict[str, Any]]:
    """What the job says of each component, in a process of its own: Megatron-Core looks for Transformer Engine at its import."""
    command = [sys.executable, "-W", "ignore", str(JOB), str(WHEEL), json.dumps(wanted)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*megatron_core, str(ROOT)])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    versions = {one["versions"][0].partition("+")[0] for one in found}
    assert versions == {"0.19.2" if megatron_core else metadata.version("megatron-core")}
    return found


def test_every_gpu_recipe_has_the_parameters_of_torchs_layers(megatron_core):
    recipes = gpu_recipes()
    assert {"sft_70b", "dpo_70b", "rm_70b", "grpo_70b", "ppo_8b", "ppo_70b", "ppo_175b", "ppo_long_context"} <= set(recipes)
    components = built([(name, TOKENIZER) for name in recipes], megatron_core)
    assert {one["config"][0] for one in components} == set(recipes)
    assert {one["component"] for one in components} >= {"trainer", "actor", "critic", "reward"}
    for one in components:
        for stage in one["stages"]:
            assert stage["differences"] == [] and stage["parameters"] > 100, one["config"]
            assert set(stage["attention"]) == {"TEDotProductAttention"}
            assert stage["adding_weight_gradients"] == ["TELayerNormColumnParallelLinear", "TERowParallelLinear"]
            assert stage["not_adding"] == [] and not stage["options"]["gradient_accumulation_fusion"]
            assert stage["options"]["apply_rope_fusion"] == (one["config"][0] != "ppo_175b")  # whose positions are learned


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


def test_models_that_no_recipe_names(megatron_core):
    found = built([("sft_70b", overrides) for overrides, _, _ in OTHERS.values()], megatron_core)
    for one, (name, (_, modules, attention)) in zip(found, OTHERS.items(), strict=True):
        (stage,) = one["stages"]
        assert stage["differences"] == [], name
        assert stage["adding_weight_gradients"] == modules and stage["not_adding"] == [] and stage["attention"] == [attention], name
        options = stage["options"]
        assert options["moe_grouped_gemm"] == (modules == GROUPED) and options["moe_permute_fusion"] == name.startswith("experts"), name
