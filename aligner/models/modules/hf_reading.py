"""Models of `transformers` out of files, read tensor by tensor: what packs a weight has it before the next one is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligner.errors import ModelFilesError
from aligner.models.checkpoint.hf_files import stored_tensors
from aligner.models.checkpoint.hf_weights import Numbers
from aligner.models.config import HFArchitecture
from aligner.models.families.own_modules import outline
from aligner.models.modules.linear import linear_weight

_NAME = "aligner"
Take = Callable[[str, Tensor], Tensor]  # what a parameter with this name becomes, from its numbers


class _Stored(NamedTuple):
    """A tensor of files, which is read when transformers takes its numbers."""

    read: Callable[[], Tensor]

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()[index]


@cache
def _taking() -> Callable[[Collection[str], Take], Any]:
    """Registers a quantizer with transformers, which hands parameters to `take`, one at a time, as soon as they have been read; what makes
    its configuration, of the names of the parameters and of `take`, is returned."""
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers import HfQuantizer
    from transformers.quantizers.auto import register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class Taking(QuantizationConfigMixin, ConversionOps):
        def __init__(self, taken: Collection[str], take: Take) -> None:
            self.quant_method, self.taken, self.take = _NAME, taken, take

        def to_dict(self) -> dict[str, Any]:
            return {"quant_method": _NAME}

        def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
            return {name: self.take(name, one[0] if isinstance(one, list) else one) for name, one in input_dict.items()}

    @register_quantizer(_NAME)
    class Quantizer(HfQuantizer):
        is_trainable = True

        def is_serializable(self) -> bool:
            return False

        def preprocess_model(self, model: Any, *_: Any, **__: Any) -> None:
            """The model stays as it is."""

        def postprocess_model(self, model: Any, **_: Any) -> None:
            del model.hf_quantizer, model.config.quantization_config

        def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
            return param_name in self.quantization_config.taken

        def get_quantize_ops(self) -> Any:
            return self.quantization_config

    return Taking


def from_files(
    architecture: HFArchitecture, source: Path, dtype: torch.dtype, *, needs_output: bool, taken: Collection[str], take: Take
) -> Any:
    """The `transformers` model of the files in `source`, whose parameters in `taken` go through `take`. Raises ModelFilesError."""
    numbers = Numbers(source, stored_tensors(source)[0])  # raises for files that are missing or cut short
    if coded := [name for name, one in numbers.tensors.items() if one.dtype.startswith(("F8", "F4", "U8", "I8"))]:
        raise ModelFilesError(f"{source}: {coded[0]} is {numbers.tensors[coded[0]].dtype} ({len(coded)} such): not read")
    try:
        model, found = _loaded(architecture, {name: partial(numbers.read, name) for name in numbers.tensors}, dtype, taken, take)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelFilesError(f"{source}: transformers cannot load it: {error}") from error
    output = model.get_output_embeddings()
    unneeded = set() if needs_output else {name for name, parameter in model.named_parameters() if parameter is output.weight}
    shapes = {name: one.shape for name, one in outline(architecture).named_parameters()}
    own = {name: linear_weight(one).shape for name, one in model.named_parameters()}
    other = [name for name in shapes.keys() & own.keys() if shapes[name] != own[name]]  # transformers does not compare what is taken
    wrong = [*sorted(set(found["missing_keys"]) - unneeded), *(str(one[0]) for one in found["mismatched_keys"]), *other]
    if wrong:
        raise ModelFilesError(f"{source}: {len(wrong)} tensors are missing or do not have the shape in the config, e.g. {wrong[:3]}")
    return model


def with_random(architecture: HFArchitecture, dtype: torch.dtype, *, taken: Collection[str], take: Take) -> Any:
    """The `transformers` model of an architecture with random numbers, whose matrices in `taken` go through `take`."""
    from transformers.core_model_loading import revert_weight_conversion

    like = outline(architecture)
    named = revert_weight_conversion(like, {name: like.get_parameter(name) for name in taken})
    std = getattr(like.config.get_text_config(), "initializer_range", 0.02)
    drawn = {name: partial(torch.normal, 0.0, std, tuple(one.shape)) for name, one in named.items()}
    return _loaded(architecture, drawn, dtype, taken, take)[0]


def _loaded(
    architecture: HFArchitecture, tensors: Mapping[str, Callable[[], Tensor]], dtype: torch.dtype, taken: Collection[str], take: Take
) -> tuple[Any, dict[str, Any]]:
    like = outline(architecture)
    with _quiet():
        return type(like).from_pretrained(
            None,
            config=like.config,
            state_dict={name: _Stored(read) for name, read in tensors.items()},
            dtype=dtype,
            output_loading_info=True,
            quantization_config=_taking()(taken, take) if taken else None,
        )


def with_types(model: Any, dtype: torch.dtype) -> Any:
    """As files would be read: some numbers (a router's) stay float32."""
    from transformers.core_model_loading import build_glob_alternation

    if plan := model._get_dtype_plan(dtype):
        kept = build_glob_alternation(list(plan))[0]
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if kept.search(name) and tensor.is_floating_point():
                tensor.data = tensor.data.float()
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars, and a report of tensors that are looked at here."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
