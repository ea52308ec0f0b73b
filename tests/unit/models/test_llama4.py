"""Llama 4 with images: what is refused (`test_wrappers.py` reads and writes it)."""

from __future__ import annotations

import json
import shutil

import pytest
from wrapped_models import write_wrapped

from aligner.errors import ConfigError, ModelFilesError
from aligner.models.families import architecture_from_hf


@pytest.fixture
def directory(tmp_path):
    """A random model of images and text."""
    write_wrapped("llama4", tmp_path / "model")
    return tmp_path / "model"


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
