"""Rotary embeddings of every kind with odd parameters: frequencies, factors and tables are those of transformers' functions and modules,
in the trainer and in the engine, behind the original context too, and after an export."""

from __future__ import annotations

import copy
import importlib
import itertools
import random
from typing import Any

import pytest
import torch
from hf_models import SIZES

from aligner.models.architecture import rope
from aligner.models.config import Architecture
from aligner.models.families import architecture_from_hf, architecture_to_hf
from aligner.rollout.builtin.decode_layers import Rotary

WINDOW, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 1.7, "original_max_position_embeddings": 37}
LLAMA3 = {"rope_type": "llama3", "factor": 5.5, "original_max_position_embeddings": 41, "low_freq_factor": 0.3, "high_freq_factor": 2.9}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 24, "short_factor": [1.0, 1.3, 2.5], "long_factor": [1.1, 4.0, 9.5]}
LATENT = {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 8, "v_head_dim": 10, "num_key_value_heads": 4, "n_routed_experts": 4}
LATENT |= {"moe_intermediate_size": 20, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2, "n_group": 1}
LATENT |= {"topk_group": 1, "qk_rope_head_dim": 6}
TYPES = {"layer_types": [WINDOW, FULL], "sliding_window": 7}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name: (module and class of transformers, the file's keys besides SIZES)
    "plain, 11 pairs": ("qwen3.Qwen3", {"head_dim": 22, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    "linear": ("llama.Llama", {"head_dim": 10, "rope_parameters": {"rope_type": "linear", "factor": 1.7, "rope_theta": 321.0}}),
    "dynamic": ("qwen2.Qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.3, "rope_theta": 500.0}}),
    "llama3": ("llama.Llama", {"head_dim": 30, "rope_parameters": LLAMA3 | {"rope_theta": 900.0}}),
    "llama3, a step": (
        "llama4.Llama4Text",
        {"rope_parameters": LLAMA3 | {"low_freq_factor": 1.1, "high_freq_factor": 1.1, "rope_theta": 90.0}},
    ),
    "yarn": ("llama.Llama", {"head_dim": 26, "rope_parameters": YARN | {"rope_theta": 50.0, "beta_fast": 2.7, "beta_slow": 0.4}}),
    "yarn, not rounded": (
        "gpt_oss.GptOss",
        {"rope_parameters": YARN | {"rope_theta": 99.0, "truncate": False, "beta_fast": 3, "beta_slow": 0.2}},
    ),
    "yarn of a part": ("glm4.Glm4", {"head_dim": 20, "rope_parameters": YARN | {"rope_theta": 1e3, "partial_rotary_factor": 0.4}}),
    "yarn, scored": (
        "deepseek_v3.DeepseekV3",
        LATENT | {"rope_parameters": YARN | {"rope_theta": 60.0, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 4.0}},
    ),
    "a quarter": ("gpt_neox.GPTNeoX", {"rotary_pct": 0.25, "rotary_emb_base": 123, "hidden_size": 64}),
    "two fifths": ("nemotron.Nemotron", {"head_dim": 20, "partial_rotary_factor": 0.4, "rope_theta": 432.0}),
    "longrope": ("phi3.Phi3", {"partial_rotary_factor": 0.75, "rope_parameters": LONG | {"rope_theta": 100.0, "factor": 3.7}}),
    "longrope, short": ("phi3.Phi3", {"partial_rotary_factor": 0.75, "rope_parameters": LONG | {"original_max_position_embeddings": 128}}),
    "by layer": (
        "gemma3.Gemma3",
        {
            "head_dim": 14,
            "rope_parameters": {WINDOW: {"rope_theta": 33.0}, FULL: {"rope_type": "linear", "factor": 2.6, "rope_theta": 700.0}},
        }
        | TYPES,
    ),
    "yarn of full layers": (
        "olmo3.Olmo3",
        {"head_dim": 18, "rope_parameters": {WINDOW: {"rope_theta": 70.0}, FULL: YARN | {"rope_theta": 70.0, "attention_factor": 1.9}}}
        | TYPES,
    ),
    "multimodal sections": (
        "qwen3_5.Qwen3_5Text",
        {
            "head_dim": 24,
            "rope_parameters": {"partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2], "mrope_interleaved": True, "rope_theta": 55},
        },
    ),
}
NAMES = {"qwen3_5": "qwen3_5_text", "gemma3": "gemma3_text", "llama4": "llama4_text"}
PASSED_ON = ("yarn", "llama3", "linear")


def hf_file(name: str) -> dict[str, Any]:
    module = CASES[name][0].partition(".")[0]
    return SIZES | {"model_type": NAMES.get(module, module), "pad_token_id": 0, "eos_token_id": 2} | CASES[name][1]


def hf_config(file: dict[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[file["model_type"]].from_dict(copy.deepcopy(file))


def tables(name: str, config: Any, positions: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' cosines and sines [N, pairs] for a layer."""
    module, _, kind = CASES[name][0].partition(".")
    rotary = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), f"{kind}RotaryEmbedding")(config)
    where = {"layer_type": config.layer_types[layer]} if "by layer" in name or "full layers" in name else {}
    found = rotary(torch.zeros(1, 1), positions[None], **where)
    cos, sin = (found.real, found.imag) if torch.is_tensor(found) else found
    pairs = cos.shape[-1] if torch.is_tensor(found) or module == "gpt_oss" else cos.shape[-1] // 2
    return cos[0, :, :pairs], sin[0, :, :pairs]


@pytest.mark.parametrize("name", CASES)
def test_tables_are_those_of_transformers(name: str) -> None:
    """At the engine's positions, most of them behind the original context; and once more by the file that an export has."""
    file = hf_file(name)
    for written in (file, SIZES | architecture_to_hf(architecture_from_hf(file, where="x")) | {"pad_token_id": 0, "eos_token_id": 2}):
        architecture, config = architecture_from_hf(written, where="x"), hf_config(file)
        positions = torch.tensor([0, 1, 5, 23, 36, 64, 101, 127])
        frequencies = rope.frequencies(architecture)
        ours = Rotary(architecture, frequencies, torch.zeros(1), 128).at(positions)
        for layer in range(architecture.num_layers):
            cos, sin = tables(name, config, positions, layer)
            both = ours[layer]
            assert both is not None
            pairs = both[0].shape[-1] // 2
            torch.testing.assert_close(both[0][:, 0, 0, pairs:], cos, rtol=1e-5, atol=2e-5)
            torch.testing.assert_close(both[1][:, 0, 0, pairs:], sin, rtol=1e-5, atol=2e-5)


def test_every_yarn_is_that_of_transformers() -> None:
    """All pairs of ramp ends, rounded and not, with each of the ways to a factor, for heads and parts of them of many sizes."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ramps = [(32, 1), (32, 4), (8, 1), (5.5, 0.7), (1.2, 1.1), (3, 0.05), (64, 16)]
    factors = [{}, {"attention_factor": 1.23}, {"mscale": 0.7, "mscale_all_dim": 1.1}, {"mscale": 0.7}, {"mscale_all_dim": 0.4}]
    heads = [(8, 1.0), (22, 1.0), (64, 0.5), (40, 0.4), (128, 1.0)]
    generator = random.Random(3)
    for (fast, slow), more, (head, part), truncate in itertools.product(ramps, factors, heads, (True, False)):
        scaling = {"rope_type": "yarn", "factor": generator.choice([1.0, 1.7, 4.0, 40.0]), "beta_fast": fast, "beta_slow": slow}
        scaling |= {"truncate": truncate, "original_max_position_embeddings": generator.choice([16, 100, 4096])} | more
        scaling |= {"rope_theta": generator.choice([50.0, 1e4, 1.5e6]), "partial_rotary_factor": part}
        file = SIZES | {"model_type": "llama", "head_dim": head, "rope_parameters": scaling}
        theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(**{k: v for k, v in copy.deepcopy(file).items() if k != "model_type"}))
        ours = Architecture(**SMALL, head_dim=head, rotary_fraction=part, rope_theta=scaling["rope_theta"], **scaled(file))
        torch.testing.assert_close(rope.frequencies(ours), theirs, rtol=1e-5, atol=0, msg=lambda m, s=scaling: f"{s}: {m}")
        assert ours.rope_attention_factor == pytest.approx(factor, rel=1e-9), scaling


SMALL = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 48, "vocab_size": 61}


def scaled(file: dict[str, Any]) -> dict[str, Any]:
    """The fields that the file's scaling sets; Llama's own files rotate whole heads."""
    read = architecture_from_hf(file | {"rope_parameters": file["rope_parameters"] | {"partial_rotary_factor": 1.0}}, where="x")
    names = ("yarn_factor", "original_length", "beta_fast", "beta_slow", "truncate", "attention_factor", "score_scale")
    return {f"rope_{name}": getattr(read, f"rope_{name}") for name in names}


def test_every_llama3_and_longrope_is_that_of_transformers() -> None:
    from transformers import LlamaConfig, Phi3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for factor, (low, high), length, theta in itertools.product((1.7, 8, 32), ((1, 4), (0.3, 2.9), (1, 1)), (16, 8192), (70.0, 5e5)):
        scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high, "rope_theta": theta}
        file = SIZES | {"head_dim": 18, "rope_parameters": scaling | {"original_max_position_embeddings": length}}
        if low < high:  # where both are alike transformers divides by 0 for a wavelength that is exactly there
            theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**copy.deepcopy(file)))
            ours = rope.frequencies(architecture_from_hf(file | {"model_type": "llama"}, where="x"))
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0, msg=lambda m, s=scaling: f"{s}: {m}")
    for original, most, factor in itertools.product((16, 128), (128, 512), (None, 2.5)):
        scaling = LONG | {"original_max_position_embeddings": original, "rope_theta": 300.0} | ({"factor": factor} if factor else {})
        file = SIZES | {"max_position_embeddings": most, "original_max_position_embeddings": original, "partial_rotary_factor": 0.75}
        file |= {"rope_parameters": scaling, "pad_token_id": 0, "eos_token_id": 2}
        ours = architecture_from_hf(file | {"model_type": "phi3"}, where="x")
        for context in (12, 16, 17, most):
            theirs, scale = ROPE_INIT_FUNCTIONS["longrope"](Phi3Config(**copy.deepcopy(file)), seq_len=context)
            torch.testing.assert_close(rope.frequencies(ours, context=context), theirs, rtol=1e-5, atol=0)
            assert ours.rope_attention_factor == pytest.approx(scale)


def test_scores_of_latent_attention_are_scaled_as_in_transformers() -> None:
    """By the square of YaRN's factor with mscale_all_dim, on top of the factor on cosines and sines."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    for factor, scale, every in itertools.product((1.0, 1.7, 40.0), (0.7, 1.0), (1.0, 1.3)):
        scaling = YARN | {"rope_theta": 60.0, "factor": factor, "mscale": scale, "mscale_all_dim": every}
        file = SIZES | {"model_type": "deepseek_v3"} | LATENT | {"rope_parameters": scaling}
        ours = architecture_from_hf(file, where="x")
        assert rope.score_scale(ours) == pytest.approx(DeepseekV3Attention(hf_config(file), 0).scaling, rel=1e-6)
