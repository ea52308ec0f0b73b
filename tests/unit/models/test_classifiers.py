"""Reward models as Hugging Face models that classify, in both directions, and the critics that start from them."""

from __future__ import annotations

import json

import pytest
import torch
from model_steps import save
from safetensors.torch import load_file

from aligner.errors import CheckpointError, ConfigError
from aligner.jobs import parts
from aligner.models.config import Dtype, ModelConfig
from aligner.models.create import create_reward_model, create_value_model, read_architecture
from aligner.models.modules.scalar_head import Pooling, ScalarHead, read_head
from aligner.models.training.trainable import Training
from aligner.models.weights import save_hf
from aligner.parallel.topology import ParallelConfig
from aligner.types import StepBatch, TokenBatch

pytestmark = pytest.mark.usefixtures("topology")

TOLERANCE = 1e-4
NAMES = ("good", "long", "kind")
PAD = 0


@pytest.fixture
def reward_model(hf_directory, topology):
    """`reward_model(name or path, head)`: one from a directory."""

    def make(source, head=None):
        config = ModelConfig(
            path=str(hf_directory(source) if isinstance(source, str) else source), dtype=Dtype.float32, make_vocab_divisible_by=8
        )
        architecture = read_architecture(config, vocab_size=0)
        made = create_reward_model(
            config, architecture, ParallelConfig(), topology, Training(optimizer=None, micro_batch_size=2), head=head
        )
        if head is not None and head.has_bias:
            with torch.no_grad():
                made.model.module.score_head.bias.fill_(0.25)
        return made

    return make


def batch() -> TokenBatch:
    draw = torch.Generator().manual_seed(3)
    lengths = torch.tensor([20, 7, 13])
    tokens = torch.randint(1, 61, (3, 20), generator=draw)
    return TokenBatch(tokens=torch.where(torch.arange(20) < lengths[:, None], tokens, PAD), lengths=lengths)


def export(reward, directory) -> None:
    save_hf(reward.model.chunks, directory, writer=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"pad_token_id": PAD}))


@torch.no_grad()
def theirs(directory, auto) -> torch.Tensor:
    model, report = auto.from_pretrained(directory, output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    rows = batch()
    mask = (torch.arange(20) < rows.lengths[:, None]).long()
    return model.eval()(rows.tokens, attention_mask=mask).logits, model.config


@pytest.mark.parametrize(
    "name", ["llama", "qwen2_tied", "qwen3", "mixtral", "nemotron", "gpt2", "phi3", "gpt_neox", "opt", "opt_projected", "gemma2", "gpt_oss"]
)
def test_sequence_scores_equal_transformers_both_ways(name, reward_model, tmp_path):
    from transformers import AutoModelForSequenceClassification

    reward = reward_model(name, ScalarHead(outputs=NAMES))
    scores = reward.scores(batch())
    export(reward, tmp_path)
    logits, config = theirs(tmp_path, AutoModelForSequenceClassification)
    assert scores.std() > 0.1 and (logits - scores).abs().max() < TOLERANCE
    assert config.num_labels == 3 and config.id2label == dict(enumerate(NAMES))
    assert read_head(tmp_path) == ScalarHead(outputs=NAMES)
    assert torch.equal(reward_model(tmp_path).scores(batch()), scores)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("pooling", [Pooling.mean, Pooling.tokens])
def test_token_scores_equal_transformers_both_ways(name, pooling, reward_model, tmp_path):
    from transformers import AutoModelForTokenClassification

    outputs = NAMES if pooling is Pooling.mean else ("step",)
    reward = reward_model(name, ScalarHead(outputs=outputs, pooling=pooling))
    export(reward, tmp_path)
    logits, config = theirs(tmp_path, AutoModelForTokenClassification)
    rows = batch()
    valid = torch.arange(20) < rows.lengths[:, None]
    if pooling is Pooling.mean:
        expected = (logits * valid[..., None]).sum(dim=1) / rows.lengths[:, None]
        assert (reward.scores(rows) - expected).abs().max() < TOLERANCE
    else:
        steps = StepBatch(tokens=rows.tokens, lengths=rows.lengths, loss_mask=valid, step_labels=torch.zeros(3, 20))
        assert (reward.step_scores(steps) - logits[..., 0] * valid).abs().max() < TOLERANCE
        assert (reward.scores(rows) - logits[torch.arange(3), rows.lengths - 1]).abs().max() < TOLERANCE
    assert config.num_labels == len(outputs) and read_head(tmp_path) == ScalarHead(outputs=outputs, pooling=pooling)
    assert torch.equal(reward_model(tmp_path).scores(rows), reward.scores(rows))


def test_a_model_that_transformers_made_is_read(hf_directory, reward_model, tmp_path):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(hf_directory("llama"), num_labels=1, pad_token_id=PAD)
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path)
    reward = reward_model(tmp_path)
    assert reward.head == ScalarHead(outputs=("LABEL_0",))
    logits, _ = theirs(tmp_path, AutoModelForSequenceClassification)
    assert (reward.scores(batch()) - logits).abs().max() < TOLERANCE
    assert read_head(hf_directory("llama")) is None


def test_checkpoints_keep_the_head_and_refuse_another(make_model, tmp_path, topology):
    head = ScalarHead(outputs=NAMES, pooling=Pooling.mean)
    reward = make_model("reward", head=head)
    path = save(reward, tmp_path)
    assert read_head(path) == head and read_head(save(make_model("policy"), tmp_path / "policy")) is None
    config = ModelConfig(path=str(path), dtype=Dtype.float32, make_vocab_divisible_by=8)
    architecture = read_architecture(config, vocab_size=0)
    made = create_reward_model(config, architecture, ParallelConfig(), topology, Training(optimizer=None))
    assert made.head == head and torch.equal(made.scores(batch()), reward.scores(batch()))
    with pytest.raises(CheckpointError, match=r"its head has 3 outputs \(good, long, kind\), this model's 1 \(reward\)"):
        create_reward_model(config, architecture, ParallelConfig(), topology, Training(optimizer=None), head=ScalarHead())


def test_a_critic_starts_from_the_weighted_sum_of_attributes(make_model, tmp_path, topology):
    """Its value of the state behind a row's last token is the row's reward."""
    weights = (0.5, -2.0, 1.0)
    reward = make_model("reward", head=ScalarHead(outputs=NAMES))
    config = ModelConfig(path=str(save(reward, tmp_path)), dtype=Dtype.float32, make_vocab_divisible_by=8)
    architecture = read_architecture(config, vocab_size=0)
    with pytest.raises(ConfigError, match=r"reward.attribute_weights=\[\]: the critic starts from a reward model with 3 outputs"):
        create_value_model(config, architecture, ParallelConfig(), topology, Training(optimizer=None))
    critic = create_value_model(config, architecture, ParallelConfig(), topology, Training(optimizer=None), output_weights=weights)
    rows = batch()
    longer = TokenBatch(tokens=torch.nn.functional.pad(rows.tokens, (0, 1)), lengths=rows.lengths + 1)
    values = critic.values(longer)[torch.arange(3), rows.lengths]
    torch.testing.assert_close(values, reward.scores(rows) @ torch.tensor(weights), rtol=0, atol=1e-5)
    assert critic.model.module.head.num_outputs == 1 and critic.model.module.score_head.bias.shape == (1,)


def test_where_one_token_ends_and_pads_sequences_have_no_padding_token(tmp_path, reward_model, monkeypatch):
    class Same:
        bos_id, eos_id, pad_id = 1, 2, 2

    monkeypatch.setattr(parts, "load_tokenizer", lambda _: Same())
    for number, (head, pad) in enumerate(((ScalarHead(), None), (ScalarHead(pooling=Pooling.mean), 2))):
        folder = tmp_path / str(number)
        export(reward_model("llama", head), folder)
        parts.name_special_tokens(folder)
        assert json.loads((folder / "config.json").read_text())["pad_token_id"] == pad
    assert set(load_file(tmp_path / "0" / "model.safetensors")) & {"score.weight", "score.bias"} == {"score.weight"}
