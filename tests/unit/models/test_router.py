"""The experts' auxiliary losses enter the objective with the weight that the config says, whatever the main loss counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aligner.losses.sft import sft_loss
from aligner.models.config import Family
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel import platform
from aligner.types import LabeledBatch, LossOutput

pytestmark = pytest.mark.usefixtures("topology")

EXPERTS = {"family": "mixtral", "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24, "qkv_bias": False}
LENGTHS = (12, 5, 9, 7)


def batch() -> LabeledBatch:
    positions, lengths = torch.arange(12), torch.tensor(LENGTHS)
    tokens = torch.randint(1, 61, (4, 12), generator=torch.Generator().manual_seed(3))
    inside = positions < lengths[:, None]
    return LabeledBatch(tokens=tokens * inside, lengths=lengths, loss_mask=inside & (positions > 2))


def by_sequences(outputs, batch: LabeledBatch) -> LossOutput:
    """The same total with another count."""
    return replace(sft_loss(outputs, batch), count=batch.loss_mask.any(1).sum())


def model(make_model, aux: float, z: float):
    sizes = EXPERTS | {"family": Family.mixtral}
    coefs = {"router_aux_loss_coef": aux, "router_z_loss_coef": z}
    optimizer = OptimizerConfig(lr=1e-9, min_lr=0.0, clip_grad=0.0, distributed=False)
    return make_model("policy", architecture=sizes, config=coefs, training={"micro_batch_size": 2} | coefs, optimizer=optimizer)


def gradients(policy, loss) -> dict[str, torch.Tensor]:
    policy.train_step(batch(), loss)
    return {name: p.main_grad.clone() for name, p in policy.module.named_parameters()}


def auxiliary_gradients(policy, aux: float, z: float) -> dict[str, torch.Tensor]:
    """By autograd through the module, one micro-batch (rows 0, 1 and 2, 3) after the other: E / (k T^2) sum_e (sum_t p_te) n_e per layer
    and micro-batch, each weighted by its T tokens of all 33; and the mean over tokens of (log sum exp)^2."""
    module, data, device = policy.module, batch(), platform.device()
    module.train()
    seen: list[torch.Tensor] = []
    hooks = []
    for layer in module.decoder.layers:
        router = layer.mlp.router
        hooks.append(router.register_forward_pre_hook(lambda router, inputs: seen.append(router.gating(inputs[0]))))
    total = torch.zeros((), device=device)
    for rows in (slice(0, 2), slice(2, 4)):
        seen.clear()
        width = int(data.lengths[rows].max())
        tokens = data.tokens[rows, :width].to(device)
        padding = (torch.arange(width) >= data.lengths[rows, None]).to(device)
        module(tokens, torch.arange(width, device=device).expand_as(tokens), None, padding_mask=padding)
        real = ~padding.transpose(0, 1).reshape(-1)
        for logits in seen:
            z_all = logits.reshape(-1, 4)[real]
            p = z_all.softmax(-1)
            chosen = torch.zeros_like(p).scatter(1, z_all.topk(2).indices, 1.0)
            t = real.sum()
            balance = 4 / (2 * t * t) * (p.sum(0) * chosen.sum(0)).sum()
            total = total + aux * balance * t + z * z_all.logsumexp(-1).square().sum()
    for hook in hooks:
        hook.remove()
    parameters = dict(module.named_parameters())
    found = torch.autograd.grad(total / sum(LENGTHS), list(parameters.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(parameters.items(), found, strict=True)}


@pytest.mark.parametrize("loss", [sft_loss, by_sequences])
@pytest.mark.parametrize(("aux", "z"), [(0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
def test_auxiliary_losses_have_their_weight(make_model, loss, aux, z):
    without = gradients(model(make_model, 0.0, 0.0), loss)
    with_losses = gradients(model(make_model, aux, z), loss)
    expected = auxiliary_gradients(model(make_model, 0.0, 0.0), aux, z)
    router = "decoder.layers.0.mlp.router.weight"
    assert expected[router].abs().max() > 1e-3
    for name, gradient in expected.items():
        added = with_losses[name] - without[name]
        torch.testing.assert_close(added, gradient, rtol=1e-3, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("rate", [0.0, 0.01])
def test_biases_move_towards_an_even_load(make_model, rate):
    """By the rate, up where an expert has fewer real tokens than the mean and down where it has more; they have no gradient."""
    sizes = EXPERTS | {"family": Family.glm4_moe, "router_sigmoid": True, "router_bias": True, "tied_embeddings": False}
    optimizer = OptimizerConfig(lr=1e-9, min_lr=0.0, distributed=False)
    policy = make_model(  # whose padding would make experts fuller than the mean
        "policy",
        seed=3,
        architecture=sizes,
        config={"router_bias_update_rate": rate},
        training={"micro_batch_size": 4},
        optimizer=optimizer,
    )
    routers, counts = [layer.mlp.router for layer in policy.module.decoder.layers], {}
    hooks = [router.register_forward_hook(lambda router, _, out: counts.setdefault(router, []).append(out[1])) for router in routers]
    before = [router.expert_bias.detach().cpu().clone() for router in routers]
    policy.train_step(batch(), sft_loss)
    for hook in hooks:
        hook.remove()
    rows = batch().tokens.shape[1]
    real = (torch.arange(rows)[:, None] < torch.tensor(LENGTHS)).flatten()
    matters = False
    for router, old in zip(routers, before, strict=True):
        (chosen,) = counts[router]
        tokens, every = chosen.cpu()[real].sum(dim=0).float(), chosen.cpu().sum(dim=0).float()
        matters |= not torch.equal(torch.sign(tokens.mean() - tokens), torch.sign(every.mean() - every))
        assert tokens.sum() == 2 * sum(LENGTHS)
        torch.testing.assert_close(router.expert_bias.detach().cpu() - old, rate * torch.sign(tokens.mean() - tokens))
        assert not router.expert_bias.requires_grad
    assert matters


def test_balance_is_reported_over_tokens(make_model):
    """With all router weights zero every expert has probability 1/4: E / (k T^2) sum_e (T / 4) n_e = 1 exactly."""
    policy = model(make_model, 0.1, 0.0)
    for layer in policy.module.decoder.layers:
        layer.mlp.router.weight.data.zero_()
    assert policy.train_step(batch(), sft_loss)["moe/load_balancing_loss"].value() == pytest.approx(1.0, rel=1e-6)
    assert "moe/load_balancing_loss" not in model(make_model, 0.0, 0.1).train_step(batch(), sft_loss)
