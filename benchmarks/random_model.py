"""Random-weight Llama models in Hugging Face format, and random prompts: the inputs of the comparison, a pure function of size and seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The sizes of a model of the comparison."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tied_embeddings: bool


SIZES = {
    "small": Size(  # 0.85 million parameters
        num_layers=3,
        hidden_size=128,
        ffn_hidden_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2048,
        tied_embeddings=True,
    ),
    "large": Size(  # 40 million
        num_layers=11,
        hidden_size=512,
        ffn_hidden_size=1408,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8192,
        tied_embeddings=False,
    ),
}


def write_model(size: Size, directory: Path, *, positions: int, seed: int) -> int:
    """Save a Llama of this size with fp32 random weights; returns its number of parameters. Imports torch and transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=size.num_layers,
            hidden_size=size.hidden_size,
            intermediate_size=size.ffn_hidden_size,
            num_attention_heads=size.num_attention_heads,
            num_key_value_heads=size.num_key_value_heads,
            vocab_size=size.vocab_size,
            tie_word_embeddings=size.tied_embeddings,
            max_position_embeddings=positions,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    model.save_pretrained(directory)
    return model.num_parameters()


def random_prompts(size: Size, *, count: int, length: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` token ids, without the special ones."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, size.vocab_size, (count, length), generator=generator).tolist()
