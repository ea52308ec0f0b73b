"""What a layer of Transformer Engine's modules and fused kernels keeps for its backward pass, tensor by tensor. Pure.

On a planning machine these modules need not be installed, and without a GPU they do not run, so the tensors are listed instead of
measured. What each module saves was read in Transformer Engine 2.9 and Megatron-Core 0.19:

* a norm that is fused with the product behind it keeps its input, its output and a float32 number a row (LayerNorm two); with sequence
  parallelism the rank's part of both: the backward pass gathers again
* flash attention keeps queries, keys and values (rotated, in memory of their own), its output, which the projection keeps too, and the
  log-sum-exp of each row and head
* fused SwiGLU keeps its input; so does any activation. A gated one that is not fused also keeps the activated half
* nothing is dropped, so there are no masks; additions keep nothing

For a layer of GPT that is 32 s b h / t bytes with sequence parallelism: 34 (Korthikanti et al. 2022, 2205.05198, equation 4, without the
part of the attention scores) less the two of the masks. Without sequence parallelism it is s b h (8 + 24 / t).
"""

from __future__ import annotations

import math

from aligner.models.architecture.divisible import torch_layers_reason
from aligner.models.config import Activation, Dtype, Layers, Normalization, Recompute
from aligner.planner.dry_run import BlockBytes
from aligner.planner.workload import Component, Head, padded_vocabulary

_FLOAT32 = 4


def uses_transformer_engine(component: Component) -> bool:
    """Whether a run on GPUs that has Transformer Engine makes the layers of its modules: what `aligner.models.modules.fusions` chooses."""
    model, architecture = component.model, component.architecture
    if model.layers is not Layers.auto:
        return model.layers is Layers.transformer_engine
    return not torch_layers_reason(architecture) and not model.batch_invariant and (model.fp8 or model.dtype is not Dtype.float32)


def kept_tensors(component: Component, tokens: int) -> dict[str, int]:
    """Bytes of every tensor that one layer keeps for `tokens` tokens of a micro-batch, by name, without recomputation."""
    return _attention(component, tokens) | (_experts if component.architecture.num_experts else _feed_forward)(component, tokens)


def block_bytes(component: Component, rows: int, length: int) -> BlockBytes:
    """The sizes of `aligner.planner.dry_run.measure_block`, with the experts' tensors, of `rows` sequences of `length` tokens."""
    tokens = rows * length
    tensors = kept_tensors(component, tokens)
    whole, hidden = sum(tensors.values()), _own(component, tokens) * component.architecture.hidden_size * component.dtype_bytes
    layer, again = whole, 0
    if component.model.recompute == Recompute.full:
        layer, again = hidden, whole - hidden
    elif component.model.recompute == Recompute.selective:  # the core attention alone: what it has to compute again is its output
        layer = whole - tensors["log-sum-exp"]
        again = tensors["log-sum-exp"] + tensors["attention's output"]
    statistics = _own(component, tokens) * _FLOAT32
    return BlockBytes(
        layer=layer,
        ends=2 * hidden + statistics,  # input and output; the final norm keeps the output and its statistics
        backward=again + _backward(component, tokens),
        forward=_forward(component, tokens),
    )


def _own(component: Component, tokens: int) -> int:
    """Tokens of a rank between the layers."""
    return tokens // component.shards_sequences


def _between(component: Component, tokens: int, name: str, *, product: bool = True) -> dict[str, int]:
    """A norm before a product: its input, its output and its statistics. `product`: the output is only that product's input."""
    a, own = component.architecture, _own(component, tokens)
    statistics = 1 if a.normalization is Normalization.rms_norm else 2
    item = _product_item(component) if product else component.dtype_bytes
    return {
        f"{name}'s input": own * a.hidden_size * component.dtype_bytes,
        f"{name}'s output": own * a.hidden_size * item,
        f"{name}'s statistics": own * statistics * _FLOAT32,
    }


def copies_in_8_bits(component: Component, weights: int, stage: int) -> int:
    """Bytes of the copies that modules keep of their weights, of a stage's `weights` (bytes): by rows, and for training by columns."""
    if not component.model.fp8:
        return 0
    a, pp = component.architecture, component.parallel.pp
    has_output = stage == pp - 1 and component.head == Head.language and (pp > 1 or not a.tied_embeddings)
    tables = ((stage == 0) + has_output) * padded_vocabulary(component) // component.parallel.tp * a.vocabulary_width
    return (2 if component.optimizer is not None else 1) * max(0, weights // component.dtype_bytes - tables)


def _product_item(component: Component) -> int:
    """Bytes of a number that a product keeps."""
    return 1 if component.model.fp8 else component.dtype_bytes


def _heads(component: Component) -> tuple[int, int]:
    """Query heads and key-value heads of a rank."""
    a, tp = component.architecture, component.parallel.tp
    return a.num_attention_heads // tp, math.ceil(a.num_key_value_heads / tp)


def _attention(component: Component, tokens: int) -> dict[str, int]:
    a, item = component.architecture, component.dtype_bytes
    here = tokens // component.parallel.cp
    heads, groups = _heads(component)
    # With shared prompts every run of responses has its own copy of its prompt's keys and values
    # (`aligner.models.modules.attention.all_runs`).
    attended = here * component.work.length // max(1, component.work.response_length) if component.model.share_prompts else here
    found = _between(component, tokens, "first norm")
    if a.qk_norm:
        found["queries and keys before their norms"] = here * (heads + groups) * (a.head_dim * item + _FLOAT32)
    found |= {
        "queries": here * heads * a.head_dim * item,
        "keys": attended * groups * a.head_dim * item,
        "values": attended * groups * a.head_dim * item,
        "log-sum-exp": here * heads * _FLOAT32,
        "attention's output": here * heads * a.head_dim * item,
    }
    if component.model.fp8:
        found["projection's input"] = here * heads * a.head_dim
    return found


def _feed_forward(component: Component, tokens: int) -> dict[str, int]:
    a, width = component.architecture, component.architecture.ffn_hidden_size // component.parallel.tp
    return _between(component, tokens, "second norm") | _activated(component, tokens // component.parallel.cp, a.gated_mlp, width)


def _activated(component: Component, rows: int, gated: bool, width: int) -> dict[str, int]:
    """What the activation and the product behind it keep."""
    item = component.dtype_bytes
    found = {
        "first product's output": rows * (2 if gated else 1) * width * item,
        "second product's input": rows * width * _product_item(component),
    }
    if gated and component.architecture.activation is not Activation.silu:
        found["activated half"] = rows * width * item
    return found


def routed_tokens(component: Component, tokens: int) -> int:
    """Pairs of a token and an expert that a rank computes, all experts equally loaded."""
    return _own(component, tokens) * component.architecture.experts_per_token * component.parallel.etp


def _experts(component: Component, tokens: int) -> dict[str, int]:
    """The norm's output, which router and permutation keep once; the router's numbers; the grouped products' inputs and outputs."""
    a, own, routed = component.architecture, _own(component, tokens), routed_tokens(component, tokens)
    return {
        **_between(component, tokens, "second norm", product=False),
        "router's logits and probabilities": own * a.num_experts * 2 * _FLOAT32,
        "routes and places of rows": own * a.num_experts * (1 + _FLOAT32),
        "permuted tokens": routed * a.hidden_size * _product_item(component),
        "permuted probabilities": routed * _FLOAT32,
        **_activated(component, routed, a.gated_mlp, a.expert_ffn_hidden_size // component.parallel.etp),
    }


def _widths(component: Component, tokens: int) -> tuple[int, int, int, int]:
    """Bytes of the residual on a rank, of a product's whole input, of the feed-forward layer's first output, and of its activated part."""
    a, item = component.architecture, component.dtype_bytes
    if a.num_experts:
        rows = routed_tokens(component, tokens)
        width, gathered = a.expert_ffn_hidden_size // component.parallel.etp, rows * a.hidden_size * item
    else:
        rows = tokens // component.parallel.cp
        width, gathered = a.ffn_hidden_size // component.parallel.tp, rows * a.hidden_size * item
    return _own(component, tokens) * a.hidden_size * item, gathered, rows * (2 if a.gated_mlp else 1) * width * item, rows * width * item


def _projected(component: Component, tokens: int) -> int:
    """Bytes of queries, keys and values."""
    heads, groups = _heads(component)
    return tokens // component.parallel.cp * (heads + 2 * groups) * component.architecture.head_dim * component.dtype_bytes


def _forward(component: Component, tokens: int) -> int:
    """Most that a layer holds in a pass without gradient: around the first product, the activation, or the queries."""
    residual, gathered, first, active = _widths(component, tokens)
    heads = tokens // component.parallel.cp * component.architecture.hidden_size * component.dtype_bytes
    return 2 * residual + max(gathered + first, first + active, active + gathered, heads + 2 * _projected(component, tokens))


def _backward(component: Component, tokens: int) -> int:
    """Most that a layer's backward pass holds besides what is kept: the gradients around the activation, around the first product, whose
    input is gathered again while what the second one kept is free, or around attention."""
    residual, gathered, first, active = _widths(component, tokens)
    whole = tokens // component.parallel.cp * component.architecture.hidden_size * component.dtype_bytes
    moments = (gathered + active, active + first, 2 * gathered - active, 2 * _projected(component, tokens) + whole)
    return 2 * residual + max(moments)
