"""What a model is: its family and sizes (`Architecture`). Light: imports neither Megatron-Core nor transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from aligner.errors import ConfigError
from aligner.models.architecture.kinds import Activation, Normalization, ParallelResidual, PositionEmbedding


class Family(str, Enum):
    """Model families with a Hugging Face mapping; the member name is HF's `model_type`."""

    llama = "llama"
    qwen2 = "qwen2"
    qwen3 = "qwen3"
    mistral = "mistral"
    mixtral = "mixtral"
    qwen3_moe = "qwen3_moe"
    nemotron = "nemotron"
    gpt2 = "gpt2"
    phi3 = "phi3"
    gpt_neox = "gpt_neox"
    opt = "opt"
    gemma2 = "gemma2"
    gemma3_text = "gemma3_text"
    olmo2 = "olmo2"
    glm4 = "glm4"
    cohere = "cohere"
    deepseek_v2 = "deepseek_v2"
    deepseek_v3 = "deepseek_v3"
    glm4_moe = "glm4_moe"
    olmo3 = "olmo3"
    qwen2_moe = "qwen2_moe"
    gpt_oss = "gpt_oss"
    llama4_text = "llama4_text"
    qwen3_next = "qwen3_next"
    qwen3_5_text = "qwen3_5_text"
    qwen3_5_moe_text = "qwen3_5_moe_text"
    cohere2 = "cohere2"
    ministral = "ministral"


# Of mixtures of experts, and what they are in dense models.
OF_EXPERTS = {
    "experts_per_token": 0,
    "expert_ffn_hidden_size": 0,
    "dense_layers": [],
    "shared_ffn_hidden_size": 0,
    "shared_expert_gate": False,
    "expert_biases": False,
    "router_sigmoid": False,
    "router_bias": False,
    "router_groups": 0,
    "router_groups_per_token": 0,
    "router_group_best": 1,
    "router_scale": 1.0,
    "weighted_expert_inputs": False,
}
# Sizes of gated delta nets: 0 in models without.
OF_LINEAR = ("linear_key_heads", "linear_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_size")
MOST_LAYERS = 10_000  # more would take hours to build
ROPE_FACTORS = ("rope_llama3_factor", "rope_linear_factor", "rope_yarn_factor", "rope_dynamic_factor")
NOT_SCALED: dict[str, Any] = dict.fromkeys(ROPE_FACTORS, 0.0) | {"rope_short_factors": [], "rope_long_factors": []}


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
    rope_llama3_factor: float = 0.0  # 0: off; else the factor of Llama 3.1's rotary scaling, by parts of the spectrum
    rope_linear_factor: float = 0.0  # 0: off; else every rotary frequency is divided by it
    rope_yarn_factor: float = 0.0  # 0: off; else the factor of YaRN's rotary scaling
    rope_dynamic_factor: float = 0.0  # 0: off; else the file's factor beyond max_position_embeddings, where no sequence here is
    rope_original_length: int = 8192  # context length before Llama 3.1's, YaRN's or LongRoPE's scaling
    rope_low_freq_factor: float = 1.0  # of Llama 3.1's scaling: turns in the original length up to which all of the factor counts
    rope_high_freq_factor: float = 4.0  # of Llama 3.1's scaling: turns in the original length from which nothing is scaled
    rope_beta_fast: float = 32.0  # of YaRN's scaling: turns in the original length from which nothing is scaled
    rope_beta_slow: float = 1.0  # of YaRN's scaling: turns in the original length up to which all of the factor counts
    rope_truncate: bool = True  # of YaRN's scaling: its bounds are rounded to whole dimensions
    rope_attention_factor: float = 1.0  # of YaRN's scaling and LongRoPE's: cosines and sines are multiplied by it
    rope_short_factors: list[float] = field(default_factory=list)  # []: off; else LongRoPE's divisors of the frequencies, one for each
    rope_long_factors: list[float] = field(default_factory=list)  # []: off; else those of a run whose context is beyond the original one
    rope_score_scale: float = 0.0  # of YaRN's scaling: scores are multiplied by (0.1 rope_score_scale ln(factor) + 1) squared
    norm_eps: float = 1e-5  # added to the variance in every norm
    tied_embeddings: bool = True  # the output layer is the token embedding
    qkv_bias: bool = False  # biases on the query, key and value layers
    qk_norm: bool = False  # a norm on the queries and keys of each head
    qk_l2_norm: bool = False  # queries and keys of each head that rotates have a mean square of 1
    initializer_range: float = 0.02  # standard deviation of random weights
    gated_mlp: bool = True  # activation(gate x) * (up x), as in SwiGLU; false: activation(up x)
    activation: Activation = Activation.silu  # non-linearity of the feed-forward layers
    normalization: Normalization = Normalization.rms_norm  # norm of every layer; those of 1p multiply by 1 + their stored weight
    glu_limit: float = 0.0  # 0: off; else gate x is cut there from above, up x at both ends
    glu_offset: float = 0.0  # added to up x before it is multiplied
    linear_bias: bool = False  # biases on every linear layer; `qkv_bias` is of query, key and value alone
    attention_out_bias: bool = False  # a bias on the layer behind attention
    mlp_bias: bool = False  # biases on the feed-forward layers
    position_embedding: PositionEmbedding = PositionEmbedding.rope  # rope: rotary; learned: a table that is added to the token embeddings
    sliding_window: int = 0  # tokens that a token attends to, itself included; 0: all before it
    attention_chunk: int = 0  # 0: off; else a token attends to those before it in its chunk of so many positions alone
    full_attention_layers: list[int] = field(default_factory=list)  # numbers, from 0, of layers without sliding_window or attention_chunk
    attention_sinks: bool = False  # each head has a learned score that no value is behind: its weights sum to less than 1
    attention_softcap: float = 0.0  # 0: off; else attention's scores are cap * tanh(score / cap)
    attention_scale: float = 0.0  # what attention's scores are multiplied by; 0: 1 / sqrt(head_dim)
    attention_scale_by_layer: bool = False  # the scores of a layer are divided by its number, counted from 1
    rotary_fraction: float = 1.0  # part of each head's dimensions that is rotated
    rotary_interleaved: bool = False  # neighbouring dimensions are rotated together; false: those that are half of the rotated ones apart
    no_rope_layers: list[int] = field(default_factory=list)  # numbers, from 0, of the layers that rotate nothing
    attention_temperature: float = 0.0  # 0: off; else no_rope_layers' queries grow by it times ln(1 + (position + 1) // the length below)
    attention_temperature_length: int = 8192  # positions after which they grow
    rope_local_theta: float = 0.0  # base of the layers with a window, which nothing scales; 0: as the others
    position_offset: int = 0  # row of the learned table that is position 0
    parallel_residual: ParallelResidual = ParallelResidual.none  # attention and feed-forward layer read the same and are added together
    pre_norms: bool = True  # norms in front of attention and of the feed-forward layer
    residual_norms: bool = False  # norms of the sums, behind each addition to the residual stream, and none in front of the output layer
    post_norms: bool = False  # norms behind them, before they are added to the residual stream
    qk_norm_whole: bool = False  # the norm on queries, and that on keys, is of all heads together
    qk_norm_by_head: bool = False  # every head has weights of its own in that norm
    embedding_size: int = 0  # width of the token embeddings and the output layer, which matrices project; 0: hidden_size, and no matrices
    embedding_scale: float = 1.0  # token embeddings are multiplied by it
    logits_scale: float = 1.0  # the output layer's logits are multiplied by it
    logits_softcap: float = 0.0  # 0: off; else logits are cap * tanh(logit / cap)
    num_experts: int = 0  # 0: dense feed-forward layers; else every layer but dense_layers is a mixture of experts
    experts_per_token: int = 0  # experts that each token is sent to; 0: none (dense)
    expert_ffn_hidden_size: int = 0  # width inside each expert; 0: none (dense)
    normalize_expert_weights: bool = True  # a token's expert weights sum to 1
    dense_layers: list[int] = field(default_factory=list)  # numbers, from 0, of a mixture's layers without experts
    shared_ffn_hidden_size: int = 0  # width of the feed-forward layer that every token passes beside its experts; 0: none
    shared_expert_gate: bool = False  # its output is multiplied by a sigmoid of each token's own
    expert_biases: bool = False  # biases on both layers of every expert, and on the router's logits
    router_sigmoid: bool = False  # experts' scores are sigmoids of the router's logits; false: their softmax
    router_bias: bool = False  # experts are chosen by score plus a bias of each, which no gradient trains
    router_groups: int = 0  # groups of neighbouring experts, of the best of which a token's are chosen; 0: of all experts
    router_groups_per_token: int = 0  # groups that a token's experts are chosen from
    router_group_best: int = 1  # a group's score is the sum of so many of its experts' best scores
    router_scale: float = 1.0  # a token's expert weights are multiplied by it
    weighted_expert_inputs: bool = False  # a token's expert weight multiplies what its expert reads; false: what it gives
    latent_size: int = 0  # 0: off; else what each token's keys and values are made of (multi-head latent attention)
    query_latent_size: int = 0  # what its queries are made of; 0: of the residual stream
    value_head_dim: int = 0  # with latent_size: of each head's values; head_dim is of its queries and keys
    attention_gate: bool = False  # what attention gives is multiplied by a sigmoid of each token's own
    linear_attention_layers: list[int] = field(default_factory=list)  # numbers, from 0, of the layers that are gated delta nets instead
    linear_key_heads: int = 0  # of a delta net's queries and keys: each serves linear_value_heads / linear_key_heads heads of values
    linear_value_heads: int = 0  # of its values, and of its state
    linear_key_head_dim: int = 0  # of each head's queries and keys
    linear_value_head_dim: int = 0  # of each head's values
    linear_conv_size: int = 0  # tokens, its own included, that each query, key and value is a convolution of

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_positions()
        self._check_windows()
        self._check_layers()
        self._check_experts()
        _check_router(self)
        _check_positions_by_layer(self)
        _check_latent(self)
        _check_linear(self)

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
        if self.num_layers > MOST_LAYERS:
            raise ConfigError(f"architecture.num_layers={self.num_layers}: must be at most {MOST_LAYERS}")
        for name in (
            "norm_eps",
            "initializer_range",
            "attention_softcap",
            "attention_scale",
            "logits_softcap",
            "rope_local_theta",
            "rope_score_scale",
            "glu_limit",
            "glu_offset",
            *ROPE_FACTORS,
        ):
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
            for name, neutral in (("rotary_fraction", 1.0), *NOT_SCALED.items()):
                if getattr(self, name) != neutral:
                    raise ConfigError(
                        f"architecture.{name}={getattr(self, name)}: position_embedding=learned rotates nothing; allowed: {neutral}"
                    )
            return
        self._check_rope_scaling()
        if self.head_dim % 2:
            raise ConfigError(f"architecture.head_dim={self.head_dim}: rotary embeddings need an even size")
        rotated = self.head_dim * self.rotary_fraction
        if abs(rotated - self.rotated) > 1e-6 or self.rotated % 2:
            raise ConfigError(
                f"architecture.rotary_fraction={self.rotary_fraction}: of head_dim={self.head_dim} it rotates {rotated} dimensions; "
                "must be an even number"
            )

    @property
    def rotated(self) -> int:
        """Dimensions of each head that are rotated."""
        return round(self.head_dim * self.rotary_fraction)

    @property
    def qk_norm_shared(self) -> bool:
        """Whether all heads have the same norm on queries, and on keys."""
        return self.qk_norm and not self.qk_norm_of_heads

    @property
    def qk_norm_of_heads(self) -> bool:
        """Whether the weights of the norm on queries, and of that on keys, are of all heads side by side."""
        return self.qk_norm_whole or self.qk_norm_by_head

    @property
    def vocabulary_width(self) -> int:
        """Of the token embeddings and the output layer."""
        return self.embedding_size or self.hidden_size

    def has_experts(self, layer: int) -> bool:
        """Whether this layer, counted from 0, is a mixture of experts."""
        return bool(self.num_experts) and layer not in self.dense_layers

    @property
    def token_ffn_size(self) -> int:
        """Width of all that one token passes in a feed-forward layer, or in a mixture with its shared part."""
        return (
            self.experts_per_token * self.expert_ffn_hidden_size + self.shared_ffn_hidden_size if self.num_experts else self.ffn_hidden_size
        )

    def window_of(self, layer: int) -> int:
        """Tokens that a token of this layer, counted from 0, attends to; 0: all before it."""
        return 0 if layer in self.full_attention_layers else self.sliding_window

    def is_linear(self, layer: int) -> bool:
        """Whether this layer, counted from 0, is a gated delta net."""
        return layer in self.linear_attention_layers

    @property
    def key_value_layers(self) -> int:
        """Layers that keep a key and a value of every token; the others are delta nets."""
        return self.num_layers - len(self.linear_attention_layers)

    def chunk_of(self, layer: int) -> int:
        """Positions of a chunk in this layer, counted from 0; 0: there are none."""
        return 0 if layer in self.full_attention_layers else self.attention_chunk

    def rotates(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has rotary positions."""
        return self.position_embedding == PositionEmbedding.rope and layer not in self.no_rope_layers

    def with_layers(self, num_layers: int) -> Architecture:
        """The same with its first layers alone, or with more of them."""
        names = ("full_attention_layers", "dense_layers", "no_rope_layers", "linear_attention_layers")
        lists = {name: [layer for layer in getattr(self, name) if layer < num_layers] for name in names}
        sizes = {} if lists["linear_attention_layers"] else dict.fromkeys(OF_LINEAR, 0)
        return replace(self, num_layers=num_layers, **lists, **sizes)

    def _check_windows(self) -> None:
        layers = self.full_attention_layers = list(self.full_attention_layers)
        if self.sliding_window < 0:
            raise ConfigError(f"architecture.sliding_window={self.sliding_window}: must not be negative (0 is none)")
        if layers and not (self.sliding_window or self.attention_chunk):
            raise ConfigError(
                f"architecture.full_attention_layers={layers}: needs sliding_window > 0 or attention_chunk > 0; allowed without: []"
            )
        self.check_numbers("full_attention_layers")

    def check_numbers(self, name: str) -> None:
        """Raise ConfigError unless the field lists numbers of layers, each once, in their order."""
        layers = getattr(self, name)
        if layers != sorted(set(layers)) or any(not 0 <= layer < self.num_layers for layer in layers):
            raise ConfigError(f"architecture.{name}={layers}: must be rising numbers from 0 to num_layers-1={self.num_layers - 1}")

    def _check_layers(self) -> None:
        for name in ("embedding_scale", "logits_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"architecture.{name}={getattr(self, name)}: must be finite and above 0")
        learned = self.position_embedding == PositionEmbedding.learned
        if self.position_offset and (self.position_offset < 0 or not learned):
            raise ConfigError(f"architecture.position_offset={self.position_offset}: must not be negative, and be 0 for rotary positions")
        if self.rope_local_theta and (learned or not self.sliding_window):
            raise ConfigError(f"architecture.rope_local_theta={self.rope_local_theta}: needs rotary positions and sliding_window > 0")
        if self.rotary_interleaved and learned:
            raise ConfigError("architecture.rotary_interleaved=True: position_embedding=learned rotates nothing; allowed: False")
        own = {"parallel_residual": self.parallel_residual != ParallelResidual.none, "post_norms": self.post_norms}
        own |= {"residual_norms": self.residual_norms}
        for name in (name for name, is_on in own.items() if is_on and self.num_experts):
            raise ConfigError(f"architecture.{name}={getattr(self, name)}: is computed for dense models; allowed with num_experts=0")
        if own["parallel_residual"] and (self.post_norms or not self.pre_norms):
            raise ConfigError(
                f"architecture.parallel_residual={self.parallel_residual.value}: allowed with pre_norms=True and post_norms=False"
            )
        if not self.pre_norms and not self.post_norms and not self.residual_norms:
            raise ConfigError("architecture.pre_norms=False: needs post_norms=True: else nothing in a layer is normalised")
        if self.residual_norms and (self.pre_norms or self.post_norms):
            raise ConfigError("architecture.residual_norms=True: allowed with pre_norms=False and post_norms=False")
        if self.embedding_size < 0:
            raise ConfigError(f"architecture.embedding_size={self.embedding_size}: must not be negative (0 is hidden_size)")
        if self.qk_norm_whole and not (self.qk_norm and self.normalization == Normalization.rms_norm):
            raise ConfigError("architecture.qk_norm_whole=True: needs qk_norm=True and normalization=rms_norm")
        if self.qk_norm_by_head and not (self.qk_norm and self.normalization == Normalization.layer_norm_no_bias):
            raise ConfigError("architecture.qk_norm_by_head=True: needs qk_norm=True and normalization=layer_norm_no_bias")

    def _check_rope_scaling(self) -> None:
        scaled = {name: getattr(self, name) for name in (*ROPE_FACTORS, "rope_long_factors") if getattr(self, name)}
        if len(scaled) > 1:
            name, value = list(scaled.items())[-1]
            raise ConfigError(f"architecture.{name}={value}: the rotary embedding is scaled one way; allowed with {next(iter(scaled))}: 0")
        for name in ("rope_original_length", "rope_beta_fast", "rope_beta_slow", "rope_attention_factor"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"architecture.{name}={getattr(self, name)}: must be finite and above 0")
        if not 0 < self.rope_low_freq_factor <= self.rope_high_freq_factor < math.inf:
            raise ConfigError(
                f"architecture.rope_low_freq_factor={self.rope_low_freq_factor}: must be above 0 and not above "
                f"rope_high_freq_factor={self.rope_high_freq_factor}"
            )
        self.rope_short_factors, self.rope_long_factors = list(self.rope_short_factors), list(self.rope_long_factors)
        count = self.rotated // 2 if self.rope_short_factors or self.rope_long_factors else 0
        for name in ("rope_short_factors", "rope_long_factors"):
            factors = getattr(self, name)
            if len(factors) != count or not all(0 < factor < math.inf for factor in factors):
                raise ConfigError(f"architecture.{name}={factors}: must be {count} finite numbers above 0, one for each rotated pair")

    def _check_experts(self) -> None:
        if self.num_experts < 0:
            raise ConfigError(f"architecture.num_experts={self.num_experts}: must not be negative (0 is a dense model)")
        self.dense_layers = list(self.dense_layers)
        if not self.num_experts:
            for name, neutral in OF_EXPERTS.items():
                if (value := getattr(self, name)) != neutral:
                    raise ConfigError(f"architecture.{name}={value}: needs num_experts > 0; allowed without: {neutral}")
            return
        self.check_numbers("dense_layers")
        if self.shared_ffn_hidden_size < 0 or self.shared_expert_gate > bool(self.shared_ffn_hidden_size):
            gate, size = self.shared_expert_gate, self.shared_ffn_hidden_size
            raise ConfigError(
                f"architecture.shared_ffn_hidden_size={size}: must not be negative (0 is none), nor 0 with shared_expert_gate={gate}"
            )
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(f"architecture.experts_per_token={self.experts_per_token}: must be from 1 to num_experts={self.num_experts}")
        if self.expert_ffn_hidden_size < 1:
            raise ConfigError(f"architecture.expert_ffn_hidden_size={self.expert_ffn_hidden_size}: must be at least 1 with num_experts > 0")
        if self.experts_per_token == 1 and self.normalize_expert_weights:
            raise ConfigError(
                "architecture.normalize_expert_weights=True: with experts_per_token=1 every weight is 1, which gives the router "
                "no gradient; allowed: False"
            )


def _check_router(a: Architecture) -> None:
    """Raise ConfigError for ways of choosing experts that are not computed here."""
    groups, kept, best = a.router_groups, a.router_groups_per_token, a.router_group_best
    if a.router_bias and not a.router_sigmoid:
        raise ConfigError("architecture.router_bias=True: is computed for sigmoid scores; allowed with router_sigmoid=True")
    if a.router_sigmoid and a.normalize_expert_weights != (a.experts_per_token > 1):
        raise ConfigError(
            f"architecture.normalize_expert_weights={a.normalize_expert_weights}: sigmoid scores of several experts are normalised, "
            f"those of one are not; allowed with experts_per_token={a.experts_per_token}: {a.experts_per_token > 1}"
        )
    if a.router_scale != 1 and a.normalize_expert_weights and not a.router_sigmoid:
        raise ConfigError(f"architecture.router_scale={a.router_scale}: allowed with router_sigmoid=True or normalize_expert_weights=False")
    if not 0 < a.router_scale < math.inf:
        raise ConfigError(f"architecture.router_scale={a.router_scale}: must be finite and above 0")
    if groups and (groups < 0 or a.num_experts % groups):
        raise ConfigError(f"architecture.router_groups={groups}: must divide num_experts={a.num_experts} (0 is none)")
    if not (1 <= kept <= groups if groups else kept == 0):
        raise ConfigError(f"architecture.router_groups_per_token={kept}: must be from 1 to router_groups={groups}, and 0 without groups")
    size = a.num_experts // groups if groups else 1
    if not 1 <= best <= size:
        raise ConfigError(f"architecture.router_group_best={best}: must be from 1 to the {size} experts of a group")
    if groups and kept * size < a.experts_per_token:
        raise ConfigError(
            f"architecture.router_groups_per_token={kept}: {kept} groups of {size} experts have fewer than "
            f"experts_per_token={a.experts_per_token}"
        )
    if a.weighted_expert_inputs and a.experts_per_token != 1:
        raise ConfigError(
            f"architecture.weighted_expert_inputs=True: is computed for one expert per token; allowed with experts_per_token="
            f"{a.experts_per_token}: False"
        )


def _check_positions_by_layer(a: Architecture) -> None:
    """Raise ConfigError for chunks, layers without rotary positions, and norms of rotated queries that do not go together."""
    a.no_rope_layers = list(a.no_rope_layers)
    a.check_numbers("no_rope_layers")
    if a.attention_chunk < 0 or a.attention_chunk and a.sliding_window:
        raise ConfigError(f"architecture.attention_chunk={a.attention_chunk}: must not be negative, and be 0 with sliding_window > 0")
    if not 0 <= a.attention_temperature < math.inf:
        raise ConfigError(f"architecture.attention_temperature={a.attention_temperature}: must be finite and not negative")
    if a.attention_temperature_length < 1:
        raise ConfigError(f"architecture.attention_temperature_length={a.attention_temperature_length}: must be at least 1")
    if a.qk_l2_norm and (a.qk_norm or a.latent_size):
        raise ConfigError("architecture.qk_l2_norm=True: allowed with qk_norm=False and latent_size=0")
    for name in ("no_rope_layers", "qk_l2_norm"):
        if getattr(a, name) and (a.position_embedding != "rope" or a.latent_size or a.rope_attention_factor != 1):
            raise ConfigError(
                f"architecture.{name}={getattr(a, name)}: allowed with position_embedding=rope, latent_size=0 and rope_attention_factor=1.0"
            )


def _check_latent(a: Architecture) -> None:
    """Raise ConfigError for sizes that latent attention cannot have, or that are there without it."""
    if not a.latent_size:
        for name in ("query_latent_size", "value_head_dim"):
            if getattr(a, name):
                raise ConfigError(f"architecture.{name}={getattr(a, name)}: needs latent_size > 0; allowed without: 0")
        return
    for name, least in (("latent_size", 1), ("query_latent_size", 0)):
        if getattr(a, name) < least:
            raise ConfigError(f"architecture.{name}={getattr(a, name)}: must not be negative (0 is none)")
    if not 1 <= a.value_head_dim <= a.head_dim:
        raise ConfigError(f"architecture.value_head_dim={a.value_head_dim}: must be from 1 to head_dim={a.head_dim}")
    fixed = {
        "num_key_value_heads": a.num_attention_heads,
        "position_embedding": "rope",
        "normalization": "rms_norm",
        **dict.fromkeys(("qkv_bias", "qk_norm", "linear_bias", "attention_gate"), False),
    }
    for name, needed in fixed.items():
        if (value := getattr(a, name)) != needed:
            raise ConfigError(f"architecture.{name}={getattr(value, 'value', value)}: allowed with latent_size={a.latent_size}: {needed}")


def _check_linear(a: Architecture) -> None:
    """Raise ConfigError for a gate, or layers and sizes of gated delta nets, that are not computed."""
    a.linear_attention_layers = list(a.linear_attention_layers)
    if a.attention_gate and a.rotary_interleaved:
        raise ConfigError("architecture.attention_gate=True: allowed with rotary_interleaved=False")
    if not a.linear_attention_layers:
        for name in OF_LINEAR:
            if getattr(a, name):
                raise ConfigError(f"architecture.{name}={getattr(a, name)}: needs linear_attention_layers; allowed without: 0")
        return
    a.check_numbers("linear_attention_layers")
    for name in OF_LINEAR:
        if getattr(a, name) < 1:
            raise ConfigError(f"architecture.{name}={getattr(a, name)}: must be at least 1 with linear_attention_layers")
    if a.linear_value_heads % a.linear_key_heads:
        raise ConfigError(f"architecture.linear_key_heads={a.linear_key_heads}: must divide linear_value_heads={a.linear_value_heads}")
    for name in ("latent_size", "linear_bias", "sliding_window", "post_norms"):
        if value := getattr(a, name):
            raise ConfigError(f"architecture.{name}={value}: allowed with linear_attention_layers: {type(value)()}")
