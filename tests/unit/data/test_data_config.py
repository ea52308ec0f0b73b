from __future__ import annotations

import subprocess
import sys

import pytest
from omegaconf import MISSING, OmegaConf

from aligner.data.config import (
    AnnotateDataConfig,
    BadLines,
    ConstitutionDataConfig,
    DistillationDataConfig,
    Learn,
    Overlong,
    PreferenceDataConfig,
    PromptDataConfig,
    RequestDataConfig,
    SFTDataConfig,
    SpecialText,
    Thinking,
)
from aligner.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PromptDataConfig(train="t", max_prompt_length=-1), "data.max_prompt_length is -1, allowed: at least 1, or 0 .the model"),
        (lambda: PromptDataConfig(train="t", num_validation_prompts=0), "data.num_validation_prompts is 0"),
        (lambda: PromptDataConfig(train="t", bad_lines="skip"), "data.bad_lines is 'skip', allowed: fail, skip"),
        (lambda: SFTDataConfig(train="t", max_length=1), "data.max_length is 1, allowed: at least 2"),
        (lambda: SFTDataConfig(train="t", prompt_field="q"), "allowed: both named or both empty"),
        (lambda: PreferenceDataConfig(train="t", overlong="cut"), "data.overlong is 'cut', allowed: drop, truncate, refuse"),
        (lambda: RequestDataConfig(train="t", overlong=Overlong.truncate), "data.overlong=truncate: complete prompts are written"),
        (lambda: ConstitutionDataConfig(train="t", overlong=Overlong.truncate), "data.overlong=truncate: complete prompts are written"),
    ],
)
def test_impossible_values_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_configs_compose_as_structured_configs():
    node = OmegaConf.merge(OmegaConf.structured(SFTDataConfig), {"train": "t", "overlong": "drop", "bad_lines": "skip"})
    config = OmegaConf.to_object(node)
    assert config == SFTDataConfig(train="t", overlong=Overlong.drop, bad_lines=BadLines.skip)
    for kind in (PromptDataConfig, PreferenceDataConfig):
        assert OmegaConf.to_container(OmegaConf.structured(kind))["train"] == MISSING


def test_config_module_is_light():
    code = "import aligner.data.config, sys; print([m for m in ('torch', 'transformers', 'datasets', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (AnnotateDataConfig, "chat_template", "chatml"),
        (AnnotateDataConfig, "thinking", Thinking.drop),
        (AnnotateDataConfig, "apply_chat_template", True),
        (AnnotateDataConfig, "learn", Learn.last_response),
        (ConstitutionDataConfig, "answer_field", "answer"),
        (DistillationDataConfig, "thinking", Thinking.keep),
        (DistillationDataConfig, "special_text", SpecialText.keep),
    ],
)
def test_a_setting_that_a_section_has_and_nothing_reads_is_refused(config, name, value):
    with pytest.raises(ConfigError, match=rf"data.{name}={getattr(value, 'value', value)}: .*; allowed: "):
        config(train="x", **{name: value})
    config(train="x")
