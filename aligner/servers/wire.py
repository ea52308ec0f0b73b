"""Every endpoint's name and tensors, once: used by server and client alike.

Shapes are written with letters for sizes that a request chooses (B rows, S positions, K attributes); one letter is one size within a
request. Sizes and masks are integers or exact zeros and ones; nothing here is rounded or padded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aligner.servers.config import RequestLimits
from aligner.types import TokenBatch, ValueBatch

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One named tensor: dtype is "int64", "float32" or "bytes" (UTF-8 text)."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    optional: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardTexts:
    """Texts to score, one entry per row; an answer of None (on the wire: empty) means that the prompt has no reference answer."""

    prompts: list[str]
    responses: list[str]
    answers: list[str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardRequest:
    """Rows to score, as tokens or as texts or as both."""

    batch: TokenBatch | None = None
    texts: RewardTexts | None = None

    def __post_init__(self) -> None:
        if self.batch is None and self.texts is None:
            raise ValueError("reward_model: send `tokens` with `sequence_lengths`, or `sentences`, or `prompts` with `responses`")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRequest:
    """Train on the rollouts of `step`."""

    batch: ValueBatch
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReply:
    """`loss_mean` over the masked tokens of the whole request, and every metric by name."""

    loss_mean: float
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """Write a checkpoint for `step`."""

    step: int


Payload = TokenBatch | TrainRequest | SaveRequest | RewardRequest
Result = Tensor | TrainReply | str


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """One Triton model. `decode` turns checked arrays into the typed payload; `encode` turns a handler's result into the reply."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    decode: Callable[[Arrays, RequestLimits], Payload]
    encode: Callable[[Payload, Result], dict[str, np.ndarray]]

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.outputs)

    def payload(self, arrays: Arrays, limits: RequestLimits) -> Payload:
        """Check a request as a whole and return its payload.

        Raises:
            ValueError: names the tensor, what it holds and what is allowed.
        """
        check_tensors(self.inputs, arrays, limits)
        return self.decode(arrays, limits)


def check_tensors(specs: tuple[TensorSpec, ...], arrays: Arrays, limits: RequestLimits) -> None:
    """Raise ValueError unless `arrays` has the stated tensors with the stated dtypes, agreeing shapes, allowed sizes and finite numbers."""
    largest = {"B": limits.max_rows, "S": limits.max_sequence_length}
    sizes: dict[str, tuple[int, str]] = {}
    names = [spec.name for spec in specs]
    for name in arrays:
        if name not in names:
            raise ValueError(f"{name}: no such tensor; allowed are {', '.join(names)}")
    for spec in specs:
        if spec.name not in arrays:
            if spec.optional:
                continue
            raise ValueError(f"{spec.name}: missing; expected {spec.dtype} {_shape_text(spec.shape)}")
        array = arrays[spec.name]
        kind = "bytes" if array.dtype.kind in "OS" else array.dtype.name
        if kind != spec.dtype or array.ndim != len(spec.shape):
            raise ValueError(f"{spec.name}: got {kind} {list(array.shape)}, expected {spec.dtype} {_shape_text(spec.shape)}")
        for expected, size in zip(spec.shape, array.shape, strict=True):
            if isinstance(expected, int):
                if size != expected:
                    raise ValueError(f"{spec.name}: got shape {list(array.shape)}, expected {_shape_text(spec.shape)}")
                continue
            if not 1 <= size <= largest[expected]:
                raise ValueError(f"{spec.name}: got shape {list(array.shape)}; {expected} may be 1 to {largest[expected]}")
            known, owner = sizes.setdefault(expected, (size, spec.name))
            if known != size:
                raise ValueError(f"{spec.name}: got shape {list(array.shape)}, but {owner} has {expected} = {known}")
        if kind == "float32" and not np.isfinite(array).all():
            bad = int((~np.isfinite(array)).sum())
            raise ValueError(f"{spec.name}: {bad} of {array.size} values are NaN or infinite; all must be finite")


def _shape_text(shape: tuple[str | int, ...]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


# ---- requests ------------------------------------------------------------------------------------------------------------------------


def encode_tokens(batch: TokenBatch) -> dict[str, np.ndarray]:
    """tokens int64 [B, S], sequence_lengths int64 [B, 1]."""
    return {"tokens": batch.tokens.cpu().numpy(), "sequence_lengths": batch.lengths.cpu().numpy().reshape(-1, 1)}


def decode_tokens(arrays: Arrays, limits: RequestLimits) -> TokenBatch:
    """Also checks every token id and every length."""
    tokens, lengths = arrays["tokens"], arrays["sequence_lengths"].reshape(-1)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= limits.vocab_size:
        raise ValueError(f"tokens: ids from {low} to {high}; allowed are 0 to {limits.vocab_size - 1}")
    low, high = int(lengths.min()), int(lengths.max())
    if low < 1 or high > tokens.shape[1]:
        raise ValueError(f"sequence_lengths: from {low} to {high}; allowed are 1 to {tokens.shape[1]}, the width of tokens")
    return TokenBatch(tokens=torch.from_numpy(tokens.copy()), lengths=torch.from_numpy(lengths.copy()))


def encode_train(request: TrainRequest) -> dict[str, np.ndarray]:
    """A value batch: the loss mask travels as float32 zeros and ones."""
    batch = request.batch
    return {
        **encode_tokens(TokenBatch(tokens=batch.tokens, lengths=batch.lengths)),
        "returns": batch.returns.cpu().numpy(),
        "prev_values": batch.old_values.cpu().numpy(),
        "mask": batch.loss_mask.cpu().numpy().astype(np.float32),
        "step": np.array([request.step], dtype=np.int64),
    }


def decode_train(arrays: Arrays, limits: RequestLimits) -> TrainRequest:
    """Also checks that the mask is 0 or 1, 0 at position 0 and in the padding, and 1 somewhere."""
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
    batch = ValueBatch(
        tokens=tokens.tokens,
        lengths=tokens.lengths,
        loss_mask=torch.from_numpy(mask > 0),
        old_values=torch.from_numpy(arrays["prev_values"].copy()),
        returns=torch.from_numpy(arrays["returns"].copy()),
    )
    return TrainRequest(batch=batch, step=_step(arrays))


def encode_save(request: SaveRequest) -> dict[str, np.ndarray]:
    return {"step": np.array([request.step], dtype=np.int64)}


def decode_save(arrays: Arrays, limits: RequestLimits) -> SaveRequest:
    return SaveRequest(step=_step(arrays))


def _step(arrays: Arrays) -> int:
    step = int(arrays["step"][0])
    if step < 0:
        raise ValueError(f"step: {step}; it must be 0 or more")
    return step


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
    """The tensors of what is there: tokens, texts or both."""
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


def num_rows(request: Payload) -> int:
    """How many rows a token or reward request has."""
    if isinstance(request, RewardRequest):
        return len(request.texts.responses) if request.batch is None else request.batch.tokens.shape[0]
    return request.tokens.shape[0]


def _checked(name: str, tensor: Tensor, rows: int) -> np.ndarray:
    """A result as float32 [rows, *]; raises ValueError for another shape or for a number that is not finite."""
    if tensor.dim() != 2 or tensor.shape[0] != rows:
        raise ValueError(f"{name}: the handler returned shape {list(tensor.shape)} for {rows} rows")
    array = tensor.detach().to(device="cpu", dtype=torch.float32).numpy()
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: {int((~np.isfinite(array)).sum())} of {array.size} results are NaN or infinite")
    return array


def encode_values(request: TokenBatch, values: Tensor) -> dict[str, np.ndarray]:
    if values.shape != request.tokens.shape:
        raise ValueError(f"values: the handler returned shape {list(values.shape)} for tokens {list(request.tokens.shape)}")
    return {"values": _checked("values", values, request.tokens.shape[0])}


def encode_scores(request: RewardRequest, scores: Tensor) -> dict[str, np.ndarray]:
    return {"rewards": _checked("rewards", scores, num_rows(request))}


def encode_trained(request: TrainRequest, reply: TrainReply) -> dict[str, np.ndarray]:
    metrics = np.empty(1, dtype=object)
    metrics[0] = json.dumps(reply.metrics).encode()
    return {"loss_mean": np.array([reply.loss_mean], dtype=np.float32), "metrics": metrics}


def encode_saved(request: SaveRequest, path: str) -> dict[str, np.ndarray]:
    answer = np.empty(1, dtype=object)
    answer[0] = path.encode()
    return {"path": answer}


def decode_trained(arrays: Arrays) -> TrainReply:
    return TrainReply(loss_mean=float(arrays["loss_mean"][0]), metrics=json.loads(arrays["metrics"][0]))


def decode_saved(arrays: Arrays) -> str:
    return arrays["path"][0].decode()


_TOKENS = (
    TensorSpec(name="tokens", dtype="int64", shape=("B", "S")),
    TensorSpec(name="sequence_lengths", dtype="int64", shape=("B", 1)),
)
_STEP = TensorSpec(name="step", dtype="int64", shape=(1,))

CRITIC_INFER = Endpoint(
    name="critic_infer",
    inputs=_TOKENS,
    outputs=(TensorSpec(name="values", dtype="float32", shape=("B", "S")),),
    decode=decode_tokens,
    encode=encode_values,
)
CRITIC_TRAIN = Endpoint(
    name="critic_train",
    inputs=(*_TOKENS, *(TensorSpec(name=name, dtype="float32", shape=("B", "S")) for name in ("returns", "prev_values", "mask")), _STEP),
    outputs=(TensorSpec(name="loss_mean", dtype="float32", shape=(1,)), TensorSpec(name="metrics", dtype="bytes", shape=(1,))),
    decode=decode_train,
    encode=encode_trained,
)
CRITIC_SAVE = Endpoint(
    name="critic_save",
    inputs=(_STEP,),
    outputs=(TensorSpec(name="path", dtype="bytes", shape=(1,)),),
    decode=decode_save,
    encode=encode_saved,
)
REWARD_MODEL = Endpoint(
    name="reward_model",
    inputs=(
        TensorSpec(name="tokens", dtype="int64", shape=("B", "S"), optional=True),
        TensorSpec(name="sequence_lengths", dtype="int64", shape=("B", 1), optional=True),
        *(TensorSpec(name=name, dtype="bytes", shape=("B", 1), optional=True) for name in ("sentences", "prompts", "responses", "answers")),
    ),
    outputs=(TensorSpec(name="rewards", dtype="float32", shape=("B", "K")),),
    decode=decode_reward,
    encode=encode_scores,
)
