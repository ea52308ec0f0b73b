"""Checkpoints of Megatron-LM and NeMo, made with Megatron-Core's own GPTModel: their logits, their bits in every form, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import megatron_files
import pytest
import torch
from megatron_files import ARGUMENTS, ROWS, chunks_of, with_common_file

from aligner.errors import AlignerError, CheckpointError, ConfigError
from aligner.models.checkpoint.foreign.model import describe, open_weights
from aligner.models.checkpoint.foreign.settings import from_nemo
from aligner.models.checkpoint.foreign.tensors import Files, TorchDist
from aligner.models.config import LoraConfig
from aligner.models.weights import export_hf, save_hf
from aligner.parallel.mcore import RowParallelLinear

pytestmark = pytest.mark.cpu  # the model that is compared is Megatron-Core's own, as it was made
TOKENS = torch.arange(3, 27)[None]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the model at `path` by its Hugging Face name."""
    return {name: tensor.detach().clone() for name, tensor in export_hf(chunks_of(path))}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def megatron_lm(topology, tmp_path_factory):
    """`megatron_lm(name, **arguments)`: (a checkpoint of Megatron-LM, the model in it); made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str, **others: Any) -> tuple[Path, Any]:
        key = f"{name} {sorted(others.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            args = megatron_files.arguments(name, **others)
            model = megatron_files.build(args)
            made[key] = megatron_files.save(folder / "iter_0000007", model, args), model
        return made[key]

    return make


@pytest.mark.parametrize("name", ARGUMENTS)
def test_logits_are_megatrons(name: str, megatron_lm, tmp_path: Path):
    """Of the Hugging Face model that comes of it; the vocabulary keeps its padding where the arguments do not say how long it is."""
    from transformers import AutoModelForCausalLM

    path, model = megatron_lm(name)
    chunks = chunks_of(path)
    assert chunks[0].architecture.vocab_size == (ARGUMENTS[name].get("vocab_size") or ROWS)
    save_hf(chunks, tmp_path, writer=True)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert ours.config.model_type == name.split("_")[0] if name != "qwen3_moe" else ours.config.model_type == name
    with torch.no_grad():
        torch.testing.assert_close(
            ours(TOKENS).logits, megatron_files.logits(model, TOKENS)[..., : ours.config.vocab_size], rtol=0, atol=2e-5
        )


FORMS = ("latest", "nemo", "gzip", "unpacked")


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("form", ["apart", *(pytest.param(one, marks=with_common_file) for one in ("no_common_file", "zarr")), *FORMS])
def test_every_form_has_the_same_bits(name: str, form: str, megatron_lm, tmp_path: Path):
    """Layers and halves of gated layers with names of their own, as they are without stacking; NeMo's archive; the former backend."""
    path, model = megatron_lm(name)
    config = megatron_files.nemo_config(name, num_moe_experts=ARGUMENTS[name].get("num_experts"))
    if form == "apart":
        apart = {"singleton_local_shards": True}
        other = megatron_files.save(tmp_path / "apart", model, megatron_files.arguments(name), metadata=apart)
        assert any(key.endswith("weight_w") for key in TorchDist(Files(other), "").shapes())
    elif form == "no_common_file":  # as of Megatron-Core 0.19
        other = megatron_files.save(tmp_path / "whole", model, megatron_files.arguments(name), common_file=False)
        (other / "common.pt").unlink(missing_ok=True)  # it is empty
    elif form == "latest":
        other = path.parent
        (other / "latest_checkpointed_iteration.txt").write_text("7")
    else:
        weights = megatron_files.save(tmp_path / "model_weights", model, None, prefix="model.")
        if form == "zarr":
            weights = megatron_files.to_zarr(weights, tmp_path / "zarr")
        if form == "unpacked":
            other = tmp_path
            (other / "model_config.yaml").write_text(json.dumps(config))
        else:
            other = megatron_files.pack(tmp_path / "model.nemo", weights, config, mode="w:gz" if form == "gzip" else "w:")
    assert_same(tensors(other), tensors(path))


@with_common_file
def test_bfloat16_in_both_forms(megatron_lm, tmp_path: Path):
    args = megatron_files.arguments("llama")
    whole = megatron_files.save(tmp_path / "torch", megatron_files.build(args).bfloat16(), args)
    zarr = megatron_files.to_zarr(whole, tmp_path / "zarr")
    assert describe(whole).dtype == describe(zarr).dtype == torch.bfloat16
    with open_weights(whole) as one, open_weights(zarr) as other:
        name = "decoder.layers.1.mlp.linear_fc2.weight"
        assert one.head(name, torch.Size([32, 48])).dtype == torch.bfloat16
        assert torch.equal(one.head(name, torch.Size([32, 48])), other.head(name, torch.Size([32, 48])))


def test_model_path(megatron_lm, load_policy, tmp_path: Path):
    """A run loads the archive itself; adapters, which would have to name it later, are refused."""
    path, model = megatron_lm("qwen2")
    weights = megatron_files.save(tmp_path / "weights", model, None, prefix="model.")
    archive = megatron_files.pack(tmp_path / "model.nemo", weights, megatron_files.nemo_config("qwen2"))
    policy = load_policy(archive)
    assert policy.model.chunks[0].architecture.family == "qwen2"
    fused = policy.model.chunks[0].decoder.layers[1].self_attention.linear_qkv.weight
    assert torch.equal(fused, model.decoder.layers[1].self_attention.linear_qkv.weight)
    with pytest.raises(ConfigError, match=r"model.lora.rank=4: adapters belong to .* allowed: 0, or model.path=DIR of `aligner convert"):
        load_policy(archive, config={"lora": LoraConfig(rank=4)})


# --- NeMo-Aligner's reward models and critics ---------------------------------------------------------------------------------------------


def scorer(tmp_path: Path, *, outputs: int = 1, bias: float = 0.0, **config: Any) -> tuple[Path, torch.Tensor]:
    """(an archive of a model with `rm_head`, its weight)."""
    model = megatron_files.build(megatron_files.arguments("llama"))
    own = {"config": model.config, "init_method": torch.nn.init.zeros_, "bias": True, "input_is_parallel": False, "skip_bias_add": False}
    model.rm_head = RowParallelLinear(model.config.hidden_size, outputs, **own)
    with torch.no_grad():
        model.rm_head.weight.normal_(generator=torch.Generator().manual_seed(5))
        model.rm_head.bias.fill_(bias)
    weights = megatron_files.save(tmp_path / "weights", model, None, prefix="model.")
    return megatron_files.pack(tmp_path / "model.nemo", weights, megatron_files.nemo_config("llama", **config)), model.rm_head.weight


@pytest.mark.parametrize(
    ("config", "outputs", "pooling"),
    [({}, 1, "last"), ({"use_avg_pool": True}, 3, "mean"), ({"output_sequence": True}, 1, "tokens"), ({}, 9, "last")],
)
def test_heads(config: dict[str, Any], outputs: int, pooling: str, topology, tmp_path: Path):
    bias = 0.0 if pooling == "last" else 0.5
    archive, weight = scorer(tmp_path, outputs=outputs, bias=bias, **config)
    (chunk,) = chunks_of(archive)
    assert (chunk.head.num_outputs, chunk.head.pooling.value) == (outputs, pooling)
    assert torch.equal(chunk.score_head.weight, weight)
    assert not chunk.head.has_bias or torch.equal(chunk.score_head.bias, torch.full((outputs,), 0.5))


@pytest.mark.parametrize(
    ("config", "outputs", "bias", "says"),
    [
        ({}, 1, 0.25, "rm_head.bias is not 0: heads that score the last token have none here"),
        ({"reward_standardization": {"enable": True, "mean": 1.0, "std": 2.0}}, 1, 0.0, "reward_standardization.enable=True is not read"),
        ({"output_sequence": True}, 2, 0.0, "regression.num_attributes=2 is not read"),
    ],
)
def test_heads_that_are_not_computed(config: dict[str, Any], outputs: int, bias: float, says: str, topology, tmp_path: Path):
    with pytest.raises(AlignerError, match=says.replace(".", r"\.")):
        chunks_of(scorer(tmp_path, outputs=outputs, bias=bias, **config)[0])


# --- settings -----------------------------------------------------------------------------------------------------------------------------

NEMO = megatron_files.nemo_config("llama")
NEMOTRON = megatron_files.nemo_config("gpt2", rotary_percentage=0.5, share_embeddings_and_output_weights=False)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (NEMO, {"family": "llama", "vocab_size": 64, "num_key_value_heads": 2, "head_dim": 12, "tied_embeddings": False}),
        (NEMO | {"layernorm_epsilon": "1e-6", "override_vocab_size": 61}, {"norm_eps": 1e-6, "vocab_size": 61}),
        (NEMO | {"seq_len_interpolation_factor": 4}, {"rope_linear_factor": 4.0}),
        (NEMO | {"scale_positional_embedding": True}, {"rope_llama3_factor": 8.0}),
        (NEMO | {"window_size": [15, 0]}, {"family": "mistral", "sliding_window": 16}),
        (NEMOTRON, {"family": "nemotron", "normalization": "layer_norm_1p", "activation": "squared_relu", "rotary_fraction": 0.5}),
    ],
)
def test_nemos_settings(config: dict[str, Any], expected: dict[str, Any]):
    found = from_nemo(config, rows=ROWS)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"mcore_gpt": False}, "mcore_gpt=False is not read; allowed: true"),
        ({"activation": "approx-gelu"}, "activation='approx-gelu' is not read; allowed"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type='alibi' is not read"),
        ({"apply_embedding_scaling": True}, "apply_embedding_scaling=True is not read"),
        (
            {"normalization": "layernorm1p"},
            "no family of models here is computed so; the closest, llama, has no normalization=layer_norm_1p",
        ),
        ({"scale_positional_embedding": True, "seq_len_interpolation_factor": 8}, "NeMo computes both"),
        ({"num_layers": "${.depth}"}, r"num_layers='\$\{.depth\}' is not read; allowed: a whole number >= 1"),
        ({"layernorm_epsilon": "small"}, "layernorm_epsilon='small' is not read"),
        ({"name": "megatron_falcon_gpt"}, "name='megatron_falcon_gpt' is not read"),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type='sinkhorn' is not read"),
    ],
)
def test_nemos_settings_that_are_not_computed(config: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        from_nemo(NEMO | config, rows=ROWS)


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"multi_latent_attention": True}, "multi_latent_attention=True is not read"),
        ({"rotary_seq_len_interpolation_factor": 2}, "rotary_seq_len_interpolation_factor=2 is not read"),
        ({"hidden_size": None}, "hidden_size=None is not read; allowed: a whole number >= 1"),
        ({"num_layers": 3}, r"decoder.layers.* is \(2, .*, the model has num_layers=3"),
        ({"ffn_hidden_size": 40}, r"mlp.linear_fc1.weight is \(96, 32\), the model's settings make it \(80, 32\)"),
        ({"qk_layernorm": True}, "no tensor for decoder.layers.0.self_attention.q_layernorm.weight, and 3 more are missing"),
        ({"untie_embeddings_and_output_weights": False, "num_experts": 2}, "no tensor for decoder.layers.0.mlp.router.weight"),
        ({"vocab_size": 70}, r"embedding.word_embeddings.weight is \(64, 32\), the model's settings make it at least \(70, 32\)"),
    ],
)
def test_arguments_that_do_not_fit(others: dict[str, Any], says: str, megatron_lm, tmp_path: Path):
    model = megatron_lm("llama")[1]
    path = megatron_files.save(tmp_path / "iter_0000007", model, megatron_files.arguments("llama", **others))
    with pytest.raises(AlignerError, match=says) as raised:
        chunks_of(path)
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)


def test_a_tensor_that_belongs_to_nothing(topology, tmp_path: Path):
    model = megatron_files.build(megatron_files.arguments("llama"))
    model.steering = torch.nn.Linear(4, 4)
    path = megatron_files.save(tmp_path / "iter_0000007", model, megatron_files.arguments("llama"))
    with pytest.raises(
        CheckpointError, match=r"2 tensors belong to no parameter of the model, e.g. \['steering.bias', 'steering.weight'\]"
    ):
        chunks_of(path)
