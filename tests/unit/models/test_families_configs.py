"""The shipped model sizes: their published parameter counts, their Hugging Face configs, and which layouts they allow."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
import yaml

from aligner.errors import ConfigError
from aligner.files import conf_directory
from aligner.models.architecture.divisible import check_divisible, check_fp8, check_together, fp8_recipe
from aligner.models.config import Architecture, Fp8Recipe, Layers, ModelConfig, PositionEmbedding
from aligner.models.create import read_architecture
from aligner.models.families import architecture_from_hf, architecture_to_hf
from aligner.models.modules.build import build_model
from aligner.models.modules.fusions import choose_layers
from aligner.models.modules.vision import make_tower
from aligner.parallel import mcore
from aligner.parallel.topology import ParallelConfig
from aligner.settings.compose import from_yaml

# What the model hubs give as the number of parameters. GPT-3: 12 H^2 + 13 H per layer (four H x H attention matrices, two H x 4H, biases,
# two norms), vocabulary and positions times H, the final norm's 2 H. Nemotron-4's paper says 9.4B in embeddings and 331.6B elsewhere.
PUBLISHED = {
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_7b": 7_615_616_512,
    "qwen2_5_72b": 72_706_203_648,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_vl_8b": 8_767_123_696,
    "qwen2_5_vl_72b": 73_410_777_344,
    "deepseek_v3": 671_026_419_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "mixtral_8x7b": 46_702_792_704,
    "gpt_175b": 96 * (12 * 12288**2 + 13 * 12288) + (50257 + 2048) * 12288 + 2 * 12288,
    "nemotron_340b": 2 * 256000 * 18432 + 331_592_011_776,
}


def shipped(name: str) -> ModelConfig:
    return from_yaml(ModelConfig, (conf_directory() / "model" / f"{name}.yaml").read_text())


def count(architecture: Architecture) -> int:
    """Parameters of the model that is really built, on the meta device."""
    with torch.device("meta"):
        chunks = build_model(architecture, ModelConfig(make_vocab_divisible_by=1), ParallelConfig(), load=True)
    return sum(p.numel() for chunk in chunks for p in chunk.parameters())


def test_every_shipped_size_is_counted_here():
    assert {path.stem for path in (conf_directory() / "model").glob("*.yaml")} == PUBLISHED.keys() | {"tiny", "from_path"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_size_has_the_published_number_of_parameters_and_is_one_of_its_family(name, topology):
    model = shipped(name)
    assert of_two_kinds(model.architecture) + in_tower(name) == PUBLISHED[name]
    assert architecture_from_hf(json.loads(json.dumps(architecture_to_hf(model.architecture)))) == model.architecture
    assert model.seq_length <= model.architecture.max_position_embeddings
    assert f"{PUBLISHED[name]:,} parameters" in (conf_directory() / "model" / f"{name}.yaml").read_text()


def in_tower(name: str) -> int:
    """Parameters of the vision tower; 0 for a model without one."""
    model = shipped(name)
    if not model.images:
        return 0
    architecture = read_architecture(model, vocab_size=0)
    with torch.device("meta"):
        return sum(p.numel() for p in make_tower(architecture, model, torch.float32).parameters())


def of_two_kinds(architecture: Architecture) -> int:
    """Layers with experts and without: what a second layer of each adds, every further one adds."""
    first, two = (count(dataclasses.replace(architecture.with_layers(n), dense_layers=[])) for n in (1, 2))
    dense = len(architecture.dense_layers)
    both = count(dataclasses.replace(architecture.with_layers(2), dense_layers=[1])) if dense else 0
    return first + (architecture.num_layers - dense - 1) * (two - first) + dense * (both - first)


FILES = yaml.load(Path(__file__).with_name("published_models.yaml").read_text(), yaml.CSafeLoader)


@pytest.mark.parametrize("name", FILES)
def test_published_files_are_read_and_have_the_published_number_of_parameters(name, topology):
    architecture = architecture_from_hf(FILES[name]["config"], where=name)
    assert of_two_kinds(architecture) == FILES[name]["parameters"]
    assert architecture_from_hf(json.loads(json.dumps(architecture_to_hf(architecture)))) == architecture


# Which layouts a model allows.

LLAMA_70B = "llama3_70b"
MOE = {"num_experts": 6, "experts_per_token": 2, "expert_ffn_hidden_size": 24, "vocab_size": 61}


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        (LLAMA_70B, {"tp": 3}, "parallel.tp=3: does not divide the model's num_attention_heads=64; allowed: 1, 2, 4, 8, 16, 32, 64"),
        (LLAMA_70B, {"pp": 3}, "parallel.pp=3: does not divide the model's num_layers=80; allowed: 1, 2, 4, 5, 8, 10, 16, 20, 40, 80"),
        (
            LLAMA_70B,
            {"pp": 8, "vpp": 4},
            "parallel.vpp=4: does not divide the 10 of the model's num_layers=80 that each stage holds; allowed: 1, 2, 5, 10",
        ),
        (
            LLAMA_70B,
            {"pp": 4, "first_stage_layers": 19},
            "parallel.first_stage_layers=19: with first_stage_layers=19 and last_stage_layers=0, 61 of the model's num_layers=80 remain "
            "for 3 equal stages; allowed: 2, 5, 8, 11, 14, 17, 20,",
        ),
        (LLAMA_70B, {"pp": 2, "first_stage_layers": 40, "last_stage_layers": 41}, "parallel.first_stage_layers=40: .*; allowed: 39$"),
        (LLAMA_70B, {"ep": 2}, r"parallel.ep=2: the model has no experts \(num_experts=0\); allowed: 1$"),
        (LLAMA_70B, {"etp": 2}, r"parallel.etp=2: the model has no experts \(num_experts=0\); allowed: 1$"),
        ("mixtral_8x7b", {"tp": 4, "sequence_parallel": True}, r"parallel.etp=1: without expert parallelism \(ep=1\) .*; allowed: 4$"),
        ("mixtral_8x7b", {"ep": 3}, "parallel.ep=3: does not divide the model's num_experts=8; allowed: 1, 2, 4, 8$"),
        ("mixtral_8x7b", {"tp": 2, "etp": 2}, "parallel.sequence_parallel=false: a model with experts and parallel.tp=2 needs it"),
        (MOE, {"ep": 2, "etp": 5}, "parallel.etp=5: does not divide the model's expert_ffn_hidden_size=24; allowed: 1, 2, 3, 4, 6, 8"),
        (
            MOE | {"expert_biases": True},
            {"tp": 4, "sequence_parallel": True, "ep": 2, "etp": 2},
            "parallel.etp=2: with biases of experts it must be 1 or parallel.tp; allowed: 1, 4",
        ),
        ({"ffn_hidden_size": 47}, {"tp": 2}, "parallel.tp=2: does not divide the model's ffn_hidden_size=47"),
        ({"hidden_size": 33, "head_dim": 8}, {"tp": 2}, "parallel.tp=2: does not divide the model's hidden_size=33"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8},
            {"tp": 4},
            "parallel.tp=4: .*be a multiple of, the model's num_key_value_heads=6",
        ),
        ({"vocab_size": 0}, {}, "architecture.vocab_size=0: must be at least 1"),
    ],
)
def test_impossible_layouts_name_the_possible_ones(model, parallel, message):
    architecture = shipped(model).architecture if isinstance(model, str) else Architecture(**({"vocab_size": 61} | model))
    with pytest.raises(ConfigError, match=message):
        check_divisible(architecture, ParallelConfig(**parallel))


# What an architecture itself must satisfy.


MIXTURE = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 8}
LINEAR = {"linear_attention_layers": [0, 2], "linear_key_heads": 2, "linear_value_heads": 4, "linear_key_head_dim": 4}
LINEAR |= {"linear_value_head_dim": 4, "linear_conv_size": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rotary_fraction": 0.0}, r"architecture.rotary_fraction=0.0: must be in \(0, 1\]"),
        ({"rotary_fraction": 1.5}, r"architecture.rotary_fraction=1.5: must be in \(0, 1\]"),
        ({"head_dim": 8, "rotary_fraction": 0.4}, "architecture.rotary_fraction=0.4: of head_dim=8 it rotates"),
        ({"position_embedding": PositionEmbedding.learned, "rotary_fraction": 0.5}, "rotary_fraction=0.5: position_embedding=learned"),
        (
            {"position_embedding": PositionEmbedding.learned, "rope_llama3_factor": 8.0},
            "rope_llama3_factor=8.0: position_embedding=learned",
        ),
        (
            {"rope_linear_factor": 2.0, "rope_yarn_factor": 4.0},
            "rope_yarn_factor=4.0: .* scaled one way; allowed with rope_linear_factor: 0",
        ),
        ({"rope_low_freq_factor": 4.5}, "rope_low_freq_factor=4.5: must be above 0 and not above rope_high_freq_factor=4.0"),
        ({"rope_original_length": 0}, "rope_original_length=0: must be finite and above 0"),
        ({"rope_short_factors": [1.0] * 16}, r"rope_long_factors=\[\]: must be 16 finite numbers above 0, one for each rotated pair"),
        ({"rope_long_factors": [1.0], "rope_yarn_factor": 4.0}, r"rope_long_factors=\[1.0\]: .* allowed with rope_yarn_factor: 0"),
        ({"num_experts": -1}, "architecture.num_experts=-1: must not be negative"),
        ({"num_experts": 4}, "architecture.experts_per_token=0: must be from 1 to num_experts=4"),
        ({"num_experts": 4, "experts_per_token": 5}, "architecture.experts_per_token=5: must be from 1 to num_experts=4"),
        ({"num_experts": 4, "experts_per_token": 2}, "architecture.expert_ffn_hidden_size=0: must be at least 1"),
        ({"experts_per_token": 2}, "architecture.experts_per_token=2: needs num_experts > 0"),
        (
            {"num_experts": 4, "experts_per_token": 1, "expert_ffn_hidden_size": 8},
            "architecture.normalize_expert_weights=True: with experts_per_token=1 .* allowed: False",
        ),
        ({"sliding_window": -1}, "sliding_window=-1: must not be negative"),
        ({"full_attention_layers": [0]}, r"full_attention_layers=\[0\]: needs .* or attention_chunk > 0; allowed without: \[\]"),
        ({"sliding_window": 4, "full_attention_layers": [1, 0]}, r"full_attention_layers=\[1, 0\]: must be rising numbers from 0 to .*=3"),
        ({"sliding_window": 4, "full_attention_layers": [4]}, r"full_attention_layers=\[4\]: must be rising numbers"),
        ({"attention_chunk": 4, "sliding_window": 4}, "attention_chunk=4: must not be negative, and be 0 with sliding_window > 0"),
        ({"no_rope_layers": [4]}, r"no_rope_layers=\[4\]: must be rising numbers from 0 to num_layers-1=3"),
        ({"no_rope_layers": [1], "position_embedding": "learned"}, r"no_rope_layers=\[1\]: allowed with position_embedding=rope"),
        ({"qk_l2_norm": True, "rope_attention_factor": 1.2}, "qk_l2_norm=True: allowed with .* rope_attention_factor=1.0"),
        ({"qk_l2_norm": True, "qk_norm": True}, "qk_l2_norm=True: allowed with qk_norm=False"),
        ({"attention_temperature": -0.1}, "attention_temperature=-0.1: must be finite and not negative"),
        ({"attention_temperature_length": 0}, "attention_temperature_length=0: must be at least 1"),
        ({"weighted_expert_inputs": True}, "weighted_expert_inputs=True: needs num_experts > 0"),
        (MIXTURE | {"weighted_expert_inputs": True}, "weighted_expert_inputs=True: .* allowed with experts_per_token=2: False"),
        ({"attention_softcap": -2.0}, "attention_softcap=-2.0: must be finite and not negative"),
        ({"dense_layers": [0]}, r"dense_layers=\[0\]: needs num_experts > 0; allowed without: \[\]"),
        (MIXTURE | {"dense_layers": [4]}, r"dense_layers=\[4\]: must be rising numbers from 0 to num_layers-1=3"),
        (MIXTURE | {"router_bias": True}, "router_bias=True: .* allowed with router_sigmoid=True"),
        (MIXTURE | {"router_scale": 2.0}, "router_scale=2.0: allowed with router_sigmoid=True or normalize_expert_weights=False"),
        (MIXTURE | {"shared_expert_gate": True}, "shared_ffn_hidden_size=0: .* nor 0 with shared_expert_gate=True"),
        (MIXTURE | {"router_groups": 4, "router_groups_per_token": 1}, "router_groups_per_token=1: 1 groups of 1 experts have fewer than"),
        ({"value_head_dim": 8}, "value_head_dim=8: needs latent_size > 0"),
        ({"latent_size": 8, "value_head_dim": 33}, "value_head_dim=33: must be from 1 to head_dim=32"),
        ({"latent_size": 8, "value_head_dim": 8, "qk_norm": True}, "qk_norm=True: allowed with latent_size=8: False"),
        ({"linear_key_heads": 2}, "architecture.linear_key_heads=2: needs linear_attention_layers; allowed without: 0"),
        (LINEAR | {"linear_conv_size": 0}, "architecture.linear_conv_size=0: must be at least 1 with linear_attention_layers"),
        (LINEAR | {"linear_key_heads": 3}, "architecture.linear_key_heads=3: must divide linear_value_heads=4"),
        (LINEAR | {"linear_attention_layers": [2, 0]}, r"linear_attention_layers=\[2, 0\]: must be rising numbers from 0 to .*=3"),
        (LINEAR | {"linear_bias": True}, "architecture.linear_bias=True: allowed with linear_attention_layers: False"),
        ({"attention_gate": True, "rotary_interleaved": True}, "attention_gate=True: allowed with rotary_interleaved=False"),
    ],
)  # fmt: skip
def test_architectures_that_make_no_sense(fields, message):
    with pytest.raises(ConfigError, match=message):
        Architecture(**fields)


@pytest.mark.parametrize("fields", [{"attention_out_bias": True}, {"mlp_bias": True}])
def test_what_transformer_engine_does_not_compute_here(fields, monkeypatch):
    monkeypatch.setattr(mcore, "transformer_engine_problem", lambda: "")
    (name,) = fields
    assert choose_layers(Architecture(**fields), ModelConfig(), torch.bfloat16) == (False, ANY)
    with pytest.raises(ConfigError, match=rf"model.layers=transformer_engine: .*{name}=.*; allowed: auto, torch"):
        choose_layers(Architecture(**fields), ModelConfig(layers=Layers.transformer_engine), torch.bfloat16)


def test_a_factor_on_part_of_each_head_wants_torchs_layers(monkeypatch):
    monkeypatch.setattr(mcore, "transformer_engine_problem", lambda: "")
    monkeypatch.setattr(mcore, "transformer_engine_version", lambda: "2.9.0")
    whole, part = (Architecture(rope_attention_factor=1.2, rotary_fraction=fraction) for fraction in (1.0, 0.5))
    assert choose_layers(whole, ModelConfig(), torch.bfloat16)[0] and not choose_layers(part, ModelConfig(), torch.bfloat16)[0]


def test_what_has_no_batch_invariant_form():
    with pytest.raises(ConfigError, match="batch_invariant=true: a factor on the rotary embedding .*; allowed: models without it"):
        check_together(Architecture(rope_attention_factor=1.1), ModelConfig(batch_invariant=True), ParallelConfig())


def test_odd_heads_are_allowed_where_nothing_is_rotated():
    assert Architecture(hidden_size=12, head_dim=3, position_embedding=PositionEmbedding.learned).head_dim == 3


# Which recipe of 8-bit products a GPU gets, and what sizes it takes. `test_transformer_engine.py` asks Transformer Engine itself.

QWEN_7B = {"vocab_size": 64, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN_7B |= {"head_dim": 128, "ffn_hidden_size": 18944}
EIGHT_GROUPS = {"num_attention_heads": 32, "num_key_value_heads": 8}
EIGHT_EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 48}


@pytest.mark.parametrize(
    ("capability", "recipe"),
    [(8.9, "tensorwise"), (9.0, "blockwise"), (10.0, "mxfp8"), (10.3, "mxfp8"), (11.0, "mxfp8"), (12.0, "tensorwise")],
)
def test_auto_is_what_the_gpu_computes_best(capability, recipe):
    assert fp8_recipe(ModelConfig(fp8=True), capability).value == recipe
    for named in ("blockwise", "mxfp8", "tensorwise"):
        assert fp8_recipe(ModelConfig(fp8=True, fp8_recipe=Fp8Recipe(named)), capability).value == named


@pytest.mark.parametrize(
    ("recipe", "architecture", "parallel", "message"),
    [
        ("blockwise", {}, {"tp": 4}, ""),
        # 18944 / 8 is 2368: 18.5 blocks of 128, 74 of 32.
        ("blockwise", EIGHT_GROUPS, {"tp": 8}, "ffn_hidden_size on a rank is 2368, not a multiple of 128"),
        ("mxfp8", EIGHT_GROUPS, {"tp": 8}, ""),
        ("mxfp8", {"hidden_size": 3600}, {}, "hidden_size on a rank is 3600, not a multiple of 32; allowed: model.fp8_recipe=tensorwise"),
        ("tensorwise", {"hidden_size": 3592}, {}, "hidden_size on a rank is 3592, not a multiple of 16; allowed: model.fp8=false"),
        (
            "tensorwise",
            {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 24},
            {},
            "num_attention_heads x head_dim on a rank",
        ),
        ("mxfp8", EIGHT_EXPERTS, {}, "expert_ffn_hidden_size on a rank is 48"),
        ("tensorwise", EIGHT_EXPERTS, {}, ""),
        ("tensorwise", EIGHT_EXPERTS, {"tp": 2, "etp": 2, "ep": 2, "sequence_parallel": True}, "expert_ffn_hidden_size on a rank is 24"),
    ],
)
def test_sizes_that_a_recipe_cannot_scale_are_named(recipe, architecture, parallel, message):
    model = ModelConfig(fp8=True, fp8_recipe=Fp8Recipe(recipe))
    arguments = Architecture(**QWEN_7B | architecture), model, ParallelConfig(**parallel), Fp8Recipe(recipe)
    if not message:
        check_fp8(*arguments)
        return
    with pytest.raises(ConfigError) as raised:
        check_fp8(*arguments)
    assert str(raised.value).startswith(f"model.fp8_recipe={recipe}: ") and message in str(raised.value)


def test_auto_says_what_it_is_here():
    with pytest.raises(ConfigError, match=r"^model.fp8_recipe=auto \(here blockwise\): hidden_size on a rank is 96, not a multiple of 128"):
        check_fp8(Architecture(**QWEN_7B | {"hidden_size": 96}), ModelConfig(fp8=True), ParallelConfig(), Fp8Recipe.blockwise)


def test_blocks_are_not_exchanged_while_layers_compute():
    overlap = ParallelConfig(tp=2, sequence_parallel=True, tp_comm_overlap=True)
    check_fp8(Architecture(**QWEN_7B), ModelConfig(fp8=True), overlap, Fp8Recipe.mxfp8)
    with pytest.raises(ConfigError, match="parallel.tp_comm_overlap=true; allowed: false, or model.fp8_recipe=tensorwise"):
        check_fp8(Architecture(**QWEN_7B), ModelConfig(fp8=True), overlap, Fp8Recipe.blockwise)
