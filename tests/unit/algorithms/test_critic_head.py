"""A critic that is a head on the policy (`critic.kind=head`): its loss by hand, its gradients and steps by plain torch, its files, and what
is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from model_steps import adam, same, save, weights_of
from safetensors.torch import load_file
from torch import Tensor

from aligner.algorithms.ppo import PPO, PPOConfig, TrainPPO
from aligner.cluster.component import Placement
from aligner.errors import CheckpointError, ConfigError
from aligner.loop.loop import Clock
from aligner.losses.aggregation import Aggregation
from aligner.losses.policy import policy_loss
from aligner.losses.value import value_loss
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype, Implementation, LoraConfig, ModelConfig
from aligner.models.create import create_policy, create_value_model, read_architecture, training
from aligner.models.modules.scalar_head import HeadGradient, PolicyHead
from aligner.models.training.added import joined
from aligner.models.training.optimizer import OptimizerConfig, OptimizerKind
from aligner.models.weights import export_hf, policy_head, save_hf
from aligner.online.critics import HeadCritic
from aligner.parallel.topology import ParallelConfig
from aligner.protocols import Added
from aligner.run.settings import UsedModel
from aligner.servers.components import CriticConfig, CriticHeadConfig, CriticKind, RewardConfig
from aligner.telemetry.metrics import Mean, Sum
from aligner.types import PolicyBatch, TokenOutputs

COEF = 0.6
VALUES = partial(value_loss, clip=0.2)
POLICY = partial(policy_loss, clip_eps_low=0.2, clip_eps_high=0.2, aggregation=Aggregation.sequence_mean)
ADDED = [Added(batch=None, loss=VALUES, coef=COEF)]
HEAD_FILE = "value_head.safetensors"


def a_head(gradient: HeadGradient = HeadGradient.joint, lr: float = 3e-3) -> PolicyHead:
    return PolicyHead(gradient=gradient, lr=lr, min_lr=lr)


def rows(number: int = 0) -> PolicyBatch:
    generator, lengths, positions = torch.Generator().manual_seed(number), torch.tensor([12, 6, 9, 7]), torch.arange(12)
    inside = positions < lengths[:, None]
    x, y, v, g = (torch.randn(4, 12, generator=generator) for _ in range(4))
    tokens = torch.randint(1, 61, (4, 12), generator=generator) * inside
    mask = inside & (positions >= 3)
    return PolicyBatch(
        tokens=tokens, lengths=lengths, loss_mask=mask, old_logprobs=0.1 * x - 4.0, advantages=y, old_values=0.1 * v, returns=g
    )


def test_the_loss_by_hand() -> None:
    """Two sequences of 2 tokens and 1. Policy (ratio 1, sequence mean): -(1 + 3) / 2 and -5, of 2 sequences: total -7. Values, of 3 tokens:
    0.5 * ((0.5 - 1)^2 + (0 - 2)^2 + (1 - 1)^2) = 2.125. The step divides by 2 sequences: -7 / 2 + 0.6 * 2.125 / 3 = -3.075."""
    mask = torch.tensor([[False, True, True], [False, True, False]])
    batch = PolicyBatch(
        tokens=torch.ones(2, 3, dtype=torch.int64),
        lengths=torch.tensor([3, 2]),
        loss_mask=mask,
        old_logprobs=torch.zeros(2, 3),
        advantages=torch.tensor([[9.0, 1, 3], [9, 5, 9]]),
        old_values=torch.tensor([[7.0, 0.5, 0], [7, 1, 7]]),
        returns=torch.tensor([[7.0, 1, 2], [7, 1, 7]]),
    )
    values = torch.tensor([[8.0, 0.5, 0], [8, 1, 8]], requires_grad=True)
    outputs = TokenOutputs(logprobs=torch.zeros(2, 3), entropy=torch.zeros(2, 3), values=values)
    result = joined(batch, POLICY, ADDED)(outputs, batch)
    assert int(result.count) == 2 and float(result.total) / 2 == pytest.approx(-3.075)
    (result.total / result.count).backward()
    assert values.grad.tolist() == [[0, pytest.approx(COEF * -0.5 / 3), pytest.approx(COEF * -2 / 3)], [0, 0, 0]]
    assert result.metrics["value/loss"].value() == pytest.approx(2.125 / 3) and "policy/loss" in result.metrics
    assert joined(batch, POLICY, []) is POLICY


def hidden_of(policy, batch: PolicyBatch) -> Tensor:
    """[B, S, H] of the states in which the tokens of the mask were chosen, at the tokens' places."""
    positions = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    hidden = policy.module(batch.tokens, positions, None).transpose(0, 1)
    return torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)


def plain_value_loss(values: Tensor, batch: PolicyBatch) -> Tensor:
    old, wanted = batch.old_values.to(values), batch.returns.to(values)
    clipped = old + (values - old).clamp(-0.2, 0.2)
    return 0.5 * torch.maximum((values - wanted) ** 2, (clipped - wanted) ** 2)[batch.loss_mask].mean()


HOW = {"whole": {"micro_batch_size": 4}, "single": {"micro_batch_size": 1}, "packed": {"micro_batch_tokens": 20, "packing": True}}
MADE = {"megatron": {}, "transformers": {"implementation": Implementation.transformers}}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("made", MADE)
def test_a_detached_head_is_one_that_plain_torch_trains_on_frozen_hidden_states(made, how, hf_directory, load_policy) -> None:
    """Values, gradients and four steps of AdamW in float64, at a learning rate below the policy's. Without advantages the policy stays."""
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0, weight_decay=0.0, clip_grad=0.0)
    with_head = {"value_head": a_head(HeadGradient.detached)} | HOW[how]
    policy = load_policy(hf_directory("qwen2"), optimizer=optimizer, config=MADE[made] | HOW[how], training=with_head)
    before = weights_of(policy)
    head = torch.nn.Linear(32, 1).double()
    head.load_state_dict({name: one.detach().double() for name, one in policy.module.score_head.state_dict().items()})
    adam = torch.optim.AdamW(head.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
    for number in range(4):
        batch = rows(number)
        batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
        with torch.no_grad():
            frozen = hidden_of(policy, batch).double()
        values = head(frozen)[:, :, 0]
        logprobs, ours = policy.per_token(batch, "logprobs", "values").values()
        torch.testing.assert_close(ours.double(), (values * batch.loss_mask).detach(), rtol=0, atol=1e-6)
        assert torch.equal(logprobs, policy.logprobs(batch))
        adam.zero_grad()
        (COEF * plain_value_loss(values, batch)).backward()
        metrics = policy.train_step(batch, POLICY, ADDED)
        for ours, plain in zip(policy.module.score_head.parameters(), head.parameters(), strict=True):
            torch.testing.assert_close(ours.main_grad.double(), plain.grad, rtol=0, atol=1e-6)
        adam.step()
        assert metrics["optim/lr"].value() == 1e-2
    for ours, plain in zip(policy.module.score_head.parameters(), head.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().double(), plain.detach(), rtol=0, atol=1e-6)
    after = weights_of(policy)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if name.startswith("score_head.")
    }


@pytest.mark.parametrize("gradient", HeadGradient)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("made", MADE)
def test_gradients_are_those_of_autograd_on_transformers_model(made, how, gradient, hf_directory, load_policy) -> None:
    """Of loss_policy + coef * loss_value, each divided by its own count; a detached head takes nothing to the trunk."""
    from transformers import AutoModelForCausalLM

    directory, batch = hf_directory("qwen2"), rows()
    with_head = {"value_head": a_head(gradient)} | HOW[how]
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-3, warmup_steps=0, clip_grad=0.0)
    policy = load_policy(directory, optimizer=optimizer, config=MADE[made] | HOW[how], training=with_head)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    head = torch.nn.Linear(32, 1).double()
    head.load_state_dict({name: one.detach().double() for name, one in policy.module.score_head.state_dict().items()})

    hidden = model.model(batch.tokens).last_hidden_state[:, :-1]
    log_p = torch.log_softmax(model.lm_head(hidden), dim=-1).gather(2, batch.tokens[:, 1:, None])[:, :, 0]
    mask, advantages = batch.loss_mask[:, 1:], batch.advantages[:, 1:].double()
    ratio = (log_p - batch.old_logprobs[:, 1:]).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    of_policy = -torch.stack([row[own].mean() for row, own in zip(surrogate, mask, strict=True)]).mean()
    seen = hidden.detach() if gradient is HeadGradient.detached else hidden
    values = torch.cat([torch.zeros(4, 1, dtype=torch.float64), head(seen)[:, :, 0]], dim=1)
    (of_policy + COEF * plain_value_loss(values, batch)).backward()
    expected = {name: one.grad for name, one in model.named_parameters()}
    expected |= {f"v_head.summary.{name}": one.grad for name, one in head.named_parameters()}

    policy.train_step(batch, POLICY, ADDED)
    for parameter in policy.module.parameters():
        parameter.data = parameter.main_grad
    found = {name: one.clone() for name, one in export_hf(policy.chunks)} | policy_head(policy.chunks)
    assert found.keys() == expected.keys()
    for name, one in found.items():
        torch.testing.assert_close(one.double(), expected[name], rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


KINDS = {
    "bfloat16": ({"dtype": Dtype.bfloat16}, {}),
    "adapters": ({"lora": LoraConfig(rank=4)}, {}),
    "average": ({}, {"ema_decay": 0.9}),
    "host": ({"dtype": Dtype.bfloat16}, {"cpu_offload": True}),
    "adam8bit": ({"dtype": Dtype.bfloat16}, {"kind": OptimizerKind.adam8bit}),
    "undistributed": ({"dtype": Dtype.bfloat16}, {"distributed": False}),
    "muon": ({}, {"kind": OptimizerKind.muon, "distributed": False}),
    "transformers": (MADE["transformers"], {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_trains_it_and_resumes_bit_for_bit(kind, hf_directory, load_policy, tmp_path: Path) -> None:
    config, changes = KINDS[kind]

    def make():
        return load_policy(hf_directory("qwen2"), optimizer=adam(**changes), config=config, training={"value_head": a_head()})

    def step(policy, number: int) -> None:
        policy.train_step(rows(number), POLICY, ADDED)
        policy.model.settle()

    policy, again = make(), make()
    start = weights_of(policy)
    for number in range(2):
        step(policy, number)
    checkpoint.load(again.model, save(policy, tmp_path))
    assert same(weights_of(policy), weights_of(again))
    assert all(not torch.equal(start[name], one) for name, one in weights_of(policy).items() if name.startswith("score_head."))
    for one in (policy, again):
        step(one, 2)
    assert same(weights_of(policy), weights_of(again))


@pytest.mark.parametrize("made", MADE)
def test_its_file_is_read_by_critics_and_by_new_runs(made, hf_directory, load_policy, topology, tmp_path: Path) -> None:
    """The export beside it is a language model as ever, and what engines are sent is too."""
    from transformers import AutoModelForCausalLM

    policy = load_policy(hf_directory("qwen2"), optimizer=adam(), config=MADE[made], training={"value_head": a_head()})
    policy.train_step(rows(), POLICY, ADDED)
    values, export = policy.per_token(rows(), "values")["values"], tmp_path / "export"
    save_hf(policy.chunks, export, writer=True)
    held = load_file(export / HEAD_FILE)
    assert {name: tuple(one.shape) for name, one in held.items()} == {"v_head.summary.weight": (1, 32), "v_head.summary.bias": (1,)}
    assert torch.equal(held["v_head.summary.weight"], policy.module.score_head.weight)
    names = {name for name, _ in policy.export_weights()}
    assert names == {name for name, _ in AutoModelForCausalLM.from_pretrained(export).named_parameters()}

    own = ModelConfig(path=str(export), dtype=Dtype.float32, make_vocab_divisible_by=8, **MADE[made])
    common = (own, read_architecture(own, vocab_size=0), ParallelConfig(), topology)
    again = create_policy(*common, training(own, None, value_head=a_head()))
    critic = create_value_model(*common, training(own, None))
    saved = replace(own, path=str(save(policy, tmp_path / "checkpoints")))
    of_saved = [
        create_policy(saved, *common[1:], training(saved, None, value_head=a_head())).per_token(rows(), "values")["values"],
        create_value_model(saved, *common[1:], training(saved, None)).values(rows()) * rows().loss_mask,
    ]
    for got in (again.per_token(rows(), "values")["values"], critic.values(rows()) * rows().loss_mask, *of_saved):
        torch.testing.assert_close(got, values, rtol=0, atol=1e-6)
    plain = create_policy(*common, training(own, None))
    assert plain.chunks[0].value_gradient is None and not hasattr(plain.chunks[0], "score_head")
    save_hf(plain.chunks, export, writer=True)
    assert not (export / HEAD_FILE).exists()  # it would be taken for that of these weights


def test_a_run_neither_loses_nor_finds_a_head(hf_directory, load_policy, tmp_path: Path) -> None:
    heads = {"with": {"value_head": a_head()}, "without": {}}
    saved = {}
    for name, given in heads.items():
        policy = load_policy(hf_directory("qwen2"), optimizer=adam(), training=given)
        policy.train_step(replace(rows(), old_values=None, returns=None), POLICY)
        saved[name] = save(policy, tmp_path / name)
    for then, now in (("with", "without"), ("without", "with")):
        other = load_policy(hf_directory("qwen2"), optimizer=adam(), training=heads[now])
        with pytest.raises(CheckpointError, match=rf"a policy {then} a head of values cannot be continued {now} one \(critic.kind=head\)"):
            checkpoint.load(other.model, saved[then])


def ppo(fakes, task, log: list[str]) -> PPO:
    class WithHead(fakes.FakePolicy):
        """The value of a state is its token / 10, as of the fakes' critic."""

        def per_token(self, batch, *names):
            log.append("one pass")
            mask = batch.loss_mask.float()
            return {"logprobs": self.level * mask, "entropy": 0.5 * mask, "values": batch.tokens / 10}

        def train_step(self, batch, loss, added=()):
            super().train_step(batch, loss, added)
            return fakes.value_metrics(float(self.version)) | {
                "policy/loss": Mean(total=torch.tensor(3.0), count=torch.tensor(1)),
                "optim/steps": Sum(total=1),
            }

    config = PPOConfig(rollouts_per_step=4, mini_batch_size=2, gae_lambda=0.5, kl_coef=0.1)
    return PPO(config, WithHead(log), task, HeadCritic(task, VALUES, coef=COEF))


def test_a_step_has_one_pass_and_its_metrics_come_with_the_next(fakes, make_task) -> None:
    log: list[str] = []
    algorithm = ppo(fakes, make_task(log), log)
    first = algorithm.step(1, Clock()).metrics
    sampling = ["policy sleeps", "engine wakes", "generate", "engine sleeps"]
    assert log == [*sampling, "one pass", "update", "update", "policy sleeps", "refit 2"]
    assert first["policy/loss"] == 3.0 and not [name for name in first if name.startswith(("value/", "critic/"))]
    for batch, added in zip(algorithm.policy.trained, algorithm.policy.added, strict=True):
        assert added == [Added(batch=None, loss=VALUES, coef=COEF)]
        assert torch.equal(batch.old_values[batch.loss_mask], batch.tokens[batch.loss_mask] / 10)
        assert batch.returns.shape == batch.advantages.shape and batch.returns.any()
    state = json.loads(json.dumps(algorithm.state()))
    resumed = ppo(fakes, make_task([]), [])
    resumed.load_state(state)
    for one in (algorithm, resumed):
        found = one.step(2, Clock()).metrics
        assert (found["critic/loss"], found["critic/explained_variance"]) == (1.5, 0.75)


def run_with(critic: CriticConfig, **others) -> TrainPPO:
    algorithm = PPOConfig(rollouts_per_step=24, mini_batch_size=12, num_epochs=2, **others.pop("algorithm", {}))
    return TrainPPO(critic=critic, algorithm=algorithm, **others)


def head_critic(**fields) -> CriticConfig:
    return CriticConfig(kind=CriticKind.head, **fields)


@pytest.mark.parametrize(
    ("critic", "others", "message"),
    [
        (
            {"num_epochs": 3},
            {},
            "^critic.num_epochs=3: critic.kind=head is trained with the policy, in its updates; allowed: the policy's, or leave",
        ),
        ({"mini_batch_size": 6}, {}, "^critic.mini_batch_size=6: .*the policy's, or leave critic.mini_batch_size out"),
        ({"optimizer": OptimizerConfig(beta1=0.5)}, {}, "^critic.optimizer.beta1=0.5: .*allowed: the policy's"),
        ({"model": ModelConfig(path="elsewhere")}, {}, r"^critic.model.path=elsewhere: critic.kind=head"),
        ({"num_processes": 2}, {}, "^critic.num_processes=2: critic.kind=head has no component of its own"),
        (
            {},
            {"algorithm": {"critic_warmup_steps": 2}},
            "^algorithm.critic_warmup_steps=2: critic.kind=head learns in the policy's updates",
        ),
    ],
)
def test_what_a_head_does_not_have_is_refused(critic, others, message) -> None:
    with pytest.raises(ConfigError, match=message):
        run_with(head_critic(**critic), **others)


def test_other_kinds_have_no_head() -> None:
    with pytest.raises(ConfigError, match=r"critic.head: critic.kind=model has no head on the policy; allowed: critic.kind=head"):
        TrainPPO(critic=CriticConfig(kind=CriticKind.model, head=CriticHeadConfig(coef=0.2)))
    with pytest.raises(ConfigError, match=r"critic.head.coef=0: must be finite and above 0"):
        CriticHeadConfig(coef=0)
    assert TrainPPO().traits().value_head is None


def test_a_run_has_one_model_in_one_component() -> None:
    own = OptimizerConfig(lr=1e-4, min_lr=1e-5)
    config = run_with(head_critic(optimizer=own, mini_batch_size=12, num_epochs=2, head=CriticHeadConfig(gradient=HeadGradient.detached)))
    assert config.traits().value_head == PolicyHead(gradient=HeadGradient.detached, lr=1e-4, min_lr=1e-5)
    assert config.models() == [UsedModel(component="actor", key="model", config=config.model)]
    assert (config.servers(), config.residents(), list(config.readers())) == ((), (), ["model"])
    traits = config.traits()
    assert list(traits.checkpoints) == ["policy"]
    shared = run_with(head_critic(), placement=Placement.colocated, reward=RewardConfig(serve=True))
    assert [one.name for one in shared.servers()] == ["reward"] and not shared.critic.optimizer.offload
