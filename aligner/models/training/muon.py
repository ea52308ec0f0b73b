"""`optimizer.kind=muon`: the matrices of the decoder's layers by Muon, all other parameters by AdamW.

Muon (Keller Jordan 2024; Liu et al. 2025, 2502.16982) adds the nearest orthogonal matrix of the momentum instead of the momentum, which
torch's Muon computes: five steps of Newton-Schulz in bfloat16, scaled to the size of AdamW's steps, so that learning rate and weight decay
are AdamW's. A matrix is one of Hugging Face's: query, key and value of a fused parameter are three, gate and up two. Where tensor
parallelism splits it, every rank gathers the whole and keeps its own part of the result. Momentum stays split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.families.mapping import shard, to_hf, to_megatron
from aligner.models.modules.chunk import Chunk, WholeChunk
from aligner.models.weights import ParameterShard, gathered, named_shards, tensor_group

_LAYERS = "decoder.layers."


class Muon(torch.optim.AdamW):
    """AdamW until `open` says which parameters are matrices."""

    def __init__(self, params: Any, *, momentum: float, **defaults: Any) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError(f"optimizer.kind=muon: needs torch 2.9 or newer, here is {torch.__version__}; allowed: adam, adam8bit")
        super().__init__(params, **defaults)
        self._momentum = momentum
        self._matrices: dict[Tensor, tuple[Chunk, ParameterShard]] = {}
        self.main: dict[Tensor, Tensor] = {}  # by the model's parameter the float32 one that is updated

    def open(self, chunks: Sequence[Chunk]) -> None:
        """Find the matrices among what is updated, of which Megatron-Core has made float32 copies by now.

        Raises ConfigError if Muon cannot train the model.
        """
        if isinstance(chunks[0], WholeChunk):
            raise ConfigError("optimizer.kind=muon: not with transformers' own modules; allowed beside it: model.implementation=megatron")
        if chunks[0].lora.is_on:
            raise ConfigError(
                f"optimizer.kind=muon: not with model.lora.rank={chunks[0].lora.rank}, whose pairs are no matrices; allowed: 0"
            )
        held = {p for group in self.param_groups for p in group["params"]}
        for part in named_shards(chunks):
            main = getattr(part.parameter, "main_param", part.parameter)
            if main in held:
                self.main[part.parameter] = main
                if is_matrix(part.place.name, part.place.shape):
                    self._matrices[main] = chunks[0], part

    def moments(self, p: Tensor) -> tuple[str, ...]:
        """Names of the states of what is updated, each of its size."""
        return ("momentum_buffer",) if p in self._matrices else ("exp_avg", "exp_avg_sq")

    def begin(self, step: int) -> None:
        """A state of `step` steps whose moments are to be filled in."""
        for p in self.main.values():
            self.state[p] = {"step": torch.tensor(float(step)), **{name: torch.zeros_like(p) for name in self.moments(p)}}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        if not self.state:
            self.begin(0)
        for group in self.param_groups:
            for p in group["params"]:
                if p in self._matrices and p.grad is not None:
                    self._update(p, group["lr"], group["weight_decay"])
                    p.grad = None  # AdamW passes it by
        super().step()

    def _update(self, p: Tensor, lr: float, weight_decay: float) -> None:
        """Collective over the ranks that share the matrix."""
        assert p.grad is not None
        state = self.state[p]
        state["step"] += 1
        momentum = state["momentum_buffer"].lerp_(p.grad, 1 - self._momentum)
        chunk, part = self._matrices[p]
        whole = gathered(chunk, part.place, p.grad.lerp(momentum, self._momentum), part.rule.layout.blocks)
        directions = [_direction(one) for one in to_hf(part.rule, whole, chunk.architecture)]
        direction = to_megatron(part.rule, directions, chunk.architecture, 0)
        group, dim = tensor_group(chunk, part.place), part.place.split_dim
        if dim is not None:
            direction = shard(part.rule.layout, direction, dim=dim, num_shards=group.size(), index=group.rank())
        p.mul_(1 - lr * weight_decay).add_(direction, alpha=lr)


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon updates the parameter of this name; heads, embeddings and what only sees images are outside of the layers."""
    return name.startswith(_LAYERS) and len(shape) == 2


def _direction(update: Tensor) -> Tensor:
    """Where torch's Muon goes from 0, at a learning rate of 1 and without momentum of its own."""
    start = torch.nn.Parameter(torch.zeros_like(update))
    start.grad = update
    torch.optim.Muon([start], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
    return start.detach()
