from __future__ import annotations

import pytest

from aligner.data.config import (
    AnnotateDataConfig,
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
