"""Sizes that cannot be split, padding that is cut again, heads, and weights that start the same for the same seed."""

from __future__ import annotations

import pytest
import torch

from aligner.errors import ConfigError
from aligner.models.architecture.divisible import check_divisible
from aligner.models.config import Architecture, Dtype, Family, ModelConfig
from aligner.models.create import read_architecture
from aligner.models.modules.build import build_model, padded_vocab_size
from aligner.models.modules.scalar_head import Pooling, ScalarHead
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel.topology import ParallelConfig

pytestmark = pytest.mark.usefixtures("topology")


def sizes(**changes) -> Architecture:
    return Architecture(**({"vocab_size": 61, "hidden_size": 32, "num_layers": 1, "ffn_hidden_size": 48} | changes))


@pytest.mark.parametrize(
    ("architecture", "tp", "message"),
    [
        (sizes(num_attention_heads=4), 3, "parallel.tp=3: does not divide the model's num_attention_heads=4"),
        (sizes(ffn_hidden_size=47), 2, "parallel.tp=2: does not divide the model's ffn_hidden_size=47"),
        (sizes(hidden_size=33, head_dim=8), 2, "parallel.tp=2: does not divide the model's hidden_size=33"),
        (sizes(num_attention_heads=12, num_key_value_heads=6, head_dim=8), 4, "be a multiple of, the model's num_key_value_heads=6"),
        (sizes(vocab_size=0), 1, "architecture.vocab_size=0: must be at least 1"),
    ],
)
def test_impossible_layouts_are_named(architecture, tp, message):
    with pytest.raises(ConfigError) as caught:
        check_divisible(architecture, ParallelConfig(tp=tp))
    assert message in str(caught.value)


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


def test_vocabulary_weight_has_no_padding():
    for tied in (True, False):
        (module,) = build_model(sizes(tied_embeddings=tied), ModelConfig(), ParallelConfig(), load=False)
        weight, start = module.vocabulary_weight()
        assert module.embedding.word_embeddings.weight.shape == (128, 32)
        assert weight.shape == (61, 32) and start == 0
        whole = module.embedding.word_embeddings.weight if tied else module.output_layer.weight
        assert weight.data_ptr() == whole.data_ptr()


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
