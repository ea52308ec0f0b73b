"""What the vision tower of a model costs for each of its features (a token that an image takes): memory, measured on the tower's own
modules, and FLOPs.

Towers take patches with their grid (Qwen's), or pictures: all of one size (CLIP's, SigLIP's, SmolVLM's tiles), or with sizes (Pixtral's).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch

from aligner.models.config import HFArchitecture, Part, Recompute, SeeingArchitecture
from aligner.models.families.own_modules import outline, part_of
from aligner.models.modules.megatron_config import resolve_dtype
from aligner.models.modules.vision import features
from aligner.planner.dry_run import LiveStorage, drop_grad
from aligner.planner.workload import Component, Tower, micro_batches

_COUNTS = (2, 4)  # pictures
_LARGEST_SIDE = 32  # patches of a picture that is measured
_SIDES = (8, 16)  # merged patches along an image's sides: between two sizes memory is linear in the features


class _Moments(NamedTuple):
    """Bytes of a pass; of a tower's, for each feature."""

    kept: float  # what waits for the backward pass
    held: float  # what else waits until the text part's forward pass is done
    working: float  # the most that forward and backward pass hold besides what is kept
    forward: float  # the most that a pass without gradient holds
    fixed: float = 0.0  # of `working`, for all features together


def features_seen(component: Component) -> int:
    """Those of a micro-batch."""
    rows = component.work.rows if component.optimizer is None else component.work.update_rows
    return micro_batches(component, rows).rows * component.seen_tokens


class _Shape(NamedTuple):
    """Of a tower."""

    patches: float  # that a feature stands for
    depth: int
    width: int
    windowed: int = 0  # layers whose attention sees `window` patches
    window: int = 0


def tower_of(component: Component) -> Tower | None:
    """None if the model reads no images, or its tower is of another kind."""
    architecture = component.architecture
    if not isinstance(architecture, SeeingArchitecture | HFArchitecture) or not component.model.images:
        return None
    whole = outline(architecture)
    config: Any = getattr(whole.config, "vision_config", None)
    if hasattr(whole.base_model, "visual") and hasattr(config, "spatial_merge_size"):
        window, layers = getattr(config, "window_size", 0), config.depth
        windowed = layers - len(config.fullatt_block_indexes) if window else 0
        width = whole.base_model.visual.patch_embed.embed_dim
        shape = _Shape(config.spatial_merge_size**2, layers, width, windowed, (window // config.patch_size) ** 2)
        fewest = max(2, len(getattr(config, "deepstack_visual_indexes", None) or []))
        first, second = (_fitted(component, whole, config, depth) for depth in (fewest, fewest + 1))
    elif all(type(getattr(config, name, None)) is int for name in ("image_size", "patch_size", "num_hidden_layers", "hidden_size")):
        used = getattr(whole.config, "vision_feature_layer", -1)  # the last layers may be of no use
        fewest = max(2, *(one + 1 if one >= 0 else -one for one in (used if isinstance(used, list) else [used])))
        try:
            (shape, first), (_, second) = (_of_pictures(component, whole, depth) for depth in (fewest, fewest + 1))
        except (AttributeError, RuntimeError, TypeError, ValueError):  # of a module that takes something else
            return None
    else:
        return None
    trained = _trained(component)
    sizes = {Part.vision: 0, Part.projector: 0}
    for name, parameter in whole.named_parameters():
        if parameter.dim() > 1 and not re.search("pos(ition)?_embed", name) and (part := part_of(name, whole)) in sizes:
            sizes[part] += parameter.numel()
    forward = {Part.vision: 2.0 * shape.patches * sizes[Part.vision], Part.projector: 2.0 * sizes[Part.projector]}
    passes = {
        Part.vision: 3.0 if Part.vision in trained else 1.0,
        Part.projector: 1.0 + (Part.vision in trained) + (Part.projector in trained),
    }
    again = sum(forward.values()) if trained and component.model.recompute is Recompute.full else 0.0
    unmeasured = shape.depth - fewest  # layers
    return Tower(
        kept=first.kept + unmeasured * (second.kept - first.kept),
        held=first.held + unmeasured * (second.held - first.held),
        working=first.working,
        forward=first.forward,
        fixed=max(0, int(first.fixed)),
        **shape._asdict(),
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


def _fitted(component: Component, whole: Any, config: Any, depth: int) -> _Moments:
    """Of a tower with that many layers."""
    config = deepcopy(config)
    config.depth, merge = depth, config.spatial_merge_size
    if getattr(config, "deepstack_visual_indexes", None):
        config.deepstack_visual_indexes = list(range(len(config.deepstack_visual_indexes)))
    trained, recomputes = _trained(component), component.model.recompute is Recompute.full
    with torch.device("meta"):
        tower = type(whole.base_model.visual)._from_config(config, dtype=resolve_dtype(component.model.dtype))
    _fill(tower, "model.visual", whole, trained)
    if trained and recomputes:
        tower.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    small, large = (_measured(tower.train(), config, side * merge) for side in _SIDES)
    few, many = (side**2 for side in _SIDES)
    slopes = _Moments(*((b - a) / (many - few) for a, b in zip(small, large, strict=True)))
    return slopes._replace(fixed=small.working - few * slopes.working)


def _fill(module: torch.nn.Module, place: str, whole: Any, trained: set[Part]) -> None:
    """Give a module at this place of the model memory on the host, and its trained parts gradients that are dropped at once."""
    module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.zero_()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(part_of(re.sub(r"\.\d+\.", ".0.", f"{place}.{name}"), whole) in trained)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(drop_grad)


def _of_pictures(component: Component, whole: Any, depth: int) -> tuple[_Shape, _Moments]:
    """A tower with that many layers for pictures, small ones if its own are large."""
    config, trained = deepcopy(whole.config), _trained(component)
    own = config.vision_config
    own.num_hidden_layers, side = depth, min(own.image_size // own.patch_size, _LARGEST_SIDE)
    if hasattr(config, "mm_tokens_per_image"):
        config.mm_tokens_per_image = config.mm_tokens_per_image * side**2 // (own.image_size // own.patch_size) ** 2
    own.image_size, config.get_text_config().num_hidden_layers = side * own.patch_size, 1
    with torch.device("meta"):
        model = type(whole.base_model)._from_config(config, dtype=resolve_dtype(component.model.dtype))
    for name, part in model.named_children():
        if part is not model.get_decoder():
            _fill(part, f"model.{name}", whole, trained)
    if trained and component.model.recompute is Recompute.full:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    taken = inspect.signature(model.get_image_features).parameters
    sized = "image_sizes" in taken and taken["image_sizes"].default is inspect.Parameter.empty

    def look(pixels: torch.Tensor) -> tuple[torch.Tensor, Any]:
        more = {"image_sizes": torch.full((len(pixels), 2), own.image_size)} if sized else {}
        output = model.get_image_features(pixels[None] if "pixel_attention_mask" in taken else pixels, **more)
        found = output.pooler_output  # the model holds the rest until its text part is done
        return found if isinstance(found, torch.Tensor) else torch.cat(list(found)), output

    model.train()
    pictures = [torch.ones(count, 3, own.image_size, own.image_size) for count in _COUNTS]
    by_count = [_moments(pixels, partial(look, pixels)) for pixels in pictures]
    features = [look(pixels)[0].numel() // config.get_text_config().hidden_size for pixels in pictures]
    seen, (few, many) = features_seen(component), features
    # By feature, with what the mask of pictures beside each other adds for each: a x + b x^2.
    bend = [(b / many - a / few) / (many - few) for a, b in zip(*by_count, strict=True)]
    slopes = _Moments(*(a / few + b * (seen - few) for a, b in zip(by_count[0], bend, strict=True)))
    whole_depth, alone = whole.config.vision_config.num_hidden_layers, 0 if sized else side**2
    shape = _Shape(_COUNTS[0] * side**2 / few, whole_depth, own.hidden_size, whole_depth if alone else 0, alone)
    return shape, slopes


def _measured(tower: Any, config: Any, side: int) -> _Moments:
    """An image of `side` x `side` patches."""
    numbers = config.in_channels * config.temporal_patch_size * config.patch_size**2
    pixels, grid = torch.zeros(side * side, numbers), torch.tensor([[1, side, side]])
    return _moments(pixels, lambda: (features(tower, pixels, grid), None))


def _moments(pixels: torch.Tensor, look: Callable[[], tuple[torch.Tensor, Any]]) -> _Moments:
    """Of what makes features of pixels, and what else it returns."""
    with LiveStorage() as tracker, torch.no_grad():
        look()
        forward = tracker.peak
    with LiveStorage() as tracker:
        found, others = look()
        waiting, peak = tracker.live, tracker.peak
        del others
        kept = tracker.live
        if found.requires_grad:
            tracker.restart()
            found.backward(torch.zeros_like(found))
            peak = max(peak, tracker.peak)
    return _Moments(kept=kept + pixels.nbytes, held=waiting - kept, working=peak - kept, forward=forward + pixels.nbytes)
