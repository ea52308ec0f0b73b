"""Llama 4 with images: its text part alone is read, and written as a model of text."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from hf_models import HF_MODELS, SIZES, randomize
from safetensors.torch import load_file

from aligner.errors import ConfigError, ModelFilesError
from aligner.models.families import architecture_from_hf
from aligner.models.weights import save_hf

IMAGES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vision_output_dim": 16}
IMAGES |= {"image_size": 28, "patch_size": 14, "projector_input_dim": 16, "projector_output_dim": 16}


@pytest.fixture
def directory(topology, tmp_path):
    """A random model of images and text."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    text = SIZES | HF_MODELS["llama4_text"]
    model = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=IMAGES))
    randomize(model, seed=3)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_text_part_of_a_model_with_images(directory, load_policy, tmp_path, capsys):
    from transformers import Llama4ForConditionalGeneration

    tokens = torch.randint(0, 61, (3, 40), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(40).expand_as(tokens)
    (chunk,) = load_policy(directory).chunks
    (again,) = load_policy(directory).chunks
    said = [line for line in capsys.readouterr().out.splitlines() if "are of images" in line]
    names = {name: name.removeprefix("language_model.") for name in load_file(directory / "model.safetensors")}
    text = {name: inner for name, inner in names.items() if inner != name}
    assert said == [f"{directory}: {len(names) - len(text)} tensors are of images, and not read: the model is its text part"]
    with torch.no_grad():
        device = again.vocabulary_weight()[0].device
        hidden = again.eval()(tokens.to(device), positions.to(device), None)
        theirs = Llama4ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).language_model(input_ids=tokens).logits
    logits = (hidden @ again.vocabulary_weight()[0].t()).transpose(0, 1).cpu()
    assert theirs.std() > 0.5 and (logits - theirs).abs().max() < 2e-5
    save_hf([chunk], tmp_path / "export", writer=True)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["model_type"] == "llama4_text"
    written, read = load_file(tmp_path / "export" / "model.safetensors"), load_file(directory / "model.safetensors")
    assert written.keys() == set(text.values()) and all(torch.equal(written[inner], read[name]) for name, inner in text.items())


def test_what_is_refused_of_a_model_with_images(directory):
    hf = json.loads((directory / "config.json").read_text())
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


def test_an_expert_of_another_size_is_named(hf_directory, load_policy, tmp_path):
    shutil.copytree(hf_directory("llama4_text"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_local_experts": 3}))
    with pytest.raises(ModelFilesError, match=r"num_local_experts=3: .*feed_forward.router.weight would be \(3, 32\), .* it is \(4, 32\)"):
        load_policy(tmp_path / "model")
