"""Logits of models in 16 bits are in float32 in the trainer and in the engine, and the output layer's gradient is summed in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aligner.losses.sft import sft_loss
from aligner.models.config import Dtype
from aligner.models.modules import heads
from aligner.models.modules.heads import _projection
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel import platform
from aligner.parallel.logprobs import ROUNDED, Projection, float32_product, linear_logprobs, linear_logprobs_of, linear_topk
from aligner.rollout.builtin.megatron import MegatronEngine
from aligner.rollout.config import RolloutConfig
from aligner.types import LabeledBatch

pytestmark = pytest.mark.usefixtures("topology")

N, H, V = 11, 24, 1500  # more columns than a CPU converts at a time


def inputs(dtype: torch.dtype, seed: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(rows, H, generator=generator).to(dtype).to(platform.device()) for rows in (N, V))
    return hidden, weight, torch.randint(0, V, (N,), generator=generator).to(platform.device())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_of_16_bits_is_that_of_float64(dtype):
    hidden, weight, _ = inputs(dtype)
    expected = hidden.double() @ weight.double().t()
    for projection in (Projection(), Projection(scale=0.5), Projection(softcap=30.0), Projection(temperature=0.7)):
        reference = expected * projection.scale
        reference = projection.softcap * torch.tanh(reference / projection.softcap) if projection.softcap else reference
        for logits in (projection.logits(hidden, weight), projection.again(hidden, weight)):
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits.double(), reference / projection.temperature, rtol=1e-5, atol=1e-5)
    off = (Projection(arithmetic=ROUNDED).logits(hidden, weight) - expected).abs().max()
    assert off > {torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]  # what rounding to 16 bits costs
    out = torch.empty(N, V, device=hidden.device)
    assert float32_product(hidden, weight.t(), out) is out and torch.equal(out, float32_product(hidden, weight.t()))


@pytest.mark.parametrize("chunk_size", [4, 100])
def test_log_probs_and_gradients_are_those_of_float64(chunk_size):
    """Of all three functions; the gradient of the logits is in 16 bits, as that of every product."""
    hidden, weight, targets = inputs(torch.bfloat16)
    projection = Projection(chunk_size=chunk_size)
    log_p = torch.log_softmax(hidden.double() @ weight.double().t(), dim=-1)
    several = torch.stack([targets, (targets + 3) % V], dim=1)
    logprobs, entropy = linear_logprobs(hidden, weight, targets, projection)
    torch.testing.assert_close(logprobs.double(), log_p.gather(1, several[:, :1])[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        linear_logprobs_of(hidden, weight, several, projection).double(), log_p.gather(1, several), rtol=1e-5, atol=1e-5
    )
    tokens, found = linear_topk(hidden, weight, 5, projection, below=V)
    assert torch.equal(tokens, log_p.topk(5).indices)
    torch.testing.assert_close(found.double(), log_p.topk(5).values, rtol=1e-5, atol=1e-5)
    for function in (
        lambda h, w: linear_logprobs(h, w, targets, projection)[0],
        lambda h, w: linear_logprobs_of(h, w, several, projection)[:, 0],
    ):
        own = [part.clone().requires_grad_() for part in (hidden, weight)]
        function(*own).sum().backward()
        slope = -log_p.exp()
        slope[torch.arange(N), targets] += 1
        slope = slope.float().bfloat16().double()
        torch.testing.assert_close(own[0].grad.double(), slope @ weight.double(), rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(own[1].grad.double(), slope.t() @ hidden.double(), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("function", ["one", "several"])
@pytest.mark.parametrize("chunk_size", [4, 100])
def test_the_weights_gradient_is_summed_in_float32(function, chunk_size):
    """Eight micro-batches, by hand: of each the slope in bfloat16 times the hidden states, added up in float64. The buffer has padding."""
    _, weight, _ = inputs(torch.bfloat16)
    parameter = torch.nn.Parameter(torch.cat([weight, weight[:5]]))
    parameter.main_grad = torch.zeros(V + 5, H, device=weight.device)
    rounded, total = (torch.zeros(V, H, dtype=dtype, device=weight.device) for dtype in (torch.bfloat16, torch.float64))
    for seed in range(8):
        hidden, _, targets = inputs(torch.bfloat16, seed)
        projection = Projection(chunk_size=chunk_size, parameter=parameter)
        if function == "one":
            linear_logprobs(hidden, parameter[:V], targets, projection)[0].sum().backward()
        else:
            linear_logprobs_of(hidden, parameter[:V], targets[:, None], projection).sum().backward()
        slope = -torch.log_softmax(projection.logits(hidden, weight), dim=-1).exp()
        slope[torch.arange(N), targets] += 1
        own = slope.bfloat16().double().t() @ hidden.double()
        total, rounded = total + own, rounded + own.bfloat16()
    assert parameter.grad_added_to_main_grad
    assert not parameter.grad.any()  # autograd reached the parameter: replicas exchange its gradient then
    torch.testing.assert_close(parameter.main_grad[:V].double(), total, rtol=1e-4, atol=1e-4)
    assert not parameter.main_grad[V:].any()
    assert (rounded.double() - total).abs().max() > 5e-3  # what rounding every micro-batch costs


@pytest.mark.parametrize("frozen", [True, False])
def test_weights_that_are_frozen_or_in_float32_have_no_sum_of_their_own(frozen):
    """A float32 weight's gradient goes through autograd: sums in another order would have other last bits."""
    hidden, weight, targets = inputs(torch.bfloat16 if frozen else torch.float32)
    parameter = torch.nn.Parameter(weight, requires_grad=not frozen)
    parameter.main_grad = torch.zeros(V, H, device=weight.device)
    linear_logprobs(hidden.requires_grad_(), parameter, targets, Projection(parameter=parameter))[0].sum().backward()
    assert hidden.grad is not None and (parameter.grad is None if frozen else parameter.grad.any()) and not parameter.main_grad.any()


def gradient_of_output(make_model, monkeypatch, *, tied: bool, overlap: bool) -> tuple[Tensor, Tensor, Tensor]:
    """[V, H] of a step of micro-batches of one row: what the optimizer gets; the sums in float64 of what each micro-batch gives the output
    layer and the embedding; and the first of these rounded to bfloat16 in each micro-batch."""
    tokens = torch.randint(3, 61, (6, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    mask[:, 0] = False
    policy = make_model(
        "policy",
        architecture={"tied_embeddings": tied},
        optimizer=OptimizerConfig(clip_grad=0.0, distributed=False),
        config={"dtype": Dtype.bfloat16},
        training={"micro_batch_size": 1, "overlap": overlap},
    )
    weight = policy.module.vocabulary_weight()[0].detach().clone()
    expected, rounded = (torch.zeros(weight.shape, dtype=torch.float64, device=weight.device) for _ in range(2))
    real = heads.linear_logprobs

    def recording(hidden, own, targets, projection):
        logprobs, entropy = real(hidden, own, targets, projection)

        def add(grad: Tensor) -> None:
            slope = -torch.softmax(hidden.double() @ weight.double().t(), dim=-1)
            slope[torch.arange(len(targets)), targets] += 1
            part = (slope * grad[:, None]).bfloat16().double().t() @ hidden.double()
            expected.add_(part)
            rounded.add_(part.bfloat16())

        logprobs.register_hook(add)
        return logprobs, entropy

    monkeypatch.setattr(heads, "linear_logprobs", recording)
    embedding = policy.module.embedding.word_embeddings

    def embedded(module, given, output: Tensor) -> None:
        ids = given[0].reshape(-1)

        def add(grad: Tensor) -> None:
            expected.index_add_(0, ids, grad.transpose(0, 1).reshape(len(ids), -1).double())

        if tied:
            output.register_hook(add)

    embedding.register_forward_hook(embedded)
    policy.train_step(LabeledBatch(tokens=tokens, lengths=torch.full((6,), 9), loss_mask=mask), sft_loss)
    count = int(mask.sum())
    return policy.module.output_parameter.main_grad[: len(weight)].double(), expected / count, rounded / count


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_sums_the_output_layers_gradient_in_float32(make_model, monkeypatch, overlap):
    found, expected, rounded = gradient_of_output(make_model, monkeypatch, tied=False, overlap=overlap)
    scale = expected.abs().max()
    assert (found - expected).abs().max() < 2e-5 * scale
    assert (rounded - expected).abs().max() > 2e-4 * scale


def test_a_tied_embeddings_own_gradient_is_added_once(make_model, monkeypatch):
    found, expected, _ = gradient_of_output(make_model, monkeypatch, tied=True, overlap=False)
    assert (found - expected).abs().max() < 5e-3 * expected.abs().max()  # the embedding's part is in bfloat16


@pytest.mark.parametrize("shape", [{}, {"logits_softcap": 5.0}, {"logits_scale": 0.5}])
@pytest.mark.parametrize("float32_logits", [True, False])
def test_engine_and_trainer_have_the_same_logits(make_model, float32_logits, shape):
    policy = make_model("policy", architecture=shape, config={"dtype": Dtype.bfloat16, "float32_logits": float32_logits})
    engine = MegatronEngine([policy.module], RolloutConfig(), eos_id=2)
    engine.refit(0)
    hidden = torch.randn(7, 32, generator=torch.Generator().manual_seed(1)).bfloat16().to(platform.device()) * 4
    weight, projection = _projection(policy.module, 1.0)
    trainers = projection.logits(hidden, weight).detach()
    engines = engine.decoder._logits(hidden)
    out = torch.empty_like(engines)
    assert engines.dtype == torch.float32 and torch.equal(engines, trainers)
    assert engine.decoder._logits(hidden, out) is out and torch.equal(out, trainers)
    reference = hidden.double() @ weight.detach().double().t() * shape.get("logits_scale", 1.0)
    if cap := shape.get("logits_softcap"):
        reference = cap * torch.tanh(reference / cap)
    off = (engines - reference).abs().max() / reference.abs().max()
    assert off < 1e-6 if float32_logits else off > 1e-4
