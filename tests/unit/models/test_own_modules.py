"""Models of `transformers`' own modules: log-probs, gradients, steps, checkpoints and exports are those of plain `transformers`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from hf_models import VOCAB
from model_steps import adam, make_batch, same, save, train, weights_of
from own_models import CONFIGS, VISION, write_vision
from safetensors.torch import load_file, save_file

from aligner.errors import ConfigError, ModelFilesError
from aligner.losses.sft import sft_loss
from aligner.models.architecture.divisible import check_together
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype, Implementation, LoraConfig, LoraTarget, ModelConfig, Recompute
from aligner.models.create import create_reward_model, load_source, read_architecture
from aligner.models.modules.hf_chunk import HFChunk
from aligner.models.modules.peft import save_peft
from aligner.models.training.trainable import Training
from aligner.models.weights import save_hf
from aligner.parallel.topology import ParallelConfig
from aligner.types import LabeledBatch

RECURRENT = {"lfm2", "falcon_h1"}
BESIDE_TEXT = ("vis", "projector", "connector", "qformer", "query_tokens", "language_projection")  # in the names of tensors
LENGTHS = torch.tensor([21, 9, 14, 2, 17])
ROWS, WIDTH = len(LENGTHS), 21


def batch() -> LabeledBatch:
    tokens = torch.randint(3, VOCAB, (ROWS, WIDTH), generator=torch.Generator().manual_seed(3))
    inside = torch.arange(WIDTH) < LENGTHS[:, None]
    return LabeledBatch(tokens=tokens * inside, lengths=LENGTHS, loss_mask=inside & (torch.arange(WIDTH) > 0))


def plain(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of `transformers`, one row at a time, and the gradients of their mean."""
    rows, given, total = torch.zeros(ROWS, WIDTH), batch(), 0.0
    for row, length in enumerate(LENGTHS.tolist()):
        logits = model(input_ids=given.tokens[row : row + 1, :length], use_cache=False).logits[0].float()
        found = logits.log_softmax(-1)[:-1].gather(1, given.tokens[row, 1:length, None])[:, 0]
        rows[row, 1:length] = found.detach()
        total = total - found.sum()
    (total / given.loss_mask.sum()).backward()
    return rows, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


WAYS: dict[str, dict[str, Any]] = {"padded": {"micro_batch_size": 2}, "packed": {"packing": True, "micro_batch_tokens": 40}}
WAYS["recomputed"] = {"recompute": Recompute.full}
CASES = [(name, way) for name in CONFIGS for way in ("padded", "packed")]
# Routers and decoders that draw in training mode do not, and a limit on the logits is found whatever a config calls it.
CASES += [(name, way) for name in ("phimoe", "biogpt", "recurrent_gemma") for way in ("padded", "recomputed")]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_log_probs_and_gradients_are_those_of_transformers(name: str, way: str, hf_directory, load_policy) -> None:
    fields = WAYS[way]
    if way == "packed" and name in RECURRENT:
        with pytest.raises(ConfigError, match="model.packing=true: .*carry a state"):
            load_policy(hf_directory(name), config=fields)
        return
    training = {key: value for key, value in fields.items() if key != "recompute"} | {"total_steps": 10}
    policy = load_policy(hf_directory(name), config=fields, training=training, optimizer=adam(clip_grad=0.0))
    reference = transformers.AutoModelForCausalLM.from_pretrained(hf_directory(name), dtype=torch.float32).eval()
    logprobs, gradients = plain(reference)
    assert torch.allclose(policy.logprobs(batch()), logprobs, atol=1e-5)
    metrics = policy.train_step(batch(), sft_loss)
    assert metrics["sft/loss"].value() == pytest.approx(-float(logprobs[batch().loss_mask].mean()), abs=1e-5)
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    assert metrics["optim/grad_norm"].value() == pytest.approx(float(norm), rel=1e-4)
    own = dict(policy.module.named_parameters())
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name_, gradient in gradients.items():
        assert torch.allclose(own[f"hf.{name_}"].main_grad.cpu(), gradient, atol=1e-4 * largest), name_


@pytest.mark.parametrize("name", ["minimax_m2", "deepseek_v4"])
def test_an_export_of_untrained_weights_has_the_files_tensors(name: str, hf_directory, load_policy, tmp_path: Path) -> None:
    """Experts too, which `transformers` has in one tensor and its files one by one; a router's biases, which are no parameters there; and
    DeepSeek-V4's tables of experts by the token's number, which are integers."""
    policy = load_policy(hf_directory(name))
    save_hf(policy.chunks, tmp_path, writer=True)
    before, after = load_file(hf_directory(name) / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[one], after[one]) for one in before)
    assert (name == "deepseek_v4") is any(tensor.dtype == torch.int64 for tensor in after.values())
    assert transformers.AutoConfig.from_pretrained(tmp_path).model_type == name


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapters"])
def test_a_resumed_run_continues_bit_for_bit(lora: bool, hf_directory, load_policy, tmp_path: Path) -> None:
    config = {"lora": LoraConfig(rank=4)} if lora else {}
    whole, first, resumed = (
        load_policy(hf_directory("granite"), optimizer=adam(), config=config, training={"total_steps": 10}) for _ in range(3)
    )
    train(whole, range(4))
    train(first, range(2))
    checkpoint.load(resumed.model, save(first, tmp_path))
    train(resumed, range(2, 4))
    assert same(weights_of(whole), weights_of(resumed))
    if not lora:
        other = {"implementation": Implementation.megatron}
        with pytest.raises(ConfigError, match="model.implementation=megatron: .*allowed: auto, transformers"):
            load_policy(tmp_path / "step_000002", config=other)
        again = load_policy(tmp_path / "step_000002")
        assert same(weights_of(first), weights_of(again))


def test_weights_come_from_where_they_are_asked_for(hf_directory, load_policy, tmp_path: Path) -> None:
    """A checkpoint of adapters merges them into its base; the files of a model replace what training made; missing ones are no weights."""
    policy = load_policy(hf_directory("granite"), optimizer=adam(), config={"lora": LoraConfig(rank=4)}, training={"total_steps": 10})
    train(policy, range(2))
    merged = load_policy(save(policy, tmp_path / "run"))
    assert torch.allclose(merged.logprobs(batch()), policy.logprobs(batch()), atol=1e-5)
    trained = load_policy(hf_directory("granite"), optimizer=adam(), training={"total_steps": 10})
    before = trained.logprobs(batch())
    train(trained, range(2))
    load_source(trained.chunks, ModelConfig(path=str(hf_directory("granite"))))
    assert torch.equal(trained.logprobs(batch()), before)
    shutil.copytree(hf_directory("granite"), tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").unlink()
    with pytest.raises(ModelFilesError, match="no model.safetensors"):
        load_policy(tmp_path / "cut")


def test_an_output_layer_of_its_own_stays_apart_whatever_the_config_says(hf_directory, load_policy, tmp_path: Path) -> None:
    """`transformers` unties them; so do a checkpoint, an export, and the copy that samples ahead."""
    shutil.copytree(hf_directory("granite"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    policy = load_policy(tmp_path / "model", optimizer=adam(), training={"total_steps": 10})
    train(policy, range(2))
    wanted = policy.logprobs(batch())
    assert torch.equal(load_policy(save(policy, tmp_path / "run")).logprobs(batch()), wanted)
    save_hf(policy.chunks, tmp_path / "out", writer=True)
    assert torch.equal(load_policy(tmp_path / "out").logprobs(batch()), wanted)
    copy = policy.chunks[0].twin()
    assert copy.take_weights(policy.chunks[0]) and torch.equal(copy.output_parameter, policy.chunks[0].output_parameter)


@pytest.mark.parametrize("name", ["smollm3", "minimax_m2"])
def test_adapters_are_pefts(name: str, hf_directory, load_policy, tmp_path: Path) -> None:
    policy = load_policy(hf_directory(name), optimizer=adam(), config={"lora": LoraConfig(rank=4)}, training={"total_steps": 10})
    train(policy, range(2))
    assert {key for key, p in policy.module.named_parameters() if p.requires_grad} == {
        key for key, _ in policy.module.named_parameters() if ".adapter." in key
    }
    save_peft(policy.chunks, tmp_path / "adapter", writer=True)
    save_hf(policy.chunks, tmp_path / "merged", writer=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(hf_directory(name), dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    ours = policy.logprobs(batch())
    for theirs in (adapted.requires_grad_(), merged):
        assert torch.allclose(ours, plain(theirs)[0], atol=2e-5)
    again = load_policy(hf_directory(name), config={"lora": LoraConfig(rank=4, path=str(tmp_path / "adapter"))})
    assert torch.equal(again.logprobs(batch()), ours)


@pytest.fixture
def make_reward(topology):
    """A reward model on the language model in a directory."""

    def make(path: Path, optimizer: Any = None) -> Any:
        model = ModelConfig(path=str(path), dtype=Dtype.float32)
        architecture = read_architecture(model, vocab_size=0)
        return create_reward_model(model, architecture, ParallelConfig(), topology, Training(optimizer=optimizer, total_steps=10))

    return make


@pytest.mark.parametrize("name", ["exaone4", "smollm3"])
def test_reward_models_are_those_of_transformers(name: str, hf_directory, make_reward, tmp_path: Path) -> None:
    """Written, read again, and scored by the class that the export's config names."""
    reward = make_reward(hf_directory(name), adam())
    train(reward, range(2), "reward")
    given = make_batch("reward", 5)
    scores = reward.scores(given)
    save_hf(reward.model.chunks, tmp_path, writer=True)
    assert torch.equal(make_reward(tmp_path).scores(given), scores)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32, pad_token_id=0).eval()
    with torch.no_grad():
        rows = [theirs(input_ids=row[None, :length]).logits[0] for row, length in zip(given.tokens, given.lengths, strict=True)]
    assert torch.allclose(scores, torch.stack(rows), atol=1e-5)


@pytest.mark.parametrize("kind", ["text", "images"])
def test_a_reward_model_is_exported_whatever_its_language_model_is_called(kind: str, hf_directory, make_reward, tmp_path: Path) -> None:
    """A config may name no class, or one of images and text."""
    if kind == "images":
        write_vision("qwen2_5_vl", tmp_path / "model")
    else:
        shutil.copytree(hf_directory("granite"), tmp_path / "model")
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        config.pop("architectures")
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    given, reward = make_batch("reward", 5), make_reward(tmp_path / "model")
    save_hf(reward.model.chunks, tmp_path / "out", writer=True)
    assert torch.equal(make_reward(tmp_path / "out").scores(given), reward.scores(given))


@pytest.mark.parametrize(
    ("model", "parallel", "named"),
    [
        ({}, {"tp": 2}, "parallel.tp=2: granite"),
        ({}, {"pp": 2}, "parallel.pp=2: granite"),
        ({}, {"cp": 2}, "parallel.cp=2: granite"),
        ({"fp8": True}, {}, "model.fp8=true: granite"),
        ({"batch_invariant": True}, {}, "model.batch_invariant=true: granite"),
        ({"recompute": Recompute.selective}, {}, "model.recompute=selective: granite.*allowed: none, full"),
        ({"router_aux_loss_coef": 0.1}, {}, "model.router_aux_loss_coef=0.1: granite"),
    ],
)
def test_what_they_cannot_have_is_refused_by_name(model: dict, parallel: dict, named: str, hf_directory) -> None:
    config = ModelConfig(path=str(hf_directory("granite")), **model)
    with pytest.raises(ConfigError, match=named):
        check_together(read_architecture(config, vocab_size=0), config, ParallelConfig(**parallel))


def test_a_line_says_which_layers_have_adapters(hf_directory, load_policy, capsys) -> None:
    """What a model calls otherwise than all others gets none."""
    load_policy(hf_directory("lfm2"), config={"lora": LoraConfig(rank=2, targets=[LoraTarget.q, LoraTarget.fc2])})
    assert "lfm2: adapters on 3 layers (q_proj, w2); none on in_proj, k_proj, out_proj, v_proj, w1, w3\n" in capsys.readouterr().out


def test_without_files_there_is_nothing_to_describe_the_model() -> None:
    with pytest.raises(ConfigError, match="model.implementation=transformers: needs model.path"):
        read_architecture(ModelConfig(implementation=Implementation.transformers), vocab_size=9)


def test_weights_that_are_not_finite_are_named(hf_directory, load_policy, tmp_path: Path) -> None:
    shutil.copytree(hf_directory("granite"), tmp_path / "spoilt")
    tensors = load_file(tmp_path / "spoilt" / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "spoilt" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="model_type=granite: its hidden states are not finite"):
        load_policy(tmp_path / "spoilt")


def test_an_unknown_model_is_refused_with_the_release(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "tomorrows_model", "auto_map": {"AutoConfig": "configuration.X"}}')
    with pytest.raises(ConfigError, match=f"model_type='tomorrows_model' is .*transformers {transformers.__version__}.*auto_map"):
        read_architecture(ModelConfig(path=str(tmp_path)), vocab_size=0)


@pytest.mark.parametrize("place", [{}, {"model_type": "llava"}])
def test_files_in_bits_that_are_not_read_are_refused(place: dict, tmp_path: Path) -> None:
    own = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    hf = place | {"text_config": {"model_type": "llama"} | own} if place else {"model_type": "granite"} | own
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ConfigError, match=r'config.json: quantization_config.quant_method="gptq" is not read; allowed: "mxfp4", "fp8" or'):
        read_architecture(ModelConfig(path=str(tmp_path), implementation=Implementation.transformers), vocab_size=0)


def test_gradients_of_adapters_with_recomputation_are_the_same(hf_directory, load_policy) -> None:
    """Their layers have inputs without gradients."""
    norms = [
        load_policy(hf_directory("exaone4"), optimizer=adam(), config={"recompute": recompute, "lora": LoraConfig(rank=4)})
        .train_step(batch(), sft_loss)["optim/grad_norm"]
        .value()
        for recompute in (Recompute.none, Recompute.full)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] > 0


def test_what_the_probe_refuses(hf_directory, load_policy, monkeypatch) -> None:
    with pytest.raises(ConfigError, match="model_type=phi: its output layer has a bias"):
        load_policy(hf_directory("phi"))
    with pytest.raises(ConfigError, match="model.recompute=full: jetmoe of transformers has no checkpointing; allowed: none"):
        load_policy(hf_directory("jetmoe"), config={"recompute": Recompute.full})
    monkeypatch.setattr(HFChunk, "forward", lambda *_: {}["key"])
    with pytest.raises(ConfigError, match="model_type=granite: its forward pass fails in transformers: KeyError: 'key'"):
        load_policy(hf_directory("granite"))


def test_what_stays_float32_does_so_from_a_checkpoint_too(hf_directory, load_policy, tmp_path: Path) -> None:
    """As a router of ERNIE: the policy that continues is the policy that was saved, and its export has the same types."""
    config = {"dtype": Dtype.bfloat16}
    policy = load_policy(hf_directory("ernie4_5_moe"), optimizer=adam(), config=config, training={"total_steps": 10})
    train(policy, range(2))
    again = load_policy(save(policy, tmp_path / "run"), config=config)
    types = {name: tensor.dtype for name, tensor in weights_of(again).items()}
    assert set(types.values()) == {torch.bfloat16, torch.float32} and same(weights_of(policy), weights_of(again))
    save_hf(again.chunks, tmp_path / "out", writer=True)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert {f"hf.{name}": parameter.dtype for name, parameter in exported.named_parameters()}.items() <= types.items()


def test_a_family_with_layers_can_be_trained_with_its_own_modules(hf_directory, load_policy) -> None:
    ours, theirs = (
        load_policy(hf_directory("qwen2"), config={"implementation": one}) for one in (Implementation.megatron, Implementation.transformers)
    )
    assert torch.allclose(ours.logprobs(batch()), theirs.logprobs(batch()), atol=1e-5)


@pytest.mark.parametrize("name", [*VISION, "blip_2"])
def test_the_text_part_of_a_model_that_sees_is_trained_alone(name: str, load_policy, tmp_path: Path) -> None:
    """Its tower and projector come back bit for bit, in the files' own names."""
    write_vision(name, tmp_path)
    asked = {"implementation": Implementation.transformers}
    policy = load_policy(tmp_path, config=asked, optimizer=adam(clip_grad=0.0, weight_decay=0.1), training={"total_steps": 10})
    whole = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    logprobs, gradients = plain(whole.language_model if name == "blip_2" else whole)  # which does without images
    assert torch.allclose(policy.logprobs(batch()), logprobs, atol=1e-5)
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    assert policy.train_step(batch(), sft_loss)["optim/grad_norm"].value() == pytest.approx(float(norm), rel=1e-4)
    save_hf(policy.chunks, tmp_path / "out", writer=True)
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "out"))
    assert before.keys() == after.keys()
    seeing = [key for key in before if any(part in key for part in BESIDE_TEXT)]
    assert len(seeing) > 5 and [key for key in before if torch.equal(before[key], after[key])] == seeing
