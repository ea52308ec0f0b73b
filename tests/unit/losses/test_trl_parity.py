"""TRL's GRPO and RLOO trainers on the same log-probs, rewards and masks: the same advantages, losses and gradients.

TRL's own `_generate_and_score_completions` and `_compute_loss` run on an object that has the settings they read; sampling, rewards and
forward passes are replaced by given tensors.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from aligner.losses.advantages import Estimator, estimate, outcome_rewards, shaped_rewards
from aligner.losses.aggregation import Aggregation
from aligner.losses.correction import Correction, CorrectionConfig, Level
from aligner.losses.kl import KLEstimator, kl_estimate
from aligner.losses.policy import Objective, policy_loss
from aligner.types import PolicyBatch, TokenOutputs

trl = pytest.importorskip("trl", reason="parity with TRL needs trl 1.16, which the `dev` extra installs on Python 3.11 and later")

GROUP, PROMPT, LENGTHS = 4, 2, (5, 3, 6, 1, 4, 2, 6, 3)
WIDTH, ROWS = max(LENGTHS), len(LENGTHS)
REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.25, 1.0, 1.0, 1.0, 1.0])  # the second group has no signal
LOSS_REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.25, -2.0, 1.0, 3.0, 0.5])
MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]


def numbers(seed, spread):
    return spread * torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


OLD = -1.0 + numbers(1, 0.3)
NEW = OLD + numbers(2, 0.3)  # ratios on both sides of both bounds
REF = OLD + numbers(3, 0.4)
ENGINE = OLD + numbers(4, 0.4)
ENTROPY = 1.0 + numbers(5, 0.2).abs()


class Given(SimpleNamespace):
    """A trainer's settings, with given tensors in the place of its model."""

    def __init__(self, rewards, **settings):
        model, reference = (SimpleNamespace(training=True, is_gradient_checkpointing=False) for _ in range(2))
        args = {"use_bias_correction_kl": False, "delta": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
        args |= {"steps_per_generation": 1, "per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 1}
        args |= {name: settings.pop(name) for name in list(settings) if name in args}
        alone = {"device": torch.device("cpu"), "num_processes": 1, "process_index": 0, "sync_gradients": True}
        super().__init__(
            model=model,
            ref_model=reference,
            args=SimpleNamespace(gradient_checkpointing_kwargs=None, **args),
            accelerator=SimpleNamespace(gather=torch.clone, reduce=lambda x, reduction: x, **alone),
            num_iterations=2,  # so that old log-probs are not those of the moment
            loss_type="grpo",
            importance_sampling_level="token",
            epsilon_low=0.2,
            epsilon_high=0.28,
            beta=0.0,
            scale_rewards="group",
            normalize_advantages=False,
            reward_clip_range=None,
            multi_objective_aggregation="sum_then_normalize",
            num_generations=GROUP,
            max_completion_length=10,
            current_gradient_accumulation_steps=1,
            use_vllm=False,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_min=None,
            vllm_importance_sampling_clip_max=1.5,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            use_adaptive_entropy=False,
            entropy_coef=0.0,
            mask_truncated_completions=False,
            environment_factories=None,
            environments=None,
            tools=None,
            pad_to_multiple_of=None,
            _tokenizer=SimpleNamespace(pad_token_id=0),
            reward_weights=torch.ones(1),
            reward_func_names=["given"],
            _metrics=defaultdict(lambda: defaultdict(list)),
            _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
            _pending_extra_logs={},
            _pending_metrics={},
            rewards=rewards,
        )
        vars(self).update(settings)

    def _calculate_rewards(self, *_):
        return self.rewards[:, None]

    def _get_per_token_logps_and_entropies(self, model, *_, **__):
        logprobs = {id(self.model): OLD, id(self.ref_model): REF}.get(id(model))
        return (model.logprobs if logprobs is None else logprobs), ENTROPY, None


class GivenGRPO(Given):
    def _generate(self, prompts):
        completions = [[3] * length for length in LENGTHS]
        engine = [row[:length].tolist() for row, length in zip(ENGINE, LENGTHS, strict=True)]
        return [[5] * PROMPT] * ROWS, completions, None, completions, engine, {}, None, None


class GivenRLOO(Given):
    def _generate(self, prompts):
        completions = [[3] * length for length in LENGTHS]
        return [[5] * PROMPT] * ROWS, completions, completions


def scored(trainer, given):
    """What TRL makes of the rollouts."""
    return trainer._generate_and_score_completions(given, [{"prompt": "ab"}] * ROWS)


def theirs(trainer, given, inputs):
    """(loss, its gradient on every token [B, T]) of TRL."""
    logprobs = NEW.clone().requires_grad_()
    loss = trainer._compute_loss(given, SimpleNamespace(logprobs=logprobs), inputs)
    loss.backward()
    return loss.item(), logprobs.grad


def on_prompt(x):
    """[B, T] as this project has it: the prompt's tokens first."""
    return torch.nn.functional.pad(x, (PROMPT, 0))


def batch(advantages):
    return PolicyBatch(
        tokens=torch.zeros(ROWS, PROMPT + WIDTH, dtype=torch.int64),
        lengths=torch.tensor(LENGTHS) + PROMPT,
        loss_mask=on_prompt(MASK),
        old_logprobs=on_prompt(OLD),
        advantages=advantages,
        ref_logprobs=on_prompt(REF),
        rollout_logprobs=on_prompt(ENGINE),
    )


def ours(advantages, **options):
    """(loss, its gradient on every token [B, T]) of this project."""
    logprobs = NEW.clone().requires_grad_()
    outputs = TokenOutputs(logprobs=on_prompt(logprobs), entropy=on_prompt(ENTROPY))
    settings = {"clip_eps_low": 0.2, "clip_eps_high": 0.28, "aggregation": Aggregation.sequence_mean} | options
    result = policy_loss(outputs, batch(advantages), **settings)
    loss = result.total / result.count
    loss.backward()
    return loss.item(), logprobs.grad


def same(left, right):
    assert left[0] == pytest.approx(right[0], rel=2e-5, abs=1e-6)
    torch.testing.assert_close(left[1], right[1], rtol=2e-5, atol=1e-6)


TOKEN_MEAN = {"aggregation": Aggregation.token_mean}
CONSTANT = {"aggregation": Aggregation.sequence_sum_constant, "aggregation_constant": 10.0}
VARIANTS = {
    "grpo": ({}, {}),
    "bnpo": ({"loss_type": "bnpo"}, TOKEN_MEAN),
    "dapo": ({"loss_type": "dapo"}, TOKEN_MEAN),
    "dr_grpo": ({"loss_type": "dr_grpo"}, CONSTANT),
    "sapo": ({"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
             {"objective": Objective.sapo, "tau_pos": 2.0, "tau_neg": 3.0}),
    "gspo": ({"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06},
             {"objective": Objective.gspo, "clip_eps_low": 0.05, "clip_eps_high": 0.06}),
    "luspo": ({"loss_type": "luspo", "importance_sampling_level": "sequence"},
              {"objective": Objective.gspo, "aggregation": Aggregation.sequence_sum_constant, "aggregation_constant": 1.0}),
    "dual clip": ({"delta": 1.4}, {"dual_clip": 1.4}),
    "kl": ({"beta": 0.1}, {"kl_coef": 0.1, "kl_estimator": KLEstimator.k3}),
    "kl, token mean": ({"beta": 0.1, "loss_type": "dapo"}, {"kl_coef": 0.1, **TOKEN_MEAN}),
    "kl, gspo": ({"beta": 0.1, "importance_sampling_level": "sequence"}, {"kl_coef": 0.1, "objective": Objective.gspo}),
    "entropy": ({"loss_type": "dapo", "_entropy_bonus_enabled": True, "entropy_coef": 0.05}, {"entropy_coef": 0.05, **TOKEN_MEAN}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient(name):
    settings, options = VARIANTS[name]
    given = GivenGRPO(LOSS_REWARDS, **settings)
    inputs = scored(trl.GRPOTrainer, given)
    same(ours(on_prompt(inputs["advantages"][:, None] * MASK), **options), theirs(trl.GRPOTrainer, given, inputs))


def test_cispo():
    """TRL's bound is the ratio itself, and its value has the log-prob where ours has the log-ratio: a constant."""
    given = GivenGRPO(LOSS_REWARDS, loss_type="cispo", epsilon_high=1.28)
    inputs = scored(trl.GRPOTrainer, given)
    loss, gradient = theirs(trl.GRPOTrainer, given, inputs)
    advantages = inputs["advantages"][:, None] * MASK
    shift = (((NEW - OLD).exp().clamp(max=1.28) * advantages * OLD).sum() / MASK.sum()).item()
    same(ours(on_prompt(advantages), objective=Objective.cispo, **TOKEN_MEAN), (loss + shift, gradient))


CORRECTIONS = {
    "token_truncate": ({"vllm_importance_sampling_clip_max": 1.3}, {"kind": Correction.tis, "high": 1.3}),
    "sequence_truncate": ({"vllm_importance_sampling_clip_max": 1.3},
                          {"kind": Correction.tis, "level": Level.sequence, "high": 1.3}),
    "token_mask": ({"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.3},
                   {"kind": Correction.icepop, "low": 0.8, "high": 1.3}),
    "sequence_mask": ({"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 1.5},
                      {"kind": Correction.icepop, "level": Level.sequence, "low": 0.5, "high": 1.5}),
}  # fmt: skip


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_correction_of_the_gap_between_engine_and_trainer(mode):
    """TRL's masks are weights inside the band and 0 outside: our `band`. The KL term is not weighed."""
    settings, correction = CORRECTIONS[mode]
    given = GivenGRPO(LOSS_REWARDS, use_vllm=True, vllm_importance_sampling_mode=mode, beta=0.1, **settings)
    inputs = scored(trl.GRPOTrainer, given)
    advantages = on_prompt(inputs["advantages"][:, None] * MASK)
    corrected = ours(advantages, kl_coef=0.1, correction=CorrectionConfig(**correction))
    same(corrected, theirs(trl.GRPOTrainer, given, inputs))
    plain = ours(advantages, kl_coef=0.1)
    assert (corrected[1] - plain[1]).abs().max() > 1e-3  # there was something to correct


@pytest.mark.parametrize(
    "rewards", [REWARDS, LOSS_REWARDS, torch.tensor([1.0, float("nan"), 0.5, 0.0, float("nan"), 2.0] + [float("nan")] * 2)]
)
def test_group_advantages(rewards):
    """With and without the division, and with completions that have no reward; TRL adds 1e-4 to the deviation, ours 1e-6."""
    mask, groups, valid = on_prompt(MASK), torch.arange(ROWS) // GROUP, ~rewards.isnan()
    token_rewards = outcome_rewards(rewards.nan_to_num(), mask)
    plain = scored(trl.GRPOTrainer, GivenGRPO(rewards, scale_rewards="none"))["advantages"]
    found = estimate(Estimator.grpo, token_rewards, mask, groups, valid=valid, normalize_std=False)
    torch.testing.assert_close(found, on_prompt(plain[:, None] * MASK), rtol=1e-6, atol=1e-6)
    scaled = scored(trl.GRPOTrainer, GivenGRPO(rewards))["advantages"]
    found = estimate(Estimator.grpo, token_rewards, mask, groups, valid=valid)
    torch.testing.assert_close(found, on_prompt(scaled[:, None] * MASK), rtol=1e-3, atol=1e-6)
    left = scored(trl.RLOOTrainer, GivenRLOO(rewards))["advantages"]
    found = estimate(Estimator.rloo, token_rewards, mask, groups, valid=valid)
    torch.testing.assert_close(found, on_prompt(left[:, None] * MASK), rtol=1e-6, atol=1e-6)


def test_rloo_with_the_kl_in_the_reward():
    """TRL's RLOO takes beta times the sum of k1 off a completion's reward; clipping comes before it."""
    given = GivenRLOO(LOSS_REWARDS, beta=0.3, reward_clip_range=(-1.0, 2.0))
    expected = scored(trl.RLOOTrainer, given)["advantages"]
    kl = on_prompt(kl_estimate(OLD, REF, KLEstimator.k1))
    token_rewards = shaped_rewards(LOSS_REWARDS.clamp(-1.0, 2.0), on_prompt(MASK), kl, 0.3)
    found = estimate(Estimator.rloo, token_rewards, on_prompt(MASK), torch.arange(ROWS) // GROUP)
    torch.testing.assert_close(found, on_prompt(expected[:, None] * MASK), rtol=1e-5, atol=2e-6)
