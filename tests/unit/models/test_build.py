"""Building models: sizes that cannot be, padded vocabularies, heads, and random weights that are the same for every layout."""

from __future__ import annotations

import pytest
import torch

from aligner.errors import ConfigError
from aligner.models.config import Architecture, Dtype, Family, Fp8Recipe, Layers, ModelConfig, Normalization
from aligner.models.create import read_architecture
from aligner.models.modules.build import build_model, padded_vocab_size
from aligner.models.modules.chunk import global_name
from aligner.models.modules.megatron_config import transformer_config
from aligner.models.modules.scalar_head import Pooling, ScalarHead
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel import mcore
from aligner.parallel.topology import ParallelConfig

pytestmark = pytest.mark.usefixtures("topology")


def sizes(**changes) -> Architecture:
    return Architecture(**({"vocab_size": 61, "hidden_size": 32, "num_layers": 1, "ffn_hidden_size": 48} | changes))


@pytest.mark.parametrize(
    ("vocab", "divisor", "tp", "padded"),
    [(61, 8, 1, 64), (64, 8, 1, 64), (65, 8, 1, 72), (61, 8, 4, 64), (65, 8, 4, 72), (61, 1, 1, 61), (61, 1, 2, 62), (61, 128, 2, 128)],
)
def test_padded_vocabulary(vocab, divisor, tp, padded):
    assert padded_vocab_size(vocab, divisor=divisor, tp=tp) == padded


def test_parallel_config_errors():
    with pytest.raises(ConfigError, match="parallel.tp=0: must be at least 1"):
        ParallelConfig(tp=0)
    with pytest.raises(ConfigError, match="parallel.sequence_parallel=true: needs parallel.tp > 1"):
        ParallelConfig(sequence_parallel=True)
    ParallelConfig(tp=2, sequence_parallel=True).check_world(4)
    with pytest.raises(ConfigError, match="parallel.tp=4 does not divide the 6 ranks of this component; allowed: 1, 2, 3, 6"):
        ParallelConfig(tp=4).check_world(6)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (Architecture, {"num_layers": 0}, "architecture.num_layers=0"),
        (Architecture, {"num_attention_heads": 6, "num_key_value_heads": 4}, "architecture.num_key_value_heads=4"),
        (Architecture, {"hidden_size": 130}, "architecture.num_attention_heads=4: must divide hidden_size=130"),
        (Architecture, {"head_dim": 5}, "architecture.head_dim=5: rotary embeddings need an even size"),
        (ModelConfig, {"micro_batch_size": 0}, "model.micro_batch_size=0"),
        (ModelConfig, {"logits_chunk_size": 0}, "model.logits_chunk_size=0"),
        (ModelConfig, {"make_vocab_divisible_by": -1}, "model.make_vocab_divisible_by=-1"),
        (ModelConfig, {"seq_length": -1}, "model.seq_length=-1"),
        (OptimizerConfig, {"lr": 0.0}, "optimizer.lr=0.0"),
        (OptimizerConfig, {"lr": 1e-5, "min_lr": 1e-4}, "min_lr=0.0001"),
        (OptimizerConfig, {"clip_grad": -1.0}, "optimizer.clip_grad=-1.0"),
        (OptimizerConfig, {"distributed": False, "precision_aware": True}, "optimizer.precision_aware=true"),
    ],
)
def test_config_errors_name_field_and_value(kind, values, message):
    with pytest.raises(ConfigError) as caught:
        kind(**values)
    assert message in str(caught.value)


def test_scalar_models_have_the_same_float32_head_and_no_output_layer():
    config = ModelConfig(dtype=Dtype.bfloat16)
    head = ScalarHead(outputs=("a", "b", "c"), pooling=Pooling.tokens)
    (one,), (other,) = (build_model(sizes(tied_embeddings=False), config, ParallelConfig(), load=False, head=head) for _ in range(2))
    assert one.score_head.weight.shape == (3, 32) and one.score_head.weight.dtype == torch.float32
    assert torch.equal(one.score_head.weight, other.score_head.weight) and not one.score_head.bias.any()
    assert "output_layer.weight" not in dict(one.named_parameters())
    assert one.embedding.word_embeddings.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": Family.llama, "qkv_bias": True}, "architecture.qkv_bias=True: models of family llama have False"),
        ({"family": Family.qwen2}, "architecture.qkv_bias=False: models of family qwen2 have True"),
        ({"family": Family.qwen3}, "architecture.qk_norm=False: models of family qwen3 have True"),
    ],
)
def test_a_model_that_its_family_cannot_describe(changes, message):
    """It would train well and export as another model."""
    with pytest.raises(ConfigError, match=message):
        read_architecture(ModelConfig(architecture=sizes(**changes)), vocab_size=61)


def test_vocabulary_of_the_tokenizer_where_the_config_gives_none():
    assert read_architecture(ModelConfig(architecture=sizes(vocab_size=0)), vocab_size=45) == sizes(vocab_size=45)
    assert read_architecture(ModelConfig(architecture=sizes(vocab_size=50)), vocab_size=45) == sizes(vocab_size=50)


# Random weights: differ where they should.


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
