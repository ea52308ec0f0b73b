"""Random weights are the same for every layout and differ where they should."""

from __future__ import annotations

import pytest
import torch

from aligner.errors import ConfigError
from aligner.models.config import Architecture, Dtype, Fp8Recipe, Layers, ModelConfig, Normalization
from aligner.models.modules.build import build_model
from aligner.models.modules.chunk import global_name
from aligner.models.modules.megatron_config import transformer_config
from aligner.parallel import mcore
from aligner.parallel.topology import ParallelConfig

pytestmark = pytest.mark.usefixtures("topology")


def build(seed: int = 5, **sizes):
    fields = {"vocab_size": 61, "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "initializer_range": 0.1} | sizes
    divisor = {"make_vocab_divisible_by": 8}
    (chunk,) = build_model(Architecture(**fields), ModelConfig(**divisor), ParallelConfig(), load=False, seed=seed)
    return chunk


def test_scale_and_special_cases():
    chunk = build(qkv_bias=True, family="qwen2", tied_embeddings=False)
    weights = dict(chunk.named_parameters())
    assert weights["decoder.layers.0.self_attention.linear_qkv.weight"].std().item() == pytest.approx(0.1, rel=0.05)
    assert weights["decoder.layers.1.mlp.linear_fc2.weight"].std().item() == pytest.approx(0.1 / 2, rel=0.05)  # sqrt(2 * 2 layers)
    assert weights["decoder.layers.1.self_attention.linear_proj.weight"].std().item() == pytest.approx(0.1 / 2, rel=0.05)
    assert weights["decoder.final_layernorm.weight"].tolist() == [1.0] * 64
    assert not weights["decoder.layers.0.self_attention.linear_qkv.bias"].any()
    embedding = weights["embedding.word_embeddings.weight"]
    assert embedding.shape[0] == 64 and not embedding[61:].any() and embedding[:61].std().item() == pytest.approx(0.1, rel=0.05)
    assert not torch.equal(embedding, weights["output_layer.weight"])


def test_layers_differ_and_seeds_matter():
    chunk, again, other = build(), build(), build(seed=6)
    first, second = (layer.mlp.linear_fc1.weight for layer in chunk.decoder.layers)
    assert not torch.equal(first, second)
    assert torch.equal(first, again.decoder.layers[0].mlp.linear_fc1.weight)
    assert not torch.equal(first, other.decoder.layers[0].mlp.linear_fc1.weight)


def test_a_deeper_model_starts_with_the_same_layers_up_to_their_scale():
    """What a pipeline stage draws depends on the layer's own number, not on those before it."""
    shallow, deep = build(), build(num_layers=3)
    for name in ("input_layernorm", "mlp.linear_fc1"):
        ours, theirs = (model.decoder.layers[1].get_submodule(name).weight for model in (shallow, deep))
        assert torch.equal(ours, theirs)


def test_names_of_norms_that_transformer_engine_fuses():
    chunk = build()
    assert global_name(chunk, "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight") == "decoder.layers.1.input_layernorm.weight"
    assert global_name(chunk, "decoder.layers.0.mlp.linear_fc1.layer_norm_bias") == "decoder.layers.0.pre_mlp_layernorm.bias"
    assert global_name(chunk, "decoder.layers.0.mlp.linear_fc1.weight") == "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.mark.cpu
def test_transformer_engine_is_refused_where_it_is_not():
    for model, message in (
        (ModelConfig(layers=Layers.transformer_engine), "model.layers=transformer_engine: there is no GPU; allowed: auto, torch"),
        (ModelConfig(fp8=True), "model.fp8=true: needs Transformer Engine's layers: there is no GPU"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_model(Architecture(vocab_size=61), model, ParallelConfig(), load=True)
    with pytest.raises(ConfigError, match=r"model.fp8=true: needs Transformer Engine's layers; allowed: model.layers=auto"):
        ModelConfig(fp8=True, layers=Layers.torch)
    with pytest.raises(ConfigError, match=r"model.fp8_recipe=delayed: its scales are those of passes before, .* allowed: auto, blockwise,"):
        ModelConfig(fp8=True, fp8_recipe=Fp8Recipe.delayed)
    with pytest.raises(ConfigError, match=r"^model.fp8_recipe=blockwise: needs model.fp8=true"):
        ModelConfig(fp8_recipe=Fp8Recipe.blockwise)


@pytest.mark.cpu
def test_overlap_of_exchanges_names_what_it_needs(monkeypatch):
    with pytest.raises(ConfigError, match="parallel.tp_comm_overlap=true: needs parallel.sequence_parallel=true"):
        ParallelConfig(tp=2, tp_comm_overlap=True)
    parallel, architecture = ParallelConfig(tp=2, sequence_parallel=True, tp_comm_overlap=True), Architecture(vocab_size=61)
    packed = {"packing": True, "micro_batch_tokens": 64, "dtype": Dtype.bfloat16}
    for message, model in {
        "needs Transformer Engine's layers; allowed: model.layers=auto": ModelConfig(**packed, layers=Layers.torch),
        "needs Transformer Engine's layers: there is no GPU": ModelConfig(**packed),
        "needs model.packing=true": ModelConfig(micro_batch_tokens=64),
    }.items():
        with pytest.raises(ConfigError, match=f"parallel.tp_comm_overlap=true: {message}"):
            transformer_config(architecture, model, parallel)
    monkeypatch.setattr(mcore, "transformer_engine_problem", lambda: "")
    monkeypatch.setattr(mcore, "transformer_engine_version", lambda: "2.9.0")
    monkeypatch.setattr(mcore, "importable_kernels", lambda: frozenset())
    assert transformer_config(architecture, ModelConfig(**packed), parallel).tp_comm_overlap


def test_delta_nets_decay_at_different_rates_and_their_norm_is_of_ones():
    """A_log is the logarithm of what is uniform up to 16; the other norms of such a model multiply by 1 + their weights."""
    sizes = {"linear_key_heads": 16, "linear_value_heads": 64, "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_conv_size": 4}
    chunk = build(linear_attention_layers=[0], normalization=Normalization.rms_norm_1p, **sizes)
    own = chunk.decoder.layers[0].self_attention
    decays = own.A_log.exp()
    assert 0 < decays.min() < 2 and 14 < decays.max() <= 16
    assert own.dt_bias.tolist() == [1.0] * 64 and own.out_norm.weight.tolist() == [1.0] * 4
    assert not chunk.decoder.layers[0].input_layernorm.weight.any() and own.conv_weight.std().item() == pytest.approx(0.1, rel=0.1)
