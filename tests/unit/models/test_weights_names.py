"""Which tensors a model has under which names: tables, shards, headless files, masks in files, and what is missing or too much."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aligner.errors import CheckpointError, ConfigError
from aligner.models.config import Architecture, Dtype, Family, PositionEmbedding
from aligner.models.families import weight_names
from aligner.models.families.mapping import Layout, rule, shard, to_hf, to_megatron
from aligner.models.weights import all_places, named_shards
from aligner.parallel import platform

pytestmark = pytest.mark.usefixtures("topology")


SIZES = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 4, "vocab_size": 3}
SIZES |= {"position_embedding": PositionEmbedding.learned}  # heads of one dimension cannot be rotated


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def test_query_key_value_rows_are_ordered_by_group():
    """Four query heads and two key-value heads of one dimension: q0 q1 k0 v0, q2 q3 k1 v1."""
    sizes = Architecture(**SIZES)
    fused = column(0, 1, 10, 20, 2, 3, 11, 21)
    separate, packed = rule("q", "k", "v", layout=Layout.qkv), rule("qkv", layout=Layout.packed_qkv)
    q, k, v = column(0, 1, 2, 3), column(10, 11), column(20, 21)
    assert torch.equal(to_megatron(separate, [q, k, v], sizes, 3), fused)
    assert torch.equal(to_megatron(packed, [torch.cat([q, k, v])], sizes, 3), fused)
    assert all(torch.equal(a, b) for a, b in zip(to_hf(separate, fused, sizes), (q, k, v), strict=True))
    assert torch.equal(to_hf(packed, fused, sizes)[0], torch.cat([q, k, v]))


def test_conv1d_weights_are_transposed():
    sizes = Architecture(**SIZES)
    stored = torch.arange(6).reshape(2, 3)  # [in, out]
    transposed = rule("w", transposed=True)
    assert torch.equal(to_megatron(transposed, [stored], sizes, 3), torch.tensor([[0, 3], [1, 4], [2, 5]]))
    assert torch.equal(to_hf(transposed, to_megatron(transposed, [stored], sizes, 3), sizes)[0], stored)


def test_gate_and_up_are_sharded_together():
    full = column(0, 1, 2, 3, 10, 11, 12, 13)
    parts = [shard(Layout.gate_up, full, dim=0, num_shards=2, index=i) for i in (0, 1)]
    assert torch.equal(parts[0], column(0, 1, 10, 11)) and torch.equal(parts[1], column(2, 3, 12, 13))


def test_names_of_a_mixture_of_experts_in_order():
    sizes = Architecture(
        **SIZES, family=Family.mixtral, num_experts=2, experts_per_token=2, expert_ffn_hidden_size=4, tied_embeddings=False
    )
    table = weight_names(sizes)
    names = list(table.names(sizes))
    layer = "decoder.layers.0."
    assert names[0] == "embedding.word_embeddings.weight" and names[-2:] == ["decoder.final_layernorm.weight", "output_layer.weight"]
    assert [name.removeprefix(layer) for name in names[5:10]] == [
        "mlp.router.weight",
        "mlp.experts.local_experts.0.linear_fc1.weight",
        "mlp.experts.local_experts.0.linear_fc2.weight",
        "mlp.experts.local_experts.1.linear_fc1.weight",
        "mlp.experts.local_experts.1.linear_fc2.weight",
    ]
    block = "model.layers.7.block_sparse_moe."
    found = table.find("decoder.layers.7.mlp.experts.local_experts.11.linear_fc1.weight")
    assert found.hf_names == (f"{block}experts.11.w1.weight", f"{block}experts.11.w3.weight") and found.layout == Layout.gate_up


def test_a_parameter_that_the_family_does_not_have():
    with pytest.raises(ConfigError, match="no parameter decoder.layers.0.self_attention.linear_qkv.bias"):
        weight_names(Architecture()).find("decoder.layers.0.self_attention.linear_qkv.bias")


def test_shards_of_a_single_process(hf_directory, load_policy):
    policy = load_policy(hf_directory("mixtral"))
    shards = {part.place.name: part for part in named_shards(policy.chunks)}
    architecture = policy.chunks[0].architecture
    assert [place.name for place in all_places(policy.chunks)] == list(weight_names(architecture).names(architecture))
    expert = shards["decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"]
    assert (expert.place.expert_rank, expert.place.split_dim, expert.place.shape) == (0, 0, (96, 32))
    assert expert.rule.hf_names[0] == "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    router = shards["decoder.layers.0.mlp.router.weight"].place
    assert router.expert_rank is None and router.split_dim is None
    assert shards["decoder.layers.0.self_attention.linear_proj.weight"].place.split_dim == 1
    assert not any(part.place.is_copy for part in shards.values())


def rewritten(source: Path, destination: Path, change) -> Path:
    """A copy of a model's directory with other tensors in its file."""
    shutil.copytree(source, destination, dirs_exist_ok=True)
    save_file(change(load_file(source / "model.safetensors")), destination / "model.safetensors", metadata={"format": "pt"})
    return destination


def test_gpt2_as_its_first_publisher_stores_it(hf_directory, load_policy, tmp_path):
    """Without the `transformer.` prefix, and with causal masks among the tensors."""
    source = hf_directory("gpt2")

    def change(tensors):
        headless = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 4, 4) for i in (0, 1)} | {"h.0.attn.masked_bias": torch.tensor(-1e4)}
        return headless | masks

    loaded = dict(load_policy(rewritten(source, tmp_path, change)).export_weights())
    expected = load_file(source / "model.safetensors")
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in expected.items())


def test_a_headless_llama_lacks_its_output_layer(hf_directory, load_policy, tmp_path):
    def change(tensors):
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}

    with pytest.raises(CheckpointError, match="no tensor named lm_head.weight, and 0 more are missing"):
        load_policy(rewritten(hf_directory("llama"), tmp_path, change))


@pytest.mark.parametrize(
    ("name", "pattern", "message"),
    [
        ("mixtral", r".*experts\.2\.w3\.weight", r"no tensor named model\.layers\.0\.block_sparse_moe\.experts\.2\.w3\.weight, and 1 more"),
        ("qwen3_moe", r".*layers\.1\.mlp\.gate\.weight", r"no tensor named model\.layers\.1\.mlp\.gate\.weight, and 0 more"),
        ("nemotron", r".*norm\.bias", r"no tensor named model\.layers\.0\.input_layernorm\.bias, and 4 more"),
        ("gpt2", r".*wpe\.weight", r"no tensor named transformer\.wpe\.weight"),
    ],
)
def test_missing_tensors_are_counted(name, pattern, message, hf_directory, load_policy, tmp_path):
    def change(tensors):
        return {key: tensor for key, tensor in tensors.items() if not re.fullmatch(pattern, key)}

    with pytest.raises(CheckpointError, match=message):
        load_policy(rewritten(hf_directory(name), tmp_path, change))


def test_an_expert_too_many(hf_directory, load_policy, tmp_path):
    extra = "model.layers.0.mlp.experts.4.up_proj.weight"
    with pytest.raises(CheckpointError, match=f"1 tensors belong to no parameter.*{extra}"):
        load_policy(rewritten(hf_directory("qwen3_moe"), tmp_path, lambda tensors: tensors | {extra: torch.zeros(24, 32)}))


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
