"""Checkpoints of one process: a resumed run is the uninterrupted one bit for bit; an unfinished checkpoint does not exist."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from model_steps import adam, make_batch, same, save, train, weights_of

from aligner.errors import CheckpointError
from aligner.models.checkpoint import checkpoint, files, optimizer as checkpoint_optimizer, weights
from aligner.models.config import Dtype
from aligner.models.training.optimizer import OptimizerKind
from aligner.types import TokenBatch

pytestmark = pytest.mark.usefixtures("topology")


WIDE = {"hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128, "tied_embeddings": False}  # some states are of 8 bits
OPTIMIZERS = {
    "adam": {},
    "not distributed": {"distributed": False},
    "adam8bit": {"kind": OptimizerKind.adam8bit},
    "muon": {"kind": OptimizerKind.muon, "distributed": False},
}


@pytest.mark.parametrize(
    ("kind", "optimizer", "dtype"),
    [
        ("policy", "adam", Dtype.float32),
        ("policy", "not distributed", Dtype.float32),
        ("policy", "adam", Dtype.bfloat16),
        ("reward", "adam", Dtype.float32),
        ("reward", "not distributed", Dtype.bfloat16),  # whose head is in float32
        *(
            (kind, optimizer, dtype)
            for optimizer in ("adam8bit", "muon")
            for kind, dtype in (("policy", Dtype.float32), ("policy", Dtype.float16), ("reward", Dtype.bfloat16))
        ),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(kind, optimizer, dtype, make_model, tmp_path):
    """Training goes on while the files are written: the checkpoint is the state of the moment at which it was asked for."""
    options = {"optimizer": adam(**OPTIMIZERS[optimizer]), "config": {"dtype": dtype}, "training": {"micro_batch_size": 2}}
    first = make_model(kind, seed=1, architecture=WIDE, **options)
    train(first, range(3), kind)
    request = checkpoint.SaveRequest(step=3, state={"position": 12, "nested": {"kl_coef": 0.25}})
    pending = checkpoint.start_save(tmp_path, first.model, request, in_background=True, read_back=True)
    noise, metrics = torch.rand(4), train(first, range(3, 6), kind)
    assert not (tmp_path / "latest").exists()  # nothing is visible yet
    assert pending.publish(60) == checkpoint.resolve(tmp_path)
    resumed = make_model(kind, seed=2, architecture=WIDE, **options)  # other random weights
    train(resumed, range(1), kind)  # and an optimizer with a past of its own
    assert checkpoint.load(resumed.model, tmp_path) == {"position": 12, "nested": {"kl_coef": 0.25}}
    assert resumed.model.version == 3
    assert torch.equal(torch.rand(4), noise)
    assert train(resumed, range(3, 6), kind) == metrics
    assert same(weights_of(resumed), weights_of(first)) and resumed.model.version == 6
    save(resumed, tmp_path, step=6)  # every parameter has the same step


@pytest.mark.parametrize("distributed", [True, False])
def test_rates_and_betas_are_those_of_the_run_that_goes_on(distributed, make_model, tmp_path):
    first = make_model("policy", optimizer=adam(distributed=distributed))
    train(first, range(2))
    save(first, tmp_path)
    own = {"lr": 3e-3, "min_lr": 2e-3, "beta1": 0.6, "beta2": 0.7, "eps": 1e-6}
    resumed = make_model("policy", optimizer=adam(distributed=distributed, **own))
    checkpoint.load(resumed.model, tmp_path)
    for group in resumed.model.optimizer.param_groups:
        assert (group["betas"], group["eps"], group["max_lr"], group["min_lr"]) == ((0.6, 0.7), 1e-6, 3e-3, 2e-3)


def test_layout_of_a_checkpoint(make_model, tmp_path):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors", "config.json"):
        (tokenizer / name).write_text(name)
    policy = make_model("policy", optimizer=adam())
    train(policy, range(2))
    request = checkpoint.SaveRequest(step=7, state={"epoch": 1}, config_yaml="a: 1\n", tokenizer=tokenizer)
    path = checkpoint.save(tmp_path / "checkpoints", policy.model, request)
    assert path == tmp_path / "checkpoints" / "step_000007"
    assert {p.name for p in path.iterdir()} == {
        *("aligner.json", "manifest.json", "sums.json", "config.json", "config.yaml", "weights", "optimizer", "state.pt", "state.json"),
        *("tokenizer.json", "chat_template.jinja"),
    }
    assert (path / "config.yaml").read_text() == "a: 1\n" and json.loads((path / "config.json").read_text())["model_type"] == "qwen2"
    state = json.loads((path / "state.json").read_text())
    assert (state["step"], state["version"], state["loop"]) == (7, 2, {"epoch": 1})
    marker = files.read_marker(path)
    assert (marker["format"], marker["kind"], marker["step"]) == (2, "language", 7)
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step_000007"
    assert checkpoint.resolve(path) == checkpoint.resolve(path.parent) == path


def test_a_frozen_model_saves_no_optimizer(make_model, tmp_path):
    reward = make_model("reward")
    path = save(reward, tmp_path)
    assert not (path / "optimizer").exists()
    assert files.read_marker(path)["num_outputs"] == 1
    other = make_model("reward", seed=5)
    checkpoint.load(other.model, path)
    assert same(weights_of(other), weights_of(reward))
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        checkpoint.load(make_model("reward", optimizer=adam()).model, path)


def test_create_reads_a_checkpoint(make_model, load_policy, tmp_path):
    policy = make_model("policy", optimizer=adam())
    train(policy, range(1))
    path = save(policy, tmp_path)
    (tmp_path / "best").write_text(path.name + "\n")
    for source in (path, tmp_path, tmp_path / "best"):
        assert same(weights_of(load_policy(source)), weights_of(policy))
    # A vocabulary padded to another size is the same vocabulary.
    batch = make_batch("policy")
    padded = load_policy(path, config={"make_vocab_divisible_by": 40})
    torch.testing.assert_close(padded.logprobs(batch), policy.logprobs(batch), rtol=0, atol=1e-6)


def test_a_value_model_starts_from_a_reward_or_a_language_model(make_model, tmp_path):
    batch = TokenBatch(tokens=make_batch("policy").tokens, lengths=make_batch("policy").lengths)
    reward, policy = make_model("reward", seed=1), make_model("policy", seed=2)
    value = make_model("value", seed=3)
    bias = value.model.module.score_head.bias.clone()
    weights.load_weights(value.model.chunks, save(reward, tmp_path / "reward"))
    assert same(weights_of(value), weights_of(reward) | {"score_head.bias": bias})  # which a reward model does not have
    assert torch.isfinite(value.values(batch)).all()
    value = make_model("value", seed=3)
    head = value.model.module.score_head.weight.clone()
    weights.load_weights(value.model.chunks, save(policy, tmp_path / "policy"))
    loaded, source = weights_of(value), weights_of(policy)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in source.items() if not name.startswith("output_layer"))
    assert torch.equal(loaded["score_head.weight"], head)


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
@pytest.mark.parametrize("distributed", [True, False])
def test_a_run_continues_with_the_other_kind_of_optimizer(distributed, dtype, make_model, tmp_path):
    # The norm that gradients are clipped by is summed in another order.
    first = make_model("policy", optimizer=adam(distributed=distributed, clip_grad=0.0), config={"dtype": dtype})
    train(first, range(2))
    save(first, tmp_path)
    resumed = make_model("policy", optimizer=adam(distributed=not distributed, clip_grad=0.0), config={"dtype": dtype}, seed=2)
    checkpoint.load(resumed.model, tmp_path)
    for ours, theirs in zip(train(resumed, range(2, 4)), train(first, range(2, 4)), strict=True):
        assert ours == pytest.approx(theirs)
    assert same(weights_of(resumed), weights_of(first))


def test_a_resumed_run_follows_its_own_configs_schedule(make_model, tmp_path):
    """More steps and a lower rate were asked for than at first: the position is the checkpoint's, the schedule the new config's."""
    options = {"warmup_steps": 0, "min_lr": 0.0, "clip_grad": 1e-6}
    short = make_model("policy", optimizer=adam(lr=1.0, **options), training={"total_steps": 4})
    train(short, range(2))
    save(short, tmp_path)
    longer = make_model("policy", optimizer=adam(lr=0.5, **options), training={"total_steps": 6})
    checkpoint.load(longer.model, tmp_path)
    (metrics,) = train(longer, range(2, 3))
    assert metrics["optim/lr"] == pytest.approx(0.25)  # cosine, third of six steps: half of 0.5


def test_a_checkpoint_from_before_the_first_step(make_model, tmp_path):
    for distributed in (True, False):
        first = make_model("policy", optimizer=adam(distributed=distributed), seed=1)
        save(first, tmp_path / str(distributed), step=0)
        second = make_model("policy", optimizer=adam(distributed=distributed), seed=2)
        checkpoint.load(second.model, tmp_path / str(distributed))
        assert train(first, range(2)) == train(second, range(2))
        assert same(weights_of(first), weights_of(second))


# What is wrong with a checkpoint.


def test_a_scalar_models_checkpoint_is_no_policy(make_model, tmp_path):
    path = save(make_model("reward"), tmp_path)
    with pytest.raises(CheckpointError, match="a scalar model's checkpoint cannot be loaded into a language model"):
        checkpoint.load(make_model("policy").model, path)


@pytest.mark.parametrize(
    "change", [{"hidden_size": 16}, {"num_layers": 3}, {"num_layers": 1}, {"ffn_hidden_size": 32}, {"vocab_size": 60}, {"vocab_size": 90}]
)
def test_a_checkpoint_of_other_sizes_is_refused(change, make_model, tmp_path):
    path = save(make_model("policy"), tmp_path)
    name = next(iter(change))
    with pytest.raises(CheckpointError, match=name):
        checkpoint.load(make_model("policy", architecture=change).model, path)


def test_loading_holds_the_optimizers_state_once(make_model, tmp_path, monkeypatch):
    """Of what was read nothing is left when the optimizer has it: a node's ranks would else need the double in host memory."""
    model = make_model("policy", optimizer=adam())
    train(model, range(2))
    save(model, tmp_path)
    seen = []

    def watched(optimizer, weights, loaded, *, step):
        read = [weakref.ref(tensor.untyped_storage()) for tensor in loaded.values()]
        found = original(optimizer, weights, loaded, step=step)
        seen.append((len(read), len(loaded), sum(one() is not None for one in read)))
        return found

    original = checkpoint_optimizer.restore
    monkeypatch.setattr(checkpoint_optimizer, "restore", watched)
    checkpoint.load(model.model, tmp_path)
    assert seen[0][0] > 0 and seen[0][1:] == (0, 0)
