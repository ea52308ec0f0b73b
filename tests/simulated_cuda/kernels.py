"""What the CPU has no operator for: CUDA's fused attention and normalisation kernels, computed in float32 from their definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The arguments of the forward kernels, in order, as far as they matter here.
_FORWARD = {
    "aten::_scaled_dot_product_flash_attention": ("query", "key", "value", "dropout_p", "is_causal", "return_debug_mask"),
    "aten::_scaled_dot_product_efficient_attention": ("query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"),
    "aten::_scaled_dot_product_cudnn_attention": ("query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"),
}
_BACKWARD = {
    "aten::_scaled_dot_product_flash_attention_backward": (
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
    ),
    "aten::_scaled_dot_product_efficient_attention_backward": (
        "grad_out", "query", "key", "value", "attn_bias", "out", "logsumexp", "seed", "offset", "dropout_p", "grad_input_mask", "is_causal",
    ),
    "aten::_scaled_dot_product_cudnn_attention_backward": (
        "grad_out", "query", "key", "value", "out", "logsumexp", "seed", "offset", "attn_bias", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
        "dropout_p", "is_causal",
    ),
}  # fmt: skip


def kernel(name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any] | None:
    """The function of (args, kwargs) that computes the operator `name` on the CPU, or None where the CPU's own one does."""
    if name in _FORWARD:
        return lambda args, kwargs: _attention_forward(name, {**dict(zip(_FORWARD[name], args, strict=False)), **kwargs})
    if name in _BACKWARD:
        return lambda args, kwargs: _attention_backward(name, {**dict(zip(_BACKWARD[name], args, strict=False)), **kwargs})
    return _OTHERS.get(name)


def _scores(name: str, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, float]:
    """float32 scores [batch, heads, queries, keys] after bias and mask, keys and values per query head, and the scale."""
    if given.get("dropout_p"):
        raise NotImplementedError(f"{name} with dropout is not simulated")
    query, key, value = (given[part].float() for part in ("query", "key", "value"))
    repeats = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeats, 1) if repeats > 1 else part for part in (key, value))
    scale = given["scale"] if given.get("scale") is not None else query.shape[-1] ** -0.5
    scores = (query @ key.transpose(-1, -2)) * scale
    bias = given.get("attn_bias")
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias
    if given.get("is_causal"):
        queries, keys = scores.shape[-2:]
        # FlashAttention aligns the mask with the last key, the others with the first.
        shift = keys - queries if "flash" in name else 0
        scores = scores.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(shift), -torch.inf)
    return scores, key, value, scale


def _attention_forward(name: str, given: dict[str, Any]) -> tuple[Any, ...]:
    query = given["query"]
    scores, _, value, _ = _scores(name, given)
    out = (scores.softmax(-1) @ value).to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    logsumexp, seed = scores.logsumexp(-1), torch.zeros((), dtype=torch.int64)
    lengths = (query.shape[2], given["key"].shape[2])
    if "flash" in name:
        state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        return (out, logsumexp, None, None, *lengths, *state, torch.empty(0, dtype=query.dtype))
    if "cudnn" in name:
        return (out, logsumexp[..., None], None, None, *lengths, seed, seed.clone(), torch.empty(0))
    return (out, logsumexp, seed, seed.clone())


def _attention_backward(name: str, given: dict[str, Any]) -> tuple[Any, ...]:
    scores, key, value, scale = _scores(name, given)
    query, grad = given["query"], given["grad_out"].float()
    probabilities = scores.softmax(-1)
    grad_value = probabilities.transpose(-1, -2) @ grad
    of_probabilities = grad @ value.transpose(-1, -2)
    of_scores = probabilities * (of_probabilities - (of_probabilities * probabilities).sum(-1, keepdim=True))
    grad_query, grad_key = of_scores @ key * scale, of_scores.transpose(-1, -2) @ query.float() * scale
    if (repeats := query.shape[1] // given["key"].shape[1]) > 1:
        grad_key, grad_value = (part.unflatten(1, (-1, repeats)).sum(2) for part in (grad_key, grad_value))
    grads = tuple(part.to(query.dtype) for part in (grad_query, grad_key, grad_value))
    return (*grads, None) if "efficient" in name else grads


def _rms_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x, _, weight, eps = args
    inverse = (x.float().square().mean(-1, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    normed = x.float() * inverse
    return (normed * weight.float() if weight is not None else normed).to(x.dtype), inverse


def _rms_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    grad, x, _, inverse, weight, _ = args
    normed, grad = x.float() * inverse, grad.float()
    of_normed = grad * weight.float() if weight is not None else grad
    grad_x = inverse * (of_normed - normed * (of_normed * normed).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), (grad * normed).flatten(0, -2).sum(0).to(weight.dtype) if weight is not None else None


def _softmax(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # "half to float" in one kernel exists for CUDA only.
    return lambda args, kwargs: function(args[0].float() if args[2] else args[0], args[1])


def _product(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """`mm`, also with `out_dtype`: 16-bit factors, sums and result in float32."""
    left, right, *out_dtype = args
    result = torch.mm(*(part.to(*out_dtype) for part in (left, right))) if out_dtype else torch.mm(left, right)
    return kwargs["out"].copy_(result) if "out" in kwargs else result


def _runs(cumulated: Tensor) -> list[slice]:
    bounds = cumulated.tolist()
    return [slice(start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def _of_run(given: dict[str, Any], queries: slice, keys: slice) -> dict[str, Any]:
    """One run of the packed [T, heads, D] as [1, heads, L, D]."""
    parts = {"query": queries, "grad_out": queries, "key": keys, "value": keys}
    return {"is_causal": given["is_causal"], "scale": given.get("scale")} | {
        name: given[name][part].transpose(0, 1)[None] for name, part in parts.items() if name in given
    }


_PACKED = ("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask")


def _packed_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """FlashAttention for sequences of several lengths."""
    given = {**dict(zip(_PACKED, args, strict=False)), **kwargs}
    outs, sums = [], []
    for queries, keys in zip(_runs(given["cum_seq_q"]), _runs(given["cum_seq_k"]), strict=True):
        out, logsumexp, *_ = _attention_forward("aten::_scaled_dot_product_flash_attention", _of_run(given, queries, keys))
        outs.append(out[0].transpose(0, 1))
        sums.append(logsumexp[0])
    state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return (torch.cat(outs), torch.cat(sums, 1), *state, torch.empty(0, dtype=given["query"].dtype))


_PACKED_BACKWARD = (
    *("grad_out", "query", "key", "value", "out", "logsumexp"),
    *("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"),
)


def _packed_attention_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    given = {**dict(zip(_PACKED_BACKWARD, args, strict=False)), **kwargs}
    grads = [torch.zeros_like(given[name]) for name in ("query", "key", "value")]
    for queries, keys in zip(_runs(given["cum_seq_q"]), _runs(given["cum_seq_k"]), strict=True):
        found = _attention_backward("aten::_scaled_dot_product_flash_attention_backward", _of_run(given, queries, keys))
        for total, part, own in zip(grads, found, (queries, keys, keys), strict=True):
            total[own] += part[0].transpose(0, 1)
    return tuple(grads)


_PLAIN = (
    *("query", "key", "value", "attn_bias", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p"),
    *("custom_mask_type", "compute_log_sumexp"),
)
_PLAIN_BACKWARD = (
    *("grad_out", "query", "key", "value", "attn_bias", "out", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    *("logsumexp", "dropout_p", "philox_seed", "philox_offset", "custom_mask_type", "bias_requires_grad"),
)


def _masked(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Arguments with [B, L, heads, D] as those of a kernel with [B, heads, L, D], and which kernel aligns its mask so: 1 is with the first
    key, 2 with the last."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("cu_seqlens_q") is not None:
        raise NotImplementedError("efficient attention to packed sequences is not simulated")
    given |= {name: given[name].transpose(1, 2) for name in ("query", "key", "value", "grad_out") if name in given}
    return ("flash" if given["custom_mask_type"] == 2 else "efficient"), given | {"is_causal": given["custom_mask_type"] > 0}


def _efficient_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    name, given = _masked(_PLAIN, args, kwargs)
    scores, _, value, _ = _scores(name, given)
    out = (scores.softmax(-1) @ value).to(given["query"].dtype).transpose(1, 2).contiguous()
    logsumexp = scores.logsumexp(-1) if given.get("compute_log_sumexp") else torch.empty(*scores.shape[:2], 0)
    seed = torch.zeros((), dtype=torch.int64)
    return out, logsumexp, seed, seed.clone(), given["query"].shape[2], given["key"].shape[2]


def _efficient_attention_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    name, given = _masked(_PLAIN_BACKWARD, args, kwargs)
    grads = _attention_backward(name, given)[:3]
    return (*(grad.transpose(1, 2).contiguous() for grad in grads), torch.empty(0))


_OTHERS: dict[str, Callable[..., Any]] = {
    "aten::_flash_attention_forward": _packed_attention,
    "aten::_flash_attention_backward": _packed_attention_backward,
    "aten::_efficient_attention_forward": _efficient_attention,
    "aten::_efficient_attention_backward": _efficient_attention_backward,
    "aten::histc": lambda args, kwargs: torch.histc(args[0].float(), *args[1:], **kwargs).to(args[0].dtype),  # of integers on CUDA only
    "aten::mm": _product,
    "aten::_fused_rms_norm": _rms_norm,
    "aten::_fused_rms_norm_backward": _rms_norm_backward,
    "aten::_softmax": _softmax(torch.softmax),
    "aten::_log_softmax": _softmax(torch.log_softmax),
}
