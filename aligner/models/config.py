"""What a model is (`Architecture`) and what a user says about it (`ModelConfig`). Light: imports neither Megatron-Core nor transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from aligner.errors import ConfigError
from aligner.hub.names import Files


class Family(str, Enum):
    """Model families with a Hugging Face mapping; the member name is HF's `model_type`."""

    llama = "llama"
    qwen2 = "qwen2"
    qwen3 = "qwen3"
    mixtral = "mixtral"
    qwen3_moe = "qwen3_moe"
    nemotron = "nemotron"
    gpt2 = "gpt2"


class Activation(str, Enum):
    """The non-linearity of the feed-forward layers; `gelu_tanh` is HF's `gelu_new` and `gelu_pytorch_tanh`, `squared_relu` its `relu2`."""

    silu = "silu"
    gelu = "gelu"
    gelu_tanh = "gelu_tanh"
    squared_relu = "squared_relu"


class Normalization(str, Enum):
    """The norm of every layer; `layer_norm_1p` is a LayerNorm whose stored weights are around 0 (the layer multiplies by 1 + weight)."""

    rms_norm = "rms_norm"
    layer_norm = "layer_norm"
    layer_norm_1p = "layer_norm_1p"


class PositionEmbedding(str, Enum):
    """Rotary, or a learned table of `max_position_embeddings` rows that is added to the token embeddings."""

    rope = "rope"
    learned = "learned"


class Dtype(str, Enum):
    """Precision of weights and activations; `auto` is bfloat16 on GPU and float32 on CPU."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def num_bytes(self) -> int:
        """Of one number; `auto` counts as float32."""
        return 2 if self in (Dtype.bfloat16, Dtype.float16) else 4


@dataclass(kw_only=True, slots=True)
class Architecture:
    """The sizes of a decoder-only transformer. In a config they matter only where `model.path` is empty (training from scratch)."""

    family: Family = Family.llama  # kind of model, as in the model_type of a Hugging Face config.json
    num_layers: int = 4  # transformer layers
    hidden_size: int = 128  # width of the residual stream
    num_attention_heads: int = 4  # query heads of a layer
    num_key_value_heads: int = 4  # key-value heads of a layer: each serves num_attention_heads / num_key_value_heads query heads
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    ffn_hidden_size: int = 352  # width inside the feed-forward layers
    vocab_size: int = 0  # 0: the tokenizer's
    max_position_embeddings: int = 512  # longest context, in tokens
    rope_theta: float = 10000.0  # base of the rotary embedding's wavelengths
    rope_llama3_factor: float = 0.0  # 0: plain rotary embedding; else Llama 3.1's scaling factor
    norm_eps: float = 1e-5  # added to the variance in every norm
    tied_embeddings: bool = True  # the output layer is the token embedding
    qkv_bias: bool = False  # biases on the query, key and value layers
    qk_norm: bool = False  # a norm on the queries and keys of each head
    initializer_range: float = 0.02  # standard deviation of random weights
    gated_mlp: bool = True  # activation(gate x) * (up x), as in SwiGLU; false: activation(up x)
    activation: Activation = Activation.silu  # non-linearity of the feed-forward layers
    normalization: Normalization = Normalization.rms_norm  # norm of every layer; layer_norm_1p multiplies by 1 + its stored weight
    linear_bias: bool = False  # biases on every linear layer; `qkv_bias` is of query, key and value alone
    position_embedding: PositionEmbedding = PositionEmbedding.rope  # rope: rotary; learned: a table that is added to the token embeddings
    rotary_fraction: float = 1.0  # part of each head's dimensions that is rotated
    num_experts: int = 0  # 0: dense feed-forward layers; else every layer is a mixture of experts
    experts_per_token: int = 0  # experts that each token is sent to; 0: none (dense)
    expert_ffn_hidden_size: int = 0  # width inside each expert; 0: none (dense)
    normalize_expert_weights: bool = True  # a token's expert weights sum to 1

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_positions()
        self._check_experts()

    def _check_sizes(self) -> None:
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
        for name in ("norm_eps", "initializer_range", "rope_llama3_factor"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"architecture.{name}={getattr(self, name)}: must be finite and not negative")
        if not 0 < self.rope_theta < math.inf:
            raise ConfigError(f"architecture.rope_theta={self.rope_theta}: must be finite and above 0")
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

    def _check_positions(self) -> None:
        if not 0 < self.rotary_fraction <= 1:
            raise ConfigError(f"architecture.rotary_fraction={self.rotary_fraction}: must be in (0, 1]")
        if self.position_embedding == PositionEmbedding.learned:
            for name, neutral in (("rotary_fraction", 1.0), ("rope_llama3_factor", 0.0)):
                if getattr(self, name) != neutral:
                    raise ConfigError(
                        f"architecture.{name}={getattr(self, name)}: position_embedding=learned rotates nothing; allowed: {neutral}"
                    )
            return
        if self.head_dim % 2:
            raise ConfigError(f"architecture.head_dim={self.head_dim}: rotary embeddings need an even size")
        rotated = self.head_dim * self.rotary_fraction
        if rotated % 2:
            raise ConfigError(
                f"architecture.rotary_fraction={self.rotary_fraction}: of head_dim={self.head_dim} it rotates {rotated} dimensions; "
                "must be an even number"
            )

    def _check_experts(self) -> None:
        if self.num_experts < 0:
            raise ConfigError(f"architecture.num_experts={self.num_experts}: must not be negative (0 is a dense model)")
        if not self.num_experts:
            for name in ("experts_per_token", "expert_ffn_hidden_size"):
                if getattr(self, name):
                    raise ConfigError(f"architecture.{name}={getattr(self, name)}: needs num_experts > 0; allowed without: 0")
            return
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(f"architecture.experts_per_token={self.experts_per_token}: must be from 1 to num_experts={self.num_experts}")
        if self.expert_ffn_hidden_size < 1:
            raise ConfigError(f"architecture.expert_ffn_hidden_size={self.expert_ffn_hidden_size}: must be at least 1 with num_experts > 0")
        if self.experts_per_token == 1 and self.normalize_expert_weights:
            raise ConfigError(
                "architecture.normalize_expert_weights=True: with experts_per_token=1 every weight is 1, which gives the router "
                "no gradient; allowed: False"
            )


class Layers(str, Enum):
    """Whose modules the layers are made of; `auto` is Transformer Engine's where they can be used (`aligner.models.fusions`)."""

    auto = "auto"
    transformer_engine = "transformer_engine"
    torch = "torch"


class Recompute(str, Enum):
    """Which activations are computed again in the backward pass instead of being kept (Korthikanti et al. 2022, 2205.05198)."""

    none = "none"
    selective = "selective"  # those inside core attention
    full = "full"  # everything but each layer's input


class LoraTarget(str, Enum):
    """Linear layers that get adapters. `qkv` is `q`, `k` and `v`; `fc1` is `gate` and `up`; `experts` is both layers of every expert."""

    qkv = "qkv"
    q = "q"
    k = "k"
    v = "v"
    proj = "proj"
    fc1 = "fc1"
    gate = "gate"
    up = "up"
    fc2 = "fc2"
    experts = "experts"


def _default_targets() -> list[LoraTarget]:
    return [LoraTarget.qkv, LoraTarget.proj, LoraTarget.fc1, LoraTarget.fc2]


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, 2106.09685): the weights W stay as they are, W + scaling B A is what the model computes with."""

    rank: int = 0  # of the adapters; 0: no adapters, every weight is trained
    alpha: float = 16.0  # scaling = alpha / rank
    rslora: bool = False  # scaling = alpha / sqrt(rank) (2312.03732)
    dropout: float = 0.0  # of what goes into the adapters, in training
    targets: list[LoraTarget] = field(default_factory=_default_targets)  # linear layers that get adapters (docs/lora.md)
    path: str = ""  # an adapter to start from: PEFT's (or ORG/NAME[@REV] of the Hub), or a checkpoint's step_...; empty: B = 0
    from_hub: ClassVar[Mapping[str, Files]] = {"path": Files.model}

    def __post_init__(self) -> None:
        self.targets = list(self.targets)
        if self.rank < 0:
            raise ConfigError(f"model.lora.rank={self.rank}: must not be negative (0 is off)")
        if self.alpha <= 0:
            raise ConfigError(f"model.lora.alpha={self.alpha}: must be positive")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.lora.dropout={self.dropout}: must be in [0, 1)")
        if not self.targets:
            raise ConfigError(f"model.lora.targets=[]: name at least one; allowed: {', '.join(LoraTarget.__members__)}")
        if self.path and not self.rank:
            raise ConfigError(f"model.lora.path={self.path}: needs model.lora.rank, the rank of the adapter there")

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained instead of the weights."""
        return self.rank > 0

    @property
    def scaling(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """One model of a run. From `micro_batch_size` to `recompute` settings change memory and speed, never the numbers."""

    path: str = ""  # Hugging Face directory, ORG/NAME[@REV] of the Hub, or a checkpoint of this project; empty: random weights
    tokenizer: str = ""  # tokenizer directory, or ORG/NAME[@REV] of the Hub; empty: the one beside the weights
    from_hub: ClassVar[Mapping[str, Files]] = {"path": Files.model, "tokenizer": Files.settings}
    architecture: Architecture = field(default_factory=Architecture)
    dtype: Dtype = Dtype.auto  # of weights and activations; auto: bfloat16 on a GPU, float32 on a CPU; float16 scales its losses
    seq_length: int = 0  # longest sequence of the run; 0: the model's max_position_embeddings
    micro_batch_size: int = 4  # rows per forward pass
    micro_batch_tokens: int = 0  # 0: micro_batch_size rows; else as many rows of like length as fit in this number of tokens
    packing: bool = False  # rows of a micro-batch one after the other instead of padded side by side; needs micro_batch_tokens
    share_prompts: bool = False  # packed rows that begin with the same prompt compute it once; needs packing
    recompute: Recompute = Recompute.none  # activations that the backward pass computes again: none, those of attention, or all of a layer
    layers: Layers = Layers.auto  # whose: transformer_engine (NVIDIA's, fused), torch; auto: the first on a GPU in 16 bits where it imports
    batch_invariant: bool = False  # a token's log-prob has the same bits in rollouts and training, whatever is computed with it: slow
    fp8: bool = False  # matrix products in 8 bits, e4m3 forward and e5m2 backward; not with layers=torch
    logits_chunk_size: int = 1024  # tokens whose logits exist at a time
    make_vocab_divisible_by: int = 128  # the vocabulary is padded to a multiple of this and of parallel.tp
    router_aux_loss_coef: float = 0.0  # of the experts' load-balancing loss, averaged over tokens
    router_z_loss_coef: float = 0.0  # of the squared log-sum-exp of the router's logits, averaged over tokens
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "logits_chunk_size", "make_vocab_divisible_by"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"model.{name}={value}: must be at least 1")
        if self.seq_length < 0:
            raise ConfigError(f"model.seq_length={self.seq_length}: must not be negative (0 is the model's own)")
        for name in ("micro_batch_tokens", "router_aux_loss_coef", "router_z_loss_coef"):
            if getattr(self, name) < 0:
                raise ConfigError(f"model.{name}={getattr(self, name)}: must not be negative (0 is off)")
        if self.fp8 and (self.layers is Layers.torch or self.batch_invariant):
            raise ConfigError(
                "model.fp8=true: needs Transformer Engine's layers; allowed: model.layers=auto or transformer_engine, not batch_invariant"
            )
        if self.batch_invariant and self.layers is Layers.transformer_engine:
            raise ConfigError(
                "model.batch_invariant=true: the sums of Transformer Engine's layers depend on the batch; allowed: layers=auto, torch"
            )
        if self.batch_invariant and self.lora.is_on:
            raise ConfigError(
                "model.batch_invariant=true: the engine computes with merged weights, whose log-probs have other last bits; "
                "allowed with model.lora.rank=0"
            )
        if self.packing and not self.micro_batch_tokens:
            raise ConfigError("model.packing=true: needs model.micro_batch_tokens, the tokens that one packed row may hold")
        if self.share_prompts and not self.packing:
            raise ConfigError("model.share_prompts=true: needs model.packing=true")
        if self.share_prompts and (self.router_aux_loss_coef or self.router_z_loss_coef):
            raise ConfigError(
                "model.share_prompts=true: the routers' auxiliary losses are means over tokens, of which there would be fewer; "
                "allowed with router_aux_loss_coef=0 and router_z_loss_coef=0"
            )

    @property
    def tokenizer_path(self) -> str:
        """Where the tokenizer is. Raises ConfigError where neither `tokenizer` nor `path` says."""
        if not (self.tokenizer or self.path):
            raise ConfigError("model.tokenizer='': name a tokenizer directory, or give model.path, which holds one")
        return self.tokenizer or self.path

    def or_else(self, actors: ModelConfig) -> ModelConfig:
        """A server's own model where its config names one, else the actor's."""
        return self if self.path or self.tokenizer else actors
