"""Models that see: log-probs, gradients of every part, steps and greedy tokens are those of plain `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from model_steps import adam, same, save, weights_of
from own_models import VISION
from safetensors.torch import load_file
from vision_rows import Rows, encoded, greedy_tokens, plain, reference, seeing_directory

from aligner.data.collate import rollout_batch
from aligner.data.tokenizer import load_tokenizer
from aligner.environments.config import EnvironmentConfig, ObservationForm
from aligner.environments.environment import Observation, Turn
from aligner.environments.exchange import environment_follow_up
from aligner.errors import ConfigError, DataError, EngineError
from aligner.losses.sft import sft_loss
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Implementation, LoraConfig, Part
from aligner.models.families.own_modules import part_of
from aligner.models.modules.peft import save_peft
from aligner.models.weights import save_hf
from aligner.rollout.config import RolloutConfig
from aligner.rollout.create import create_engine
from aligner.types import Images, Prompt, SamplingConfig

PACKED = {"packing": True, "micro_batch_tokens": 90}


@pytest.fixture
def load_seeing(load_policy) -> Callable[..., Any]:
    """As `load_policy`, with transformers' modules: the text parts alone have layers here."""

    def load(path: Path, *, config: dict[str, Any] | None = None, **options: Any) -> Any:
        return load_policy(path, config={"implementation": Implementation.transformers} | (config or {}), **options)

    return load


directory = pytest.fixture(scope="module")(seeing_directory)


@pytest.mark.parametrize("name", VISION)
def test_log_probs_and_gradients_of_every_part_are_those_of_transformers(name: str, directory, load_seeing) -> None:
    rows = Rows(name, directory(name))
    training = {"micro_batch_size": 2, "total_steps": 10, "sees": rows.vision}
    policy = load_seeing(directory(name), config={"freeze": []}, training=training, optimizer=adam(clip_grad=0.0))
    logprobs, gradients = plain(reference(directory(name)), rows)
    assert torch.allclose(policy.logprobs(rows.batch()), logprobs, atol=2e-5)
    policy.module.vision, seeing = None, policy.module.vision
    blind = policy.logprobs(replace(rows.batch(), extras={}))
    policy.module.vision = seeing
    assert float((blind - logprobs)[0].abs().max()) > 0.01  # the images matter
    metrics = policy.train_step(rows.batch(), sft_loss)
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    assert metrics["optim/grad_norm"].value() == pytest.approx(float(norm), rel=1e-4)
    own = dict(policy.module.named_parameters())
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert any("vis" in one and float(gradient.abs().max()) > 1e-4 * largest for one, gradient in gradients.items())
    for one, gradient in gradients.items():
        assert torch.allclose(own[f"hf.{one}"].main_grad.cpu(), gradient, atol=1e-4 * largest), one


@pytest.mark.parametrize("name", VISION)
def test_greedy_tokens_are_those_of_generate(name: str, directory, load_seeing) -> None:
    rows = Rows(name, directory(name))
    policy = load_seeing(directory(name), training={"sees": rows.vision})
    prompts = rows.prompts()
    greedy = SamplingConfig(max_response_length=10, temperature=0.0)
    config = RolloutConfig(max_batch_size=3, sampling=SamplingConfig(max_response_length=10))
    engine = create_engine(policy, config, eos_id=rows.end, decode=str)
    model = reference(directory(name))
    rollouts = [one for part in engine.generate(prompts, list(range(len(prompts))), greedy) for one in part]
    assert len(rollouts) == len(prompts)
    for rollout in rollouts:
        assert list(rollout.response) == greedy_tokens(rows, rollout.prompt.id, model, greedy.max_response_length)


@pytest.mark.parametrize("name", ["qwen3_vl", "smolvlm"])
def test_a_resumed_run_continues_bit_for_bit_and_its_export_has_the_frozen_parts_untouched(
    name: str, directory, load_seeing, tmp_path
) -> None:
    rows = Rows(name, directory(name))
    options: dict[str, Any] = {"config": {"freeze": [Part.vision]}, "training": {"total_steps": 10, "sees": rows.vision}}
    whole, first, resumed = (load_seeing(directory(name), optimizer=adam(), **options) for _ in range(3))
    for policy, steps in ((whole, 4), (first, 2)):
        for _ in range(steps):
            policy.train_step(rows.batch(), sft_loss)
    checkpoint.load(resumed.model, save(first, tmp_path / "saved"))
    for _ in range(2):
        resumed.train_step(rows.batch(), sft_loss)
    assert same(weights_of(whole), weights_of(resumed))
    save_hf(resumed.chunks, tmp_path / "export", writer=True)
    before, after = (load_file(one / "model.safetensors") for one in (directory(name), tmp_path / "export"))
    assert before.keys() == after.keys()
    started = reference(directory(name))
    trained = {one: parameter.cpu() for one, parameter in resumed.module.hf.named_parameters()}
    changed = {one for one, parameter in trained.items() if not torch.equal(parameter, started.get_parameter(one))}
    assert {part_of(one, started) for one in changed} == {Part.text, Part.projector}


@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_adapters_of_every_part_are_pefts(name: str, directory, load_seeing, tmp_path: Path) -> None:
    rows = Rows(name, directory(name))
    lora = LoraConfig(rank=4, alpha=8.0, parts=list(Part))
    training = {"total_steps": 10, "sees": rows.vision}
    policy = load_seeing(directory(name), config={"lora": lora}, training=training, optimizer=adam(lr=0.01))
    for _ in range(2):
        policy.train_step(rows.batch(), sft_loss)
    layers = [one.partition(".adapter")[0] for one in weights_of(policy) if ".b." in one]
    assert {part_of(f"{layer.removeprefix('hf.')}.weight", policy.module.hf) for layer in layers} == set(Part)
    save_peft(policy.chunks, tmp_path, writer=True)
    adapted = peft.PeftModel.from_pretrained(reference(directory(name)), tmp_path).eval().base_model.model
    assert torch.allclose(policy.logprobs(rows.batch()), plain(adapted, rows)[0], atol=2e-5)
    again = load_seeing(directory(name), config={"lora": replace(lora, path=str(tmp_path))}, training={"sees": rows.vision})
    assert torch.equal(again.logprobs(rows.batch()), policy.logprobs(rows.batch()))


class Album:
    """Shows two pictures, then ends the episode."""

    def reset(self, prompt: Prompt) -> None:
        return None

    def step(self, state: None, turn: Turn) -> Observation:
        shown = [encoded("a"), encoded("c")]
        return Observation(done=True, reward=1.0) if turn.number > 1 else Observation(text="this <image>, that <image>?", images=shown)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "smolvlm"])
def test_an_environment_shows_pictures(name: str, directory, load_seeing) -> None:
    """Of a second turn too, the engine's log-probs are the trainer's; no slot is sampled."""
    rows = Rows(name, directory(name))
    tokenizer = load_tokenizer(directory(name)).seeing(rows.vision)
    policy = load_seeing(directory(name), training={"sees": rows.vision})
    settings = EnvironmentConfig(path=f"{__name__}:Album", form=ObservationForm.chat, role="user", max_turns=3)
    follow_up = environment_follow_up(settings, tokenizer, rows.prompts())
    config = RolloutConfig(max_batch_size=3, sampling=SamplingConfig(max_response_length=250, stop_token_ids=list(range(30, 80))))
    engine = create_engine(policy, config, tokenizer=tokenizer, follow_up=follow_up)
    prompts = [prompt for prompt in rows.prompts() for _ in range(2)]
    rollouts = [one for part in engine.generate(prompts, list(range(len(prompts)))) for one in part]
    shown = [one for one in rollouts if one.num_turns > 1]
    assert len(rollouts) == len(prompts) and shown
    for rollout in shown:
        assert Images.digests(rollout.all_extras["images"])[-2:] == [rows.digests["a"], rows.digests["c"]]
        text = tokenizer.decode(rollout.response, skip_special=False)
        assert "this " in text and rows.vision.expansion(rows.digests["a"]) in text
    drawn = torch.tensor([token for one in rollouts for token, own in zip(one.response, one.written or (), strict=True) if own])
    assert not rows.vision.types(drawn).any()
    batch = rollout_batch(rollouts, tokenizer.pad_id)
    gap = (policy.logprobs(batch) - batch.rollout_logprobs).abs() * batch.loss_mask
    assert float(gap.max()) < 1e-4


def test_rows_that_lost_their_images_are_refused(directory, load_seeing) -> None:
    rows = Rows("llava", directory("llava"))
    policy = load_seeing(directory("llava"), training={"sees": rows.vision})
    with pytest.raises(DataError, match="rows have slots of images, and no images"):
        policy.logprobs(replace(rows.batch(), extras={}))
    packed = load_seeing(directory("llava"), config=PACKED, training={"sees": rows.vision} | PACKED)
    with pytest.raises(ConfigError, match=r"model.packing=true: .*allowed: false"):
        packed.logprobs(rows.batch())
    text = load_seeing(directory("llava"))
    with pytest.raises(EngineError, match="has images, which rollout.engine=transformers does not read"):
        create_engine(text, RolloutConfig(max_batch_size=2), eos_id=rows.end, decode=str).generate(rows.prompts(), range(4))
