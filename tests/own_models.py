"""Tiny random models of kinds that have no layers here, written by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import VOCAB

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15}
ENDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
# None of them is a family with layers here.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("SmolLM3Config", ENDS),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.2}),
    "exaone4": ("Exaone4Config", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "ernie4_5": ("Ernie4_5Config", {}),
    "minimax_m2": ("MiniMaxM2Config", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16, "attention_dropout": 0.1, "residual_dropout": 0.1}),
    "gemma4_text": (
        "Gemma4TextConfig",
        {"head_dim": 16, "sliding_window": 8, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "falcon_h1": (
        "FalconH1Config",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16},
    ),
}


def make_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`directory(name)`: a random model of `CONFIGS`, made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            kind, more = CONFIGS[name]
            torch.manual_seed(1)
            model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**(SIZES | more)))
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return make
