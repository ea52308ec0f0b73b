"""Rows with images in vLLM: against vLLM itself where it is installed, and what is said and made without it."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from model_steps import adam
from own_models import write_vision
from rollout_parts import sampled
from vision_models import write_seeing
from vision_rows import Rows, encoded, greedy_tokens, reference

from aligner.data.collate import rollout_batch
from aligner.errors import ConfigError, DataError, EngineError
from aligner.losses.sft import sft_loss
from aligner.models.config import Implementation
from aligner.models.families.wrappers import with_axes
from aligner.rollout.config import EngineKind, RolloutConfig, VerifyRefit, VLLMConfig
from aligner.rollout.create import create_engine
from aligner.rollout.engine import EngineSampling, GenRequest
from aligner.rollout.vllm import images as wrapper
from aligner.types import Images, Prompt, SamplingConfig

installed = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
# vLLM's kernels want heads of 32 dimensions. Qwen3-VL's axes take turns, though this file does not say so.
_WIDE: dict[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
_AXES = {"qwen2_5_vl": [4, 6, 6], "qwen3_vl": [6, 5, 5]}
MARKS = {"smolvlm": pytest.mark.skipif(find_spec("num2words") is None, reason="num2words, which its processor needs, is not installed")}
OWN, SEEN = {"implementation": Implementation.transformers}, {"images": True}
GREEDY = SamplingConfig(max_response_length=8, temperature=0.0)


def write(name: str, path: Path) -> Rows:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": _AXES[name]}} if name in _AXES else {}
    write_seeing(name, path, **_WIDE, **rope)
    return Rows(name, path)


def engine_of(policy: Any, rows: Rows, **more: Any) -> Any:
    vllm = VLLMConfig(enforce_eager=True)
    config = RolloutConfig(engine=EngineKind.vllm, sampling=SamplingConfig(max_response_length=8), max_batch_size=3, vllm=vllm)
    engine = create_engine(policy, replace(config, verify_refit=VerifyRefit.checksum, **more), eos_id=rows.end)
    engine.refit(policy.version)
    return engine


def gap(policy: Any, rollouts: list[Any]) -> float:
    """The largest difference between vLLM's log-probs and training's."""
    batch = rollout_batch(rollouts, 0)
    return float(((policy.logprobs(batch) - batch.rollout_logprobs).abs() * batch.loss_mask).max())


@installed
@pytest.mark.parametrize(
    ("name", "fields"),
    [("qwen2_5_vl", SEEN), ("qwen3_vl", SEEN), *(pytest.param(name, OWN, marks=MARKS.get(name, ())) for name in wrapper.KINDS)],
    ids=["qwen2_5_vl", "qwen3_vl", *(f"{name}-own" for name in wrapper.KINDS)],
)
def test_tokens_and_log_probs_are_trainings_before_and_after_a_step(name: str, fields: dict, load_policy, tmp_path: Path) -> None:
    """Rows with no, one and two images side by side. The step trains the tower too, so that nothing it has seen may be left over."""
    rows = write(name, tmp_path)
    training = {"micro_batch_size": 2, "total_steps": 10, "sees": rows.vision}
    policy = load_policy(tmp_path, config=fields | {"freeze": []}, training=training, optimizer=adam(lr=1e-2))
    engine, prompts, model = engine_of(policy, rows), rows.prompts(), reference(tmp_path)
    warm = EngineSampling(max_response_length=8, missing_ids=rows.vision.slot_ids)  # as with a tokenizer
    greedy, before = sampled(engine, prompts, sampling=GREEDY), sampled(engine, prompts, sampling=warm)
    for one in greedy:
        assert list(one.response) == greedy_tokens(rows, one.prompt.id, model, GREEDY.max_response_length)
    assert gap(policy, greedy) < 1e-4 and gap(policy, before) < 1e-4
    policy.train_step(rows.batch(), sft_loss)
    engine.refit(policy.version)
    after = sampled(engine, prompts, sampling=warm)
    assert gap(policy, after) < 1e-4 and [one.logprobs for one in after] != [one.logprobs for one in before]
    engine.shutdown()


@installed
def test_a_group_shares_its_image_and_another_image_shares_nothing(load_policy, tmp_path: Path, monkeypatch) -> None:
    """Two images of one size have the same tokens: what vLLM keeps is known by their digests."""
    rows = write("qwen2_5_vl", tmp_path)
    policy = load_policy(tmp_path, config=SEEN, training={"micro_batch_size": 2, "sees": rows.vision})
    engine = engine_of(policy, rows, prefill_chunk_tokens=16)
    model = engine.engine.foreign._llm.apply_model(lambda one: one)[0]
    seen: Counter[int] = Counter()  # images in the tower, by their patches

    def counted(look: Any = model.embed_multimodal, **given: Any) -> Any:
        seen.update(given["image_grid_thw"].prod(dim=1).tolist())
        return look(**given)

    monkeypatch.setattr(model, "embed_multimodal", counted)
    tokens = tuple(rows.tokens[3]) + tuple(rows.tokens[1]) * 20  # more than a page of vLLM's
    two = [Images.of([digest]) for digest in (rows.digests["c"], rows.vision.add(encoded("c", seed=7)))]
    prompts = [Prompt(tokens=tokens, id=i, source="test", extras={Images.name: images}) for i, images in enumerate(two)]
    group = sampled(engine, [prompts[0]] * 5, sampling=GREEDY)
    assert len({one.response for one in group}) == 1 and seen == {16: 1}
    both = sampled(engine, [*prompts, prompts[1]], sampling=GREEDY)
    assert seen == {16: 2} and gap(policy, both) < 1e-4
    assert both[0].logprobs != both[1].logprobs == both[2].logprobs
    lost = replace(prompts[0], tokens=tuple(rows.tokens[1]))
    with pytest.raises(DataError, match="request 0: its images have 4 features, its tokens 0 slots"):
        sampled(engine, [lost])
    engine.shutdown()


class Named(SimpleNamespace):
    """vLLM's `PlaceholderRange`, and an item of its `MultiModalKwargsItems`, of which there may be weak references."""


class Items(dict):
    """vLLM's `MultiModalKwargsItems`."""

    @classmethod
    def from_hf_inputs(cls, hf_inputs: dict[str, torch.Tensor], config_by_key: dict[str, str]) -> Items:
        return cls(image=[Named(**{name: hf_inputs[name] for name in config_by_key})])


def test_a_row_of_slots_with_others_between_them_has_a_mask_and_a_group_has_one_copy(tmp_path: Path, monkeypatch) -> None:
    """An image of Pixtral's is written with a token at the end of each row."""
    rows = write("mistral3", tmp_path)
    for name, own in (("vllm.inputs", {"mm_input": lambda *given: given}), ("vllm.multimodal.inputs", {"PlaceholderRange": Named})):
        module = ModuleType(name)
        vars(module).update(own, MultiModalKwargsItems=Items)
        monkeypatch.setitem(sys.modules, name, module)
    processor = SimpleNamespace(_get_mm_fields_config=lambda inputs, options: dict.fromkeys(inputs, "batched"))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(renderer=SimpleNamespace(get_mm_processor=lambda: processor)))
    given = wrapper.GivenImages(llm, rows.vision, torch.bfloat16)
    prompt = rows.prompts()[2]
    request = GenRequest(index=0, tokens=prompt.tokens, seed=1, extras=prompt.extras)
    (tokens, items, hashes, places), (_, again, _, _) = given.prompt(request), given.prompt(request)
    assert tuple(tokens) == prompt.tokens and hashes == {"image": rows.images[2]}
    for place in places["image"]:
        shown = prompt.tokens[place.offset : place.offset + place.length]
        assert place.is_embed.tolist() == [True, True, False, True, True] == [token == 3 for token in shown]
    assert [item.pixel_values.dtype for item in items["image"]] == [torch.bfloat16] * 2
    assert all(one is other for one, other in zip(items["image"], again["image"], strict=True))
    with pytest.raises(DataError, match="its images have 8 features, its tokens 4 slots"):
        given.prompt(replace(request, tokens=prompt.tokens[:-12]))


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_names_of_a_missing_torchvision_are_there_for_an_import_and_cannot_be_called() -> None:
    with wrapper._without_torchvision():
        functional = importlib.import_module("torchvision.transforms.v2").functional
    with pytest.raises(ImportError, match=r"torchvision\.transforms\.v2\.functional\.resize was called"):
        functional.resize(1)
    with pytest.raises(ImportError):
        importlib.import_module("torchvision")


def test_a_config_says_which_way_the_axes_take_turns(tmp_path: Path) -> None:
    """transformers' Qwen3-VL mixes them whatever its file says, vLLM only if it says so."""
    text = {"hidden_size": 64, "num_attention_heads": 2, "rope_theta": 5e5}
    mixed = with_axes({"model_type": "qwen3_vl", "text_config": text | {"rope_scaling": {"rope_type": "default"}}})["text_config"]
    assert mixed["rope_parameters"]["mrope_section"] == [24, 20, 20] and mixed["rope_parameters"]["mrope_interleaved"] is True
    assert mixed["rope_parameters"]["rope_theta"] == 5e5 and "rope_scaling" not in mixed
    flat = with_axes({"model_type": "qwen2_5_vl", **text, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}})
    assert flat["rope_parameters"]["mrope_section"] == [4, 6, 6] and "mrope_interleaved" not in flat["rope_parameters"]
    assert with_axes({"model_type": "granite"}) == {"model_type": "granite"}


def test_other_models_of_images_are_refused_with_those_that_have_run(load_policy, tmp_path: Path) -> None:
    write_vision("gemma3", tmp_path)
    policy = load_policy(tmp_path, config=OWN)
    with pytest.raises(
        ConfigError,
        match=r"rollout\.engine=vllm: gemma3 is a model of images too.*has run with qwen2_5_vl, qwen3_vl, mistral3, llava, smolvlm;",
    ):
        create_engine(policy, RolloutConfig(engine=EngineKind.vllm), eos_id=1)


@installed
def test_a_model_without_an_image_processor_refuses_rows_with_images(load_policy, tmp_path: Path) -> None:
    rows = write("qwen2_5_vl", tmp_path)
    engine = engine_of(load_policy(tmp_path, config=SEEN), rows)
    with pytest.raises(EngineError, match="test: has images, which rollout.engine=vLLM does not read"):
        sampled(engine, rows.prompts())
    assert len(sampled(engine, [rows.prompts()[1]])) == 1
    engine.shutdown()


@installed
def test_vllms_attention_on_cpus_is_causal_inside_images() -> None:
    """So Gemma 3, whose images' tokens look at those behind them, is not among the models that it reads."""
    backend = importlib.import_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    assert not backend.supports_mm_prefix() and "gemma3" not in wrapper.KINDS
