"""Noise on the embeddings of training passes (NEFTune): its size, whose rows have which, and that nothing else sees it."""

from __future__ import annotations

import math

import pytest
import torch
from model_steps import adam, save
from packed_models import make_batch

from aligner.algorithms.sft import SFTConfig, TrainSFT
from aligner.errors import ConfigError
from aligner.losses.sft import sft_loss
from aligner.models.checkpoint import checkpoint
from aligner.models.config import ModelConfig
from aligner.models.modules.noise import noise_of

ALPHA, PACKED = 5.0, {"packing": True, "micro_batch_tokens": 64}


@pytest.fixture
def make(load_policy, hf_directory):
    def policy(name: str, alpha: float = ALPHA, **shape):
        training = shape | {"neftune_alpha": alpha, "total_steps": 10}
        return load_policy(hf_directory(name), optimizer=adam(), config=shape, training=training)

    return policy


def inputs_of(policy, act) -> list[torch.Tensor]:
    """What goes into the first layer while `act` runs: [rows, L, d] of each pass."""
    found: list[torch.Tensor] = []
    module, is_own = policy.module, hasattr(policy.module, "hf")
    layer = module.hf.model.layers[0] if is_own else module.decoder.layers[0]

    def see(_, args, options):
        hidden = (args[0] if args else options["hidden_states"]).detach().clone()
        found.append(hidden if is_own else hidden.transpose(0, 1))

    hook = layer.register_forward_pre_hook(see, with_kwargs=True)
    act()
    hook.remove()
    return found


def test_each_number_is_uniform_up_to_alpha_over_the_root_of_tokens_and_width():
    """Two rows of 400 and 100 tokens in 500 slots: +-5 / sqrt(400 * 64) and +-5 / sqrt(100 * 64), and nothing in the padding."""
    lengths, width = torch.tensor([400, 100]), 400
    token_of = torch.where(torch.arange(width) < lengths[:, None], torch.arange(2 * width).view(2, width), -1)
    found = noise_of(token_of, lengths, [6, 3], width=width, alpha=ALPHA, seed=(1, 0)).added(torch.zeros(2, width, 64))
    for row, bound in ((found[0], 5 / 160), (found[1, :100], 5 / 80)):
        assert 0.999 * bound < row.abs().max() <= bound
        assert row.mean().abs() < 0.03 * bound
        assert row.square().mean() == pytest.approx(bound**2 / 3, rel=0.03)  # that of a uniform distribution
        assert torch.corrcoef(row[:4]).fill_diagonal_(0).abs().max() < 0.5  # of neighbouring tokens
    assert not found[1, 100:].any()
    for seed, rows in (((2, 0), [6, 3]), ((1, 1), [6, 3]), ((1, 0), [3, 6])):  # another run, update or row
        other = noise_of(token_of, lengths, rows, width=width, alpha=ALPHA, seed=seed).added(torch.zeros(2, width, 64))
        assert (other == found)[0].float().mean() < 0.001


@pytest.mark.parametrize("name", ["qwen2", "granite"], ids=["megatron", "transformers"])
def test_training_passes_alone_have_it(name, make):
    """Training adds the row's own noise to the same embeddings; log-probs and validations are those without it. Granite multiplies what its
    embedding gives, which is where TRL adds noise."""
    policy, plain, batch = make(name, micro_batch_size=4), make(name, alpha=0.0, micro_batch_size=4), make_batch()
    assert torch.equal(policy.logprobs(batch), plain.logprobs(batch))
    clean = inputs_of(plain, lambda: plain.logprobs(batch))[0]
    assert torch.equal(inputs_of(policy, lambda: policy.logprobs(batch))[0], clean)
    assert torch.equal(inputs_of(plain, lambda: plain.train_step(batch, sft_loss))[0], clean)
    scale = policy.module.hf.config.embedding_multiplier if name == "granite" else 1.0
    noise = (inputs_of(policy, lambda: policy.train_step(batch, sft_loss))[0] - clean) / scale
    lengths = noise.any(dim=2).sum(dim=1).tolist()
    assert sorted(lengths) == [7, 10, 12, 12]
    for row, length in zip(noise, lengths, strict=True):
        bound = ALPHA / math.sqrt(length * row.shape[1])
        assert not row[length:].any() and 0.9 * bound < row.abs().max() <= bound * 1.0001


@pytest.mark.parametrize("name", ["qwen2", "granite"], ids=["megatron", "transformers"])
def test_packing_and_micro_batches_change_no_noise(name, make):
    policies = [make(name, micro_batch_size=1), make(name, micro_batch_size=4), make(name, **PACKED)]
    losses = [[one.train_step(make_batch(), sft_loss)["sft/loss"].value() for _ in range(2)] for one in policies]
    clean = make(name, alpha=0.0).train_step(make_batch(), sft_loss)["sft/loss"].value()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)
    assert abs(losses[0][0] - clean) > 1e-3


def test_every_update_has_noise_of_its_own(make):
    policy = make("qwen2", micro_batch_size=4)
    for group in policy.model.optimizer.param_groups:
        group["max_lr"] = group["min_lr"] = 0.0
    first, second = (inputs_of(policy, lambda: policy.train_step(make_batch(), sft_loss))[0] for _ in range(2))
    assert (first == second).float().mean() < 0.3  # the padding


def test_a_resumed_run_has_the_noise_of_the_whole_one(make, tmp_path):
    whole, first, resumed = (make("qwen2") for _ in range(3))
    losses = [whole.train_step(make_batch(), sft_loss)["sft/loss"].value() for _ in range(3)]
    first.train_step(make_batch(), sft_loss)
    checkpoint.load(resumed.model, save(first, tmp_path))
    assert [resumed.train_step(make_batch(), sft_loss)["sft/loss"].value() for _ in range(2)] == losses[1:]


def test_settings_that_cannot_be():
    with pytest.raises(ConfigError, match="algorithm.neftune_alpha=-1"):
        SFTConfig(neftune_alpha=-1.0)
    shared = ModelConfig(micro_batch_tokens=64, packing=True, share_prompts=True)
    with pytest.raises(ConfigError, match="algorithm.neftune_alpha=5.0: not with model.share_prompts=true, because"):
        TrainSFT(model=shared, algorithm=SFTConfig(neftune_alpha=5.0))
