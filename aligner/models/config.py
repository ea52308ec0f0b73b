"""What a model is (`Architecture`) and what a user says about it (`ModelConfig`). Light: imports neither Megatron-Core nor transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from aligner.errors import ConfigError


class Family(str, Enum):
    """Model families with a Hugging Face mapping; the member name is HF's `model_type`."""

    llama = "llama"
    qwen2 = "qwen2"
    qwen3 = "qwen3"


class Dtype(str, Enum):
    """Precision of weights and activations; `auto` is bfloat16 on GPU and float32 on CPU."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(kw_only=True, slots=True)
class Architecture:
    """The sizes of a decoder-only transformer. In a config they matter only where `model.path` is empty (training from scratch)."""

    family: Family = Family.llama
    num_layers: int = 4
    hidden_size: int = 128
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    ffn_hidden_size: int = 352
    vocab_size: int = 0  # 0: the tokenizer's
    max_position_embeddings: int = 512
    rope_theta: float = 10000.0
    rope_llama3_factor: float = 0.0  # 0: plain rotary embedding; else Llama 3.1's scaling factor
    norm_eps: float = 1e-5
    tied_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "ffn_hidden_size",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"architecture.{name}={value}: must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"architecture.num_key_value_heads={self.num_key_value_heads}: must divide num_attention_heads={self.num_attention_heads}"
            )
        if not self.head_dim:
            if self.hidden_size % self.num_attention_heads:
                raise ConfigError(
                    f"architecture.num_attention_heads={self.num_attention_heads}: must divide hidden_size={self.hidden_size}"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.head_dim % 2:
            raise ConfigError(f"architecture.head_dim={self.head_dim}: rotary embeddings need an even size")


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """One model of a run."""

    path: str = ""  # Hugging Face directory or a checkpoint of this project; empty: random weights from `architecture`
    tokenizer: str = ""  # tokenizer directory; empty: the one beside the weights
    architecture: Architecture = field(default_factory=Architecture)
    dtype: Dtype = Dtype.auto
    seq_length: int = 0  # longest sequence of the run; 0: the model's max_position_embeddings
    micro_batch_size: int = 4  # rows per forward pass; changes memory and speed, never the numbers
    logits_chunk_size: int = 4096  # tokens whose logits exist at a time
    make_vocab_divisible_by: int = 128

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "logits_chunk_size", "make_vocab_divisible_by"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"model.{name}={value}: must be at least 1")
        if self.seq_length < 0:
            raise ConfigError(f"model.seq_length={self.seq_length}: must not be negative (0 is the model's own)")

    @property
    def tokenizer_path(self) -> str:
        """Where the tokenizer is. Raises ConfigError where neither `tokenizer` nor `path` says."""
        if not (self.tokenizer or self.path):
            raise ConfigError("model.tokenizer='': name a tokenizer directory, or give model.path, which holds one")
        return self.tokenizer or self.path
