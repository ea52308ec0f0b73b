"""What a model of `transformers`' own modules computes, found on a few tokens at the start instead of by lists of families.

A model that is not causal, whose logits are not a head's product with its hidden states, or that carries a state from one packed sequence
into the next would train on wrong numbers in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.modules.hf_chunk import HFChunk

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}  # of the largest number
_LENGTHS = (7, 5)
_MANY, _TRIES = 64, 3  # tokens, and passes, of which one may be random


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
    wanted = chunk.hf(input_ids=tokens, use_cache=False).logits[0].float()
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
