"""Which recipe of 8-bit products a GPU gets, and what sizes it takes. `test_transformer_engine.py` asks Transformer Engine itself."""

from __future__ import annotations

import pytest

from aligner.errors import ConfigError
from aligner.models.architecture.divisible import check_fp8, fp8_recipe
from aligner.models.config import Architecture, Fp8Recipe, ModelConfig
from aligner.parallel.topology import ParallelConfig

QWEN_7B = {"vocab_size": 64, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN_7B |= {"head_dim": 128, "ffn_hidden_size": 18944}
EIGHT_GROUPS = {"num_attention_heads": 32, "num_key_value_heads": 8}
MIXTURE = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 48}


@pytest.mark.parametrize(
    ("capability", "recipe"),
    [(8.9, "tensorwise"), (9.0, "blockwise"), (10.0, "mxfp8"), (10.3, "mxfp8"), (11.0, "mxfp8"), (12.0, "tensorwise")],
)
def test_auto_is_what_the_gpu_computes_best(capability, recipe):
    assert fp8_recipe(ModelConfig(fp8=True), capability).value == recipe
    for named in ("blockwise", "mxfp8", "tensorwise"):
        assert fp8_recipe(ModelConfig(fp8=True, fp8_recipe=Fp8Recipe(named)), capability).value == named


@pytest.mark.parametrize(
    ("recipe", "architecture", "parallel", "message"),
    [
        ("blockwise", {}, {"tp": 4}, ""),
        # 18944 / 8 is 2368: 18.5 blocks of 128, 74 of 32.
        ("blockwise", EIGHT_GROUPS, {"tp": 8}, "ffn_hidden_size on a rank is 2368, not a multiple of 128"),
        ("mxfp8", EIGHT_GROUPS, {"tp": 8}, ""),
        ("mxfp8", {"hidden_size": 3600}, {}, "hidden_size on a rank is 3600, not a multiple of 32; allowed: model.fp8_recipe=tensorwise"),
        ("tensorwise", {"hidden_size": 3592}, {}, "hidden_size on a rank is 3592, not a multiple of 16; allowed: model.fp8=false"),
        (
            "tensorwise",
            {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 24},
            {},
            "num_attention_heads x head_dim on a rank",
        ),
        ("mxfp8", MIXTURE, {}, "expert_ffn_hidden_size on a rank is 48"),
        ("tensorwise", MIXTURE, {}, ""),
        ("tensorwise", MIXTURE, {"tp": 2, "etp": 2, "ep": 2, "sequence_parallel": True}, "expert_ffn_hidden_size on a rank is 24"),
    ],
)
def test_sizes_that_a_recipe_cannot_scale_are_named(recipe, architecture, parallel, message):
    model = ModelConfig(fp8=True, fp8_recipe=Fp8Recipe(recipe))
    arguments = Architecture(**QWEN_7B | architecture), model, ParallelConfig(**parallel), Fp8Recipe(recipe)
    if not message:
        check_fp8(*arguments)
        return
    with pytest.raises(ConfigError) as raised:
        check_fp8(*arguments)
    assert str(raised.value).startswith(f"model.fp8_recipe={recipe}: ") and message in str(raised.value)


def test_auto_says_what_it_is_here():
    with pytest.raises(ConfigError, match=r"^model.fp8_recipe=auto \(here blockwise\): hidden_size on a rank is 96, not a multiple of 128"):
        check_fp8(Architecture(**QWEN_7B | {"hidden_size": 96}), ModelConfig(fp8=True), ParallelConfig(), Fp8Recipe.blockwise)


def test_blocks_are_not_exchanged_while_layers_compute():
    overlap = ParallelConfig(tp=2, sequence_parallel=True, tp_comm_overlap=True)
    check_fp8(Architecture(**QWEN_7B), ModelConfig(fp8=True), overlap, Fp8Recipe.mxfp8)
    with pytest.raises(ConfigError, match="parallel.tp_comm_overlap=true; allowed: false, or model.fp8_recipe=tensorwise"):
        check_fp8(Architecture(**QWEN_7B), ModelConfig(fp8=True), overlap, Fp8Recipe.blockwise)
