"""How sampling settings become TensorRT-LLM's, and its responses ours. A setting that has no exact counterpart is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aligner.errors import EngineError
from aligner.rollout.engine import GenRequest, GenResult
from aligner.types import FinishReason, LogprobKind, SamplingConfig

_NO_END = -1  # no end-of-sequence token of its own: all that stop are stop tokens, which stay in the response
_SEED_BITS = (1 << 63) - 1


def stop_ids(sampling: SamplingConfig, eos_id: int) -> list[int]:
    """The tokens that end a response."""
    return sorted({eos_id, *sampling.stop_token_ids})


def sampling_arguments(sampling: SamplingConfig, request: GenRequest, *, max_tokens: int, eos_id: int, pad_id: int) -> dict[str, Any]:
    """Keyword arguments of the package's SamplingParams for one request."""
    drawn: dict[str, Any] = {"top_k": 1}  # greedy in either sampler, whatever else is left unset
    if sampling.temperature > 0:
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": request.seed & _SEED_BITS}
        drawn |= {"top_k": sampling.top_k} if sampling.top_k else {}
        drawn |= {"min_p": sampling.min_p} if sampling.min_p else {}
    return drawn | {
        "max_tokens": max_tokens,
        "end_id": _NO_END,
        "pad_id": pad_id,
        "stop_token_ids": stop_ids(sampling, eos_id),
        "include_stop_str_in_output": True,
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
    }


def to_result(request: GenRequest, output: Any, sampling: SamplingConfig, *, kind: LogprobKind, eos_id: int, version: int) -> GenResult:
    """The package's CompletionOutput as ours. Raises EngineError for one that ended in another way than by a stop token or its length."""
    tokens = tuple(output.token_ids)
    logprobs = tuple(_logprob(entry, token) for entry, token in zip(output.logprobs, tokens, strict=False))
    if not tokens or len(logprobs) != len(tokens):
        raise EngineError(f"TensorRT-LLM gave {len(logprobs)} log-probs for the {len(tokens)} tokens of request {request.index}")
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(f"TensorRT-LLM ended request {request.index} after {len(tokens)} tokens: finish_reason={output.finish_reason!r}")
    stopped = tokens[-1] in stop_ids(sampling, eos_id)  # also where that was at the very limit, which the package calls its length
    return GenResult(
        index=request.index,
        tokens=tokens,
        logprobs=logprobs,
        kind=kind,
        finish_reason=FinishReason.stop if stopped else FinishReason.length,
        weight_version=version,
        raw_logprobs=logprobs if sampling.raw_logprobs else None,
    )


def _logprob(entry: Any, token: int) -> float:
    """One position's: a number, or by token, with the sampled one among them."""
    return float(entry[token].logprob) if isinstance(entry, Mapping) else float(entry)
