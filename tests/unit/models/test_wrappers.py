"""Models of images and text whose text part has layers here: its numbers are those of `transformers`' whole model, exports are that model
again, the rest of it bit for bit.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from model_steps import adam, make_batch, save, train
from safetensors.torch import load_file, save_file
from wrapped_models import FILES, write_wrapped

from aligner.commands import convert as commands_convert
from aligner.commands.parts import ConvertOptions
from aligner.errors import CheckpointError, ConfigError, ModelFilesError
from aligner.models import create
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype, HFArchitecture, Implementation, LoraConfig, LoraTarget, ModelConfig
from aligner.models.families import architecture_from_hf, has_layers
from aligner.models.families.wrappers import WRAPPERS, has_images
from aligner.models.modules.peft import load_peft, save_peft
from aligner.models.weights import save_hf
from aligner.parallel import launch
from aligner.parallel.topology import ParallelConfig

TOKENS = torch.randint(9, 50, (3, 40), generator=torch.Generator().manual_seed(3))
WEIGHTS, CONFIG = "model.safetensors", "config.json"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory):
    """`directory(name)`: a random model of `FILES`, made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "model"
            write_wrapped(name, made[name])
        return made[name]

    return make


@pytest.fixture
def copy(directory, tmp_path: Path):
    """`copy(name)`: the directory of a model that a test may change."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(directory(name), tmp_path / "model"))

    return make


def logits(policy: Any) -> torch.Tensor:
    (chunk,) = policy.chunks
    weight = chunk.vocabulary_weight()[0]
    with torch.no_grad():
        hidden = chunk.eval()(TOKENS.to(weight.device), torch.arange(40, device=weight.device).expand_as(TOKENS), None)
        return (hidden @ weight.t()).transpose(0, 1).cpu()


def whole_model(path: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()


def their_logits(model: Any) -> torch.Tensor:
    model = getattr(model, "language_model", model)  # Llama 4's forward pass fails without images
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def of_images(names: Any) -> set[str]:
    return {name for name in names if any(part in name for part in ("vis", "projector", "connector"))}


def exported(policy: Any, target: Path) -> dict[str, torch.Tensor]:
    save_hf(policy.chunks, target, writer=True)
    return load_file(target / WEIGHTS)


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("name", FILES)
def test_a_text_part_computes_what_the_whole_model_does_and_is_exported_as_it(name, directory, load_policy, tmp_path, capsys) -> None:
    path = directory(name)
    policy, theirs, stored = load_policy(path), their_logits(whole_model(path)), load_file(path / WEIGHTS)
    assert not isinstance(policy.chunks[0].architecture, HFArchitecture)
    assert theirs.std() > 0.5 and (logits(policy) - theirs).abs().max() < 5e-5
    assert is_equal(exported(policy, tmp_path), stored)
    said = [line for line in capsys.readouterr().out.splitlines() if "of images" in line]
    what = f"{len(of_images(stored))} tensors are of images: not trained, and unchanged in exports; the model here is the text part"
    assert said == [f"{path}: {what}"]
    written = json.loads((tmp_path / CONFIG).read_text())
    assert written.pop("dtype") == "float32"
    published = {key: value for key, value in FILES[name].items() if key != "torch_dtype"}
    if name == "mistral3":  # the file leaves it open, its kind ties, the weights are two
        published |= {"tie_word_embeddings": False, "text_config": published["text_config"] | {"tie_word_embeddings": False}}
    if name == "llava":
        published |= {"text_config": published["text_config"] | {"torch_dtype": "float32"}}
    assert written == published


def renamed(path: Path, *changes: tuple[str, str]) -> None:
    """Begin the names of tensors otherwise."""
    tensors = {}
    for name, tensor in load_file(path / WEIGHTS).items():
        old, new = next(((old, new) for old, new in changes if name.startswith(old)), ("", ""))
        tensors[new + name.removeprefix(old)] = tensor
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


NEW_NAMES = {  # as version 5 of transformers has them in its modules, where published files are older
    "qwen2_5_vl": (("model.", "model.language_model."), ("visual.", "model.visual.")),
    "gemma3": (("language_model.model.", "model.language_model."), ("vision_tower.", "model.vision_tower."))
    + (("multi_modal_projector.", "model.multi_modal_projector."),),
    "mistral3": (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."))
    + (("vision_tower.", "model.vision_tower."), ("multi_modal_projector.", "model.multi_modal_projector.")),
}


@pytest.mark.parametrize("name", NEW_NAMES)
def test_files_with_the_names_of_modules_are_read_and_written_so(name: str, directory, copy, load_policy, tmp_path: Path) -> None:
    path = copy(name)
    renamed(path, *NEW_NAMES[name])
    policy = load_policy(path)
    assert torch.equal(logits(policy), logits(load_policy(directory(name))))
    assert is_equal(exported(policy, tmp_path / "out"), load_file(path / WEIGHTS))


@pytest.mark.parametrize(("name", "transposed"), [("qwen3_5_moe", False), ("qwen3_vl_moe", False), ("qwen3_vl_moe", True)])
def test_all_experts_of_a_layer_in_two_tensors(name: str, transposed: bool, directory, copy, load_policy, tmp_path: Path) -> None:
    """Published files of Qwen3.5 have them as modules do, those of Qwen3-VL transposed; `transformers` writes single ones of Qwen3.5."""
    path = copy(name)
    tensors, stacks = load_file(path / WEIGHTS), {}
    modules = dict(whole_model(path).named_parameters())
    for key in [key for key in tensors if ".mlp.experts." in key]:
        block = key[: key.index(".experts.") + len(".experts.")]
        stacks |= {f"{block}{one}": modules[f"{block}{one}"].detach() for one in ("gate_up_proj", "down_proj")}
        del tensors[key]
    stacks = {key: stack.transpose(1, 2).contiguous() if transposed else stack for key, stack in stacks.items()}
    save_file(tensors | stacks, path / WEIGHTS, metadata={"format": "pt"})
    policy = load_policy(path)
    assert len(stacks) == 4 and torch.equal(logits(policy), logits(load_policy(directory(name))))
    assert is_equal(exported(policy, tmp_path / "out"), tensors | stacks)


def test_a_trained_text_part_is_exported_from_every_checkpoint(copy, load_policy, topology, tmp_path: Path, monkeypatch) -> None:
    """Resumed, as the start of another run, and converted; not without the directory that has the rest, nor with another in its place."""
    path = copy("qwen2_5_vl")
    policy = load_policy(path, optimizer=adam(), training={"total_steps": 10})
    train(policy, range(1))
    saved = save(policy, tmp_path / "checkpoints", step=1)
    resumed = load_policy(path, optimizer=adam(), training={"total_steps": 10})
    checkpoint.load(resumed.model, saved)
    for one in (policy, resumed):
        train(one, range(1, 2))
    trained = exported(policy, tmp_path / "first")
    assert is_equal(exported(resumed, tmp_path / "resumed"), trained)
    before = load_file(path / WEIGHTS)
    assert trained.keys() == before.keys()
    assert {name for name in before if torch.equal(before[name], trained[name])} == of_images(before)
    assert torch.allclose(their_logits(whole_model(tmp_path / "first")), logits(policy), atol=1e-5)

    again = load_policy(saved, optimizer=adam(), training={"total_steps": 10})
    at_step = exported(again, tmp_path / "again")
    assert of_images(at_step) == of_images(before) and json.loads((tmp_path / "again" / CONFIG).read_text())["model_type"] == "qwen2_5_vl"
    monkeypatch.setattr(commands_convert, "_world", lambda _: topology)  # the tests' own world, which stays
    monkeypatch.setattr(launch, "shutdown", lambda: None)
    commands_convert.convert(ConvertOptions(from_megatron=saved, to_hf=tmp_path / "converted"))
    assert is_equal(load_file(tmp_path / "converted" / WEIGHTS), at_step)
    assert (tmp_path / "converted" / "preprocessor_config.json").read_bytes() == (path / "preprocessor_config.json").read_bytes()
    commands_convert.convert(ConvertOptions(from_hf=path, to_megatron=tmp_path / "back"))
    commands_convert.convert(ConvertOptions(from_megatron=tmp_path / "back", to_hf=tmp_path / "forth"))
    assert is_equal(load_file(tmp_path / "forth" / WEIGHTS), before)

    save_file({"visual.other": torch.zeros(3)}, path / WEIGHTS)
    with pytest.raises(CheckpointError, match="qwen2_5_vl model belongs to the model that was in .*model; other weights are there now"):
        save_hf(again.chunks, tmp_path / "changed", writer=True)
    shutil.rmtree(path)
    load_policy(saved)  # one that is not trained is not exported
    with pytest.raises(CheckpointError, match=r"text part of a qwen2_5_vl model belongs to the model in .*model, which is not there"):
        load_policy(saved, optimizer=adam(), training={"total_steps": 10})


def test_a_checkpoint_of_the_other_modules_is_not_continued(directory, load_policy, tmp_path: Path) -> None:
    """Such as one from before these models had layers here."""
    load = partial(load_policy, directory("gemma3"), optimizer=adam(), training={"total_steps": 10})
    saved = save(load(config={"implementation": Implementation.transformers}), tmp_path, step=1)
    with pytest.raises(CheckpointError, match="was saved with model.implementation=transformers, the model has megatron's modules"):
        checkpoint.load(load().model, saved)


def test_a_reward_model_is_made_of_the_text_part_alone(directory, topology, tmp_path: Path, capsys) -> None:
    config = ModelConfig(path=str(directory("qwen3_vl")), dtype=Dtype.float32)
    architecture, parallel = create.read_architecture(config, vocab_size=0), ParallelConfig()
    model = create.create_reward_model(config, architecture, parallel, topology, create.training(config, adam()))
    assert "tensors are of images: neither read nor exported" in capsys.readouterr().out
    assert not of_images(exported(model.model, tmp_path))
    assert json.loads((tmp_path / CONFIG).read_text())["architectures"] == ["Qwen3ForSequenceClassification"]
    assert transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).score.out_features == 1


def changed(path: Path, change: Any) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


Q_PROJ, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q_PROJ), f"no tensor named {Q_PROJ}, and 0 more are missing"),
        (lambda t: t.update({NORM: torch.ones(31)}), rf"{NORM} is \(31,\), the model's config makes it \(32,\)"),
        (lambda t: t.update({Q_PROJ: torch.ones(31, 32)}), rf"hidden_size=32.*: {Q_PROJ} would be \(32, 32\), .* it is \(31, 32\)"),
        (lambda t: t.update({"model.language_model.norm.weight": t[NORM].clone()}), "are two of one tensor; allowed: one of them"),
        (lambda t: t.update({"audio.weight": torch.ones(2)}), r"1 tensors belong to no parameter of the model, e.g. \['audio.weight'\]"),
        (lambda t: t.update({"visual.x": torch.ones(2).to(torch.float8_e4m3fn)}), "visual.x is F8_E4M3: exports have weights that are not"),
    ],
)
def test_damaged_files_are_refused_by_name(change, message: str, copy, load_policy) -> None:
    path = copy("qwen2_5_vl")
    changed(path, change)
    with pytest.raises(ModelFilesError, match=message):
        load_policy(path)


def test_whose_modules_a_model_is_made_of(directory, copy) -> None:
    def read(path: Path, **more: Any) -> type:
        return type(create.read_architecture(ModelConfig(path=str(path), **more), vocab_size=0))

    assert read(directory("gemma3"), implementation=Implementation.transformers) is HFArchitecture
    path = copy("mistral3")
    for change, is_ours in (
        ({}, True),
        ({"text_config": FILES["mistral3"]["text_config"] | {"model_type": "ministral3"}}, False),
        ({"architectures": ["Mistral3Model"]}, False),
    ):
        hf = FILES["mistral3"] | change
        (path / CONFIG).write_text(json.dumps(hf))
        assert has_layers(hf) is is_ours and has_images(hf) and (read(path) is not HFArchitecture) is is_ours
    assert has_images({"model_type": "new", "vision_config": {}}) and not has_images({"model_type": "qwen2"})
    hf = FILES["gemma3"] | {"text_config": FILES["gemma3"]["text_config"] | {"use_bidirectional_attention": True}}
    with pytest.raises(ConfigError, match="use_bidirectional_attention=true is not supported .*; or model.implementation=transformers"):
        architecture_from_hf(hf)


def test_what_is_refused_of_llama4_with_images() -> None:
    hf = FILES["llama4"]
    for change, message in (
        (
            {"architectures": ["Llama4ForSequenceClassification"]},
            r'architectures=\["Llama4ForSequenceClassification"\] is not supported for',
        ),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config"),
        ({"text_config": None}, "model_type='llama4' is not supported"),
        (
            {"text_config": hf["text_config"] | {"model_type": "llama"}},
            'text_config.model_type="llama" is not supported for model_type llama4; allowed: "llama4_text"',
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            architecture_from_hf(hf | change)


STATED = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 32}
STATED |= {"max_position_embeddings": 128, "num_experts": 4, "moe_intermediate_size": 20}


@pytest.mark.parametrize(("model_type", "kind"), [(name, kind) for name, one in WRAPPERS.items() for kind in one.texts])
def test_keys_that_a_text_config_leaves_out_have_the_values_of_transformers(model_type: str, kind: str) -> None:
    """Sizes too, where published files leave them out: Gemma-3-4b-it has no vocab_size, llava-1.5-7b-hf no hidden_size."""
    stated = (
        {} if kind in ("llama", "mistral", "qwen2", "gemma3_text") else STATED | {"num_experts_per_tok": 1 if kind == "llama4_text" else 2}
    )
    full = transformers.CONFIG_MAPPING[kind](**stated).to_dict()
    bare, whole = (
        architecture_from_hf({"model_type": model_type, "tie_word_embeddings": False, "text_config": {"model_type": kind} | text})
        for text in (stated, full)
    )
    assert bare == whole


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5_moe"])
def test_an_adapter_names_the_layers_of_the_whole_model(name: str, directory, load_policy, tmp_path: Path) -> None:
    targets = [LoraTarget.q, LoraTarget.k, LoraTarget.v, LoraTarget.proj] + ([LoraTarget.fc1] if name != "qwen3_5_moe" else [])
    config = {"lora": LoraConfig(rank=4, alpha=8, targets=targets)}
    policy = load_policy(directory(name), optimizer=adam(), config=config, training={"total_steps": 10})
    train(policy, range(2))
    ours = policy.logprobs(make_batch())
    save_peft(policy.chunks, tmp_path / "adapter", writer=True)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    adapted = peft.PeftModel.from_pretrained(whole_model(directory(name)), tmp_path / "adapter")
    assert stored and not of_images(stored)
    assert {key.replace(".default", "") for key, _ in adapted.named_parameters() if "lora_" in key} == stored.keys()
    save_hf(policy.chunks, tmp_path / "merged", writer=True)
    merged = their_logits(whole_model(tmp_path / "merged"))
    assert (their_logits(adapted.base_model.model) - merged).abs().max() < 5e-5 * merged.std()
    from_checkpoint = load_policy(save(policy, tmp_path / "checkpoints", step=2))
    assert is_equal(exported(from_checkpoint, tmp_path / "again"), load_file(tmp_path / "merged" / WEIGHTS))
    again = load_policy(directory(name), config=config)
    load_peft(again.chunks, tmp_path / "adapter")
    assert torch.allclose(again.logprobs(make_batch()), ours, atol=1e-6)


def test_adapters_of_feed_forward_layers_beside_experts_are_refused(directory, load_policy) -> None:
    config = {"lora": LoraConfig(rank=4, targets=[LoraTarget.q, LoraTarget.fc1])}
    with pytest.raises(ConfigError, match=r"model.lora.targets: of a qwen3_5_moe model only adapters of attention"):
        load_policy(directory("qwen3_5_moe"), optimizer=adam(), config=config)
