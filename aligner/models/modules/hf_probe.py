"""What a model of `transformers`' own modules computes, found on a few tokens at the start instead of by lists of families.

A model that is not causal, whose logits are not a head's product with its hidden states, or that carries a state from one packed sequence
into the next would train on wrong numbers in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.modules.hf_chunk import HFChunk

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}  # of the largest number
_LENGTHS = (7, 5)


@torch.no_grad()
def probe(chunk: HFChunk, *, packing: bool) -> list[str]:
    """Set the factor and the limit of the logits in the chunk's architecture; returns what a user should know. Adapters that the chunk has
    add nothing yet.

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
        alone = [chunk(row, position)[:, 0] for row, position in zip(rows, positions, strict=True)]
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
    return [f"{where}: {name}={value} of its config is off in training" for name, value in chunk.dropouts.items()]


def _find_head(chunk: HFChunk, tokens: Tensor, hidden: Tensor, where: str) -> None:
    """Find the factor and the limit that make the model's logits of head @ hidden."""
    wanted = chunk.hf(input_ids=tokens, use_cache=False).logits[0].float()
    plain = hidden.float() @ chunk.vocabulary_weight()[0].float().t()
    wanted = wanted[:, : plain.shape[1]]
    config = chunk.hf.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None) or 0.0
    before = softcap * torch.atanh((wanted.double() / softcap).clamp(-1 + 1e-12, 1 - 1e-12)).float() if softcap else wanted
    scale = _named(float((before * plain).sum() / plain.square().sum()), config)
    logits = plain * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if not _equal(logits, wanted, dtype=chunk.config.params_dtype):
        off = float((logits - wanted).abs().max())
        raise ConfigError(f"{where}: its logits are not a product of its last hidden states (off by {off:.2g})")
    chunk.architecture.logits_scale, chunk.architecture.logits_softcap = scale, float(softcap)


def _named(scale: float, config: Any) -> float:
    """The exact factor that was found roughly: 1, or a number of the config, or its inverse."""
    numbers = [float(value) for value in config.to_dict().values() if type(value) in (int, float) and value > 0]
    exact = [1.0, *(one for number in numbers for one in (number, 1 / number))]
    return next((one for one in exact if abs(scale / one - 1) < 1e-2), scale)


def _equal(one: Tensor, other: Tensor, *, dtype: torch.dtype | None = None) -> bool:
    return float((one - other).abs().max()) <= _TOLERANCE[dtype or other.dtype] * max(float(other.abs().max()), 1e-6)


@contextmanager
def _evaluated(chunk: HFChunk) -> Iterator[None]:
    was_training = chunk.training
    chunk.eval()
    try:
        yield
    finally:
        chunk.train(was_training)
