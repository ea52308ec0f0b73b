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
from aligner.models.architecture.divisible import check_divisible, check_together
from aligner.models.config import Activation, Architecture, Layers, ModelConfig, PositionEmbedding
from aligner.models.create import read_architecture
from aligner.models.families import architecture_from_hf, architecture_to_hf
from aligner.models.modules.build import build_model
from aligner.models.modules.fusions import choose_layers
from aligner.models.modules.layers import ZeroCenteredLayerNorm
from aligner.models.modules.megatron_config import transformer_config
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
def test_parameter_count_is_the_published_one(name, topology):
    assert of_two_kinds(shipped(name).architecture) + in_tower(name) == PUBLISHED[name]


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


def test_qwen3_next_has_the_published_number_of_parameters(topology):
    """80B-A3B: 36 delta nets, 12 layers of attention, a mixture in each. The hub's 81,324,862,720 count one more layer of attention, which
    predicts further tokens, with a matrix of 2H x H and three norms: neither is read here."""
    file = {"model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 5120}
    file |= {"vocab_size": 151936, "moe_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10}
    architecture = architecture_from_hf(file | {"max_position_embeddings": 262144})
    assert architecture.linear_attention_layers == [layer for layer in range(48) if layer % 4 != 3]
    small = {"num_experts": 16}  # experts are all alike
    one, two = (count(dataclasses.replace(architecture.with_layers(n), **small)) for n in (1, 2))
    both = count(dataclasses.replace(architecture.with_layers(2), linear_attention_layers=[0], **small))
    more_experts = (512 - 16) * (3 * 2048 * 512 + 2048)
    further = both - one + more_experts + 2 * 2048**2 + 3 * 2048
    assert one + 35 * (two - one) + 12 * (both - one) + 48 * more_experts == 81_324_862_720 - further


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_size_is_one_of_its_family(name):
    architecture = shipped(name).architecture
    assert architecture_from_hf(json.loads(json.dumps(architecture_to_hf(architecture)))) == architecture
    assert shipped(name).seq_length <= architecture.max_position_embeddings


def test_sizes_in_the_comments_are_the_tested_ones():
    for name, total in PUBLISHED.items():
        assert f"{total:,} parameters" in (conf_directory() / "model" / f"{name}.yaml").read_text(), name


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
    ],
)
def test_impossible_layouts_name_the_possible_ones(model, parallel, message):
    with pytest.raises(ConfigError, match=message):
        check_divisible(shipped(model).architecture, ParallelConfig(**parallel))


def test_experts_that_cannot_be_split():
    with pytest.raises(
        ConfigError, match="parallel.etp=5: does not divide the model's expert_ffn_hidden_size=24; allowed: 1, 2, 3, 4, 6, 8"
    ):
        check_divisible(Architecture(**MOE), ParallelConfig(ep=2, etp=5))
    with pytest.raises(ConfigError, match="parallel.etp=2: with biases of experts it must be 1 or parallel.tp; allowed: 1, 4"):
        check_divisible(Architecture(**MOE, expert_biases=True), ParallelConfig(tp=4, sequence_parallel=True, ep=2, etp=2))


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (LLAMA_70B, {"tp": 8, "pp": 8, "vpp": 5}),
        (LLAMA_70B, {"tp": 16, "pp": 4, "first_stage_layers": 19, "last_stage_layers": 19}),
        (LLAMA_70B, {"pp": 2, "first_stage_layers": 39}),
        ("mixtral_8x7b", {"tp": 2, "sequence_parallel": True, "ep": 8, "etp": 2}),
        ("qwen3_235b_a22b", {"tp": 4, "sequence_parallel": True, "pp": 2, "ep": 32}),
        ("gpt_175b", {"tp": 8, "pp": 16}),
        ("nemotron_340b", {"tp": 8, "pp": 12}),
    ],
)
def test_possible_layouts_of_large_models(model, parallel):
    check_divisible(shipped(model).architecture, ParallelConfig(**parallel))


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


# What Megatron-Core is told.


def settings(parallel: dict | None = None, model: dict | None = None, **architecture):
    sizes = Architecture(**({"vocab_size": 61} | architecture))
    return transformer_config(sizes, ModelConfig(**(model or {})), ParallelConfig(**(parallel or {})))


def test_pipeline_settings_that_gloo_needs():
    """Batched exchanges under the interleaved schedule, and outputs freed early, give wrong gradients on gloo."""
    plain, interleaved = settings({"pp": 2}), settings({"pp": 2, "vpp": 2})
    assert (plain.overlap_p2p_comm, plain.batch_p2p_comm) == (False, True)
    assert (interleaved.overlap_p2p_comm, interleaved.batch_p2p_comm) == (True, False)
    for config in (plain, interleaved):
        assert config.deallocate_pipeline_outputs == torch.cuda.is_available()
        assert not config.variable_seq_lengths
    assert plain.virtual_pipeline_model_parallel_size is None and interleaved.virtual_pipeline_model_parallel_size == 2
    uneven = settings({"pp": 2, "last_stage_layers": 1})
    assert (uneven.num_layers_in_first_pipeline_stage, uneven.num_layers_in_last_pipeline_stage) == (None, 1)


def test_activations_by_hand():
    """At x = 2: silu 2/(1+e^-2); gelu 2 Phi(2); its tanh form x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); relu(x)^2."""
    expected = {
        Activation.silu: 1.7615942,
        Activation.gelu: 1.9544997,
        Activation.gelu_tanh: 1.9545977,
        Activation.squared_relu: 4.0,
    }
    for activation, value in expected.items():
        function = settings(activation=activation, gated_mlp=False).activation_func
        assert function(torch.tensor([2.0])).item() == pytest.approx(value, abs=1e-6)
        assert function(torch.tensor([-30.0])).item() == pytest.approx(0.0, abs=1e-6)


def test_zero_centered_norm_by_hand():
    """x = [-1, 1] has mean 0 and variance 1: with weights [0.5, -1] and biases [0.25, 2] it becomes [-1.5 + 0.25, 0 + 2]."""
    norm = ZeroCenteredLayerNorm(2, eps=0.0)
    x = torch.tensor([[-1.0, 1.0]])
    assert torch.equal(norm(x), x)  # starts as the identity on normalized input
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5, -1.0]))
        norm.bias.copy_(torch.tensor([0.25, 2.0]))
    assert torch.allclose(norm(x), torch.tensor([[-1.25, 2.0]]))
