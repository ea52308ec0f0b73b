"""What a model is made of, from its architecture alone; the stream of its weights in buckets that keep together what engines fuse."""

from __future__ import annotations

import gc

import pytest
import torch

from aligner.errors import EngineError
from aligner.parallel import platform
from aligner.rollout.engine.foreign import fusion_group, weight_buckets
from aligner.rollout.engine.manifest import Manifest, TensorSpec, global_manifest, hf_manifest

pytestmark = pytest.mark.usefixtures("topology")

FAMILIES = ["llama", "llama_tied_llama3_rope", "qwen2", "qwen2_tied", "qwen3", "mixtral", "qwen3_moe", "nemotron", "gpt2"]
FAMILIES += ["llama_biases_llama3_rope", "mistral", "phi3", "gpt_neox", "opt", "gemma2", "gemma3_text", "olmo2", "glm4", "cohere"]
FAMILIES += ["olmo3", "glm4_moe", "deepseek_v2", "deepseek_v3", "qwen2_moe", "qwen3_moe_dense_layers"]
FAMILIES += ["cohere_plus", "cohere2", "opt_projected", "gpt_oss", "llama4_text"]
FAMILIES += ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_manifest_is_what_is_exported(name, hf_directory, load_policy):
    """Names, order, shapes, dtypes; the vocabulary (61 rows, padded to 64 in training) without its padding."""
    policy = load_policy(hf_directory(name), config={"dtype": "bfloat16"} if name == "qwen3" else {})
    architecture, dtype = policy.module.architecture, policy.module.config.params_dtype
    list(weight_buckets(policy.export_weights(), bucket_bytes=1, manifest=hf_manifest(architecture, dtype)))  # what is fused comes together
    exported = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in policy.export_weights()]
    assert exported == [(key, spec.shape, spec.dtype) for key, spec in hf_manifest(architecture, dtype).tensors.items()]
    assert exported[0][1][0] == 61 and policy.module.embedding.word_embeddings.weight.shape[0] == 64
    wanted = global_manifest(architecture, dtype)
    assert wanted.num_bytes == hf_manifest(architecture, dtype).num_bytes
    held = {key: tuple(parameter.shape) for key, parameter in policy.module.named_parameters()}
    for key, spec in wanted.tensors.items():
        assert held[key][1:] == spec.shape[1:] and held[key][0] in (spec.shape[0], 64), key
    assert len(held) == len(wanted.tensors)


def test_what_is_fused():
    same = lambda *names: len({fusion_group(f"model.layers.3.{name}") for name in names}) == 1  # noqa: E731
    assert same(*(f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")))
    assert same("mlp.gate_proj.weight", "mlp.up_proj.weight")
    assert same("mlp.experts.0.gate_proj.weight", "mlp.experts.11.down_proj.weight")
    assert same("block_sparse_moe.experts.0.w1.weight", "block_sparse_moe.experts.1.w2.weight")
    for one, other in (
        ("mlp.up_proj.weight", "mlp.down_proj.weight"),
        ("self_attn.q_proj.weight", "self_attn.o_proj.weight"),
        ("self_attn.q_proj.weight", "self_attn.q_norm.weight"),
        ("mlp.gate.weight", "mlp.experts.0.gate_proj.weight"),
        ("self_attn.q_proj.weight", "mlp.gate_proj.weight"),
    ):
        assert not same(one, other)
    assert fusion_group("model.layers.1.self_attn.q_proj.weight") != fusion_group("model.layers.11.self_attn.q_proj.weight")


def test_buckets_are_full_and_keep_groups_whole():
    """Sizes in bytes: embedding 40; layer 0: q 16, k 8, v 8, o 16; gate 24, up 24, down 24; norm 4."""
    layer = "model.layers.0."
    sizes = {"embed.weight": 10, layer + "self_attn.q_proj.weight": 4, layer + "self_attn.k_proj.weight": 2}
    sizes |= {layer + "self_attn.v_proj.weight": 2, layer + "self_attn.o_proj.weight": 4, layer + "mlp.gate_proj.weight": 6}
    sizes |= {layer + "mlp.up_proj.weight": 6, layer + "mlp.down_proj.weight": 6, "norm.weight": 1}
    tensors = {name: torch.arange(size, dtype=torch.float32) for name, size in sizes.items()}

    def counts(limit: int) -> list[int]:
        buckets = list(weight_buckets(iter(tensors.items()), bucket_bytes=limit, manifest=listed(tensors)))
        assert [name for bucket in buckets for name, _ in bucket] == list(sizes)
        assert all(torch.equal(tensor, tensors[name]) for bucket in buckets for name, tensor in bucket)
        return [len(bucket) for bucket in buckets]

    assert counts(1) == [1, 3, 1, 2, 1, 1]  # a group is never cut, even where it is larger than a bucket
    assert counts(40) == [1, 3, 1, 2, 2]  # 40, 32, 16, 48 (too large, alone), 24 + 4
    assert counts(72) == [4, 3, 2]  # 40 + 32, 16 + 48, 24 + 4
    assert counts(1000) == [9]


def test_a_stream_that_tears_a_group_apart_is_refused():
    names = ["l.self_attn.q_proj.weight", "l.self_attn.o_proj.weight", "l.self_attn.k_proj.weight"]
    with pytest.raises(EngineError, match="k_proj.weight came apart from the tensors that it is fused with"):
        list(weight_buckets(((name, torch.zeros(1)) for name in names), bucket_bytes=1, manifest=listed({"other": torch.zeros(1)})))


def test_transposed_tensors_are_contiguous(hf_directory, load_policy):
    policy = load_policy(hf_directory("gpt2"))
    buckets = weight_buckets(policy.export_weights(), bucket_bytes=20_000, manifest=of_policy(policy))
    state = {name: tensor for bucket in buckets for name, tensor in bucket}
    expected = dict(policy.export_weights())
    assert any(not tensor.is_contiguous() for tensor in expected.values())
    for name, tensor in state.items():
        assert tensor.is_contiguous() and torch.equal(tensor, expected[name])


def test_the_stream_holds_one_bucket_at_most(make_model):
    """Whenever a bucket is loaded, what came into being with the stream is this bucket; before the next one it is gone."""
    policy = make_model("policy", architecture={"num_layers": 6, "qkv_bias": False})
    there_before = storages()
    limit, sizes = 16_000, []
    gc.freeze()  # the collector then lists what comes into being alone, not everything that this process has
    try:
        for bucket in weight_buckets(policy.export_weights(), bucket_bytes=limit, manifest=of_policy(policy)):
            sizes.append(sum(size for place, size in storages().items() if place not in there_before))
            del bucket
    finally:
        gc.unfreeze()
    assert len(sizes) > 3 and 0 < max(sizes) <= limit


def listed(tensors: dict[str, torch.Tensor]) -> Manifest:
    return Manifest(tensors={name: TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in tensors.items()})


def of_policy(policy) -> Manifest:
    return hf_manifest(policy.module.architecture, policy.module.config.params_dtype)


def storages() -> dict[int, int]:
    """Bytes of every storage that a tensor of this process has, by address."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors if tensor.device == platform.device()
    }
