"""What a model is: its family, its sizes and the kinds of its parts (`Architecture`). Imports neither Megatron-Core nor transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from aligner.errors import AT_LEAST_1, FINITE, NOT_NEGATIVE, POSITIVE, ConfigError, check_range


class Activation(str, Enum):
    """The non-linearity of the feed-forward layers; `gelu_tanh` is HF's `gelu_new` and `gelu_pytorch_tanh`, `squared_relu` its `relu2`,
    `quick_gelu` x * sigmoid(1.702 x)."""

    silu = "silu"
    gelu = "gelu"
    gelu_tanh = "gelu_tanh"
    squared_relu = "squared_relu"
    relu = "relu"
    quick_gelu = "quick_gelu"


class Normalization(str, Enum):
    """The norm of every layer; stored weights of `..._1p` are around 0 (the layer multiplies by 1 + weight)."""

    rms_norm = "rms_norm"
    layer_norm = "layer_norm"
    layer_norm_1p = "layer_norm_1p"
    rms_norm_1p = "rms_norm_1p"
    layer_norm_no_bias = "layer_norm_no_bias"

    @property
    def has_bias(self) -> bool:
        return self in (Normalization.layer_norm, Normalization.layer_norm_1p)


class PositionEmbedding(str, Enum):
    """Rotary, or a learned table of `max_position_embeddings` rows that is added to the token embeddings."""

    rope = "rope"
    learned = "learned"


class ParallelResidual(str, Enum):
    """Whether the feed-forward layer reads what attention reads, and both are added to it; through a norm of its own, or attention's."""

    none = "none"
    own_norm = "own_norm"
    shared_norm = "shared_norm"


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


# Fields of mixtures of experts, with their values in dense models.
OF_EXPERTS: dict[str, Any] = {
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
OF_LINEAR = ("linear_key_heads", "linear_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_size")
# By the field that switches a kind of layer on: those that need it, with their values where it is off.
_NEEDS: dict[str, dict[str, Any]] = {
    "num_experts": OF_EXPERTS,
    "latent_size": {"query_latent_size": 0, "value_head_dim": 0},
    "linear_attention_layers": dict.fromkeys(OF_LINEAR, 0),
}
MOST_LAYERS = 10_000  # more would take hours to build
ROPE_FACTORS = ("rope_llama3_factor", "rope_linear_factor", "rope_yarn_factor", "rope_dynamic_factor")
NOT_SCALED: dict[str, Any] = dict.fromkeys(ROPE_FACTORS, 0.0) | {"rope_short_factors": [], "rope_long_factors": []}


def refuse(*checks: tuple[Any, str]) -> None:
    """Raise ConfigError with the message of the first check that is true."""
    for wrong, message in checks:
        if wrong:
            raise ConfigError(message)


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
    rope_dynamic_factor: float = 0.0  # 0: off; else dynamic scaling's factor, which only matters beyond max_position_embeddings
    rope_original_length: int = 8192  # context length before Llama 3.1's, YaRN's or LongRoPE's scaling
    rope_low_freq_factor: float = 1.0  # Llama 3.1's scaling: frequencies with at most these turns in the original length are fully scaled
    rope_high_freq_factor: float = 4.0  # Llama 3.1's scaling: frequencies with at least these turns are not scaled
    rope_beta_fast: float = 32.0  # YaRN's scaling: frequencies with at least these turns in the original length are not scaled
    rope_beta_slow: float = 1.0  # YaRN's scaling: frequencies with at most these turns in the original length are fully scaled
    rope_truncate: bool = True  # YaRN's scaling: bounds are rounded to whole dimensions
    rope_attention_factor: float = 1.0  # YaRN's and LongRoPE's scaling: factor on cosines and sines
    rope_short_factors: list[float] = field(default_factory=list)  # []: off; else LongRoPE's divisor of each frequency
    rope_long_factors: list[float] = field(default_factory=list)  # []: off; else the same for runs beyond the original context
    rope_score_scale: float = 0.0  # YaRN's scaling: scores are multiplied by (0.1 rope_score_scale ln(factor) + 1) squared
    norm_eps: float = 1e-5  # added to the variance in every norm
    tied_embeddings: bool = True  # the output layer is the token embedding
    qkv_bias: bool = False  # biases on the query, key and value layers
    qk_norm: bool = False  # a norm on the queries and keys of each head
    qk_l2_norm: bool = False  # queries and keys of each head that rotates have a mean square of 1
    initializer_range: float = 0.02  # standard deviation of random weights
    gated_mlp: bool = True  # activation(gate x) * (up x), as in SwiGLU; false: activation(up x)
    activation: Activation = Activation.silu  # non-linearity of the feed-forward layers
    normalization: Normalization = Normalization.rms_norm  # norm of every layer; the 1p kinds multiply by 1 + their stored weight
    glu_limit: float = 0.0  # 0: off; else an upper limit of gate x, and a limit of up x in both directions
    glu_offset: float = 0.0  # added to up x before it is multiplied
    linear_bias: bool = False  # biases on every linear layer; `qkv_bias` concerns query, key and value only
    attention_out_bias: bool = False  # a bias on the layer behind attention
    mlp_bias: bool = False  # biases on the feed-forward layers
    position_embedding: PositionEmbedding = PositionEmbedding.rope  # rope: rotary; learned: a table that is added to the token embeddings
    sliding_window: int = 0  # tokens that a token attends to, itself included; 0: all before it
    attention_chunk: int = 0  # 0: off; else the positions of a chunk: a token attends to those before it in its own chunk only
    full_attention_layers: list[int] = field(default_factory=list)  # numbers, from 0, of layers without sliding_window or attention_chunk
    attention_sinks: bool = False  # each head has a learned score without a value: its weights sum to less than 1
    attention_softcap: float = 0.0  # 0: off; else attention's scores are cap * tanh(score / cap)
    attention_scale: float = 0.0  # factor on attention's scores; 0: 1 / sqrt(head_dim)
    attention_scale_by_layer: bool = False  # the scores of a layer are divided by its number, counted from 1
    rotary_fraction: float = 1.0  # part of each head's dimensions that is rotated
    rotary_interleaved: bool = False  # neighbouring dimensions are rotated together; false: pairs that are half the rotated ones apart
    no_rope_layers: list[int] = field(default_factory=list)  # numbers, from 0, of the layers that rotate nothing
    attention_temperature: float = 0.0  # 0: off; else no_rope_layers' queries grow by it times ln(1 + (position + 1) // the length below)
    attention_temperature_length: int = 8192  # positions after which attention_temperature's factor grows
    rope_local_theta: float = 0.0  # unscaled rotary base of the layers with a window; 0: rope_theta
    position_offset: int = 0  # row of the learned table that is position 0
    parallel_residual: ParallelResidual = ParallelResidual.none  # whether attention and feed-forward layer read the same input
    pre_norms: bool = True  # norms in front of attention and of the feed-forward layer
    residual_norms: bool = False  # norms of the residual stream behind each addition; no norm in front of the output layer
    post_norms: bool = False  # norms behind attention and the feed-forward layer, before the addition to the residual stream
    qk_norm_whole: bool = False  # the norm on queries, and the one on keys, spans all heads together
    qk_norm_by_head: bool = False  # every head has its own weights in the norms on queries and keys
    embedding_size: int = 0  # width of token embeddings and output layer, if matrices project them; 0: hidden_size
    embedding_scale: float = 1.0  # token embeddings are multiplied by it
    logits_scale: float = 1.0  # the output layer's logits are multiplied by it
    logits_softcap: float = 0.0  # 0: off; else logits are cap * tanh(logit / cap)
    num_experts: int = 0  # 0: dense feed-forward layers; else every layer but dense_layers is a mixture of experts
    experts_per_token: int = 0  # experts that each token is sent to; 0: none (dense)
    expert_ffn_hidden_size: int = 0  # width inside each expert; 0: none (dense)
    normalize_expert_weights: bool = True  # a token's expert weights sum to 1
    dense_layers: list[int] = field(default_factory=list)  # numbers, from 0, of a mixture's layers without experts
    shared_ffn_hidden_size: int = 0  # width of the feed-forward layer that every token passes beside its experts; 0: none
    shared_expert_gate: bool = False  # the shared layer's output is multiplied by a sigmoid per token
    expert_biases: bool = False  # biases on both layers of every expert, and on the router's logits
    router_sigmoid: bool = False  # experts' scores are sigmoids of the router's logits; false: their softmax
    router_bias: bool = False  # experts are chosen by score plus a bias per expert, which no gradient trains
    router_groups: int = 0  # groups of neighbouring experts: a token's experts come from the best groups; 0: no groups
    router_groups_per_token: int = 0  # groups that a token's experts are chosen from
    router_group_best: int = 1  # a group's score is the sum of this number of its experts' best scores
    router_scale: float = 1.0  # a token's expert weights are multiplied by it
    weighted_expert_inputs: bool = False  # a token's expert weight multiplies its expert's input; false: the output
    latent_size: int = 0  # 0: off; else the size of the latent behind keys and values (multi-head latent attention)
    query_latent_size: int = 0  # with latent_size: the size of the latent behind queries; 0: queries come from the residual stream
    value_head_dim: int = 0  # with latent_size: size of each head's values; head_dim is the size of queries and keys
    attention_gate: bool = False  # attention's output is multiplied by a sigmoid per token
    linear_attention_layers: list[int] = field(default_factory=list)  # numbers, from 0, of the layers with gated delta nets
    linear_key_heads: int = 0  # delta nets: heads of queries and keys; each serves linear_value_heads / linear_key_heads of values
    linear_value_heads: int = 0  # delta nets: heads of values, and of the state
    linear_key_head_dim: int = 0  # delta nets: size of each head's queries and keys
    linear_value_head_dim: int = 0  # delta nets: size of each head's values
    linear_conv_size: int = 0  # delta nets: tokens under the causal convolution, the own one included

    def __post_init__(self) -> None:
        self.full_attention_layers, self.no_rope_layers = list(self.full_attention_layers), list(self.no_rope_layers)
        self.dense_layers, self.linear_attention_layers = list(self.dense_layers), list(self.linear_attention_layers)
        self.rope_short_factors, self.rope_long_factors = list(self.rope_short_factors), list(self.rope_long_factors)
        for check in (_check_sizes, _check_positions, _check_layers, _check_parts, _check_experts, _check_latent, _check_linear):
            check(self)

    def wrong(self, name: str, why: str) -> ConfigError:
        value = getattr(self, name)
        return ConfigError(f"architecture.{name}={getattr(value, 'value', value)}: {why}")

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
        """Positions of a chunk in this layer, counted from 0; 0: the layer has no chunks."""
        return 0 if layer in self.full_attention_layers else self.attention_chunk

    def rotates(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has rotary positions."""
        return self.position_embedding == PositionEmbedding.rope and layer not in self.no_rope_layers

    def with_layers(self, num_layers: int) -> Architecture:
        """The same with its first layers alone, or with more of them."""
        lists = {name: [layer for layer in getattr(self, name) if layer < num_layers] for name in _LAYER_LISTS}
        return replace(self, num_layers=num_layers, **lists, **({} if lists["linear_attention_layers"] else dict.fromkeys(OF_LINEAR, 0)))


# Keys of a config that describe a file or a use of the model, not its arithmetic.
_NOT_ARITHMETIC = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures", "use_cache", "pooling", "id2label"}
_NOT_ARITHMETIC |= {"label2id", "problem_type", "classifier_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"}


@dataclass(kw_only=True, slots=True)
class HFArchitecture(Architecture):
    """A model of `transformers`' own modules. Sizes are those of its text part, as far as its config has them."""

    hf: dict[str, Any] = field(default_factory=dict)  # config.json

    def __post_init__(self) -> None:
        """Nothing is checked here: `transformers` checks its own configs, and `aligner.models.modules.hf_chunk` the model."""

    @property
    def model_type(self) -> str:
        return str(self.hf.get("model_type"))

    def arithmetic(self) -> dict[str, Any]:
        """The part of the config on which the numbers depend."""
        return {key: value for key, value in self.hf.items() if key not in _NOT_ARITHMETIC and value is not None}


@dataclass(kw_only=True, slots=True)
class SeeingArchitecture(Architecture):
    """The text part of a model of images and text, of which Megatron-Core's layers are made, and the rest of the model in front of it."""

    hf: dict[str, Any] = field(default_factory=dict)  # config.json of the whole model
    rope_sections: list[int] = field(default_factory=list)  # rotary frequencies of each axis of positions: time, height, width
    rope_mixed: bool = False  # the axes take turns among the frequencies; false: one axis follows the other
    deep_layers: int = 0  # first layers behind which the tower adds further features to the slots of images

    def with_layers(self, num_layers: int) -> Architecture:
        """The text part alone, with other layers."""
        return Architecture(**{one.name: getattr(self, one.name) for one in fields(Architecture)}).with_layers(num_layers)


_LAYER_LISTS = ("full_attention_layers", "dense_layers", "no_rope_layers", "linear_attention_layers")
_COUNTS = ("num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "ffn_hidden_size", "max_position_embeddings")
_NUMBERS = ("norm_eps", "initializer_range", "attention_softcap", "attention_scale", "logits_softcap", "rope_local_theta")
_NUMBERS += ("rope_score_scale", "glu_limit", "glu_offset", "attention_temperature", *ROPE_FACTORS)


def _check_sizes(a: Architecture) -> None:
    check_range(a, "architecture", AT_LEAST_1, *_COUNTS, "attention_temperature_length")
    if a.num_layers > MOST_LAYERS:
        raise a.wrong("num_layers", f"must be at most {MOST_LAYERS}")
    check_range(a, "architecture", FINITE, *_NUMBERS)
    check_range(a, "architecture", POSITIVE, "rope_theta", "embedding_scale", "logits_scale", "router_scale")
    check_range(a, "architecture", NOT_NEGATIVE, "sliding_window", "latent_size", "query_latent_size", note=" (0 is none)")
    check_range(a, "architecture", NOT_NEGATIVE, "embedding_size", note=" (0 is hidden_size)")
    check_range(a, "architecture", NOT_NEGATIVE, "num_experts", note=" (0 is a dense model)")
    for switch, needing in _NEEDS.items():
        for name, neutral in needing.items() if not getattr(a, switch) else ():
            if getattr(a, name) != neutral:
                raise a.wrong(name, f"needs {switch}{'' if switch.endswith('layers') else ' > 0'}; allowed without: {neutral}")
    if a.num_attention_heads % a.num_key_value_heads:
        raise a.wrong("num_key_value_heads", f"must divide num_attention_heads={a.num_attention_heads}")
    if not a.head_dim:
        if a.hidden_size % a.num_attention_heads:
            raise a.wrong("num_attention_heads", f"must divide hidden_size={a.hidden_size}")
        a.head_dim = a.hidden_size // a.num_attention_heads


def _check_positions(a: Architecture) -> None:
    if not 0 < a.rotary_fraction <= 1:
        raise a.wrong("rotary_fraction", "must be in (0, 1]")
    learned = a.position_embedding == PositionEmbedding.learned
    if a.position_offset and (a.position_offset < 0 or not learned):
        raise a.wrong("position_offset", "must not be negative, and be 0 for rotary positions")
    if a.rope_local_theta and (learned or not a.sliding_window):
        raise a.wrong("rope_local_theta", "needs rotary positions and sliding_window > 0")
    if learned:
        for name, neutral in {"rotary_fraction": 1.0, "rotary_interleaved": False, **NOT_SCALED}.items():
            if getattr(a, name) != neutral:
                raise a.wrong(name, f"position_embedding=learned rotates nothing; allowed: {neutral}")
        return
    _check_rope_scaling(a)
    if a.head_dim % 2:
        raise a.wrong("head_dim", "rotary embeddings need an even size")
    rotated = a.head_dim * a.rotary_fraction
    if abs(rotated - a.rotated) > 1e-6 or a.rotated % 2:
        raise a.wrong("rotary_fraction", f"of head_dim={a.head_dim} it rotates {rotated} dimensions; must be an even number")


def _check_rope_scaling(a: Architecture) -> None:
    scaled = [name for name in (*ROPE_FACTORS, "rope_long_factors") if getattr(a, name)]
    if len(scaled) > 1:
        raise a.wrong(scaled[-1], f"the rotary embedding is scaled one way; allowed with {scaled[0]}: 0")
    check_range(a, "architecture", POSITIVE, "rope_original_length", "rope_beta_fast", "rope_beta_slow", "rope_attention_factor")
    if not 0 < a.rope_low_freq_factor <= a.rope_high_freq_factor < math.inf:
        raise a.wrong("rope_low_freq_factor", f"must be above 0 and not above rope_high_freq_factor={a.rope_high_freq_factor}")
    count = a.rotated // 2 if a.rope_short_factors or a.rope_long_factors else 0
    for name in ("rope_short_factors", "rope_long_factors"):
        factors = getattr(a, name)
        if len(factors) != count or not all(0 < factor < math.inf for factor in factors):
            raise a.wrong(name, f"must be {count} finite numbers above 0, one for each rotated pair")


def _check_layers(a: Architecture) -> None:
    if a.full_attention_layers and not (a.sliding_window or a.attention_chunk):
        raise a.wrong("full_attention_layers", "needs sliding_window > 0 or attention_chunk > 0; allowed without: []")
    for name in _LAYER_LISTS:
        layers = getattr(a, name)
        if layers != sorted(set(layers)) or any(not 0 <= layer < a.num_layers for layer in layers):
            raise a.wrong(name, f"must be rising numbers from 0 to num_layers-1={a.num_layers - 1}")
    if a.attention_chunk < 0 or a.attention_chunk and a.sliding_window:
        raise a.wrong("attention_chunk", "must not be negative, and be 0 with sliding_window > 0")
    if a.qk_l2_norm and (a.qk_norm or a.latent_size):
        raise a.wrong("qk_l2_norm", "allowed with qk_norm=False and latent_size=0")
    for name in ("no_rope_layers", "qk_l2_norm"):
        if getattr(a, name) and (a.position_embedding != "rope" or a.latent_size or a.rope_attention_factor != 1):
            raise a.wrong(name, "allowed with position_embedding=rope, latent_size=0 and rope_attention_factor=1.0")


def _check_parts(a: Architecture) -> None:
    side_by_side = a.parallel_residual != ParallelResidual.none
    for name, is_on in {"parallel_residual": side_by_side, "post_norms": a.post_norms, "residual_norms": a.residual_norms}.items():
        if is_on and a.num_experts:
            raise a.wrong(name, "is computed for dense models; allowed with num_experts=0")
    if side_by_side and (a.post_norms or not a.pre_norms):
        raise a.wrong("parallel_residual", "allowed with pre_norms=True and post_norms=False")
    if not a.pre_norms and not a.post_norms and not a.residual_norms:
        raise a.wrong("pre_norms", "needs post_norms=True: else nothing in a layer is normalised")
    if a.residual_norms and (a.pre_norms or a.post_norms):
        raise a.wrong("residual_norms", "allowed with pre_norms=False and post_norms=False")
    if a.qk_norm_whole and not (a.qk_norm and a.normalization == Normalization.rms_norm):
        raise a.wrong("qk_norm_whole", "needs qk_norm=True and normalization=rms_norm")
    if a.qk_norm_by_head and not (a.qk_norm and a.normalization == Normalization.layer_norm_no_bias):
        raise a.wrong("qk_norm_by_head", "needs qk_norm=True and normalization=layer_norm_no_bias")


def _check_experts(a: Architecture) -> None:
    if not a.num_experts:
        return
    if a.shared_ffn_hidden_size < 0 or a.shared_expert_gate > bool(a.shared_ffn_hidden_size):
        gate = a.shared_expert_gate
        raise a.wrong("shared_ffn_hidden_size", f"must not be negative (0 is none), nor 0 with shared_expert_gate={gate}")
    if not 1 <= a.experts_per_token <= a.num_experts:
        raise a.wrong("experts_per_token", f"must be from 1 to num_experts={a.num_experts}")
    check_range(a, "architecture", AT_LEAST_1, "expert_ffn_hidden_size", note=" with num_experts > 0")
    if a.experts_per_token == 1 and a.normalize_expert_weights:
        why = "with experts_per_token=1 every weight is 1, which gives the router no gradient; allowed: False"
        raise a.wrong("normalize_expert_weights", why)
    _check_router(a)


def _check_router(a: Architecture) -> None:
    groups, kept, chosen = a.router_groups, a.router_groups_per_token, a.experts_per_token
    if a.router_bias and not a.router_sigmoid:
        raise a.wrong("router_bias", "is computed for sigmoid scores; allowed with router_sigmoid=True")
    if a.router_sigmoid and a.normalize_expert_weights != (chosen > 1):
        why = (
            f"sigmoid scores of several experts are normalised, those of one are not; allowed with experts_per_token={chosen}: {chosen > 1}"
        )
        raise a.wrong("normalize_expert_weights", why)
    if a.router_scale != 1 and a.normalize_expert_weights and not a.router_sigmoid:
        raise a.wrong("router_scale", "allowed with router_sigmoid=True or normalize_expert_weights=False")
    if groups and (groups < 0 or a.num_experts % groups):
        raise a.wrong("router_groups", f"must divide num_experts={a.num_experts} (0 is none)")
    if not (1 <= kept <= groups if groups else kept == 0):
        raise a.wrong("router_groups_per_token", f"must be from 1 to router_groups={groups}, and 0 without groups")
    size = a.num_experts // groups if groups else 1
    if not 1 <= a.router_group_best <= size:
        raise a.wrong("router_group_best", f"must be from 1 to the {size} experts of a group")
    if groups and kept * size < chosen:
        raise a.wrong("router_groups_per_token", f"{kept} groups of {size} experts have fewer than experts_per_token={chosen}")
    if a.weighted_expert_inputs and chosen != 1:
        raise a.wrong("weighted_expert_inputs", f"is computed for one expert per token; allowed with experts_per_token={chosen}: False")


def _check_latent(a: Architecture) -> None:
    if not a.latent_size:
        return
    if not 1 <= a.value_head_dim <= a.head_dim:
        raise a.wrong("value_head_dim", f"must be from 1 to head_dim={a.head_dim}")
    fixed = {
        "num_key_value_heads": a.num_attention_heads,
        "position_embedding": "rope",
        "normalization": "rms_norm",
        **dict.fromkeys(("qkv_bias", "qk_norm", "linear_bias", "attention_gate"), False),
    }
    for name, needed in fixed.items():
        if getattr(a, name) != needed:
            raise a.wrong(name, f"allowed with latent_size={a.latent_size}: {needed}")


def _check_linear(a: Architecture) -> None:
    if a.attention_gate and a.rotary_interleaved:
        raise a.wrong("attention_gate", "allowed with rotary_interleaved=False")
    if not a.linear_attention_layers:
        return
    check_range(a, "architecture", AT_LEAST_1, *OF_LINEAR, note=" with linear_attention_layers")
    if a.linear_value_heads % a.linear_key_heads:
        raise a.wrong("linear_key_heads", f"must divide linear_value_heads={a.linear_value_heads}")
    for name in ("latent_size", "linear_bias", "sliding_window", "post_norms"):
        if value := getattr(a, name):
            raise a.wrong(name, f"allowed with linear_attention_layers: {type(value)()}")
