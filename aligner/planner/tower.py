"""What the vision tower of a model costs for each of its features (a token that an image takes): memory, measured on the tower's own
modules, and FLOPs. Of towers that take patches with their grid (Qwen's)."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from aligner.models.config import HFArchitecture, Part, Recompute, SeeingArchitecture
from aligner.models.families.own_modules import outline, part_of
from aligner.models.modules.megatron_config import resolve_dtype
from aligner.models.modules.vision import Sight, features
from aligner.planner.dry_run import LiveStorage
from aligner.planner.workload import Component, Tower

_SIDES = (8, 16)  # merged patches along an image's sides: between two sizes memory is linear in the features


class _Moments(NamedTuple):
    """Bytes of a pass."""

    kept: float  # what waits for the backward pass
    working: float  # the most that forward and backward pass hold besides
    forward: float  # the most that a pass without gradient holds


def tower_of(component: Component) -> Tower | None:
    """None if the model reads no images, or its tower is of another kind."""
    architecture = component.architecture
    if not isinstance(architecture, SeeingArchitecture | HFArchitecture) or not component.model.images:
        return None
    whole = outline(architecture)
    config = getattr(whole.config, "vision_config", None)
    if not hasattr(whole.base_model, "visual") or not hasattr(config, "spatial_merge_size"):
        return None
    trained = _trained(component)
    sizes = {Part.vision: 0, Part.projector: 0}
    for name, parameter in whole.named_parameters():
        if parameter.dim() > 1 and "pos_embed" not in name and (part := part_of(name, whole)) in sizes:
            sizes[part] += parameter.numel()
    merged = config.spatial_merge_size**2
    forward = {Part.vision: 2.0 * merged * sizes[Part.vision], Part.projector: 2.0 * sizes[Part.projector]}
    passes = {
        Part.vision: 3.0 if Part.vision in trained else 1.0,
        Part.projector: 1.0 + (Part.vision in trained) + (Part.projector in trained),
    }
    again = sum(forward.values()) if trained and component.model.recompute is Recompute.full else 0.0
    deep = len(getattr(config, "deepstack_visual_indexes", None) or [])
    fewest = max(2, deep)
    first, second = (_fitted(component, whole, config, depth) for depth in (fewest, fewest + 1))
    more = config.depth - fewest  # layers that are not measured
    window = getattr(config, "window_size", 0)
    return Tower(
        kept=first[0].kept + more * (second[0].kept - first[0].kept),
        working=first[0].working,
        forward=first[0].forward,
        fixed=max(0, int(first[1].working)),
        patches=merged,
        depth=config.depth,
        width=whole.base_model.visual.patch_embed.embed_dim,
        windowed=config.depth - len(config.fullatt_block_indexes) if window else 0,
        window=(window // config.patch_size) ** 2,
        flops=sum(forward.values()),
        trained_flops=sum(passes[part] * forward[part] for part in forward) + again,
    )


def _trained(component: Component) -> set[Part]:
    """The parts with the tower that get gradients, as weights or through adapters."""
    model, seen = component.model, {Part.vision, Part.projector}
    if component.optimizer is None:
        return set()
    if model.lora.is_on:
        return seen & set(model.lora.parts) if isinstance(component.architecture, HFArchitecture) else set()
    return seen - set(model.freeze)


def _fitted(component: Component, whole: Any, config: Any, depth: int) -> tuple[_Moments, _Moments]:
    """(by feature, besides) of a tower with that many layers."""
    config = deepcopy(config)
    config.depth, merge = depth, config.spatial_merge_size
    if getattr(config, "deepstack_visual_indexes", None):
        config.deepstack_visual_indexes = list(range(len(config.deepstack_visual_indexes)))
    trained, recomputes = _trained(component), component.model.recompute is Recompute.full
    with torch.device("meta"):
        tower = type(whole.base_model.visual)._from_config(config, dtype=resolve_dtype(component.model.dtype))
    for name, parameter in tower.named_parameters():
        parameter.requires_grad_(part_of(re.sub(r"blocks\.\d+", "blocks.0", f"model.visual.{name}"), whole) in trained)
    tower.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*tower.parameters(), *tower.buffers()):
            tensor.zero_()
    for parameter in tower.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_grad)
    if trained and recomputes:
        tower.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    small, large = (_measured(tower.train(), config, side * merge) for side in _SIDES)
    few, many = (side**2 for side in _SIDES)
    slopes = _Moments(*((b - a) / (many - few) for a, b in zip(small, large, strict=True)))
    return slopes, _Moments(*(a - few * slope for a, slope in zip(small, slopes, strict=True)))


def _drop_grad(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _measured(tower: Any, config: Any, side: int) -> _Moments:
    """An image of `side` x `side` patches."""
    numbers = config.in_channels * config.temporal_patch_size * config.patch_size**2
    none = torch.zeros(0, dtype=torch.int64)
    pixels, grid = torch.zeros(side * side, numbers), torch.tensor([[1, side, side]])
    sight = Sight(pixels=pixels, grid=grid, feature_of=none, positions=none)
    with LiveStorage() as tracker, torch.no_grad():
        features(tower, sight)
        forward = tracker.peak
    with LiveStorage() as tracker:
        found = features(tower, sight)
        kept, peak = tracker.live, tracker.peak
        if found.requires_grad:
            tracker.restart()
            found.backward(torch.zeros_like(found))
            peak = max(peak, tracker.peak)
    return _Moments(kept=kept + pixels.nbytes, working=peak - kept, forward=forward + pixels.nbytes)
