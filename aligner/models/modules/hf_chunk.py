"""A model of `transformers`' own modules as the one chunk of a model here: whole on every rank, under data parallelism alone.

The module is unchanged and gives hidden states; the head, the losses, Megatron-Core's DistributedDataParallel and its distributed optimizer
are those of every model. Padded rows are padded on the right, where causal attention does not look. Of packed rows `transformers` finds the
bounds in the positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.enums import ModelType
from safetensors import safe_open
from torch import Tensor

from aligner.errors import ConfigError, DataError
from aligner.models.checkpoint.files import MARKER
from aligner.models.checkpoint.hf_files import stored_tensors
from aligner.models.config import HFArchitecture, ModelConfig, Part, Quantization, Recompute
from aligner.models.families.mapping import ADAPTER
from aligner.models.families.own_modules import PREFIX, auto_class, hf_config, is_multimodal, layer_of, packed_linears, part_of, text_of
from aligner.models.modules.chunk import WholeChunk
from aligner.models.modules.heads import linear_head
from aligner.models.modules.hf_reading import from_files, with_random, with_types
from aligner.models.modules.linear import linear_weight
from aligner.models.modules.lora import Adapter, MergedWeights, attach
from aligner.models.modules.megatron_config import resolve_dtype
from aligner.models.modules.noise import Noise
from aligner.models.modules.packed import PackedLinear, dense, packed_parameter
from aligner.models.modules.scalar_head import HEAD, HF_HEADS, ScalarHead
from aligner.parallel import platform
from aligner.parallel.logprobs import shaped
from aligner.parallel.mcore import ProcessGroupCollection, ShardedTensor, TransformerConfig, parallel_state
from aligner.types import Batch, Images

NOT_PACKED = "model.packing=true: transformers' own modules compute rows with images side by side; allowed: false"


class HFChunk(WholeChunk):
    """A chunk around a `transformers` model, with the numbers of the Hugging Face files in `source`; random ones if that is a
    checkpoint, which fills the chunk afterwards.

    Raises ModelFilesError if a file is missing or damaged, lacks a tensor, or has one of another shape.
    """

    def __init__(self, architecture: HFArchitecture, model: ModelConfig, *, source: Path | None, head: ScalarHead | None = None) -> None:
        dtype = resolve_dtype(model.dtype)
        super().__init__(
            TransformerConfig(
                num_layers=architecture.num_layers,
                hidden_size=architecture.hidden_size,
                num_attention_heads=1,
                params_dtype=dtype,
                pipeline_dtype=dtype,
                bf16=dtype == torch.bfloat16,
                fp16=dtype == torch.float16,
                calculate_per_token_loss=True,
                use_cpu_initialization=True,
                batch_p2p_comm=True,
            )
        )
        self.architecture, self.lora, self.head = architecture, model.lora, head
        self.quantization, self.double_quantization = model.quantization, model.double_quantization
        self.logits_chunk_size, self.float32_logits = model.logits_chunk_size, model.float32_logits
        self.batch_invariant, self.share_embeddings_and_output_weights = False, False
        self.max_sequence_length = model.seq_length or architecture.max_position_embeddings
        self.pre_process = self.post_process = True
        self.vp_stage, self.model_type = None, ModelType.encoder_or_decoder
        self.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        self.embedding, self.decoder = torch.nn.ModuleList(), SimpleNamespace(layers=[])
        self.hf = self._made(source, dtype)
        self._untie()
        self.dropouts = _without_dropout(self.hf)
        self.always_evaluates = False  # `probe` found that training mode has other numbers
        _keep_buffers(self.hf)
        self._backbone = [text_of(self.hf)[1]]  # in a list: no second name
        for name, parameter in self.hf.named_parameters() if is_multimodal(self.hf) else ():
            part = part_of(name, self.hf)
            parameter.requires_grad_(parameter.requires_grad and part is not None and part not in model.freeze)
            self.trains_vision |= parameter.requires_grad and part is not Part.text
        if head is not None:
            self._drop_vocabulary()
            self.score_head = linear_head(head, architecture.hidden_size, torch.device("cpu"))
        if model.recompute is Recompute.full:
            if not self.hf.supports_gradient_checkpointing:
                raise ConfigError(f"model.recompute=full: {architecture.model_type} of transformers has no checkpointing; allowed: none")
            enable = getattr(self.hf, "activation_checkpointing_enable", self.hf.gradient_checkpointing_enable)  # releases before 5.24
            enable({"use_reentrant": False})
        if model.lora.is_on:
            attach(self, model.lora)

    def _made(self, source: Path | None, dtype: torch.dtype) -> Any:
        """The `transformers` model, of which nothing that is to be packed is dense for longer than it takes to pack it."""
        where = f"{source or 'config'}"
        config = hf_config(self.architecture.hf, where)
        self._made_by = auto_class(config, where)
        self._fresh_from: Path | None = None  # whose numbers the module has, while nothing has changed them
        names = packed_linears(self.architecture, self.quantization) if self.quantization.is_on else []
        taken = {f"{name}.weight" for name in names}

        def pack(name: str, numbers: Tensor) -> torch.nn.Parameter:
            numbers = numbers.to(platform.device())  # whose kernels pack: a scale may have other last bits on another
            return packed_parameter(numbers, self.quantization, dtype, nested=self.double_quantization)

        if source is not None and not (source / MARKER).exists():
            model = from_files(self.architecture, source, dtype, needs_output=self.head is None, taken=taken, take=pack)
            self._fresh_from = source
        elif source is not None and names:
            model = with_random(self.architecture, dtype, taken=taken, take=pack)
        else:
            model = with_types(self._made_by.from_config(config, dtype=dtype), dtype)
        for name in names:
            linear = model.get_submodule(name)
            if "packed" not in linear.weight.__dict__:
                linear.weight = pack(name, linear.weight.data)
            linear.__class__ = PackedLinear
        return model

    @property
    def backbone(self) -> Any:
        """The module whose `last_hidden_state` the head reads: the text part of a model of text and images."""
        return self._backbone[0]

    def train(self, mode: bool = True) -> HFChunk:
        """Adapters and checkpointed layers alone know of training, if `always_evaluates`."""
        super().train(mode)
        for part in self.hf.modules() if self.always_evaluates else ():
            part.training = mode and (isinstance(part, Adapter) or bool(getattr(part, "gradient_checkpointing", False)))
        return self

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention_mask: Tensor | None = None,
        *,
        images: Tensor | None = None,
        noise: Noise | None = None,
        **options: Any,
    ) -> Tensor:
        """Tokens and positions [rows, L], and the `Images` of the rows -> hidden states [L, rows, H].

        Raises ConfigError for packed rows with images, DataError if an image cannot be read, or rows with slots have lost their images.
        """
        seen = {} if images is None else self.seen(tokens, images)
        if images is None and self.vision is not None and bool(self.vision.types(tokens).any()):
            raise DataError("rows have slots of images, and no images: what made them has lost them")
        if seen and options.get("packed_seq_params") is not None:
            raise ConfigError(NOT_PACKED)
        given = {"input_ids": tokens, "position_ids": positions, "attention_mask": attention_mask, "use_cache": False}
        with _adding(noise, self.hf.get_input_embeddings()):
            hidden = (self.hf.base_model if seen else self.backbone)(**{**given, **seen}).last_hidden_state
        return hidden.transpose(0, 1).contiguous()

    def own_weights(self) -> dict[str, Any]:
        """The parameters but adapters', by their names here."""
        return {name: parameter for name, parameter in self.named_parameters() if ADAPTER not in name}

    def see(self, batch: Batch, images: Tensor, token_of: Tensor) -> Tensor:
        return images

    def seen(self, tokens: Tensor, images: Tensor) -> dict[str, Any]:
        """What the module takes beside tokens [rows, L] with images, such as positions on Qwen's three axes; empty without images."""
        digests = [digest for row in images for digest in Images.digests(row)]
        if not digests:
            return {}
        if self.vision is None:
            raise ConfigError(f"{self.architecture.model_type}: the rows have images, and the model's directory no image processor")
        model, device = self.hf.base_model, tokens.device
        dtype = next(self.hf.parameters()).dtype
        pixels = {name: one.to(device, dtype if one.is_floating_point() else None) for name, one in self.vision.inputs(digests).items()}
        types = dict.fromkeys(("mm_token_type_ids", "token_type_ids"), self.vision.types(tokens))
        taken = inspect.signature(model.forward).parameters
        given = {name: one for name, one in {**pixels, **types}.items() if name in taken}
        if hasattr(model, "get_rope_index"):
            index = {name: one for name, one in given.items() if name in inspect.signature(model.get_rope_index).parameters}
            given["position_ids"], _ = model.get_rope_index(tokens, **index)
        return given

    def set_input_tensor(self, tensor: Any) -> None:
        """For Megatron-Core's schedules; there is no stage before."""

    @property
    def output_parameter(self) -> Tensor:
        return self.hf.get_output_embeddings().weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, H] -> float32 logits [N, V], as the log-probs of training have them."""
        own = self.arithmetic.project(hidden, self.vocabulary_weight()[0]).float()
        scale, softcap = self.architecture.logits_scale, self.architecture.logits_softcap
        return shaped(own, scale=scale, softcap=softcap) if softcap or scale != 1 else own

    def adapted(self) -> str:
        """Which linear layers have an adapter, by the last part of their names, and which have none."""
        whole = self.backbone if self.lora.parts == [Part.text] else self.hf
        linears = [(name, one) for name, one in whole.named_modules() if isinstance(one, torch.nn.Linear)]
        have, lack = ([name.rsplit(".", 1)[-1] for name, one in linears if hasattr(one, "adapter") is wanted] for wanted in (True, False))
        none = f"; none on {', '.join(sorted(set(lack)))}" if lack else ""
        packed = [one for one in self.hf.modules() if isinstance(one, PackedLinear)]
        in_all = sum(linear_weight(one).shape.numel() for name, one in self.hf.named_parameters() if ADAPTER not in name)
        part = sum(one.in_features * one.out_features for one in packed) / in_all
        form = f"; {len(packed)} layers in {self.quantization.value}, {part:.0%} of all weights" if packed else ""
        return f"{self.architecture.model_type}: adapters on {len(have)} layers ({', '.join(sorted(set(have)))}){none}{form}"

    def twin(self) -> HFChunk:
        """The same model with weights of its own, which `take_weights` fills: for who samples while this one is trained."""
        made, device = copy(self), next(self.hf.parameters()).device
        made._modules, made.gather, made.quantization = dict(self._modules), None, Quantization.none
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            made.hf = with_types(self._made_by.from_config(self.hf.config, dtype=self.config.params_dtype), self.config.params_dtype)
        _keep_buffers(made.hf)
        made.hf.requires_grad_(False).eval()
        made._backbone = [text_of(made.hf)[1]]
        return made

    @torch.no_grad()
    def take_weights(self, trained: HFChunk) -> int:
        """Copy the numbers of the model whose `twin` this is, adapters merged; returns the bytes."""
        trained.settle()
        theirs = MergedWeights(trained.own_weights(), [trained])
        for name, parameter in self.named_parameters():
            parameter.copy_(theirs[name])
        return sum(parameter.nbytes for parameter in self.parameters())

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict[str, Any]:
        """For checkpoints: every parameter but adapters', whole, with the number of its copy."""
        number = (0, 0, parallel_state.get_data_parallel_rank(with_context_parallel=True))
        own = self.own_weights()
        return {name: ShardedTensor.from_rank_offsets(name, parameter, replica_id=number) for name, parameter in own.items()}

    def read_files(self, directory: Path, *, with_head: bool, then: Callable[[str], None] | None = None) -> None:
        """As `WholeChunk`'s. What was read when the module was made is not read twice."""
        if self._fresh_from != directory or then is not None:
            own = {name: parameter for name, parameter in self.hf.named_parameters() if ADAPTER not in name}

            @torch.no_grad()
            def fill(name: str, numbers: Tensor) -> Tensor:
                with dense([own[name]]):
                    own[name].copy_(numbers)
                    if then is not None:
                        then(f"{PREFIX}{name}")
                return own[name].new_zeros(()).expand(numbers.shape)

            taken = [name for name, parameter in own.items() if "packed" in parameter.__dict__]
            dtype = self.config.params_dtype
            read = from_files(self.architecture, directory, dtype, needs_output=self.head is None, taken=taken, take=fill)
            _keep_buffers(read)
            theirs = dict(read.named_parameters())
            for name in own.keys() - taken:
                fill(name, theirs[name])
        self._fresh_from = None
        if self.head is None or not with_head:
            return
        tensors = {name: one.file for name, one in stored_tensors(directory)[0].items() if name.startswith(HF_HEADS)}
        stored = {HEAD + name.split(".", 1)[1]: (name, file) for name, file in tensors.items()}
        for name, parameter in self.score_head.named_parameters(prefix=HEAD.rstrip(".")):
            if name in stored:
                theirs, file = stored[name]
                with safe_open(directory / file, framework="pt") as handle, torch.no_grad():
                    parameter.copy_(handle.get_tensor(theirs))

    def file_tensors(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        self.settle()
        yield from self._in_files(MergedWeights(self.own_weights(), [self] if merged else []))

    def file_outline(self) -> Iterator[tuple[str, Tensor]]:
        """`file_tensors` on the meta device."""
        weights = {name: linear_weight(parameter) for name, parameter in self.own_weights().items()}
        yield from self._in_files({name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in weights.items()})

    def _in_files(self, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """One layer at a time: what is converted, or has an adapter merged into it, takes memory."""
        from transformers.core_model_loading import revert_weight_conversion

        for _, names in groupby((name for name in own if name.startswith(PREFIX)), key=layer_of):
            yield from revert_weight_conversion(self.hf, {name.removeprefix(PREFIX): own[name].detach() for name in names}).items()
        yield from ((name, own[name].detach()) for name in own if self.head is not None and name.startswith(HEAD))

    def _untie(self) -> None:
        """An output layer that the files have apart from the embedding stays apart, whatever the config says, in copies and exports too."""
        configs = (self.hf.config, self.hf.config.get_text_config())
        if self.hf.get_output_embeddings().weight is self.hf.get_input_embeddings().weight or not any(
            getattr(one, "tie_word_embeddings", False) for one in configs
        ):
            return
        for one in configs:
            one.tie_word_embeddings = False
        hf = self.architecture.hf | {"tie_word_embeddings": False}
        self.architecture.hf = hf | ({"text_config": hf["text_config"] | {"tie_word_embeddings": False}} if "text_config" in hf else {})
        self.architecture.tied_embeddings = False

    def _drop_vocabulary(self) -> None:
        """A model that scores has no output layer; one that is the embedding stays that."""
        output, embedding = self.hf.get_output_embeddings(), self.hf.get_input_embeddings()
        if output.weight is not embedding.weight:
            (name,) = [name for name, module in self.hf.named_modules() if module is output]
            self.hf.set_submodule(name, torch.nn.Identity())


@contextmanager
def _adding(noise: Noise | None, embedding: torch.nn.Module) -> Iterator[None]:
    if noise is None:
        yield
        return
    hook = embedding.register_forward_hook(lambda module, inputs, output: noise.added(output))
    try:
        yield
    finally:
        hook.remove()


def _without_dropout(model: torch.nn.Module) -> dict[str, float]:
    """Switch every dropout off; returns those that were on, by their names in the config or the module."""
    found = {}
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout) and part.p:
            found["dropout"], part.p = part.p, 0.0
        for name, value in list(vars(part).items()):
            if "drop" in name and type(value) is float and value:
                found[name] = value
                vars(part)[name] = 0.0
    return found


def _keep_buffers(model: torch.nn.Module) -> None:
    """Persistent buffers (a router's biases, a table of experts by token) become parameters without gradient, so that checkpoints and
    exports have them."""
    for part in model.modules():
        for name, buffer in list(part._buffers.items()):
            if buffer is not None and name not in part._non_persistent_buffers_set:
                del part._buffers[name]
                part.register_parameter(name, torch.nn.Parameter(buffer, requires_grad=False))


_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}  # of the largest number
_LENGTHS = (7, 5)
_MANY, _TRIES = 64, 3  # tokens, and passes, of which one may be random


@torch.no_grad()
def probe(chunk: HFChunk, *, packing: bool) -> list[str]:
    """Find what a model computes on a few tokens at the start, instead of by lists of families, and set the factor and the limit of the
    logits in the chunk's architecture; returns what a user should know. Adapters that the chunk has add nothing yet.

    Raises ConfigError for a model that is not causal or whose logits are not those of a head on its hidden states, and for `packing` with a
    model whose layers see through the bounds of packed sequences.
    """
    where = f"model_type={chunk.architecture.model_type}"
    parameters = inspect.signature(chunk.backbone.forward).parameters
    if "position_ids" not in parameters and not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        raise ConfigError(f"{where}: its forward pass takes no position_ids; allowed: models that do")
    device = next(chunk.hf.parameters()).device
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(chunk.architecture.vocab_size, (1, length), generator=generator).to(device) for length in _LENGTHS]
    positions = [torch.arange(length, device=device)[None] for length in _LENGTHS]
    with _evaluated(chunk):
        try:
            alone = [chunk(row, position)[:, 0] for row, position in zip(rows, positions, strict=True)]
        except Exception as error:  # of whatever kind a module raises
            raise ConfigError(f"{where}: its forward pass fails in transformers: {type(error).__name__}: {error}") from error
        if not all(bool(hidden.isfinite().all()) for hidden in alone):
            raise ConfigError(
                f"{where}: its hidden states are not finite: the weights have such a number, or {chunk.config.params_dtype} overflows"
            )
        short = chunk(rows[0][:, : _LENGTHS[1]], positions[1])[:, 0]
        if not _equal(short, alone[0][: _LENGTHS[1]]):
            raise ConfigError(f"{where}: a token's hidden state depends on tokens behind it: not a causal language model")
        if chunk.head is None:
            _find_head(chunk, rows[0], alone[0], where)
        if packing:
            both = chunk(torch.cat(rows, dim=1), torch.cat(positions, dim=1))[:, 0]
            if not _equal(both, torch.cat(alone)):
                off = float((both - torch.cat(alone)).abs().max() / torch.cat(alone).abs().max())
                raise ConfigError(
                    f"model.packing=true: {where}: its layers carry a state from one packed sequence into the next (hidden states are "
                    f"{off:.1g} of their largest number off); allowed: false"
                )
    notes = [f"{where}: {name}={value} of its config is off in training" for name, value in chunk.dropouts.items()]
    length = min(_MANY, chunk.max_sequence_length)
    many = (
        torch.randint(chunk.architecture.vocab_size, (1, length), generator=generator).to(device),
        torch.arange(length, device=device)[None],
    )
    if not _same_in_training(chunk, *many):
        chunk.always_evaluates = True
        if not _same_in_training(chunk, *many):
            raise ConfigError(f"{where}: in training its hidden states are random, and differ from those that log-probs are computed from")
        notes.append(f"{where}: its training mode is random (other than by dropout): it is trained in evaluation mode")
    return notes


def _same_in_training(chunk: HFChunk, tokens: Tensor, positions: Tensor) -> bool:
    """Whether the hidden states in training mode are those of evaluation. The generators stay as they were."""
    with _evaluated(chunk):
        alone = chunk(tokens, positions)
        with torch.random.fork_rng(devices=[tokens.device] if tokens.is_cuda else []):
            chunk.train()
            return all(_equal(chunk(tokens, positions), alone) for _ in range(_TRIES))


def _find_head(chunk: HFChunk, tokens: Tensor, hidden: Tensor, where: str) -> None:
    """Find the factor and the limit that make the model's logits of head @ hidden."""
    wanted = text_of(chunk.hf)[0](input_ids=tokens, use_cache=False).logits[0].float()
    plain = hidden.float() @ chunk.vocabulary_weight()[0].float().t()
    wanted = wanted[:, : plain.shape[1]]
    config = chunk.hf.config.get_text_config().to_dict()
    numbers = {name: float(value) for name, value in config.items() if type(value) in (int, float) and value > 0}
    limits = {number for name, number in numbers.items() if "cap" in name and "attn" not in name}
    found = min((_shaped(wanted, plain, softcap, list(numbers.values())) for softcap in (0.0, *sorted(limits))), key=lambda one: one[0])
    off, chunk.architecture.logits_scale, chunk.architecture.logits_softcap = found
    if off > _TOLERANCE[chunk.config.params_dtype] * float(wanted.abs().max()):
        bias = getattr(chunk.hf.get_output_embeddings(), "bias", None)
        why = "its output layer has a bias" if bias is not None else "its logits are not a product of its last hidden states"
        raise ConfigError(f"{where}: {why} (off by {off:.2g}), which the losses here do not compute")


def _shaped(wanted: Tensor, plain: Tensor, softcap: float, numbers: list[float]) -> tuple[float, float, float]:
    """How far from the wanted logits the product is with this limit and the factor that fits best; that factor; the limit."""
    before = softcap * torch.atanh((wanted.double() / softcap).clamp(-1 + 1e-12, 1 - 1e-12)).float() if softcap else wanted
    scale = _named(float((before * plain).sum() / plain.square().sum()), numbers)
    logits = softcap * torch.tanh(plain * scale / softcap) if softcap else plain * scale
    return float((logits - wanted).abs().max()), scale, softcap


def _named(scale: float, numbers: list[float]) -> float:
    """The exact factor that was found roughly: 1, or a number of the config, or its inverse."""
    exact = [1.0, *(one for number in numbers for one in (number, 1 / number))]
    return next((one for one in exact if abs(scale / one - 1) < 1e-2), scale)


def _equal(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= _TOLERANCE[other.dtype] * max(float(other.abs().max()), 1e-6)


@contextmanager
def _evaluated(chunk: HFChunk) -> Iterator[None]:
    was_training = chunk.training
    chunk.eval()
    try:
        yield
    finally:
        chunk.train(was_training)
