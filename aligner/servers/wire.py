"""Every endpoint's name and tensors, once: used by both server and client.

Shapes are written with letters for sizes that a request chooses (B rows, S positions, K attributes); one letter is one size within a
request. Sizes and masks are integers or exact zeros and ones; nothing here is rounded or padded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aligner.servers.config import RequestLimits
from aligner.servers.payloads import (
    Payload,
    Result,
    RewardRequest,
    RewardTexts,
    SaveRequest,
    StatusRequest,
    TrainIdentity,
    TrainRequest,
    ValuesRequest,
    digest_of,
)
from aligner.types import Batch, RowTensor, TokenBatch, ValueBatch
from aligner.types.extras import KINDS

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One named tensor: dtype is "int64", "float32" or "bytes" (UTF-8 text)."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    optional: bool = False


def check_tensors(specs: tuple[TensorSpec, ...], arrays: Arrays, limits: RequestLimits) -> None:
    """Raise ValueError unless `arrays` has the stated tensors with the stated dtypes, agreeing shapes, allowed sizes and finite numbers."""
    described = {name: ("bytes" if array.dtype.kind in "OS" else array.dtype.name, array.shape) for name, array in arrays.items()}
    check_structure(specs, described, limits)
    for name, (dtype, _) in described.items():
        if dtype == "float32" and not np.isfinite(arrays[name]).all():
            bad = int((~np.isfinite(arrays[name])).sum())
            raise ValueError(f"{name}: {bad} of {arrays[name].size} values are NaN or infinite; all must be finite")


def check_structure(specs: tuple[TensorSpec, ...], described: Mapping[str, tuple[str, tuple[int, ...]]], limits: RequestLimits) -> None:
    """Raise ValueError unless the names, dtypes and shapes in `described` are what `specs` and `limits` allow."""
    largest = {"B": limits.max_rows, "S": limits.max_sequence_length}
    sizes: dict[str, tuple[int, str]] = {}
    names = [spec.name for spec in specs]
    for name in described:
        if name not in names:
            raise ValueError(f"{name}: no such tensor; allowed are {', '.join(names)}")
    for spec in specs:
        if spec.name not in described:
            if spec.optional:
                continue
            raise ValueError(f"{spec.name}: missing; expected {spec.dtype} {_shape_text(spec.shape)}")
        dtype, shape = described[spec.name]
        if dtype != spec.dtype or len(shape) != len(spec.shape):
            raise ValueError(f"{spec.name}: got {dtype} {list(shape)}, expected {spec.dtype} {_shape_text(spec.shape)}")
        for expected, size in zip(spec.shape, shape, strict=True):
            if isinstance(expected, int):
                if size != expected:
                    raise ValueError(f"{spec.name}: got shape {list(shape)}, expected {_shape_text(spec.shape)}")
                continue
            if not 1 <= size <= largest[expected]:
                raise ValueError(f"{spec.name}: got shape {list(shape)}; {expected} may be 1 to {largest[expected]}")
            known, owner = sizes.setdefault(expected, (size, spec.name))
            if known != size:
                raise ValueError(f"{spec.name}: got shape {list(shape)}, but {owner} has {expected} = {known}")


def _shape_text(shape: tuple[str | int, ...]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """One Triton model. `decode` turns checked arrays into the typed payload; `encode` turns a handler's result into the reply.

    `tensors` are its inputs beside the extras that accompany tokens.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    decode: Callable[[Arrays, RequestLimits], Payload]
    encode: Callable[[Payload, Result], dict[str, np.ndarray]]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Every tensor that a request may have."""
        return (*self.tensors, *_extra_specs()) if "tokens" in (spec.name for spec in self.tensors) else self.tensors

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.outputs)

    def payload(self, arrays: Arrays, limits: RequestLimits) -> Payload:
        """Check a request as a whole and return its payload. Raises ValueError: names the tensor, what it holds and what is allowed."""
        check_tensors(self.inputs, arrays, limits)
        return self.decode(arrays, limits)


# ---- requests ------------------------------------------------------------------------------------------------------------------------


def _sent() -> dict[str, type[RowTensor]]:
    """The kinds of extras that servers are sent, by the name of the tensor."""
    return {f"extras.{name}": kind for name, kind in KINDS.items() if kind.is_sent}


def _extra_specs() -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name=name, dtype=_wire_dtype(kind), shape=("B", *("S" * kind.per_token), *(kind.shape or ())), optional=True)
        for name, kind in _sent().items()
    )


def _wire_dtype(kind: type[RowTensor]) -> str:
    return "float32" if kind.dtypes[0].is_floating_point else "int64"


def encode_tokens(batch: Batch) -> dict[str, np.ndarray]:
    """tokens int64 [B, S], sequence_lengths int64 [B, 1], and the extras that are sent."""
    extras = {name: (kind, batch.extras[kind.name].data) for name, kind in _sent().items() if kind.name in batch.extras}
    return {
        "tokens": batch.tokens.cpu().numpy(),
        "sequence_lengths": batch.lengths.cpu().numpy().reshape(-1, 1),
        **{name: data.to("cpu", getattr(torch, _wire_dtype(kind))).numpy() for name, (kind, data) in extras.items()},
    }


def decode_tokens(arrays: Arrays, limits: RequestLimits) -> TokenBatch:
    """Also checks every token id and every length."""
    tokens, lengths = arrays["tokens"], arrays["sequence_lengths"].reshape(-1)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= limits.vocab_size:
        raise ValueError(f"tokens: ids from {low} to {high}; allowed are 0 to {limits.vocab_size - 1}")
    low, high = int(lengths.min()), int(lengths.max())
    if low < 1 or high > tokens.shape[1]:
        raise ValueError(f"sequence_lengths: from {low} to {high}; allowed are 1 to {tokens.shape[1]}, the width of tokens")
    extras = {kind.name: kind(torch.from_numpy(arrays[name].copy()).to(kind.dtypes[0])) for name, kind in _sent().items() if name in arrays}
    return TokenBatch(tokens=torch.from_numpy(tokens.copy()), lengths=torch.from_numpy(lengths.copy()), extras=extras)


def encode_value_batch(batch: ValueBatch) -> dict[str, np.ndarray]:
    """The tensors of a value batch, of which its digest is made: the loss mask travels as float32 zeros and ones."""
    return {
        **encode_tokens(batch),
        "returns": batch.returns.cpu().numpy(),
        "prev_values": batch.old_values.cpu().numpy(),
        "mask": batch.loss_mask.cpu().numpy().astype(np.float32),
        **({} if batch.episodes is None else {"episodes": batch.episodes.cpu().numpy().reshape(-1, 1)}),
    }


def encode_fields(request: TrainIdentity | SaveRequest | StatusRequest) -> dict[str, np.ndarray]:
    """Its fields: numbers int64 [1], texts bytes [1]; None is left out."""
    return _packed(**asdict(request))


def _packed(**fields: int | str | None) -> dict[str, np.ndarray]:
    present = {name: value for name, value in fields.items() if value is not None}
    return {name: _column([value])[0] if isinstance(value, str) else np.array([value], dtype=np.int64) for name, value in present.items()}


def _unpacked(arrays: Arrays) -> dict[str, Any]:
    """The numbers and texts among these tensors."""
    alone = {name: array for name, array in arrays.items() if array.shape == (1,)}
    return {name: _texts(name, arrays)[0] if array.dtype.kind in "OS" else int(array[0]) for name, array in alone.items()}


def decode_train(arrays: Arrays, limits: RequestLimits) -> TrainRequest:
    """Also checks that the mask is 0 or 1, 0 at position 0 and in the padding, and 1 somewhere, and that the tensors have their digest."""
    tokens = decode_tokens(arrays, limits)
    mask = arrays["mask"]
    if not np.isin(mask, (0.0, 1.0)).all():
        raise ValueError(f"mask: values from {mask.min()} to {mask.max()}; allowed are 0 and 1")
    if mask[:, 0].any():
        raise ValueError(f"mask: 1 at position 0 of row {int(mask[:, 0].argmax())}; no token is chosen there, so it must be 0")
    padding = np.arange(mask.shape[1])[None] >= arrays["sequence_lengths"]
    if (mask * padding).any():
        row = int((mask * padding).any(axis=1).argmax())
        raise ValueError(f"mask: 1 in the padding of row {row}; it must be 0 from sequence_lengths ({int(tokens.lengths[row])}) on")
    if not mask.any():
        raise ValueError("mask: 0 everywhere; at least one token must be trained on")
    episodes = torch.from_numpy(arrays["episodes"].reshape(-1).copy()) if "episodes" in arrays else None
    if episodes is not None and (episodes[0] or not torch.isin(episodes.diff(), torch.arange(2)).all()):
        raise ValueError(f"episodes: {episodes.tolist()}; it must begin at 0 and stay or grow by 1 from row to row")
    batch = ValueBatch(
        tokens=tokens.tokens,
        lengths=tokens.lengths,
        extras=tokens.extras,
        loss_mask=torch.from_numpy(mask > 0),
        old_values=torch.from_numpy(arrays["prev_values"].copy()),
        returns=torch.from_numpy(arrays["returns"].copy()),
        episodes=episodes,
    )
    identity = TrainIdentity(**_unpacked(arrays))
    found = digest_of({name: array for name, array in arrays.items() if name in {*VALUE_BATCH, *_sent()}})
    if found != identity.digest:
        raise ValueError(f"digest: {identity.digest}, but that of the tensors is {found}")
    return TrainRequest(batch=batch, identity=identity)


def encode_values_request(request: ValuesRequest) -> dict[str, np.ndarray]:
    return encode_tokens(request.batch) | _packed(after=request.after)


def decode_save(arrays: Arrays, limits: RequestLimits) -> SaveRequest:
    fields = _unpacked(arrays)
    if (wait := fields.get("wait", 1)) not in (0, 1):
        raise ValueError(f"wait: {wait}; allowed are 0 and 1")
    return SaveRequest(**fields | {"wait": bool(wait)})


def _texts(name: str, arrays: Arrays) -> list[str]:
    """The UTF-8 texts of a bytes [B, 1] tensor."""
    texts = []
    for row, raw in enumerate(arrays[name].reshape(-1).tolist()):
        try:
            texts.append(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}: row {row} is not UTF-8 ({error})") from error
    return texts


def _column(texts: list[str]) -> np.ndarray:
    column = np.empty((len(texts), 1), dtype=object)
    column[:, 0] = [text.encode("utf-8") for text in texts]
    return column


def encode_reward(request: RewardRequest) -> dict[str, np.ndarray]:
    """The tensors for tokens, texts or both."""
    arrays = {} if request.batch is None else encode_tokens(request.batch)
    if request.texts is not None:
        arrays["prompts"] = _column(request.texts.prompts)
        arrays["responses"] = _column(request.texts.responses)
        arrays["answers"] = _column([answer or "" for answer in request.texts.answers])
    return arrays


def decode_reward(arrays: Arrays, limits: RequestLimits) -> RewardRequest:
    """`sentences` are whole texts without a known prompt: they arrive as responses to an empty prompt."""
    for first, second in (("tokens", "sequence_lengths"), ("prompts", "responses")):
        if (first in arrays) != (second in arrays):
            sent, other = (first, second) if first in arrays else (second, first)
            raise ValueError(f"{sent}: sent without {other}; send both or none")
    if "sentences" in arrays and "responses" in arrays:
        raise ValueError("sentences: sent together with responses; send one of them")
    batch = decode_tokens(arrays, limits) if "tokens" in arrays else None
    responses = _texts("responses", arrays) if "responses" in arrays else _texts("sentences", arrays) if "sentences" in arrays else None
    if responses is None:
        return RewardRequest(batch=batch)
    prompts = _texts("prompts", arrays) if "prompts" in arrays else [""] * len(responses)
    answers = [text or None for text in _texts("answers", arrays)] if "answers" in arrays else [None] * len(responses)
    return RewardRequest(batch=batch, texts=RewardTexts(prompts=prompts, responses=responses, answers=answers))


# ---- replies -------------------------------------------------------------------------------------------------------------------------


def encode_values(request: ValuesRequest, values: Tensor) -> dict[str, np.ndarray]:
    tokens = request.batch.tokens
    if values.shape != tokens.shape:
        raise ValueError(f"values: the handler returned shape {list(values.shape)} for tokens {list(tokens.shape)}")
    array = values.detach().float().cpu().numpy()
    if not np.isfinite(array).all():
        raise ValueError(f"values: {int((~np.isfinite(array)).sum())} of {array.size} results are NaN or infinite")
    return {"values": array}


def encode_scores(request: RewardRequest, scores: Tensor) -> dict[str, np.ndarray]:
    """Scores that are not finite are sent too: the client decides the consequence (`guard.reward`)."""
    if scores.dim() != 2 or scores.shape[0] != request.num_rows:
        raise ValueError(f"rewards: the handler returned shape {list(scores.shape)} for {request.num_rows} rows")
    return {"rewards": scores.detach().float().cpu().numpy()}


_TOKENS = (
    TensorSpec(name="tokens", dtype="int64", shape=("B", "S")),
    TensorSpec(name="sequence_lengths", dtype="int64", shape=("B", 1)),
)
_STEP = TensorSpec(name="step", dtype="int64", shape=(1,))
_AFTER = TensorSpec(name="after", dtype="bytes", shape=(1,), optional=True)
_RUN = TensorSpec(name="run", dtype="bytes", shape=(1,))
_VALUE_BATCH = (
    *_TOKENS,
    *(TensorSpec(name=name, dtype="float32", shape=("B", "S")) for name in ("returns", "prev_values", "mask")),
    TensorSpec(name="episodes", dtype="int64", shape=("B", 1), optional=True),
)
VALUE_BATCH = tuple(spec.name for spec in _VALUE_BATCH)

CRITIC_INFER = Endpoint(
    name="critic_infer",
    tensors=(*_TOKENS, _AFTER),
    outputs=(TensorSpec(name="values", dtype="float32", shape=("B", "S")),),
    decode=lambda arrays, limits: ValuesRequest(batch=decode_tokens(arrays, limits), **_unpacked(arrays)),
    encode=encode_values,
)
CRITIC_TRAIN = Endpoint(
    name="critic_train",
    tensors=(
        *_VALUE_BATCH,
        _STEP,
        TensorSpec(name="part", dtype="int64", shape=(1,)),
        _RUN,
        *(TensorSpec(name=name, dtype="bytes", shape=(1,)) for name in ("digest", "previous")),
    ),
    outputs=(TensorSpec(name="loss_mean", dtype="float32", shape=(1,)), TensorSpec(name="metrics", dtype="bytes", shape=(1,))),
    decode=decode_train,
    encode=lambda request, reply: _packed(metrics=json.dumps(reply.metrics)) | {"loss_mean": np.array([reply.loss_mean], dtype=np.float32)},
)
CRITIC_SAVE = Endpoint(
    name="critic_save",
    tensors=(_STEP, _AFTER, TensorSpec(name="wait", dtype="int64", shape=(1,), optional=True)),
    outputs=(TensorSpec(name="path", dtype="bytes", shape=(1,)),),
    decode=decode_save,
    encode=lambda request, path: _packed(path=path),
)
CRITIC_STATUS = Endpoint(
    name="critic_status",
    tensors=(_RUN, TensorSpec(name="adopt", dtype="bytes", shape=(1,), optional=True)),
    outputs=(TensorSpec(name="status", dtype="bytes", shape=(1,)),),
    decode=lambda arrays, limits: StatusRequest(**_unpacked(arrays)),
    encode=lambda request, status: _packed(status=json.dumps(asdict(status))),
)
REWARD_MODEL = Endpoint(
    name="reward_model",
    tensors=(
        *(replace(spec, optional=True) for spec in _TOKENS),
        *(TensorSpec(name=name, dtype="bytes", shape=("B", 1), optional=True) for name in ("sentences", "prompts", "responses", "answers")),
    ),
    outputs=(TensorSpec(name="rewards", dtype="float32", shape=("B", "K")),),
    decode=decode_reward,
    encode=encode_scores,
)
