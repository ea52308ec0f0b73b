"""Random Llama models in Hugging Face format, and random prompts: the inputs of the comparisons, pure functions of size and seed."""

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


GPU_SIZES = {  # the layouts of Qwen2.5's models of these sizes, without biases
    "0.5b": Size(
        num_layers=24,
        hidden_size=896,
        ffn_hidden_size=4864,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tied_embeddings=True,
    ),
    "1.5b": Size(
        num_layers=28,
        hidden_size=1536,
        ffn_hidden_size=8960,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        tied_embeddings=True,
    ),
    "7b": Size(
        num_layers=28,
        hidden_size=3584,
        ffn_hidden_size=18944,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        tied_embeddings=False,
    ),
}

EOS = 1


def write_model(size: Size, directory: Path, *, positions: int, seed: int, mean_length: int = 0, dtype: str = "float32") -> int:
    """Save a Llama of this size with random weights; returns its number of parameters. Imports torch and transformers.

    With a `mean_length` the end-of-sequence token has a probability of about its inverse after every token: responses have geometric
    lengths by themselves, whoever samples them. Without, it is as rare as any other token.
    """
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
            eos_token_id=EOS,
            pad_token_id=0,
        )
    )
    if mean_length:
        _end_after(model, mean_length)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    return model.num_parameters()


def _end_after(model, mean_length: int) -> None:
    """A first entry that all embeddings share makes one direction of the last hidden state nearly constant; the end's output row is given
    as much of it as its probability needs."""
    import torch

    tokens = torch.randint(2, model.config.vocab_size, (8, 64), generator=torch.Generator().manual_seed(0))
    low, high = 0.0, 20.0
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 0.2
        row = model.get_output_embeddings().weight[EOS]
        for _ in range(20):
            row[0] = (low + high) / 2
            mean = float(model(tokens).logits.softmax(dim=-1)[..., EOS].mean())
            low, high = (low, float(row[0])) if mean * mean_length > 1 else (float(row[0]), high)


def random_prompts(size: Size, *, count: int, length: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` token ids, without the special ones."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, size.vocab_size, (count, length), generator=generator).tolist()
