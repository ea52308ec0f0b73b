"""The experts that the built-in engine sampled with are those that train, and it is counted how many would have been others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rollout_parts import engine_of, sampled

from aligner.data.collate import rollout_batch
from aligner.errors import ConfigError
from aligner.losses.sft import sft_loss
from aligner.parallel import platform
from aligner.rollout.config import RoutingReplay
from aligner.types import RolloutBatch, Routes, no_expert

pytestmark = pytest.mark.usefixtures("topology")

EXACT = 1e-4  # nats, float32 on the CPU
MISMATCH, REPLACED = "rollout/route_mismatch", "rollout/route_replaced"


@pytest.fixture
def sample(mixed_prompts):
    """`sample(policy, **settings)`: rollouts in the order of their prompts."""

    def sample_of(policy, **settings) -> list:
        sampling = {"max_response_length": 18, "min_response_length": 14, "top_k": 50, "stop_token_ids": [7]}
        engine = engine_of(policy, sampling=sampling, max_batch_size=4, routing_replay=RoutingReplay.replay, **settings)
        found = sampled(engine, mixed_prompts)
        if "kv_cache_tokens" in settings:
            assert engine.engine.generation.counters.preemptions > 0 and engine.engine.generation.counters.shared_tokens > 0
        return found

    return sample_of


def make(load_policy, directory, *, replays: bool):
    from aligner.models.training.optimizer import OptimizerConfig

    optimizer = OptimizerConfig(lr=1e-9, min_lr=0.0, clip_grad=0.0, distributed=False)
    return load_policy(
        directory, optimizer=optimizer, config={"seq_length": 64}, training={"micro_batch_size": 4, "replay_routes": replays}
    )


def shares(policy, batch: RolloutBatch) -> dict[str, float]:
    found = policy.train_step(batch, sft_loss)
    return {name: metric.value() for name, metric in found.items() if "route" in name}


def disturb(policy) -> None:
    """As another kernel's rounding would, but more: part of the tokens go elsewhere."""
    from aligner.models.modules.router import routers

    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for router in routers(policy.chunks):
            weight = router.weight
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator).to(weight.device)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe_unnormalized", "deepseek_v2_groups", "deepseek_v3"])
def test_what_sampled_is_what_trains(family, hf_directory, load_policy, logprob_gap, sample):
    """Chunked prefill, shared prompts, evicted responses and kernels of another arithmetic record the same routes, which are the trainer's
    own where the weights are the same."""
    policy = make(load_policy, hf_directory(family), replays=True)
    rollouts = sample(policy, prefill_chunk_tokens=6, kv_cache_tokens=96)
    for rollout, easily in zip(rollouts, sample(policy), strict=True):
        assert rollout.response == easily.response
        routes, easy = rollout.extras["routes"], easily.extras["routes"]
        assert routes.dtype == torch.uint8 and torch.equal(routes.sort().values, easy.sort().values)
    batch = rollout_batch(rollouts, 0)
    assert float(logprob_gap(policy, rollouts).max()) < EXACT
    assert shares(policy, batch) == {MISMATCH: 0.0, REPLACED: 0.0}
    assert shares(make(load_policy, hf_directory(family), replays=False), batch) == {MISMATCH: 0.0}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_another_router_goes_where_the_sampler_went(family, hf_directory, load_policy, sample):
    """Differences are counted without replay, and gone with it; then even log-probs are nearer to the sampler's."""
    rollouts = sample(make(load_policy, hf_directory(family), replays=True))
    batch, gaps = rollout_batch(rollouts, 0), []
    for replays in (False, True):
        policy = make(load_policy, hf_directory(family), replays=replays)
        disturb(policy)
        found = shares(policy, batch)
        gaps.append(float((policy.logprobs(batch) - batch.rollout_logprobs)[batch.loss_mask].abs().mean()))
        assert found[REPLACED if replays else MISMATCH] > 0.02
        if replays:
            assert found[MISMATCH] == 0
    assert gaps[1] < gaps[0]


def router_of(make_model):
    """A router of 4 experts, 2 to a token, whose logits are the first four numbers of its input."""
    from aligner.models.config import Family

    sizes = {"family": Family.mixtral, "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24, "qkv_bias": False}
    router = make_model("policy", architecture=sizes).module.decoder.layers[1].mlp.router
    with torch.no_grad():
        router.weight.copy_(torch.eye(4, 32))
    return router


def test_gate_scores_and_gradients_by_hand(make_model):
    """The scores of the second token are a softmax over its replayed experts 0 and 3, whose logits are 1 and 2: s = e / (e + e^2)
    = 0.26894142 and 0.73105858. Of sum(scores * weights) with weights 5 at expert 0 and 0 elsewhere the gradient at these logits is
    5 s (1 - s) = 0.98305967 and its negative, at the others 0. The last token has no route and keeps its best two."""
    router = router_of(make_model)
    router.train()
    router.routes.replays = True
    device = platform.device()
    none = no_expert(torch.uint8)
    routes = torch.tensor([[[9, 9], [0, 1]], [[9, 9], [3, 0]], [[9, 9], [none, none]]], dtype=torch.uint8)
    from aligner.models.modules.router import give

    give([router], routes.to(device))
    logits = torch.tensor([[4.0, 3, 2, 1], [1, 4, 3, 2], [1, 4, 3, 2]], device=device).view(3, 1, 4).requires_grad_()
    scores, chosen = router.routing(logits)
    assert chosen.int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 1], [0, 1, 1, 0]]
    torch.testing.assert_close(scores[1], torch.tensor([0.26894142, 0, 0, 0.73105858], device=device))
    (scores[:, 0] * torch.tensor([0.0, 5.0, 0.0], device=device)).sum().backward()
    torch.testing.assert_close(logits.grad[1, 0], torch.tensor([0.98305967, 0, 0, -0.98305967], device=device))
    assert not logits.grad[[0, 2]].any()
    assert router.routes.counts.tolist() == [2, 0, 1]  # two routes, of which the second is not the router's own


def test_recomputed_layers_replay_their_own_micro_batch(make_model):
    """Two micro-batches pass without gradient before the first of them comes back, as in a pipeline; and nothing is counted twice."""
    from aligner.models.modules.router import give

    router = router_of(make_model)
    router.train()
    router.routes.replays = True
    logits = torch.tensor([[[4.0, 3, 2, 1]]], device=platform.device())
    seen, given = [], [torch.tensor([[[0, 0], pair]], dtype=torch.uint8, device=platform.device()) for pair in ([0, 3], [1, 2])]
    for routes in given:
        give([router], routes)
        with torch.no_grad():
            router.routing(logits)
    for _ in given:
        seen.append(router.routing(logits.clone().requires_grad_())[1].int().tolist()[0])
    assert seen == [[1, 0, 0, 1], [0, 1, 1, 0]]
    assert router.routes.counts.tolist() == [2, 0, 2]
    router.routes.forget()
    assert router.routing(logits)[1].int().tolist() == [[1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("settings", "num_experts", "message"),
    [
        ({}, 0, "rollout.routing_replay=replay: the model has no experts; allowed: none"),
        (
            {"engine": "vllm"},
            4,
            "rollout.routing_replay=replay: rollout.engine=vllm does not report the chosen experts; allowed: none, or",
        ),
        ({"engine": "tensorrt_llm"}, 4, "rollout.routing_replay=replay: rollout.engine=tensorrt_llm does not report"),
    ],
)
def test_what_cannot_replay_is_refused(settings, num_experts, message):
    from aligner.models.config import Architecture
    from aligner.rollout.config import RolloutConfig, RoutingReplay, check_engine, check_untrained

    architecture = Architecture(num_experts=num_experts, experts_per_token=min(num_experts, 2), expert_ffn_hidden_size=8 * num_experts)
    config = RolloutConfig(routing_replay=RoutingReplay.replay, **settings)
    with pytest.raises(ConfigError, match=message):
        check_engine(config, architecture, tp=1, world_size=1)
    with pytest.raises(ConfigError, match="rollout.routing_replay=replay: nothing is trained here; allowed: none"):
        check_untrained(config, "nothing is trained here")


def test_prompts_with_other_routes_are_not_shared(hf_directory, load_policy, sample):
    """Rows 1 and 4 have one prompt, and one family unless a token of it was sampled by other experts; not the prompt's last, which no
    family shares."""
    from aligner.models.training.trainable import families

    batch = rollout_batch(sample(make(load_policy, hf_directory("mixtral"), replays=True)), 0)

    def number(changed: int | None) -> int:
        routes = batch.extras["routes"].data.clone()
        if changed is not None:
            routes[4, changed] = 3 - routes[4, changed]
        return len(families(replace(batch, extras={"routes": Routes(routes)}), unit=1, capacity=1000))

    assert [number(None), number(20), number(21), number(30)] == [5, 6, 5, 5]
