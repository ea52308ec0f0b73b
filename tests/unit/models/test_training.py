"""Optimizer steps: the same for every micro-batch size, in both precisions, and refused where the gradient is not finite."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from aligner.errors import ConfigError
from aligner.losses.aggregation import Aggregation
from aligner.losses.policy import policy_loss
from aligner.losses.reward import BradleyTerry, bradley_terry_loss
from aligner.losses.sft import sft_loss
from aligner.losses.value import value_loss
from aligner.models.config import Dtype
from aligner.models.training.optimizer import Decay, OptimizerConfig
from aligner.models.training.policy import ReferencePolicy
from aligner.parallel import platform
from aligner.types import LabeledBatch, PolicyBatch, PreferenceBatch, ValueBatch

pytestmark = pytest.mark.usefixtures("topology")

ROWS, WIDTH, VOCAB = 8, 20, 61
LOSSES = {
    "policy": partial(policy_loss, clip_eps_low=0.2, clip_eps_high=0.2, entropy_coef=0.01, aggregation=Aggregation.token_mean),
    "value": partial(value_loss, clip=0.2),
    "reward": partial(bradley_terry_loss, variant=BradleyTerry.standard),
}


def make_batch(kind: str):
    generator = torch.Generator().manual_seed(4)
    positions, lengths = torch.arange(WIDTH), torch.tensor([20, 6, 13, 9, 17, 5, 20, 11])
    tokens = torch.randint(1, VOCAB, (ROWS, WIDTH), generator=generator) * (positions < lengths[:, None])
    mask = (positions >= 3) & (positions < lengths[:, None])
    x, y = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    common = {"tokens": tokens, "lengths": lengths, "loss_mask": mask}
    if kind == "policy":
        return PolicyBatch(**common, old_logprobs=0.1 * x - 4.0, advantages=y)
    if kind == "value":
        return ValueBatch(**common, old_values=x, returns=y)
    if kind == "reward":
        return PreferenceBatch(**common, margins=torch.zeros(ROWS // 2))
    return LabeledBatch(**common)


def adam(**changes) -> OptimizerConfig:
    """eps is large, so that a gradient which is zero but for rounding (a key bias has one) moves nothing."""
    return OptimizerConfig(**({"lr": 1e-2, "min_lr": 1e-2, "warmup_steps": 0, "eps": 1e-3, "clip_grad": 0.5} | changes))


def weights_of(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.model.module.parameters()]


@pytest.mark.parametrize("kind", LOSSES)
def test_a_step_is_the_same_for_every_micro_batch_size(kind, make_model):
    def step(size: int) -> tuple[list[torch.Tensor], dict[str, float], list[torch.Tensor]]:
        model = make_model(kind, optimizer=adam(), training={"micro_batch_size": size})
        before = weights_of(model)
        metrics = model.train_step(make_batch(kind), LOSSES[kind])
        return weights_of(model), {name: metric.value() for name, metric in metrics.items()}, before

    whole, metrics, before = step(8)
    assert max((a - b).abs().max() for a, b in zip(whole, before, strict=True)) > 1e-3  # it moved
    for size in (1, 3):
        weights, again, _ = step(size)
        assert again == pytest.approx(metrics, rel=1e-5, abs=1e-6)
        for ours, expected in zip(weights, whole, strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_micro_batches_filled_up_to_one_size_give_the_same_numbers(make_model):
    """What `parallel.tp_comm_overlap` asks for, without the Transformer Engine that it is for."""
    packed = {"micro_batch_tokens": 45, "packing": True}
    usual, filled = (make_model("policy", optimizer=adam(), training=packed) for _ in range(2))
    filled.model.splits = replace(filled.model.splits, fixed_tokens=45)
    batch = make_batch("policy")
    assert torch.equal(filled.logprobs(batch), usual.logprobs(batch))
    shapes = {part.placement.whole_shape for part in filled.model._micro_batches(batch, filled.model._plan(batch))}
    assert shapes == {(1, 45)}
    assert usual.train_step(batch, LOSSES["policy"]) == filled.train_step(batch, LOSSES["policy"])
    for ours, expected in zip(weights_of(filled), weights_of(usual), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_packed_rows_do_not_see_each_other(make_model):
    """One after the other in one input, log-probs and an update are those of rows that are computed apart."""
    batch = make_batch("policy")
    apart = make_model("policy", optimizer=adam(), training={"micro_batch_size": 1})
    packed = make_model("policy", optimizer=adam(), training={"micro_batch_tokens": 200, "packing": True})
    torch.testing.assert_close(packed.logprobs(batch), apart.logprobs(batch), rtol=0, atol=1e-5)
    for model in (apart, packed):
        model.train_step(batch, LOSSES["policy"])
    for ours, expected in zip(weights_of(packed), weights_of(apart), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def mean_loss(module, batch) -> torch.Tensor:
    """Mean negative log-likelihood over the masked tokens, by autograd through the plain module."""
    tokens, mask = batch.tokens.to(platform.device()), batch.loss_mask.to(platform.device())
    hidden = module(tokens, torch.arange(WIDTH, device=tokens.device).expand_as(tokens), None).transpose(0, 1)
    log_p = torch.log_softmax(hidden @ module.vocabulary_weight()[0].t(), dim=-1)
    chosen = log_p[:, :-1].gather(2, tokens[:, 1:, None])[:, :, 0]
    return -chosen[mask[:, 1:]].mean()


def by_torch(reference, batch, settings: OptimizerConfig, total_steps: int) -> list[tuple[float, float]]:
    """(gradient norm, learning rate) of updates of `reference` by torch alone: mean NLL, `clip_grad_norm_`, AdamW, a linear schedule."""
    decayed = [p for p in reference.parameters() if p.dim() > 1]
    plain = [p for p in reference.parameters() if p.dim() == 1]  # norms and biases: Megatron-Core does not shrink them
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(settings.beta1, settings.beta2), eps=settings.eps)
    seen = []
    for step in range(1, total_steps + 1):
        falling = (step - settings.warmup_steps) / (total_steps - settings.warmup_steps)
        rate = settings.lr * step / settings.warmup_steps if falling <= 0 else settings.lr - falling * (settings.lr - settings.min_lr)
        optimizer.zero_grad()
        mean_loss(reference, batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(list(reference.parameters()), settings.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        seen.append((norm.item(), rate))
    return seen


@pytest.mark.parametrize("distributed", [True, False])
def test_updates_are_those_of_adamw_with_clipping_warm_up_and_decay(make_model, distributed):
    """Settings with which each matters: all gradients are longer than `clip_grad`, betas and weight decay far from the usual ones."""
    settings = adam(lr=4e-3, min_lr=1e-3, decay=Decay.linear, warmup_steps=3, weight_decay=0.5, beta1=0.7, beta2=0.8, clip_grad=0.4)
    settings = replace(settings, distributed=distributed)
    batch, total_steps = make_batch("sft"), 8
    policy = make_model("policy", optimizer=settings, training={"micro_batch_size": 3, "total_steps": total_steps})
    reference = make_model("policy").module.requires_grad_()
    expected = by_torch(reference, batch, settings, total_steps)
    for norm, rate in expected:
        metrics = policy.train_step(batch, sft_loss)
        assert metrics["optim/lr"].value() == pytest.approx(rate)
        assert metrics["optim/grad_norm"].value() == pytest.approx(norm, rel=1e-4)
        assert norm > 2 * settings.clip_grad
    assert policy.version == total_steps
    for (name, p), q in zip(policy.module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_entropies_come_with_the_log_probs(make_model):
    policy, batch = make_model("policy"), make_batch("sft")
    logprobs, entropy = policy.per_token(batch, "logprobs", "entropy").values()
    assert torch.equal(logprobs, policy.logprobs(batch)) and not entropy[~batch.loss_mask].any()
    _, of_all = policy.topk(batch, VOCAB, below=VOCAB)
    torch.testing.assert_close(entropy, -(of_all.exp() * of_all).sum(dim=-1), rtol=1e-4, atol=1e-5)


def test_the_reference_keeps_weights_until_it_is_renewed_or_restored(make_model):
    policy, batch = make_model("policy", optimizer=adam()), make_batch("sft")
    first, reference = policy.logprobs(batch), ReferencePolicy(policy)
    policy.train_step(batch, sft_loss)
    second, kept, addresses = policy.logprobs(batch), weights_of(policy), [p.data_ptr() for p in policy.module.parameters()]
    assert torch.equal(reference.logprobs(batch), first) and not torch.allclose(second, first)
    assert torch.equal(policy.logprobs(batch), second) and [p.data_ptr() for p in policy.module.parameters()] == addresses
    reference.renew()
    policy.train_step(batch, sft_loss)  # the optimizer still writes to the weights that the module reads
    third, trained = policy.logprobs(batch), weights_of(policy)
    assert torch.equal(reference.logprobs(batch), second) and not torch.equal(third, second)
    reference.renew()
    assert torch.equal(reference.logprobs(batch), third)

    def load(chunks):
        with torch.no_grad():
            for parameter, weight in zip(chunks[0].parameters(), kept, strict=True):
                parameter.copy_(weight)

    reference.restore(load)
    assert torch.equal(reference.logprobs(batch), second)
    broken = make_batch("sft")
    broken.tokens[0, 0] = VOCAB + 1000
    with pytest.raises(IndexError):
        reference.logprobs(broken)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(policy), trained, strict=True))


def test_a_frozen_model_has_no_gradients_and_no_optimizer(make_model):
    reward = make_model("reward")
    assert reward.model.optimizer is None and not any(p.requires_grad for p in reward.model.module.parameters())


@pytest.mark.parametrize(
    ("decay", "rates"),
    [
        (Decay.constant, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (Decay.linear, [0.5, 1.0, 0.775, 0.55, 0.325, 0.1]),  # 1 - 0.9 * k/4
        (Decay.cosine, [0.5, 1.0, 0.8682, 0.55, 0.2318, 0.1]),  # 0.1 + 0.45 * (1 + cos(pi * k/4))
    ],
)
def test_learning_rate_schedule(make_model, decay, rates):
    """Two steps of warm-up (never a rate of 0), then four to the minimum."""
    optimizer = adam(lr=1.0, min_lr=0.1, warmup_steps=2, decay=decay, clip_grad=1e-6)
    reward = make_model("reward", optimizer=optimizer, training={"total_steps": 6, "micro_batch_size": 8})
    seen = [reward.train_step(make_batch("reward"), LOSSES["reward"])["optim/lr"].value() for _ in range(6)]
    assert seen == pytest.approx(rates, abs=1e-4)


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("kind", LOSSES)
def test_bfloat16_is_near_float32(kind, distributed, make_model):
    """Weights and activations in bfloat16, the optimizer's copy in float32: losses and outputs within bfloat16's 3 digits."""
    batch, outputs = make_batch(kind), {"policy": "logprobs", "value": "values", "reward": "scores"}[kind]
    results = []
    for dtype in (Dtype.float32, Dtype.bfloat16):
        model = make_model(kind, optimizer=adam(distributed=distributed), config={"dtype": dtype}, training={"micro_batch_size": 4})
        metrics = model.train_step(batch, LOSSES[kind])
        results.append((metrics["optim/grad_norm"].value(), getattr(model, outputs)(batch)))
        assert model.model.module.embedding.word_embeddings.weight.dtype == getattr(torch, dtype.value)
    (norm, output), (norm_bf16, output_bf16) = results
    assert norm_bf16 == pytest.approx(norm, rel=0.1)
    assert output_bf16.dtype == torch.float32 and torch.isfinite(output_bf16).all()
    assert (output_bf16 - output).abs().mean() < 0.05 * output.abs().mean() + 0.02


def test_bfloat16_updates_smaller_than_its_resolution_add_up(make_model):
    """0.001 a step is less than half of bfloat16's spacing above 0.5 (0.0039), so a bfloat16 weight would never move; 8 steps do."""
    policy = make_model("policy", optimizer=adam(lr=1e-3, min_lr=1e-3, eps=1e-12, weight_decay=0.0), config={"dtype": Dtype.bfloat16})
    batch, weight = make_batch("sft"), policy.module.decoder.final_layernorm.weight
    before = weight.detach().clone().float()
    for _ in range(8):
        policy.train_step(batch, sft_loss)
    moved = (weight.detach().float() - before).abs()[before > 0.55]
    assert moved.numel() > 10 and moved.max() >= 0.0039


@pytest.mark.parametrize("distributed", [True, False])
def test_a_gradient_that_is_not_measured_is_not_said_to_be_zero(distributed, make_model):
    """Megatron-Core gives a norm of 0 where it clips nothing."""
    policy = make_model("policy", optimizer=adam(clip_grad=0.0, distributed=distributed))
    metrics = policy.train_step(make_batch("sft"), sft_loss)
    assert "optim/grad_norm" not in metrics or metrics["optim/grad_norm"].value() > 0
    clipped = make_model("policy", optimizer=adam(distributed=distributed))
    assert clipped.train_step(make_batch("sft"), sft_loss)["optim/grad_norm"].value() > 0


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", list(Dtype))
def test_the_fingerprint_shows_every_update(dtype, distributed, make_model):
    """Also one that bfloat16 weights do not show yet; and none where there was none, or one too small for float32."""
    found = {}
    for lr in (1e-7, 1e-30):
        policy = make_model("policy", optimizer=adam(lr=lr, min_lr=lr, weight_decay=0.0, distributed=distributed), config={"dtype": dtype})
        before, weights = policy.model.fingerprint(), weights_of(policy)
        assert before and policy.model.fingerprint() == before
        metrics = policy.train_step(make_batch("sft"), sft_loss)
        assert metrics["optim/updates"].value() == 1
        found[lr] = policy.model.fingerprint() != before
        if lr == 1e-30:
            assert all(torch.equal(old, new) for old, new in zip(weights, weights_of(policy), strict=True))
    assert found == {1e-7: True, 1e-30: False}


def test_the_warm_up_is_a_tenth_of_the_run_unless_steps_are_given():
    assert [OptimizerConfig().warmup(total) for total in (1, 5, 10, 11, 100, 1000)] == [1, 1, 1, 2, 10, 100]
    assert OptimizerConfig(warmup_fraction=0.03).warmup(100) == 3  # as written: 0.03 * 100 is above 3 in floating point
    assert OptimizerConfig(warmup_fraction=0.0).warmup(100) == 0 == OptimizerConfig(warmup_steps=0).warmup(100)
    assert OptimizerConfig(warmup_steps=7, warmup_fraction=0.5).warmup(100) == 7
    for wrong, said in (({"warmup_fraction": 1.0}, "warmup_fraction=1.0"), ({"warmup_steps": -2}, "warmup_steps=-2")):
        with pytest.raises(ConfigError, match=f"optimizer.{said}"):
            OptimizerConfig(**wrong)


def test_a_run_that_ends_within_its_warm_up_says_so(make_model, capsys):
    make_model("policy", optimizer=OptimizerConfig(lr=1e-3, min_lr=0.0, warmup_steps=8), training={"total_steps": 4})
    said = "warning: optimizer.warmup_steps=8, optimizer.lr=0.001: the run has 4 optimizer steps, so the learning rate rises to 0.0005 only"
    assert said in capsys.readouterr().out
    assert OptimizerConfig(warmup_steps=8).shortfall(8) == "" == OptimizerConfig().shortfall(1)
