"""Images on Megatron-Core's layers: log-probs, gradients of every part, exports and checkpoints are those of plain `transformers`."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from model_steps import adam, save
from safetensors.torch import load_file
from torch import Tensor
from vision_models import picture
from vision_rows import PICTURES, Rows, plain, reference, seeing_directory

from aligner.commands import convert as commands_convert
from aligner.commands.parts import ConvertOptions
from aligner.errors import ConfigError, DataError
from aligner.files import conf_directory
from aligner.losses.sft import sft_loss
from aligner.models import create
from aligner.models.architecture.divisible import check_together
from aligner.models.config import Dtype, HFArchitecture, LoraConfig, LoraTarget, ModelConfig, Part, Recompute, SeeingArchitecture
from aligner.models.families import weight_names
from aligner.models.modules.build import LanguageModel, build_model
from aligner.models.modules.fusions import Kernel, fusions
from aligner.models.modules.peft import load_peft, save_peft
from aligner.models.modules.shared_prompts import prompt_keys
from aligner.models.weights import save_hf
from aligner.parallel import launch
from aligner.parallel.topology import ParallelConfig
from aligner.settings.compose import from_yaml
from aligner.types import LabeledBatch

directory = pytest.fixture(scope="module")(seeing_directory)
NAMES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
OTHERS = ("qwen2_vl", "qwen3_vl_moe", "qwen3_5_moe")  # towers and text parts that others have too, put together
SEES: dict[str, Any] = {"images": True, "freeze": []}
SHARED = {"packing": True, "micro_batch_tokens": 400, "share_prompts": True}
WAYS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packing": True, "micro_batch_tokens": 400},
    "packed, recomputed": {"packing": True, "micro_batch_tokens": 400, "recompute": Recompute.full},
}


@pytest.fixture
def load(directory, load_policy):
    """`load(name, config fields, optimizer)`: (rows, a policy of Megatron-Core's layers that sees them)."""

    def make(name: str, fields: dict[str, Any], **options: Any) -> tuple[Rows, Any]:
        rows = Rows(name, directory(name))
        own = {key: value for key, value in fields.items() if key in ("packing", "micro_batch_tokens", "share_prompts")}
        training = {"micro_batch_size": 2, "total_steps": 10, "sees": rows.vision} | own
        return rows, load_policy(directory(name), config=fields, training=training, **options)

    return make


def gradients_of(policy: Any, model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """(ours, theirs) of each tensor of the files, by its name there."""
    own = policy.module
    saved = {name: parameter.data for name, parameter in own.named_parameters()}
    theirs = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    for parameter in own.parameters():
        parameter.data = parameter.main_grad.clone()
    ours = {name: tensor.cpu().clone() for name, tensor in policy.export_weights()}
    for name, parameter in own.named_parameters():
        parameter.data = saved[name]
    stored = weight_names(own.architecture).stored
    for name in [name for name in theirs if ".experts." in name]:  # of all experts of a layer
        ours[stored(name)] = all_experts(ours, stored(name))
    return {name: (ours[stored(name)], gradient) for name, gradient in theirs.items()}


def all_experts(ours: dict[str, Tensor], name: str) -> Tensor:
    """As `transformers`' module has them, where files have them transposed or one by one."""
    if name in ours:
        return ours[name].transpose(1, 2)
    block, _, kind = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    each = ([ours[f"{block}.{number}.{part}.weight"] for part in parts] for number in range(4))
    return torch.stack([torch.cat(own) for own in each])


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, way) for name in NAMES for way in WAYS), *((name, way) for name in OTHERS for way in ("padded", "packed, recomputed"))],
)
def test_log_probs_and_gradients_of_every_part_are_those_of_transformers(name: str, way: str, directory, load) -> None:
    rows, policy = load(name, SEES | WAYS[way], optimizer=adam(clip_grad=0.0))
    assert isinstance(policy.module, LanguageModel)
    model = reference(directory(name))
    logprobs, _ = plain(model, rows)
    assert torch.allclose(policy.logprobs(rows.batch()), logprobs, atol=1e-5)
    blind = policy.logprobs(replace(rows.batch(), extras={}))
    assert float((blind - logprobs)[0].abs().max()) > 0.01  # the images matter
    policy.train_step(rows.batch(), sft_loss)
    found = gradients_of(policy, model)
    assert sum("visual" in one for one in found) > 20
    for one, (ours, theirs) in found.items():
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * max(float(theirs.abs().max()), 0.1)), one


@pytest.mark.parametrize("name", NAMES)
def test_frozen_parts_stay_and_the_others_learn(name: str, load) -> None:
    for freeze, moved in (([Part.vision, Part.projector], set()), ([Part.vision], {"projector"}), ([Part.text], {"vision", "projector"})):
        rows, policy = load(name, SEES | {"freeze": freeze, "recompute": Recompute.full}, optimizer=adam())
        before = {one: parameter.detach().clone() for one, parameter in policy.module.named_parameters()}
        policy.train_step(rows.batch(), sft_loss)
        changed = {one for one, parameter in policy.module.named_parameters() if not torch.equal(parameter, before[one])}
        parts = {"projector" if "merger" in one else "vision" if one.startswith("visual.") else "text" for one in changed}
        assert parts == moved | ({"text"} - {part.value for part in freeze})
        assert policy.module.trains_vision == bool(moved)


@pytest.mark.parametrize("name", (*NAMES[:2], *OTHERS[:2]))
def test_equal_tokens_share_a_prompt_only_with_equal_images(name: str, load) -> None:
    shared, apart = (load(name, SEES | more, optimizer=adam()) for more in (SHARED, {}))
    rows, policy = shared
    other = io.BytesIO()
    picture(*PICTURES["a"], seed=9).save(other, "PNG")
    digest = rows.vision.store.put(other.getvalue())
    prompt, (first, second) = rows.tokens[2], rows.images[2]
    rows.tokens = [[*prompt, *response] for response in ([5, 6, 7], [8, 9], [5, 6, 7], [9, 5])]
    rows.images = [[first, second], [first, second], [first, digest], [first, digest]]
    batch = rows.batch()
    batch = replace(batch, loss_mask=batch.loss_mask & (torch.arange(batch.tokens.shape[1]) >= len(prompt)))
    found, expected = (one.logprobs(batch) for one in (policy, apart[1]))
    assert torch.allclose(found, expected, atol=1e-5)
    assert float((expected[0] - expected[2]).abs().max()) > 0.01  # the images differ
    assert len(set(prompt_keys(batch))) == 2
    metrics = [one.train_step(batch, sft_loss)["optim/grad_norm"].value() for one in (policy, apart[1])]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5)


def test_rows_without_images_do_not_need_their_gradients(load) -> None:
    rows, policy = load("qwen3_vl", SEES | {"freeze": [Part.text], "recompute": Recompute.full}, optimizer=adam())
    batch = replace(rows.batch(), extras={})
    metrics = policy.train_step(batch, sft_loss)
    assert metrics["optim/grad_norm"].value() == 0.0


@pytest.mark.parametrize("name", (*NAMES, *OTHERS))
def test_exports_and_checkpoints_have_every_tensor_bit_for_bit(name: str, directory, load, topology, tmp_path, monkeypatch) -> None:
    rows, policy = load(name, SEES, optimizer=adam())
    save_hf(policy.chunks, tmp_path / "same", writer=True)
    files, written = (load_file(path / "model.safetensors") for path in (directory(name), tmp_path / "same"))
    assert files.keys() == written.keys()
    assert all(torch.equal(files[one], written[one]) for one in files)
    policy.train_step(rows.batch(), sft_loss)
    logprobs = policy.logprobs(rows.batch())
    path = save(policy, tmp_path / "checkpoints")
    config = ModelConfig(path=str(path), images=True, dtype=Dtype.float32, make_vocab_divisible_by=8)
    with pytest.raises(ConfigError, match=r"model\.images=false: the checkpoint in .* is of a model that reads images; allowed: true"):
        create.read_architecture(replace(config, images=False), vocab_size=0)
    architecture = create.read_architecture(config, vocab_size=0)
    assert isinstance(architecture, SeeingArchitecture)
    training = create.training(config, None, vision=rows.vision)
    again = create.create_policy(config, architecture, ParallelConfig(), topology, training)
    weights, loaded = (dict(model.module.named_parameters()) for model in (policy, again))
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(weights[one], loaded[one]) for one in weights)
    assert torch.allclose(again.logprobs(rows.batch()), logprobs, atol=1e-5)
    monkeypatch.setattr(commands_convert, "_world", lambda _: topology)  # the tests' own world, which stays
    monkeypatch.setattr(launch, "shutdown", lambda: None)
    commands_convert.convert(ConvertOptions(from_megatron=path, to_hf=tmp_path / "exported"))
    trained = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "exported", dtype=torch.float32).eval()
    theirs, _ = plain(trained, rows)
    assert torch.allclose(theirs, logprobs, atol=2e-5)


def test_adapters_of_the_text_part_are_pefts(directory, load, tmp_path) -> None:
    lora = LoraConfig(rank=2, targets=[LoraTarget.qkv, LoraTarget.proj])
    rows, policy = load("qwen3_vl", SEES | {"lora": lora}, optimizer=adam())
    policy.train_step(rows.batch(), sft_loss)
    logprobs = policy.logprobs(rows.batch())
    save_peft(policy.chunks, tmp_path, writer=True)
    peft = pytest.importorskip("peft")
    theirs = peft.PeftModel.from_pretrained(reference(directory("qwen3_vl")), tmp_path, is_trainable=True)
    found, _ = plain(theirs.base_model.model, rows)
    assert torch.allclose(found, logprobs, atol=2e-5)
    _, other = load("qwen3_vl", SEES | {"lora": lora}, optimizer=adam())
    load_peft(other.chunks, tmp_path)
    assert torch.allclose(other.logprobs(rows.batch()), logprobs, atol=1e-6)


def test_what_cannot_see_is_refused_by_name(directory, load) -> None:
    rows, blind = load("qwen3_vl", {})
    with pytest.raises(ConfigError, match=r"model\.images=false: a qwen3 model reads no images; allowed: true, or model\.implementation"):
        blind.logprobs(rows.batch())
    rows, policy = load("qwen3_vl", SEES)
    batch: LabeledBatch = rows.batch()
    cut = batch.lengths.clamp(max=6)
    with pytest.raises(DataError, match="row 0 of a micro-batch: its images have 4 features, its tokens 2 slots"):
        policy.logprobs(replace(batch, lengths=cut))
    slot = rows.vision.slot_ids[0]
    tokens = torch.cat([batch.tokens, torch.full((len(batch.tokens), 1), slot)], dim=1)  # as a policy may have written
    last = batch.loss_mask.new_zeros(len(tokens), 1)
    written = replace(batch, tokens=tokens, loss_mask=torch.cat([batch.loss_mask, last], dim=1))
    written.tokens[1, batch.lengths[1]] = slot
    written = replace(written, lengths=batch.lengths + torch.tensor([0, 1, 0, 0]))
    assert torch.allclose(policy.logprobs(written)[:, :-1], policy.logprobs(batch), atol=1e-5)
    policy.module.vision = None
    with pytest.raises(ConfigError, match="qwen3_vl: the rows have images, and the model's directory no image processor"):
        policy.logprobs(batch)
    other = ModelConfig(path=str(directory("gemma3")), images=True)
    assert isinstance(create.read_architecture(other, vocab_size=0), HFArchitecture)
    megatron = replace(other, implementation=ModelConfig().implementation.megatron)
    with pytest.raises(
        ConfigError, match=r"model\.images=true: .*config\.json: Megatron's layers read the images of qwen2_vl, qwen2_5_vl, qwen3_vl"
    ):
        create.read_architecture(megatron, vocab_size=0)


def test_sections_of_the_rotary_embedding_must_fit_the_heads(directory, tmp_path) -> None:
    hf = json.loads((directory("qwen3_vl") / "config.json").read_text())
    hf["text_config"]["rope_parameters"]["mrope_section"] = [2, 3, 2]
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ConfigError, match=r"config\.json: mrope_section=\[2, 3, 2\]: expected three numbers that sum to 8"):
        create.read_architecture(ModelConfig(path=str(tmp_path), images=True), vocab_size=0)


def test_deep_features_need_their_layers_on_the_first_stage(directory) -> None:
    architecture = create.read_architecture(ModelConfig(path=str(directory("qwen3_vl")), images=True), vocab_size=0)
    assert isinstance(architecture, SeeingArchitecture)
    assert (architecture.deep_layers, architecture.rope_sections, architecture.rope_mixed) == (2, [2, 3, 3], True)
    with pytest.raises(ConfigError, match=r"1 layers on the first stage: its first 2 layers add features of images"):
        build_model(replace(architecture, num_layers=1), ModelConfig(), ParallelConfig(), load=True)


def test_settings_that_images_cannot_have_are_refused(directory) -> None:
    path = str(directory("qwen3_vl"))
    architecture = create.read_architecture(ModelConfig(path=path, images=True), vocab_size=0)
    with pytest.raises(ConfigError, match=r"model\.batch_invariant=true: the tower of a model that reads images has no invariant form"):
        check_together(architecture, ModelConfig(batch_invariant=True), ParallelConfig())
    with pytest.raises(ConfigError, match=r"model\.freeze: text with parallel\.pp=2 leaves later stages nothing to train"):
        check_together(architecture, ModelConfig(freeze=[Part.text]), ParallelConfig(pp=2))
    fused = fusions(architecture, ModelConfig(path=path, images=True), torch.bfloat16)
    assert not fused.on(Kernel.rope)


def test_a_plan_needs_no_files(topology) -> None:
    text = from_yaml(ModelConfig, (conf_directory() / "model" / "qwen3_vl_8b.yaml").read_text())
    architecture = create.read_architecture(text, vocab_size=0)
    assert isinstance(architecture, SeeingArchitecture)
    assert (architecture.deep_layers, architecture.rope_sections) == (3, [24, 20, 20])
    with pytest.raises(ConfigError, match=r"model\.path='': a model that reads images is trained from weights"):
        create.create_policy(text, architecture, ParallelConfig(), topology, create.training(text, None))
