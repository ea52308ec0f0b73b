"""Prompts with images in the built-in engine: what the tower sees, where it stands, and by which numbers the cache knows it.

Two images of one size have the same tokens, so everything that looks for a known beginning (pages, shared prompts, turns) compares keys
instead: in the slots of an image they hold numbers below zero, which no other image has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aligner.data.vision import Vision
from aligner.models.config import ModelConfig, SeeingArchitecture
from aligner.models.families.wrappers import TOWER
from aligner.models.modules.build import LanguageModel
from aligner.models.modules.vision import feature_counts, features, look, make_tower
from aligner.parallel import platform
from aligner.rollout.builtin.attention import SeenChunk
from aligner.rollout.builtin.scheduler import SeenPrompt
from aligner.rollout.config import KEPT_FEATURES
from aligner.rollout.engine import GenRequest
from aligner.types import Images
from aligner.types.rows import upload


class Eyes:
    """The vision tower with the engine's weights, `named` by their global names. `apart`: nothing is shared with training's thread."""

    def __init__(self, chunk: LanguageModel, named: Mapping[str, Tensor], *, apart: bool) -> None:
        assert isinstance(chunk.architecture, SeeingArchitecture)
        self._architecture, self.vision = chunk.architecture, chunk.vision
        if apart and self.vision is not None:
            self.vision = Vision(self.vision.directory, self.vision.store)
        self._tower: Any = make_tower(chunk.architecture, ModelConfig(), chunk.config.params_dtype).to(platform.device()).eval()
        for name, parameter in self._tower.named_parameters():
            parameter.requires_grad_(False)
            parameter.data = named[TOWER + name].detach()
        self._firsts: dict[str, int] = {}  # the number of the first feature of each image
        self._next = 0  # the first number that no feature has
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    def forget(self) -> None:
        """The weights have changed."""
        self._kept.clear()

    def look(self, request: GenRequest) -> SeenPrompt | None:
        """The images of a request; None if it has none. Raises ConfigError and DataError as `aligner.models.modules.vision.look`."""
        row = request.extras.get(Images.name)
        if row is None:
            return None
        tokens, length = torch.tensor([request.tokens]), len(request.tokens)
        sight = look(self._architecture, self.vision, tokens, torch.tensor([length]), row[None])
        if sight is None:
            return None
        digests = tuple(Images.digests(row))
        counts = feature_counts(self._architecture, sight.grid).tolist()
        numbers = [number for digest, count in zip(digests, counts, strict=True) for number in self._numbers(digest, count)]
        feature_of, axes = sight.feature_of[0].numpy(), sight.positions[:, 0].numpy()
        keys = tuple(token if at < 0 else -1 - numbers[at] for token, at in zip(request.tokens, feature_of.tolist(), strict=True))
        return SeenPrompt(keys=keys, digests=digests, feature_of=feature_of, axes=axes, shift=int(axes.max()) + 1 - length)

    @torch.no_grad()
    def chunk(self, prompt: SeenPrompt, start: int, end: int) -> SeenChunk:
        """What is seen in tokens `start` to `end` of the prompt and what follows it."""
        own = prompt.feature_of[start:end]
        slots = (own >= 0).nonzero()[0]
        found = self._features(prompt.digests)[:, torch.from_numpy(own[slots])] if len(slots) else None
        return SeenChunk(axes=prompt.axes_of(start, end), slots=slots, features=found)

    def _numbers(self, digest: str, count: int) -> range:
        first = self._firsts.setdefault(digest, self._next)
        self._next = max(self._next, first + count)
        return range(first, first + count)

    def _features(self, digests: Sequence[str]) -> Tensor:
        """[1 + deep layers, features, H] of these images, one's behind the other's."""
        missing = [digest for digest in dict.fromkeys(digests) if digest not in self._kept]
        if missing:
            assert self.vision is not None  # `look` has read them
            inputs, device = self.vision.inputs(missing), platform.device()
            grid = inputs["image_grid_thw"]
            found = features(self._tower, upload(inputs["pixel_values"], device), upload(grid, device))
            self._kept |= zip(missing, found.split(feature_counts(self._architecture, grid).tolist(), dim=1), strict=True)
        for digest in digests:
            self._kept.move_to_end(digest)
        whole = torch.cat([self._kept[digest] for digest in digests], dim=1)
        while len(self._kept) > 1 and sum(tensor.nbytes for tensor in self._kept.values()) > KEPT_FEATURES:
            self._kept.popitem(last=False)
        return whole
