"""Models that see: log-probs, gradients of every part, steps and greedy tokens are those of plain `transformers`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_steps import adam
from own_models import VISION
from vision_rows import Rows, greedy_tokens, plain, reference, seeing_directory

from aligner.losses.sft import sft_loss
from aligner.models.config import Implementation
from aligner.rollout.config import RolloutConfig
from aligner.rollout.create import create_engine
from aligner.types import Images, Prompt, SamplingConfig

directory = pytest.fixture(scope="module")(seeing_directory)
OWN = {"implementation": Implementation.transformers}


@pytest.mark.parametrize("name", VISION)
def test_log_probs_and_gradients_of_every_part_are_those_of_transformers(name: str, directory, load_policy) -> None:
    rows = Rows(name, directory(name))
    training = {"micro_batch_size": 2, "total_steps": 10, "vision": rows.vision}
    policy = load_policy(directory(name), config=OWN | {"freeze": []}, training=training, optimizer=adam(clip_grad=0.0))
    logprobs, gradients = plain(reference(directory(name)), rows)
    assert torch.allclose(policy.logprobs(rows.batch()), logprobs, atol=2e-5)
    blind = policy.logprobs(replace(rows.batch(), extras={}))
    assert float((blind - logprobs)[0].abs().max()) > 0.01  # the images matter
    metrics = policy.train_step(rows.batch(), sft_loss)
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    assert metrics["optim/grad_norm"].value() == pytest.approx(float(norm), rel=1e-4)
    own = dict(policy.module.named_parameters())
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert any("vis" in one and float(gradient.abs().max()) > 1e-4 * largest for one, gradient in gradients.items())
    for one, gradient in gradients.items():
        assert torch.allclose(own[f"hf.{one}"].main_grad, gradient, atol=1e-4 * largest), one


@pytest.mark.parametrize("name", VISION)
def test_greedy_tokens_are_those_of_generate(name: str, directory, load_policy) -> None:
    rows = Rows(name, directory(name))
    policy = load_policy(directory(name), config=OWN, training={"vision": rows.vision})
    prompts = [
        Prompt(tokens=tuple(tokens), id=number, source="test", extras={"images": Images.of(images)} if images else {})
        for number, (tokens, images) in enumerate(zip(rows.tokens, rows.images, strict=True))
    ]
    greedy = SamplingConfig(max_response_length=10, temperature=0.0)
    config = RolloutConfig(max_batch_size=3, sampling=SamplingConfig(max_response_length=10))
    engine = create_engine(policy, config, eos_id=rows.end, decode=str)
    model = reference(directory(name))
    rollouts = [one for part in engine.generate(prompts, list(range(len(prompts))), greedy) for one in part]
    assert len(rollouts) == len(prompts)
    for rollout in rollouts:
        assert list(rollout.response) == greedy_tokens(rows, rollout.prompt.id, model, greedy.max_response_length)
