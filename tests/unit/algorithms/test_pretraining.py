"""PPO-ptx: the gradient of an update by hand, which text an update learns, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from aligner.algorithms.ppo import PPO, PPOConfig, Pretraining, TrainPPO
from aligner.data.collate import SupervisedExample
from aligner.data.config import BadLines, Learn, Overlong, PretrainingConfig, PromptDataConfig
from aligner.data.order import EpochSampler
from aligner.errors import ConfigError
from aligner.loop.loop import Clock
from aligner.losses.aggregation import Aggregation
from aligner.losses.policy import policy_loss
from aligner.losses.sft import pretraining_loss
from aligner.models.config import Architecture, Family
from aligner.models.training.optimizer import OptimizerConfig
from aligner.online.critics import ServedCritic
from aligner.parallel import platform
from aligner.protocols import Added
from aligner.servers.components import RewardConfig
from aligner.types import LabeledBatch, PolicyBatch

COEF = 0.7


def rows_of(lengths: list[int], width: int, first: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Generator]:
    """Random rows that are learnt from position `first` on."""
    generator, size, positions = torch.Generator().manual_seed(seed), torch.tensor(lengths), torch.arange(width)
    inside = positions < size[:, None]
    tokens = torch.randint(1, 61, (len(lengths), width), generator=generator) * inside
    return {"tokens": tokens, "lengths": size, "loss_mask": inside & (positions >= first)}, generator


def policy_batch() -> PolicyBatch:
    rows, generator = rows_of([12, 6, 9, 7], 12, 3, seed=1)
    x, y = (torch.randn(4, 12, generator=generator) for _ in range(2))
    return PolicyBatch(**rows, old_logprobs=0.1 * x - 4.0, advantages=y)


def text() -> LabeledBatch:
    return LabeledBatch(**rows_of([18, 5, 11], 18, 1, seed=2)[0])


def by_autograd(module, batch: LabeledBatch) -> dict[str, torch.Tensor]:
    """The gradient of the mean negative log-likelihood over all learnt tokens, by torch through the plain module, at temperature 1."""
    tokens, mask = batch.tokens.to(platform.device()), batch.loss_mask.to(platform.device())
    hidden = module(tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), None).transpose(0, 1)
    log_p = torch.log_softmax(hidden @ module.vocabulary_weight()[0].t(), dim=-1)
    chosen = log_p[:, :-1].gather(2, tokens[:, 1:, None])[:, :, 0]
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(-chosen[mask[:, 1:]].mean(), parameters), strict=True))


@pytest.mark.parametrize("aggregation", [Aggregation.token_mean, Aggregation.sequence_mean])
@pytest.mark.parametrize(
    "how",
    [{"micro_batch_size": 8}, {"micro_batch_size": 1}, {"micro_batch_tokens": 40, "packing": True}],
    ids=["whole", "single", "packed"],
)
def test_the_gradient_is_that_of_ppo_plus_coef_times_that_of_the_text(aggregation, how, make_model) -> None:
    """Each is divided by its own count. The samples are at temperature 0.7, the text is not."""
    loss = partial(policy_loss, clip_eps_low=0.2, clip_eps_high=0.2, aggregation=aggregation)
    adam = OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0, clip_grad=0.0)

    def gradients(added: list[Added]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        model = make_model("policy", optimizer=adam, training={"temperature": 0.7} | how)
        metrics = model.train_step(policy_batch(), loss, added)
        found = {name: p.main_grad.clone() for name, p in model.module.named_parameters()}
        return found, {name: metric.value() for name, metric in metrics.items()}

    plain = make_model("policy").module
    plain.requires_grad_(True)
    (alone, before), of_text = gradients([]), by_autograd(plain, text())
    both, after = gradients([Added(batch=text(), loss=pretraining_loss, coef=COEF)])
    assert max(float(one.abs().max()) for one in of_text.values()) > 1e-2  # it is of something
    for name, found in both.items():
        torch.testing.assert_close(found, alone[name] + COEF * of_text[name], rtol=0, atol=1e-6)
    own = ("policy/loss", "policy/clip_fraction", "policy/approx_kl")
    assert [after[name] for name in own] == pytest.approx([before[name] for name in own], rel=1e-6)
    nll = -make_model("policy").logprobs(text()).double().sum() / text().loss_mask.sum()
    assert after["policy/pretraining_loss"] == pytest.approx(float(nll), rel=1e-5)
    assert "sft/loss" not in after and "policy/pretraining_loss" not in before


def test_fewer_rows_of_text_than_replicas_are_refused(make_model) -> None:
    model = make_model("policy", optimizer=OptimizerConfig())
    model.model.topology = replace(model.model.topology, dp_size=4)
    with pytest.raises(ConfigError, match="a training batch of 3 is smaller than the 4 data-parallel replicas"):
        model.train_step(policy_batch(), policy_loss, [Added(batch=text(), loss=pretraining_loss, coef=1.0)])


def examples(count: int = 5) -> list[SupervisedExample]:
    return [SupervisedExample(tokens=(number + 1, 7, 8), loss_mask=(False, True, True), source=f"t:{number}") for number in range(count)]


def ptx(fakes, task, **config) -> PPO:
    settings = PPOConfig(rollouts_per_step=4, mini_batch_size=2, pretraining_coef=COEF, **config)
    held = Pretraining(examples=examples(), order=EpochSampler(5, 2, seed=1), pad_id=9, coef=COEF)
    critic = ServedCritic(task, fakes.FakeCritic([]))
    return PPO(settings, fakes.FakePolicy([]), task, critic, pretraining=held)


def firsts(algorithm: PPO) -> list[list[int]]:
    """The first tokens of the text's rows in each update."""
    return [added.batch.tokens[:, 0].tolist() for (added,) in algorithm.policy.added]


def test_every_update_takes_the_next_batch_and_a_resumed_run_the_one_after(fakes, make_task) -> None:
    whole = ptx(fakes, make_task([]))
    states = [whole.step(step, Clock()) and whole.state() for step in (1, 2, 3)]
    order = EpochSampler(5, 2, seed=1)
    assert firsts(whole) == [[row + 1 for row in order.indices(number)] for number in range(6)]
    assert {first for part in firsts(whole)[:3] for first in part} == {1, 2, 3, 4, 5}  # an epoch has all of it
    assert [state["pretraining_batches"] for state in states] == [2, 4, 6]
    (added,) = whole.policy.added[0]
    assert (added.coef, added.loss) == (COEF, pretraining_loss)
    assert added.batch.loss_mask.tolist() == [[False, True, True]] * 2
    resumed = ptx(fakes, make_task([]))
    resumed.load_state(states[0])
    resumed.step(2, Clock())
    assert firsts(resumed) == firsts(whole)[2:4]
    assert resumed.state()["pretraining_batches"] == states[1]["pretraining_batches"]


def test_steps_without_updates_take_no_text(fakes, make_task) -> None:
    algorithm = ptx(fakes, make_task([]), critic_warmup_steps=1)
    algorithm.step(1, Clock())
    assert algorithm.policy.added == [] and algorithm.state()["pretraining_batches"] == 0
    algorithm.step(2, Clock())
    assert len(algorithm.policy.added) == 2


def test_without_text_nothing_is_added_or_kept(fakes, make_task) -> None:
    task = make_task([])
    algorithm = PPO(PPOConfig(rollouts_per_step=4, mini_batch_size=2), fakes.FakePolicy([]), task, ServedCritic(task, fakes.FakeCritic([])))
    algorithm.step(1, Clock())
    assert algorithm.policy.added == [[], []] and "pretraining_batches" not in algorithm.state()
    later = ptx(fakes, make_task([]))  # the text is switched on in a run that began without
    later.load_state(algorithm.state())
    assert later.state()["pretraining_batches"] == 0


def run_with(coef: float = COEF, **pretraining) -> TrainPPO:
    algorithm = PPOConfig(rollouts_per_step=4, mini_batch_size=4, pretraining_coef=coef)
    return TrainPPO(reward=RewardConfig(serve=True), algorithm=algorithm, pretraining=PretrainingConfig(**pretraining))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(run_with, -1.0), "algorithm.pretraining_coef=-1.0: must be finite and not negative"),
        (partial(run_with, float("nan")), "algorithm.pretraining_coef=nan: must be finite"),
        (run_with, "algorithm.pretraining_coef=0.7: needs pretraining.train"),
        (partial(run_with, 0.0, train="a.jsonl"), "pretraining.train=a.jsonl: nothing learns it with algorithm.pretraining_coef=0"),
        (partial(run_with, train="a.jsonl", batch_size=0), "pretraining.batch_size=0: must be at least 1"),
        (partial(run_with, train="a.jsonl", max_length=1), "pretraining.max_length=1: must be at least 2"),
    ],
)
def test_refused_settings(make, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_batch_has_a_row_for_every_replica() -> None:
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 48}
    architecture = Architecture(family=Family.qwen2, vocab_size=61, max_position_embeddings=64, **sizes)
    with pytest.raises(ConfigError, match="pretraining.batch_size=3: smaller than the 4 data-parallel replicas"):
        run_with(train="a.jsonl", batch_size=3).check(architecture, 4)
    run_with(train="a.jsonl", batch_size=4).check(architecture, 4)
    run_with(0.0, batch_size=3).check(architecture, 4)


def test_the_text_is_read_as_the_run_reads_its_prompts() -> None:
    data = PromptDataConfig(train="p.jsonl", bad_lines=BadLines.skip, cache="kept", num_workers=2, chat_template="chatml")
    found = PretrainingConfig(train="t.jsonl", max_length=9).reading(data)
    assert (found.train, found.max_length, found.overlong, found.learn) == ("t.jsonl", 9, Overlong.truncate, Learn.responses)
    assert (found.bad_lines, found.cache, found.num_workers, found.chat_template) == (BadLines.skip, "kept", 2, "chatml")


def test_the_plan_counts_the_text_as_sequences_of_the_rollouts_length() -> None:
    """32 texts of 300 tokens are 48 sequences of 200 tokens beside each mini-batch of 4."""
    config = run_with(train="a.jsonl", batch_size=32, max_length=300)
    config.data.max_prompt_length, config.rollout.sampling.max_response_length = 120, 80
    assert config.traits().work.update_rows == 4 + 48
    config.algorithm.pretraining_coef = 0.0
    assert config.traits().work.update_rows == 4
