"""Settings of a model (`ModelConfig`); also names of `Architecture` and its parts. Imports neither Megatron-Core nor transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar

from aligner.errors import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, ConfigError, check_range
from aligner.hub.names import Files
from aligner.models.architecture.architecture import (
    NOT_SCALED as NOT_SCALED,
    OF_EXPERTS as OF_EXPERTS,
    ROPE_FACTORS as ROPE_FACTORS,
    Activation as Activation,
    Architecture as Architecture,
    Family as Family,
    HFArchitecture as HFArchitecture,
    Normalization as Normalization,
    ParallelResidual as ParallelResidual,
    PositionEmbedding as PositionEmbedding,
    SeeingArchitecture as SeeingArchitecture,
    refuse,
)


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


class Implementation(str, Enum):
    """Whose modules a model is made of; `auto` is Megatron-Core's for the families that have layers here, else `transformers`'."""

    auto = "auto"
    megatron = "megatron"
    transformers = "transformers"


class Layers(str, Enum):
    """Whose modules the layers are made of; `auto` is Transformer Engine's where they can be used (`aligner.models.modules.fusions`)."""

    auto = "auto"
    transformer_engine = "transformer_engine"
    torch = "torch"


class Fp8Recipe(str, Enum):
    """What has a scale of its own in 8-bit products; `auto` is blockwise on Hopper, mxfp8 on Blackwell, else tensorwise."""

    auto = "auto"
    blockwise = "blockwise"
    mxfp8 = "mxfp8"
    tensorwise = "tensorwise"
    delayed = "delayed"  # refused: its scales are those of passes before


class Float32Matmul(str, Enum):
    """What float32 matrix products are computed in: float32, or TF32 (10 bits of mantissa) where a GPU has it."""

    highest = "highest"
    high = "high"


class Quantization(str, Enum):
    """How frozen weights of linear layers are stored (QLoRA; Dettmers et al. 2023, 2305.14314)."""

    none = "none"
    nf4 = "nf4"  # 4 bits, with a float32 scale for each 64 numbers of a row
    int8 = "int8"  # 8 bits, with a float32 scale for each row

    @property
    def is_on(self) -> bool:
        """Whether weights are packed."""
        return self is not Quantization.none

    @property
    def num_bytes(self) -> float:
        """Of one number, without scales; 0 where nothing is packed."""
        return {Quantization.none: 0, Quantization.nf4: 0.5, Quantization.int8: 1}[self]


class Recompute(str, Enum):
    """Which activations are computed again in the backward pass instead of being kept (Korthikanti et al. 2022, 2205.05198)."""

    none = "none"
    selective = "selective"  # those inside core attention
    full = "full"  # everything but each layer's input


class Part(str, Enum):
    """A part of a model that sees images."""

    vision = "vision"  # the tower, which makes features of pixels
    projector = "projector"  # between the tower and the text part
    text = "text"


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


class LoraInit(str, Enum):
    """What new adapters begin with."""

    uniform = "uniform"  # A as PEFT's default, B = 0
    pissa = "pissa"  # the largest singular values and vectors of the weights (2404.02948)


def _default_targets() -> list[LoraTarget]:
    return [LoraTarget.qkv, LoraTarget.proj, LoraTarget.fc1, LoraTarget.fc2]


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, 2106.09685): the weights W stay unchanged, and the model computes with W + scaling B A."""

    rank: int = 0  # rank of the adapters; 0: no adapters, every weight is trained
    alpha: float = 16.0  # scaling = alpha / rank
    rslora: bool = False  # scaling = alpha / sqrt(rank) (2312.03732)
    dora: bool = False  # learn the magnitude of each output apart from its direction (2402.09353); model.lora.dropout must be 0
    dropout: float = 0.0  # dropout of the adapters' inputs, in training
    targets: list[LoraTarget] = field(default_factory=_default_targets)  # linear layers that get adapters (docs/lora.md)
    parts: list[Part] = field(default_factory=lambda: [Part.text])  # parts that get them, of a model that sees: text, vision, projector
    init: LoraInit = LoraInit.uniform  # new adapters: uniform A and B = 0, or pissa, the weights' largest singular vectors (2404.02948)
    pissa_iterations: int = 0  # of a randomized decomposition with init=pissa, fast on large weights (16 is usual); 0: an exact one
    path: str = ""  # an adapter to start from: PEFT's (or ORG/NAME[@REV] of the Hub), or a checkpoint's step_...; empty: B = 0
    from_hub: ClassVar[Mapping[str, Files]] = {"path": Files.model}

    def __post_init__(self) -> None:
        self.targets, self.parts = list(self.targets), list(self.parts)
        check_range(self, "model.lora", NOT_NEGATIVE, "rank", note=" (0 is off)")
        check_range(self, "model.lora", NOT_NEGATIVE, "pissa_iterations", note=" (0 is exact)")
        check_range(self, "model.lora", POSITIVE, "alpha")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.lora.dropout={self.dropout}: must be in [0, 1)")
        if self.dora and self.dropout:
            raise ConfigError(
                f"model.lora.dropout={self.dropout}: must be 0 with model.lora.dora=true, which scales the layer's own product too"
            )
        if self.dora and LoraTarget.experts in self.targets:
            raise ConfigError("model.lora.targets: PEFT has no DoRA of experts; allowed with model.lora.dora=true: the other targets")
        if self.dora and self.is_pissa:
            raise ConfigError("model.lora.init=pissa: not with model.lora.dora=true, whose magnitudes are of W; allowed: uniform")
        if self.pissa_iterations and not self.is_pissa:
            raise ConfigError(f"model.lora.pissa_iterations={self.pissa_iterations}: needs model.lora.init=pissa; allowed: 0")
        if not self.targets:
            raise ConfigError(f"model.lora.targets=[]: name at least one; allowed: {', '.join(LoraTarget.__members__)}")
        if not self.parts:
            raise ConfigError(f"model.lora.parts=[]: name at least one; allowed: {', '.join(Part.__members__)}")
        if self.path and not self.rank:
            raise ConfigError(f"model.lora.path={self.path}: needs model.lora.rank, the rank of the adapter there")

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained instead of the weights."""
        return self.rank > 0

    @property
    def is_pissa(self) -> bool:
        """Whether a layer has a frozen first pair, whose product is subtracted."""
        return self.init is LoraInit.pissa

    @property
    def plain(self) -> LoraConfig:
        """The ordinary adapters that compute the same: the frozen first pair behind the trained one."""
        if not self.is_pissa:
            return self
        alpha = self.alpha * (math.sqrt(2) if self.rslora else 2)
        return replace(self, rank=2 * self.rank, alpha=alpha, init=LoraInit.uniform, pissa_iterations=0)

    @property
    def scaling(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """One model of a run. From `micro_batch_size` to `recompute` settings change memory and speed, never the numbers."""

    path: str = ""  # Hugging Face directory, ORG/NAME[@REV] of the Hub, or a checkpoint, Megatron-LM's or NeMo's too; empty: random weights
    tokenizer: str = ""  # tokenizer directory, or ORG/NAME[@REV] of the Hub; empty: the one beside the weights
    from_hub: ClassVar[Mapping[str, Files]] = {"path": Files.model, "tokenizer": Files.settings}
    implementation: Implementation = Implementation.auto  # megatron (tp, pp, cp, ep), transformers' modules (dp alone); auto: by the family
    architecture: Architecture = field(default_factory=Architecture)
    dtype: Dtype = Dtype.auto  # of weights and activations; auto: bfloat16 on a GPU, float32 on a CPU; float16 scales its losses
    seq_length: int = 0  # longest sequence of the run; 0: the model's max_position_embeddings
    micro_batch_size: int = 4  # rows per forward pass
    micro_batch_tokens: int = 0  # 0: micro_batch_size rows; else as many rows of like length as fit in this number of tokens
    packing: bool = False  # rows of a micro-batch one after the other instead of padded side by side; needs micro_batch_tokens
    share_prompts: bool = False  # packed rows that begin with the same prompt compute it once; needs packing
    recompute: Recompute = Recompute.none  # activations that the backward pass computes again: none, those of attention, or all of a layer
    layers: Layers = Layers.auto  # transformer_engine (NVIDIA's, fused) or torch; auto: the first on a GPU in 16 bits if it imports
    batch_invariant: bool = False  # a token's log-prob has the same bits in rollouts and training, whatever the batch: slow
    fp8: bool = False  # the layers' matrix products in 8 bits; not with layers=torch
    fp8_recipe: Fp8Recipe = Fp8Recipe.auto  # unit with a scale: 128 numbers, 32 (mxfp8), whole tensors; auto: by the GPU
    float32_matmul: Float32Matmul = Float32Matmul.highest  # float32 products: in float32, or high: on a GPU in TF32, faster
    float32_logits: bool = True  # the output layer's product is not rounded to dtype; a GPU needs torch 2.8, a CPU converts the factors
    logits_chunk_size: int = 1024  # tokens whose logits exist at a time
    make_vocab_divisible_by: int = 128  # the vocabulary is padded to a multiple of this and of parallel.tp
    router_aux_loss_coef: float = 0.0  # coefficient of the experts' load-balancing loss, averaged over tokens
    router_z_loss_coef: float = 0.0  # coefficient of the squared log-sum-exp of the router's logits, averaged over tokens
    router_bias_update_rate: float = 0.0  # added to the router biases of experts with too few tokens, taken from the others', each step
    lora: LoraConfig = field(default_factory=LoraConfig)
    quantization: Quantization = Quantization.none  # frozen linear layers in nf4 (4 bits) or int8 under the adapters; needs lora.rank
    double_quantization: bool = False  # the scales of nf4 have 8 bits (and bitsandbytes' numbers): 0.516 bytes a weight instead of 0.5625
    images: bool = False  # Megatron's layers read images too, through the model's own vision tower; transformers' modules always do
    vision: dict[str, Any] = field(default_factory=dict)  # for plans without path: config.json around `architecture`, of a model that sees
    freeze: list[Part] = field(default_factory=lambda: [Part.vision, Part.projector])  # parts of a model that sees: vision, projector, text

    def __post_init__(self) -> None:
        check_range(self, "model", AT_LEAST_1, "micro_batch_size", "logits_chunk_size", "make_vocab_divisible_by")
        check_range(self, "model", NOT_NEGATIVE, "seq_length", note=" (0 is the model's own)")
        coefficients = ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate")
        check_range(self, "model", NOT_NEGATIVE, "micro_batch_tokens", *coefficients, note=" (0 is off)")
        not_torch = "needs Transformer Engine's layers; allowed: model.layers=auto or transformer_engine, not batch_invariant"
        delayed = (
            "its scales are those of passes before, so data-parallel replicas that make different numbers of passes wait for each other "
            "for ever, and a model that is not trained has none; allowed: auto, blockwise, mxfp8, tensorwise"
        )
        merged = "the engine computes with merged weights, whose log-probs have other last bits; allowed with model.lora.rank=0"
        means = "the routers' auxiliary losses are means over tokens, which it makes fewer; allowed if both coefficients are 0"
        quantized = f"model.quantization={self.quantization.value}"
        recipe, te = self.fp8_recipe, "the sums of Transformer Engine's layers depend on the batch; allowed: layers=auto, torch"
        tokens = "needs model.micro_batch_tokens, the tokens that one packed row may hold"
        refuse(
            (self.fp8 and (self.layers is Layers.torch or self.batch_invariant), f"model.fp8=true: {not_torch}"),
            (recipe is Fp8Recipe.delayed, f"model.fp8_recipe=delayed: {delayed}"),
            (
                recipe is not Fp8Recipe.auto and not self.fp8,
                f"model.fp8_recipe={recipe.value}: needs model.fp8=true; allowed without: auto",
            ),
            (self.batch_invariant and self.layers is Layers.transformer_engine, f"model.batch_invariant=true: {te}"),
            (self.batch_invariant and self.lora.is_on, f"model.batch_invariant=true: {merged}"),
            (
                self.quantization.is_on and not self.lora.is_on,
                f"{quantized}: packed weights cannot be trained: needs adapters on them (model.lora.rank > 0); allowed without: none",
            ),
            (
                self.quantization.is_on and self.fp8,
                f"{quantized}: not with model.fp8=true, which reads dense weights; allowed: none",
            ),
            (
                self.quantization.is_on and self.layers is Layers.transformer_engine,
                f"{quantized}: Transformer Engine's layers read dense weights; allowed: layers=auto, torch",
            ),
            (
                self.quantization.is_on and self.lora.is_pissa,
                f"model.lora.init=pissa: not with {quantized}: its residual would have to be packed instead of the weights; "
                "allowed: uniform",
            ),
            (
                self.double_quantization and self.quantization is not Quantization.nf4,
                f"model.double_quantization=true: {quantized} has no blocks of scales; allowed: false, or model.quantization=nf4",
            ),
            (self.packing and not self.micro_batch_tokens, f"model.packing=true: {tokens}"),
            (self.share_prompts and not self.packing, "model.share_prompts=true: needs model.packing=true"),
            (self.share_prompts and (self.router_aux_loss_coef or self.router_z_loss_coef), f"model.share_prompts=true: {means}"),
        )

    @property
    def tokenizer_path(self) -> str:
        """Where the tokenizer is. Raises ConfigError if neither `tokenizer` nor `path` is set."""
        if not (self.tokenizer or self.path):
            raise ConfigError("model.tokenizer='': name a tokenizer directory, or give model.path, which holds one")
        return self.tokenizer or self.path

    def or_else(self, actors: ModelConfig) -> ModelConfig:
        """A server's own model where its config names one, else the actor's."""
        return self if self.path or self.tokenizer else actors
