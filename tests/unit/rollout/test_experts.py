"""Mixtures of experts: what does not depend on the routing in its shapes adds up the same as what runs each expert on its own tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from host_syncs import HostSyncs

from aligner.models.architecture.architecture import Architecture
from aligner.models.modules.megatron_config import activation_of
from aligner.parallel import platform
from aligner.rollout.builtin.decode_layers import FeedForward, mix, mix_all, mix_grouped, multiplies_groups, route, stack_of
from aligner.rollout.builtin.refit import allocated
from aligner.rollout.builtin.weights import Affine
from aligner.rollout.engine.manifest import TensorSpec

EXPERTS, HIDDEN, INNER, TOP_K = 6, 16, 24, 2


def layer_of(*, gated: bool, biased: bool = False) -> tuple[FeedForward, ...]:
    """Experts in stacked memory, as the engine's own weights on a GPU are, in an order in which they may well arrive."""
    name = "decoder.layers.3.mlp.experts.local_experts.{}.{}.weight"
    shapes = {"linear_fc1": (INNER * (1 + gated), HIDDEN), "linear_fc2": (HIDDEN, INNER)}
    order = [5, 0, 1, 4, 2, 3]
    specs = {name.format(i, part): TensorSpec(shape=shape, dtype=torch.float32) for i in order for part, shape in shapes.items()}
    if biased:
        biases = {key.replace("weight", "bias"): TensorSpec(shape=one.shape[:1], dtype=one.dtype) for key, one in specs.items()}
        specs |= biases
    tensors = allocated(specs | {"other": TensorSpec(shape=(3,), dtype=torch.float32)}, stacked=True)
    assert list(tensors) == [*specs, "other"] and tensors["other"].untyped_storage().nbytes() == 12
    for tensor in tensors.values():
        tensor.normal_()

    def affine(number: int, part: str) -> Affine:
        weight = name.format(number, part)
        return Affine(weight=tensors[weight], bias=tensors[weight.replace("weight", "bias")] if biased else None)

    return tuple(FeedForward(up=affine(i, "linear_fc1"), down=affine(i, "linear_fc2")) for i in range(EXPERTS))


def routed(rows: int, *, normalize: bool) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Tokens, of which none chooses the third expert, and their routing."""
    torch.manual_seed(1)
    router = torch.randn(EXPERTS, HIDDEN).to(platform.device())
    x = torch.randn(rows, HIDDEN).to(platform.device())
    router[2] = -20 * x.mean(0).sign()
    x = x + x.mean(0).sign()
    sizes = {"num_experts": EXPERTS, "experts_per_token": TOP_K, "expert_ffn_hidden_size": INNER}
    routing = route(x, Affine(weight=router, bias=None), None, Architecture(**sizes, normalize_expert_weights=normalize))
    assert not (routing[1] == 2).any()
    return x, routing


def inner_of(*, gated: bool):
    def inner(x: torch.Tensor, expert: FeedForward) -> torch.Tensor:
        inner = F.linear(x, expert.up.weight, expert.up.bias)
        if not gated:
            return F.silu(inner)
        gate, up = inner.chunk(2, dim=-1)
        return F.silu(gate) * up

    return inner


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", [1, 9])
def test_every_expert_on_all_tokens_gives_the_same(rows, biased, gated):
    x, routing = routed(rows, normalize=gated)
    experts, inner = layer_of(gated=gated, biased=biased), inner_of(gated=gated)
    for with_bias in (True, False):
        with HostSyncs() as syncs:
            found = mix_all(x, experts, routing, inner, biased=with_bias)
        torch.testing.assert_close(found, mix(x, experts, routing, inner, biased=with_bias), rtol=1e-5, atol=1e-4)
        assert syncs.found == []


def test_what_overflows_for_tokens_of_others_does_not_count():
    x, routing = routed(9, normalize=True)
    experts, inner = layer_of(gated=True), inner_of(gated=True)
    expected = mix_all(x, experts, routing, inner, biased=False)
    experts[2].up.weight.fill_(torch.inf)  # nobody's
    assert torch.equal(mix_all(x, experts, routing, inner, biased=False), expected)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [1, 9])
def test_grouped_products_give_the_same(rows, gated, backwards, biased):
    x, routing = routed(rows, normalize=gated)
    experts = layer_of(gated=gated, biased=biased)[:: -1 if backwards else 1]
    activate = activation_of(Architecture(gated_mlp=gated))
    stack, first = stack_of(experts), experts[-1 if backwards else 0]
    assert stack.is_backwards == backwards
    assert stack.up.weight.data_ptr() == first.up.weight.data_ptr() and stack.down.weight.data_ptr() == first.down.weight.data_ptr()
    real, syncs = torch._grouped_mm, HostSyncs()

    def on_device(*args, **options):
        """The kernel's own reading of the counts is a GPU's, not the host's: here, on a CPU, it is not looked at."""
        with torch.utils._python_dispatch._disable_current_modes():
            return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch, syncs:
        if not x.is_cuda:
            patch.setattr(torch, "_grouped_mm", on_device)
        both = [mix_grouped(x, stack, routing, activate, biased=with_bias) for with_bias in (True, False)]
    assert syncs.found == []
    for found, with_bias in zip(both, (True, False), strict=True):
        torch.testing.assert_close(found, mix(x, experts, routing, inner_of(gated=gated), biased=with_bias), rtol=1e-5, atol=1e-4)


def test_what_cannot_be_stacked():
    experts = layer_of(gated=True)
    biased = layer_of(gated=True, biased=True)
    alone = Affine(weight=biased[2].up.weight, bias=biased[2].up.bias.clone())
    assert stack_of(biased[:3]) is not None and stack_of((*biased[:2], FeedForward(up=alone, down=biased[2].down))) is None
    assert stack_of((experts[1], experts[0], experts[2])) is None and stack_of((experts[0], experts[1], experts[3])) is None
    assert stack_of(experts[1:5]).up.weight.shape == (4, 2 * INNER, HIDDEN)
    apart = FeedForward(up=Affine(weight=experts[2].up.weight.clone(), bias=None), down=experts[2].down)
    assert stack_of((*experts[:2], apart)) is None
    assert not multiplies_groups(torch.zeros(1, dtype=torch.bfloat16))
    odd = torch.zeros(3, 5, 7).unbind(0)  # rows of 28 bytes
    assert stack_of([FeedForward(up=Affine(weight=w, bias=None), down=Affine(weight=w, bias=None)) for w in odd]) is None
