"""Tiny models for single-process tests: random Hugging Face directories, and policies and scalar models built from sizes alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB = 61  # not a multiple of the vocabulary padding
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_QWEN3_MOE = {"model_type": "qwen3_moe", "tie_word_embeddings": False, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 24}
HF_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False, "rope_theta": 10000.0},
    "llama_tied_llama3_rope": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": _LLAMA3 | {"rope_theta": 1e6}},
    "llama_multi_head": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-3},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False, "rope_theta": 1000.0},
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 16},
    "qwen3_tied": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 16},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": _QWEN3_MOE | {"num_experts_per_tok": 3, "norm_topk_prob": True},
    "qwen3_moe_unnormalized": _QWEN3_MOE | {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "nemotron": {"model_type": "nemotron"},
    "gpt2": {"model_type": "gpt2", "n_inner": 48, "bos_token_id": 0, "eos_token_id": 0},
}


@torch.no_grad()
def randomize(module: torch.nn.Module, seed: int) -> None:
    """Weights that matter everywhere: order-one logits, biases far from zero, norm weights far from one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name or ".ln_" in name:
            parameter.copy_(1 + 0.3 * noise)
        else:
            parameter.copy_(noise * (0.5 if "bias" in name else 0.2))


@pytest.fixture(scope="session")
def hf_directory(tmp_path_factory) -> Callable[[str], Path]:
    """`hf_directory(name)`: a random model of `HF_MODELS`, written by transformers."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            from transformers import AutoConfig, AutoModelForCausalLM

            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(_SIZES | HF_MODELS[name])))
            randomize(model, seed=len(name))
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return make


@pytest.fixture(scope="session")
def load_policy(topology) -> Callable[..., Any]:
    """`load_policy(path, optimizer=None, config=ModelConfig fields, training=Training fields)`: `create_policy`, from a directory."""
    from aligner.models.config import Dtype, ModelConfig
    from aligner.models.create import create_policy, read_architecture
    from aligner.models.trainable import Training
    from aligner.parallel.topology import ParallelConfig

    def load(path: Path, *, optimizer: Any = None, config: dict[str, Any] | None = None, training: dict[str, Any] | None = None) -> Any:
        model = ModelConfig(path=str(path), **({"dtype": Dtype.float32, "make_vocab_divisible_by": 8} | (config or {})))
        architecture = read_architecture(model, vocab_size=0)
        return create_policy(model, architecture, ParallelConfig(), topology, Training(optimizer=optimizer, **(training or {})))

    return load


@pytest.fixture(scope="session")
def make_model(topology) -> Callable[..., Any]:
    """`make_model(kind, optimizer=None, seed=0, architecture=..., config=..., training=...)`: a random policy, value or reward model.

    kind: "policy", "value" or "reward" (with its `head`); others are fields of `Architecture`, `ModelConfig` and `Training`.
    """
    from aligner.models.build import LanguageModel, ScalarModel
    from aligner.models.config import Architecture, Dtype, Family, ModelConfig
    from aligner.models.policy import MegatronPolicy
    from aligner.models.reward import MegatronRewardModel, MegatronValueModel
    from aligner.models.scalar_head import VALUES, ScalarHead
    from aligner.models.trainable import TrainableModel, Training
    from aligner.parallel.topology import ParallelConfig

    def make(kind: str, *, optimizer: Any = None, seed: int = 0, architecture=None, config=None, training=None, head=None) -> Any:
        sizes = {"family": Family.qwen2, "num_layers": 2, "hidden_size": 32, "num_key_value_heads": 2, "ffn_hidden_size": 48}
        sizes |= {"vocab_size": VOCAB, "max_position_embeddings": 64, "qkv_bias": True} | (architecture or {})
        own = {"dtype": Dtype.float32, "make_vocab_divisible_by": 8, "logits_chunk_size": 16}
        model = ModelConfig(**(own | (config or {})))
        head = {"value": {"head": VALUES}, "reward": {"head": head or ScalarHead()}}.get(kind, {})
        module = (ScalarModel if head else LanguageModel)(Architecture(**sizes), model, ParallelConfig(), load=False, **head)
        randomize(module, seed)
        trainable = TrainableModel([module], topology, Training(optimizer=optimizer, **({"total_steps": 10} | (training or {}))))
        if kind == "policy":
            return MegatronPolicy(trainable, temperature=(training or {}).get("temperature", 1.0))
        return {"value": MegatronValueModel, "reward": MegatronRewardModel}[kind](trainable)

    return make
