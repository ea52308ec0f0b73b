"""Rows with images in vLLM: it gets the tokens and pixels that training has, instead of making its own from files.

vLLM's class of the model is registered again under its name, with a processor that is asked for sizes and for the fields of pixels only. So
no tokenizer is loaded, and no processor of `transformers`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import torch

from aligner.data.images import images_in
from aligner.data.vision import Vision
from aligner.errors import DataError, EngineError
from aligner.models.config import Architecture
from aligner.rollout.engine import GenRequest
from aligner.types.extras import MOST_IMAGES

# Models whose rows with images have been compared with training's. Gemma 3's tokens of an image look at each other, which needs a GPU.
KINDS = ("qwen2_5_vl", "qwen3_vl", "mistral3", "llava", "smolvlm")
# The functions and arguments in use, as `aligner.rollout.vllm.engine.USED`.
USED = (
    ("vllm.inputs", "mm_input prompt_token_ids mm_kwargs mm_hashes mm_placeholders"),
    ("vllm.model_executor.models.registry", "ModelRegistry.register_model model_arch model_cls"),
    ("vllm.multimodal", "MULTIMODAL_REGISTRY.register_processor processor info dummy_inputs"),
    ("vllm.multimodal.inputs", "PlaceholderRange offset length is_embed, MultiModalKwargsItems.from_hf_inputs config_by_key"),
    ("vllm.multimodal.processing", "BaseMultiModalProcessor._get_mm_fields_config hf_inputs hf_processor_mm_kwargs"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.reset_encoder_cache"),
)
# Of `vllm.LLM`. Pixels are not kept in a second cache, and no image is made up to measure the tower's memory.
SETTINGS = {"limit_mm_per_prompt": {"image": MOST_IMAGES}, "mm_processor_cache_gb": 0, "skip_mm_profiling": True}
_GIVEN = "reads_given_rows"  # marks vLLM's classes that are registered again
_IMPORTED = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


def is_seen(architecture: Architecture) -> bool:
    """Whether this is a model of `KINDS` with its tower."""
    return getattr(architecture, "hf", {}).get("model_type") in KINDS


def register(name: str) -> None:
    """Let vLLM make its model `name` without a tokenizer and without the files of an image processor. Raises EngineError if it has none."""
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing import BaseMultiModalProcessor

    if name not in ModelRegistry.models:
        raise EngineError(f"rollout.engine=vllm: vLLM has no model {name}; allowed: rollout.engine=megatron")
    with _without_torchvision():
        kind = ModelRegistry.models[name].load_model_cls()
    if hasattr(kind, _GIVEN):  # an engine was started before
        return
    made = kind._processor_factory
    BaseMultiModalProcessor.requires_tokenizer = False
    limits = {
        "get_supported_mm_limits": lambda self: {"image": None},
        "get_mm_max_tokens_per_item": lambda self, seq_len, mm_counts: {"image": seq_len},  # an image has no more than its row
    }
    warm_up: dict[str, Any] = {"get_dummy_mm_inputs": lambda self, *_, **__: {}}  # vLLM's does without
    own = type(kind.__name__, (kind,), {"__module__": kind.__module__, _GIVEN: True})
    info, processor = _changed(made.info, limits), _changed(made.processor, warm_up)
    MULTIMODAL_REGISTRY.register_processor(processor, info=info, dummy_inputs=made.dummy_inputs)(own)
    ModelRegistry.register_model(name, own)


def _changed(make: Callable[..., Any], methods: dict[str, Any]) -> Callable[..., Any]:
    """A class or a function like `make`, whose objects have other methods."""

    def made(*given: Any, **named: Any) -> Any:
        found = make(*given, **named)
        found.__class__ = type(type(found).__name__, (type(found),), methods)
        return found

    return made


def has_inner_level(model: Any) -> bool:
    """Whether the vision tower of vLLM's model has the level of names that transformers 5 leaves out."""
    return hasattr(getattr(model, "vision_tower", None), "vision_model")


def with_inner_level(name: str) -> str:
    """The name in such a model of a tensor in files of any release."""
    return re.sub(r"(^|\.)vision_tower\.(?!vision_model\.)", r"\1vision_tower.vision_model.", name)


class GivenImages:
    """Makes vLLM's prompts of requests with images."""

    def __init__(self, llm: Any, vision: Vision, dtype: torch.dtype) -> None:
        self._vision, self._dtype = vision, dtype
        self._fields = llm.llm_engine.renderer.get_mm_processor()._get_mm_fields_config
        self._items: WeakValueDictionary[str, Any] = WeakValueDictionary()  # of the images in unfinished requests, which share them

    def prompt(self, request: GenRequest) -> Any:
        """The tokens of a request, and the images in their slots, which vLLM's caches know by their digests.

        Raises DataError if an image cannot be read, or the tokens have fewer slots than the images have features.
        """
        from vllm.inputs import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        digests, is_slot = images_in(request.extras), self._vision.types(torch.tensor(request.tokens)).bool()
        counts, slots = [self._vision.num_slots(digest) for digest in digests], is_slot.nonzero().flatten()
        if len(slots) < sum(counts):
            raise DataError(f"request {request.index}: its images have {sum(counts)} features, its tokens {len(slots)} slots")
        ranges = []
        for own in slots[: sum(counts)].split(counts):
            first, end = int(own[0]), int(own[-1]) + 1
            shown = is_slot[first:end]  # rows of an image may have other tokens between them
            ranges.append(PlaceholderRange(offset=first, length=end - first, is_embed=None if bool(shown.all()) else shown))
        items = MultiModalKwargsItems({"image": [self._item(digest) for digest in digests]})
        return mm_input(list(request.tokens), items, {"image": list(digests)}, {"image": ranges})

    def _item(self, digest: str) -> Any:
        from vllm.multimodal.inputs import MultiModalKwargsItems

        item = self._items.get(digest)
        if item is None:
            found = self._vision.inputs([digest])
            inputs = {name: one.to(self._dtype) if one.is_floating_point() else one for name, one in found.items()}
            if "num_patches" in self._fields(inputs, {}):
                inputs = _tiles(inputs)
            (item,) = MultiModalKwargsItems.from_hf_inputs(inputs, self._fields(inputs, {}))["image"]
            self._items[digest] = item
        return item


def _tiles(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An image whose tiles vLLM counts (Gemma 3's crops, SmolVLM's), which for some models are in a dimension behind that of rows."""
    if inputs["pixel_values"].dim() == 5:
        inputs = {name: one.flatten(0, 1) for name, one in inputs.items()}
    return inputs | {"num_patches": torch.tensor([len(inputs["pixel_values"])])}


class _Absent(ModuleType):
    """What is imported from a package that is not installed; it cannot be called."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __call__(self, *given: Any, **named: Any) -> None:
        raise ImportError(f"{self.__name__} was called, and torchvision is not installed")


@contextmanager
def _without_torchvision() -> Iterator[None]:
    """Where torchvision is missing, what is imported meanwhile finds names in its place: vLLM's modules of models import those of
    processors, which import it, and none of them is called here."""
    from transformers.utils import is_torchvision_available

    absent = {} if is_torchvision_available() else {name: _Absent(name) for name in _IMPORTED}  # transformers remembers the answer
    sys.modules.update(absent)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
