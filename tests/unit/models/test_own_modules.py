"""Models of `transformers`' own modules: log-probs, gradients, steps, checkpoints and exports are those of plain `transformers`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import VOCAB
from model_steps import adam
from safetensors.torch import load_file

from aligner.errors import ConfigError
from aligner.losses.sft import sft_loss
from aligner.models.config import Implementation, LoraConfig
from aligner.types import LabeledBatch

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
RECURRENT = {"lfm2", "falcon_h1"}
LENGTHS = torch.tensor([21, 9, 14, 2, 17])
ROWS, WIDTH = len(LENGTHS), 21


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory):
    """`directory(name)`: a random model of `CONFIGS`, written by transformers."""
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


def batch() -> LabeledBatch:
    tokens = torch.randint(3, VOCAB, (ROWS, WIDTH), generator=torch.Generator().manual_seed(3))
    inside = torch.arange(WIDTH) < LENGTHS[:, None]
    return LabeledBatch(tokens=tokens * inside, lengths=LENGTHS, loss_mask=inside & (torch.arange(WIDTH) > 0))


def plain(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of `transformers`, one row at a time, and the gradients of their mean."""
    rows, given, total = torch.zeros(ROWS, WIDTH), batch(), 0.0
    for row, length in enumerate(LENGTHS.tolist()):
        logits = model(input_ids=given.tokens[row : row + 1, :length], use_cache=False).logits[0].float()
        found = logits.log_softmax(-1)[:-1].gather(1, given.tokens[row, 1:length, None])[:, 0]
        rows[row, 1:length] = found.detach()
        total = total - found.sum()
    (total / given.loss_mask.sum()).backward()
    return rows, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


PACKED = {"packing": True, "micro_batch_tokens": 40}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_and_gradients_are_those_of_transformers(name: str, packed: bool, directory, load_policy) -> None:
    shape = PACKED if packed else {"micro_batch_size": 2}
    if packed and name in RECURRENT:
        with pytest.raises(ConfigError, match="model.packing=true: .*carry a state"):
            load_policy(directory(name), config=shape)
        return
    policy = load_policy(directory(name), config=shape, training=shape | {"total_steps": 10}, optimizer=adam(clip_grad=0.0))
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory(name), dtype=torch.float32).eval()
    logprobs, gradients = plain(reference)
    assert torch.allclose(policy.logprobs(batch()), logprobs, atol=1e-5)
    metrics = policy.train_step(batch(), sft_loss)
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    assert metrics["optim/grad_norm"].value() == pytest.approx(float(norm), rel=1e-4)
    own = dict(policy.module.named_parameters())
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name_, gradient in gradients.items():
        assert torch.allclose(own[f"hf.{name_}"].main_grad, gradient, atol=1e-4 * largest), name_
