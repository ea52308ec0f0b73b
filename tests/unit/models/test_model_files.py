"""What is assumed of a model's files is looked at before anything is built: relations between tensors, sizes, names, kinds of folders."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aligner.errors import ConfigError, ModelFilesError
from aligner.models import create
from aligner.models.checkpoint.hf_weights import HFWeights, described
from aligner.models.config import Architecture, Dtype, ModelConfig
from aligner.models.families import architecture_from_hf, weight_names
from aligner.models.modules.scalar_head import Pooling, ScalarHead
from aligner.models.weights import save_hf
from aligner.parallel import platform
from aligner.parallel.topology import ParallelConfig

pytestmark = pytest.mark.usefixtures("topology")


@pytest.fixture
def unbuilt(monkeypatch, load_policy):
    """`unbuilt(directory)`: what loading a policy raises, without anything being built."""

    def build(*_: object, **__: object) -> None:
        raise AssertionError("built")

    monkeypatch.setattr(create, "build_model", build)

    def load(directory: Path, kind: type[Exception] = ConfigError) -> str:
        with pytest.raises(kind) as caught:
            load_policy(directory)
        return str(caught.value)

    return load


def split(directory: Path, parts: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, str]) -> None:
    for file, tensors in parts.items():
        save_file(tensors, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


# Tied heads.

EMBEDDINGS = dict.fromkeys(("llama_tied_llama3_rope", "gemma2", "cohere", "qwen2_moe", "qwen3_5_text"), "model.embed_tokens.weight")
EMBEDDINGS |= {"gpt2": "transformer.wte.weight", "gpt_neox_sequential": "gpt_neox.embed_in.weight"}
EMBEDDINGS |= {"opt": "model.decoder.embed_tokens.weight"}
TIED_BY_DEFAULT = ["gemma2", "cohere", "gpt2", "opt"]


@pytest.mark.parametrize(("name", "flag"), [*((name, True) for name in EMBEDDINGS), *((name, ...) for name in TIED_BY_DEFAULT)])
def test_a_tied_head_in_the_file_is_compared(name, flag, changed, load_policy, tmp_path, capsys):
    """Equal: tied. Another one: kept apart, as transformers keeps it, and so exported."""
    from transformers import AutoModelForCausalLM

    embedding, head = EMBEDDINGS[name], "embed_out.weight" if name.startswith("gpt_neox") else "lm_head.weight"
    same = changed(name, lambda tensors: tensors.update({head: tensors[embedding].clone()}), tie_word_embeddings=flag)
    assert described(same).tied_embeddings
    (chunk,) = load_policy(same).chunks
    save_hf([chunk], tmp_path / "same", writer=True)
    assert head not in load_file(tmp_path / "same" / "model.safetensors") and "kept apart" not in capsys.readouterr().out
    other = changed(name, lambda tensors: tensors.update({head: tensors[embedding] * 2 + 1}), tie_word_embeddings=flag)
    (chunk,) = load_policy(other).chunks
    assert not described(other).tied_embeddings
    save_hf([chunk], tmp_path / "other", writer=True)
    written, read = load_file(tmp_path / "other" / "model.safetensors"), load_file(other / "model.safetensors")
    assert written.keys() == read.keys() and all(torch.equal(written[name], read[name]) for name in read)
    assert json.loads((tmp_path / "other" / "config.json").read_text())["tie_word_embeddings"] is False
    theirs, exported = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (other, tmp_path / "other"))
    assert torch.equal(theirs.get_output_embeddings().weight, exported.get_output_embeddings().weight)
    tied = replace(described(other), tied_embeddings=True)  # as an adapter's checkpoint of before says
    with pytest.raises(ModelFilesError, match=f"{head} is not the embedding, to which the model's config ties it"):
        HFWeights(other, weight_names(tied)).check(tied, is_scalar=False)


@pytest.mark.parametrize("what", ["dtype", "last number"])
def test_heads_that_nearly_are_the_embedding(what, changed):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1, -1] += 1e-3 if what == "last number" else 0
        tensors["lm_head.weight"] = head.double() if what == "dtype" else head

    assert not described(changed("llama_multi_head", change)).tied_embeddings


def test_a_head_that_is_missing_is_refused_with_the_choice(changed, unbuilt):
    message = unbuilt(changed("llama", lambda tensors: tensors.pop("lm_head.weight")))
    assert "no tensor named lm_head.weight" in message and "if it is the embedding: tie_word_embeddings=true" in message
    message = unbuilt(changed("llama", lambda tensors: tensors.pop("lm_head.weight"), tie_word_embeddings=...))
    assert "no tensor named lm_head.weight" in message

    def headless(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    assert "no tensor named lm_head.weight, and 0 more are missing" in unbuilt(changed("llama", headless), ModelFilesError)
    wide = changed("llama_multi_head", lambda tensors: tensors.update({"lm_head.weight": torch.zeros(70, 32)}))
    assert "vocab_size=61: lm_head.weight would be (61, 32), in model.safetensors it is (70, 32)" in unbuilt(wide)


def test_a_reward_model_has_no_use_for_an_output_layer(changed):
    other = changed("llama_multi_head", lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    architecture = described(other)
    HFWeights(other, weight_names(architecture)).check(architecture, is_scalar=True)


# Tensors that are there twice.


def test_a_tensor_in_two_shards(changed, load_policy):
    directory = changed("llama")
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    name, one, two = "model.norm.weight", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    for index in ({}, {name: one}, {name: two}):  # none is the first file's
        weight_map = dict.fromkeys(tensors, one) | {"lm_head.weight": two} | index
        split(directory, {one: tensors, two: {name: tensors[name], "lm_head.weight": tensors["lm_head.weight"]}}, weight_map)
        load_policy(directory)
        split(directory, {two: {name: tensors[name] + 1, "lm_head.weight": tensors["lm_head.weight"]}}, weight_map)
        with pytest.raises(ModelFilesError, match=f"{directory}: {name} is in {one} and, another one, in {two}; allowed: one of them"):
            load_policy(directory)


def test_a_whole_file_beside_an_index(changed, load_policy):
    """transformers reads the one file, others the index. What no index names is not read by anybody."""
    directory = changed("llama")
    tensors = load_file(directory / "model.safetensors")
    split(directory, {"m-1.safetensors": tensors}, dict.fromkeys(tensors, "m-1.safetensors"))
    save_file({"strange": torch.zeros(2)}, directory / "consolidated.safetensors")
    save_file({"strange": torch.zeros(2)}, directory / "m-2.safetensors")
    load_policy(directory)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name] + 1}, directory / "model.safetensors")
    with pytest.raises(ModelFilesError, match=f"{name} is in m-1.safetensors and, another one, in model.safetensors"):
        load_policy(directory)


TWICE = [  # (model, a tensor that it does not have, its shape)
    ("phi3", "model.layers.0.self_attn.q_proj.weight", (32, 32)),  # fused and split
    ("llama", "model.layers.0.mlp.gate_up_proj.weight", (96, 32)),
    ("llama", "model.layers.1.self_attn.q_proj.bias", (32,)),  # which the config denies
    ("qwen2", "model.layers.1.self_attn.o_proj.bias", (32,)),
    ("llama", "lm_head.bias", (61,)),
    ("gpt_neox", "lm_head.weight", (61, 32)),  # another family's head
    ("llama", "score.weight", (1, 32)),
    ("llama", "v_head.summary.weight", (1, 32)),
    ("llama", "model.norm.lora_A.weight", (1, 32)),
    ("deepseek_v3", "model.layers.2.input_layernorm.weight", (32,)),
]


@pytest.mark.parametrize(("name", "tensor", "shape"), TWICE)
def test_tensors_that_nothing_reads_are_named(name, tensor, shape, changed, unbuilt):
    message = unbuilt(changed(name, lambda tensors: tensors.update({tensor: torch.zeros(shape)})), ModelFilesError)
    assert f"1 tensors belong to no parameter of the model, e.g. ['{tensor}']" in message


def test_two_names_of_one_tensor(changed, unbuilt):
    def both(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {"score.weight": torch.zeros(1, 32), "classifier.weight": torch.ones(1, 32)}

    message = unbuilt(changed("llama", both))
    assert "classifier.weight and score.weight are two of one tensor; allowed: one of them" in message


def test_a_bias_that_the_config_names_is_missing(changed, unbuilt):
    assert "no tensor named model.layers.0.self_attn.q_proj.bias, and 7 more" in unbuilt(changed("llama", attention_bias=True))
    assert "no tensor named model.layers.0.mlp.gate_proj.bias, and 5 more" in unbuilt(changed("llama", mlp_bias=True))


@pytest.mark.parametrize(
    ("name", "pattern", "message"),
    [
        ("mixtral", r".*experts\.2\.w3\.weight", r"no tensor named model\.layers\.0\.block_sparse_moe\.experts\.2\.w3\.weight, and 1 more"),
        ("qwen3_moe", r".*layers\.1\.mlp\.gate\.weight", r"no tensor named model\.layers\.1\.mlp\.gate\.weight, and 0 more"),
        ("nemotron", r".*norm\.bias", r"no tensor named model\.layers\.0\.input_layernorm\.bias, and 4 more"),
        ("gpt2", r".*wpe\.weight", r"no tensor named transformer\.wpe\.weight"),
    ],
)
def test_missing_tensors_are_counted(name, pattern, message, changed, unbuilt):
    def remove(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if re.fullmatch(pattern, key)]:
            del tensors[key]

    assert re.search(message, unbuilt(changed(name, remove), ModelFilesError))


def test_gpt2_as_its_first_publisher_stores_it(hf_directory, changed, load_policy):
    """Without the `transformer.` prefix, and with causal masks among the tensors."""

    def headless(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 4, 4) for i in (0, 1)} | {"h.0.attn.masked_bias": torch.tensor(-1e4)}

    loaded = dict(load_policy(changed("gpt2", headless)).export_weights())
    expected = load_file(hf_directory("gpt2") / "model.safetensors")
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("fields", [{"seq_length": 32}, {"dtype": Dtype.bfloat16}])
def test_learned_positions(fields, hf_directory, load_policy):
    """The table keeps its rows where a run's sequences are shorter, and has the precision of the other weights."""
    policy = load_policy(hf_directory("gpt2"), config=fields)
    (chunk,) = policy.chunks
    tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(1)).to(platform.device())
    with torch.no_grad():
        hidden = chunk.eval()(tokens, torch.arange(16, device=tokens.device).expand_as(tokens), None)
    assert hidden.dtype == chunk.config.params_dtype and hidden.isfinite().all()
    assert dict(policy.export_weights())["transformer.wpe.weight"].shape == (128, 32)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_in_another_code_are_refused(dtype, changed, unbuilt):
    name = "model.layers.0.mlp.up_proj.weight"
    message = unbuilt(changed("llama", lambda tensors: tensors.update({name: tensors[name].to(dtype)})))
    assert f"{name} is " in message and "(1 such): not read; allowed: F64, F32, F16, BF16" in message


def test_other_dtypes_are_read_tensor_by_tensor(changed, load_policy):
    def mix(tensors: dict[str, torch.Tensor]) -> None:
        for number, name in enumerate(sorted(tensors)):
            tensors[name] = tensors[name].to((torch.float16, torch.bfloat16, torch.float32, torch.float64)[number % 4])

    directory = changed("llama", mix)
    save_hf(load_policy(directory, config={"dtype": Dtype.float32}).chunks, directory / "export", writer=True)
    written, read = load_file(directory / "export" / "model.safetensors"), load_file(directory / "model.safetensors")
    assert written.keys() == read.keys() and all(torch.equal(written[name], read[name].float()) for name in read)


def test_layers_that_predict_further_tokens_are_named_once(changed, load_policy, capsys):
    def further(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {"model.layers.2.eh_proj.weight": torch.zeros(32, 64), "model.layers.2.input_layernorm.weight": torch.zeros(32)}

    directory = changed("deepseek_v3", further)
    for _ in range(2):
        load_policy(directory)
    said = [line for line in capsys.readouterr().out.splitlines() if "further tokens" in line]
    assert said == [
        f"{directory}: 2 tensors, such as model.layers.2.eh_proj.weight, predict further tokens, and are not read and not exported"
    ]


# Heads of models that score.


def test_heads_that_are_not_what_the_class_says(make_model, tmp_path):
    for pooling, change, named in (
        (Pooling.last, lambda t: t.pop("score.weight"), "score_head.weight"),  # would be random
        (Pooling.last, lambda t: t.update({"score.bias": torch.ones(1)}), "score.bias"),  # would not be added
        (Pooling.mean, lambda t: t.pop("score.bias"), "score_head.bias"),
    ):
        save_hf(make_model("reward", head=ScalarHead(pooling=pooling)).model.chunks, tmp_path, writer=True)
        architecture = described(tmp_path)
        HFWeights(tmp_path, weight_names(architecture)).check(architecture, is_scalar=True)
        tensors = load_file(tmp_path / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ModelFilesError, match=rf"the class in its config has a head of .*, the files differ in \['{named}'\]"):
            HFWeights(tmp_path, weight_names(architecture)).check(architecture, is_scalar=True)


# Sizes.


LARGE = {"hidden_size": (10**12, 2**63), "vocab_size": (10**10,), "num_hidden_layers": (10**9,), "head_dim": (10**6,)}
LARGE |= {"intermediate_size": (10**11,), "num_attention_heads": (2**40,)}
OF_FAMILIES = {
    "gpt2": ("n_embd", "n_layer", "n_inner", "n_positions", "vocab_size"),
    "opt": ("hidden_size", "num_hidden_layers", "ffn_dim", "word_embed_proj_dim", "max_position_embeddings"),
    "gpt_neox": ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"),
    "phi3": ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"),
    "gemma2": ("head_dim", "num_attention_heads", "num_hidden_layers"),
    "mixtral": ("num_local_experts", "intermediate_size"),
    "deepseek_v3": ("n_routed_experts", "moe_intermediate_size", "intermediate_size", "n_shared_experts", "num_hidden_layers"),
    "qwen3_next": ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size", "head_dim", "num_hidden_layers"),
    "llama4_text": ("num_local_experts", "intermediate_size", "intermediate_size_mlp", "head_dim", "num_hidden_layers"),
    "gpt_oss": ("num_local_experts", "intermediate_size", "head_dim", "num_hidden_layers"),
}
SIZES = [("llama", key, value) for key, values in LARGE.items() for value in values]
SIZES += [(name, key, value) for name, keys in OF_FAMILIES.items() for key in keys for value in (10**9, 10**13)]


@pytest.mark.parametrize(("name", "key", "value"), SIZES)
def test_sizes_that_the_files_refute(name, key, value, changed, unbuilt):
    message = unbuilt(changed(name, **{key: value}), ModelFilesError)
    assert "config.json: " in message and f"{key}={value}" in message and "\n" not in message
    assert "in model.safetensors it is (" in message or "the weight files beside it have" in message


OFF = [("llama", {"num_key_value_heads": 4}), ("llama", {"num_attention_heads": 8}), ("llama", {"intermediate_size": 40})]
OFF += [("llama", {"vocab_size": 60}), ("llama4_text", {"num_local_experts": 3})]


@pytest.mark.parametrize(("name", "change"), OFF)
def test_sizes_that_are_a_little_off(name, change, changed, unbuilt):
    ((key, value),) = change.items()
    message = unbuilt(changed(name, **change), ModelFilesError)
    assert f"config.json: {key}={value}" in message and re.search(r"would be \(.*\), in model.safetensors it is \(", message)


def test_layers_too_few_and_too_many(changed, unbuilt):
    assert "num_hidden_layers=3: the weight files beside it have 2 layers" in unbuilt(changed("llama", num_hidden_layers=3))
    for name in ("llama", "deepseek_v3", "gpt2"):  # of the second, the layer behind the last may be one that predicts further tokens
        key = "n_layer" if name == "gpt2" else "num_hidden_layers"
        assert "belong to no parameter of the model" in unbuilt(changed(name, **{key: 1}))


@pytest.mark.parametrize("value", [-1, 0, 2.0, "32", True, float("nan"), [3], {}, 10**400])
@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size", "head_dim"])
def test_sizes_that_are_none(key, value, changed, unbuilt):
    message = unbuilt(changed("llama", **{key: value}))
    assert f"{key}=" in message and "config.json" in message and "\n" not in message


@pytest.mark.parametrize(
    ("name", "key"),
    [("deepseek_v3", key) for key in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "max_position_embeddings")]
    + [("qwen3_next", key) for key in ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_value_heads")]
    + [("llama", "max_position_embeddings"), ("gpt_oss", "max_position_embeddings")],
)
def test_sizes_that_no_memory_holds(name, key, changed, unbuilt):
    """Those of what is not compared: some matrices, and the engine's rotary tables."""
    message = unbuilt(changed(name, **{key: 10**12}))
    assert "/model: its weights and tables take more than" in message and "the largest sizes are" in message


FROM_SCRATCH = ["hidden_size", "ffn_hidden_size", "vocab_size", "num_attention_heads"]


@pytest.mark.parametrize("field", FROM_SCRATCH)
def test_models_from_scratch_that_no_memory_holds(field, topology):
    large = {field: 10**12} | ({"num_key_value_heads": 1, "head_dim": 2} if field == "num_attention_heads" else {})
    config = ModelConfig(architecture=Architecture(**({"vocab_size": 61} | large)))
    architecture = create.read_architecture(config, vocab_size=61)
    with pytest.raises(
        ConfigError,
        match=rf"model.architecture: its weights and tables take more than .* the largest sizes are .*{field}={10**12}",
    ):
        create.create_policy(config, architecture, ParallelConfig(), topology, create.training(config, None))


def test_layers_that_nobody_builds():
    with pytest.raises(ConfigError, match="architecture.num_layers=1000000000: must be at most 10000"):
        Architecture(num_layers=10**9)
    for name in ("gemma2", "qwen2", "llama4_text"):  # of which each layer has an entry in a list
        hf = {"model_type": name, "num_hidden_layers": 10**9}
        with pytest.raises(ConfigError, match="num_hidden_layers=1000000000 is not supported for model_type .*; allowed: at most 10000"):
            architecture_from_hf(hf | dict.fromkeys(("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"), 8))


# Names.


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "..", ".", "", "sub/model.safetensors", "a\\b", "a\0b"])
def test_an_index_that_leads_elsewhere(file, changed, unbuilt):
    directory = changed("llama")
    names = load_file(directory / "model.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
    message = unbuilt(directory, ModelFilesError)
    assert f"model.safetensors.index.json: weight_map has {file!r}" in message and "allowed: the name of a file beside it" in message


def test_a_snapshot_of_the_cache_is_made_of_links(changed, load_policy, tmp_path):
    directory = changed("llama")
    tensors = load_file(directory / "model.safetensors")
    (tmp_path / "blobs").mkdir()
    save_file(tensors, tmp_path / "blobs" / "0123", metadata={"format": "pt"})
    (directory / "model.safetensors").unlink()
    (directory / "m-1.safetensors").symlink_to("../blobs/0123")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "m-1.safetensors")}))
    load_policy(directory)


# Folders of other kinds.


def test_an_adapter_as_a_model_leads_to_its_setting(changed, unbuilt, tmp_path):
    (tmp_path / "adapter").mkdir()
    says = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 8, "lora_alpha": 16}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(says))
    message = unbuilt(tmp_path / "adapter")
    assert f"model.path={tmp_path}/adapter: an adapter (adapter_config.json), not a model by itself" in message
    assert f"allowed: model.path=org/base with model.lora.path={tmp_path}/adapter model.lora.rank=8 model.lora.alpha=16" in message
    both = changed("llama")
    (both / "adapter_config.json").write_text(json.dumps(says | {"base_model_name_or_path": None}))
    message = unbuilt(both)  # of which transformers would read the base model that the adapter names
    assert (
        "model.path=the model that it was trained on with" in message and "or without its files if the model beside it is meant" in message
    )


def test_code_that_a_model_brings(changed):
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    named = "its auto_map names code of its own, .*modeling_own.OwnForCausalLM.*, which is never run here"
    for change, refused in (
        ({"model_type": "own"}, "model_type='own' is not supported"),
        ({"model_type": ...}, "model_type=None is not supported"),
        ({"architectures": ["OwnForCausalLM"]}, "architectures="),
    ):
        with pytest.raises(ConfigError, match=f"{refused}.*{named}"):
            described(changed("llama", auto_map=code, **change))
    assert described(changed("llama", auto_map=code)).num_layers == 2  # as DeepSeek-V3's and Phi-3's published files


def test_settings_whose_weights_are_elsewhere(changed):
    """As for a plan: the files beside the config are an index at most."""
    directory = changed("llama")
    (directory / "model.safetensors").unlink()
    assert described(directory).num_layers == 2
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": "m-1.safetensors"}}))
    assert described(directory).num_layers == 2
