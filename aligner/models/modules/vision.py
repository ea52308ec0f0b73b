"""What a model that sees has in front of Megatron-Core's layers: `transformers`' own vision tower, whole on each rank of the first pipeline
stage, whose features stand in the slots of images; and positions in time, height and width.

Slots are among the tokens before the model gets them, so that rows are padded, packed, and split as those of text are. Some models add
further features of the tower behind their first layers ("deep" ones: DeepStack, 2406.04334).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aligner.data.vision import Vision
from aligner.errors import ConfigError, DataError
from aligner.models.config import Architecture, ModelConfig, Part, Recompute, SeeingArchitecture
from aligner.models.families.own_modules import hf_config, outline, part_of
from aligner.models.families.wrappers import TOWER
from aligner.parallel import mcore
from aligner.types import Images
from aligner.types.rows import upload


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """Tokens [rows, L], or the slots of a model's input, with the images among them."""

    pixels: Tensor  # patches of all images, as the tower takes them
    grid: Tensor  # int64 [images, 3]: the patches of each, in time, height and width
    feature_of: Tensor  # int64 [rows, L]: the feature of the tower that stands there; -1: none
    positions: Tensor  # int64 [3, rows, L]

    def at(self, token_of: Tensor) -> Sight:
        """The same for slots that hold these of the tokens, in flat numbers; -1: none."""
        flat = token_of.clamp(min=0)
        features = torch.where(token_of >= 0, self.feature_of.flatten()[flat], -1)
        return replace(self, feature_of=features, positions=self.positions.flatten(1)[:, flat])

    def to(self, device: torch.device) -> Sight:
        return Sight(**{name: upload(getattr(self, name), device) for name in self.__slots__})


def look(architecture: SeeingArchitecture, vision: Vision | None, tokens: Tensor, lengths: Tensor, images: Tensor) -> Sight | None:
    """Rows of tokens [rows, L] with their `Images`, on the host; None if no row has one.

    Raises ConfigError without an image processor, DataError if an image cannot be read, or the rows have other slots than its features.
    """
    rows = [Images.digests(row) for row in images]
    if not any(rows):
        return None
    if vision is None:
        raise ConfigError(f"{architecture.hf['model_type']}: the rows have images, and the model's directory no image processor")
    inputs, inside = vision.inputs([digest for row in rows for digest in row]), torch.arange(tokens.shape[1]) < lengths[:, None]
    types, grid = vision.types(tokens) * inside, inputs["image_grid_thw"]
    counts = [part.sum() for part in feature_counts(architecture, grid).split([len(row) for row in rows])]
    types *= types.cumsum(dim=1) <= torch.stack(counts)[:, None]  # whatever else a model has written
    for row, (count, slots) in enumerate(zip(counts, types.sum(dim=1), strict=True)):
        if count != slots:
            raise DataError(f"row {row} of a micro-batch: its images have {count} features, its tokens {slots} slots: it may have been cut")
    positions, _ = outline(architecture).model.get_rope_index(
        tokens, mm_token_type_ids=types, image_grid_thw=grid, attention_mask=inside.long()
    )
    numbers = torch.where(types > 0, types.flatten().cumsum(0).view_as(types) - 1, -1)
    return Sight(pixels=inputs["pixel_values"], grid=grid, feature_of=numbers, positions=positions)


def feature_counts(architecture: SeeingArchitecture, grid: Tensor) -> Tensor:
    """The features that stand for each image, whose patches are those of a `Sight`'s grid."""
    return grid.prod(dim=1) // outline(architecture).config.vision_config.spatial_merge_size ** 2


def make_tower(architecture: SeeingArchitecture, model: ModelConfig, dtype: torch.dtype) -> Any:
    """The tower with its projector, of random numbers."""
    config = hf_config(architecture.hf, "config.json").vision_config
    tower = type(outline(architecture).model.visual)._from_config(config, dtype=dtype)
    if model.recompute is Recompute.full and not sees_frozen(architecture, model):
        tower.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return tower


def sees_frozen(architecture: Architecture, model: ModelConfig) -> bool:
    """Whether no parameter is trained that only rows with images have a gradient for."""
    return not isinstance(architecture, SeeingArchitecture) or model.lora.is_on or {Part.vision, Part.projector} <= set(model.freeze)


def freeze(chunk: torch.nn.Module, architecture: SeeingArchitecture, parts: list[Part]) -> None:
    """Train no parameter of these parts."""
    whole = outline(architecture)
    for name, parameter in chunk.named_parameters():
        part = part_of(f"model.{name}", whole) if name.startswith(TOWER) else Part.text
        parameter.requires_grad_(part not in parts)


def features(tower: Any, pixels: Tensor, grid: Tensor) -> Tensor:
    """[1 + deep layers, features, H]: what stands in the slots, then what is added behind the first layers."""
    output = tower(pixels.to(tower.dtype), grid_thw=grid)
    return torch.stack([output.pooler_output, *(getattr(output, "deepstack_features", None) or [])])


def in_slots(found: Tensor, feature_of: Tensor, others: Tensor | float) -> Tensor:
    """[L, rows, H]: features [features, H] where `feature_of` [L, rows] names one, else `others`."""
    feature_of = feature_of.contiguous()  # so that what pipeline stages send is
    return torch.where((feature_of >= 0)[..., None], found[feature_of.clamp(min=0)], others)


class DeepLayer(mcore.TransformerLayer):
    """Behind it come features of the tower, where slots have some. They are what Megatron-Core calls the context, all deep features
    [deep layers, features, H], and its mask, the feature of each slot [L, rows]: so they are arguments of what is recomputed."""

    def forward(
        self, *args: Any, context: Tensor | None = None, context_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[L, rows, H] -> the same shape, and the context where the next layer needs it."""
        hidden, _ = super().forward(*args, **options)
        if context is None or context_mask is None:
            return hidden, None
        behind = self.layer_number
        hidden = hidden + in_slots(context[behind - 1], context_mask, 0.0)
        return hidden, context if behind < len(context) else None
