"""Weights in 4 and 8 bits in every layout: the codes, log-probs, gradients, steps and samples of a single process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layout_models import assert_close, assert_metrics, exported, gradients, make_batch, make_losses, train_step
from ranks import joined, laid_out

from aligner.data.collate import rollout_batch
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype, LoraConfig, LoraTarget, ModelConfig, Quantization, Recompute
from aligner.models.create import create_policy, read_architecture, training
from aligner.models.modules.linear import PackedWeight, linear_weight
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel.collectives import gather_objects
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.config import RolloutConfig
from aligner.rollout.create import create_engine
from aligner.types import Prompt, SamplingConfig

LAYOUTS = {  # fields of ParallelConfig, fields of ModelConfig, ranks of a replica of the engine (0: as in training)
    "tp2": ({"tp": 2}, {}, 0),
    "tp2_sp": ({"tp": 2, "sequence_parallel": True}, {"recompute": "full"}, 1),
    "pp2": ({"pp": 2}, {}, 0),
    "dp2": ({}, {}, 2),
    "cp2": ({"cp": 2}, {}, 0),
}
KINDS = ("nf4", "int8")
CASES = [*(("nf4", layout) for layout in LAYOUTS), ("int8", "tp2"), ("int8", "pp2")]
OPTIMIZER = {"lr": 1e-3, "min_lr": 1e-3, "warmup_steps": 0, "clip_grad": 0.5, "eps": 1e-4}


def write_base(folder: Path) -> None:
    """A random Llama with biases, and an adapter on it that is not zero, by PEFT."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=61, max_position_embeddings=64, initializer_range=0.1, attention_bias=True, mlp_bias=True, **sizes)
    model = LlamaForCausalLM(config).float()
    model.save_pretrained(folder / "base")
    names = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    adapted = get_peft_model(model, PeftConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder / "adapter")


def start(kind: str, folder: Path, topology, parallel: dict, model: dict, base: str = "base"):
    lora = LoraConfig(rank=4, alpha=8.0, path=str(folder / "adapter"), targets=[LoraTarget(one) for one in ("qkv", "proj", "fc1", "fc2")])
    settings = {"dtype": Dtype.float32, "make_vocab_divisible_by": 8, "logits_chunk_size": 16, "micro_batch_size": 1, "lora": lora}
    config = ModelConfig(path=str(folder / base), quantization=Quantization(kind), **(settings | model))
    how = training(config, OptimizerConfig(**OPTIMIZER, distributed=True), total_steps=10)
    return create_policy(config, read_architecture(config, vocab_size=0), ParallelConfig(**parallel), topology, how)


def codes(policy) -> dict[str, torch.Tensor]:
    """Codes and scales of the first layer's weights on this rank, by name."""
    return {name: tensor for name, tensor in all_codes(policy).items() if ".layers.0." in name}


def all_codes(policy) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in policy.chunks[0].named_parameters():
        weight = linear_weight(parameter)
        if isinstance(weight, PackedWeight):
            found |= {f"{name} {number}": tensor.clone() for number, tensor in enumerate(weight.storage)}
    return found


def sampled_gap(policy, tp: int) -> float:
    """How far the engine's log-probs of what it samples are from the policy's."""
    engine = create_engine(policy, RolloutConfig(tp=tp), eos_id=2, decode=None)
    engine.refit(1)
    prompts = [Prompt(id=n, tokens=(3 + n, 7, 9), source="test") for n in range(4)]
    rollouts = [one for part in engine.generate(prompts, [1, 2, 3, 4], SamplingConfig(max_response_length=6)) for one in part]
    engine.shutdown()
    everywhere = {one.prompt.id: one for part in gather_objects(rollouts) for one in part}
    batch = rollout_batch([everywhere[number] for number in range(len(prompts))], 0)
    return float(((policy.logprobs(batch) - batch.rollout_logprobs) * batch.loss_mask).abs().max())


def train(kind: str, folder: Path, topology, parallel: dict, model: dict, tp: int = 0) -> dict:
    policy, batch, (loss, _) = start(kind, folder, topology, parallel, model), make_batch("dpo"), make_losses("dpo")
    found = {"codes": codes(policy), "logprobs": policy.logprobs(batch), "gap": sampled_gap(policy, tp)}
    found |= {"metrics": train_step(policy, batch, loss), "gradients": gradients(policy.model.chunks)}
    return found | {"next": train_step(policy, batch, loss), "merged": exported(policy.model.chunks), "end": policy.logprobs(batch)}


def resumed(kind: str, folder: Path, topology, parallel: dict, model: dict) -> dict:
    """The second step of a run that was saved after the first one in this layout and resumed in it, that of the run which went on, and the
    model that was saved."""
    policy, batch, (loss, _) = start(kind, folder, topology, parallel, model), make_batch("dpo"), make_losses("dpo")
    train_step(policy, batch, loss)
    saved = folder / f"{kind}_{'_'.join(parallel) or 'dp'}"
    checkpoint.save(saved, policy.model, checkpoint.SaveRequest(step=1, state={}))
    merged = exported(policy.model.chunks)
    again, further = start(kind, folder, topology, parallel, model), train_step(policy, batch, loss)
    checkpoint.load(again.model, checkpoint.resolve(saved))
    return {"again": train_step(again, batch, loss), "further": further, "merged": merged}


def save_whole(folder: Path, topology) -> None:
    """A checkpoint of the base's weights."""
    config = ModelConfig(path=str(folder / "base"), dtype=Dtype.float32, make_vocab_divisible_by=8)
    policy = create_policy(config, read_architecture(config, vocab_size=0), ParallelConfig(), topology, training(config, None))
    checkpoint.save(folder / "whole", policy.model, checkpoint.SaveRequest(step=0, state={}))


def reads_a_checkpoint(kind: str, folder: Path, topology, parallel: dict, model: dict) -> bool:
    """Whether this rank has of a checkpoint, written by one process, what it has of the files."""
    found, expected = (all_codes(start(kind, folder, topology, parallel, model, base)) for base in ("whole", "base"))
    return found.keys() == expected.keys() and all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def merged_from(saved: Path, topology) -> dict[str, torch.Tensor]:
    """What a checkpoint of adapters is as a model, read without packing over two ranks."""
    config = ModelConfig(path=str(saved), dtype=Dtype.float32, make_vocab_divisible_by=8)
    how = training(config, None)
    policy = create_policy(config, read_architecture(config, vocab_size=0), ParallelConfig(tp=2), topology, how)
    return exported(policy.model.chunks)


def settings(model: dict) -> dict:
    return {name: Recompute(value) if name == "recompute" else value for name, value in model.items()}


def in_every_layout(folder: Path) -> dict:
    results: dict = {}
    with joined():
        for kind in KINDS:
            for name in (layout for own, layout in CASES if own == kind):
                parallel, model, tp = LAYOUTS[name]
                with laid_out(parallel, seed=1) as topology:
                    own = train(kind, folder, topology, parallel, settings(model), tp)
                    own["resumed"] = resumed(kind, folder, topology, parallel, settings(model))
                    own["read"] = all(gather_objects(reads_a_checkpoint(kind, folder, topology, parallel, settings(model))))
                    results[kind, name] = own | {"codes": gather_objects(own["codes"])}
            with laid_out({"tp": 2}, seed=1) as topology:
                results[kind, "saved"] = merged_from(folder / f"{kind}_pp", topology)
        return results if dist.get_rank() == 0 else {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("packed")
    write_base(directory)
    return directory


@pytest.fixture(scope="module")
def one(folder, topology) -> dict[str, dict]:
    save_whole(folder, topology)
    return {kind: train(kind, folder, topology, {}, {}) for kind in KINDS}


@pytest.fixture(scope="module")
def many(folder, one, on_ranks) -> dict:
    return on_ranks(in_every_layout, 2, folder)[0]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_packed_weights_equal_the_single_process(kind, layout, one, many):
    expected, got = one[kind], many[kind, layout]
    assert expected["metrics"]["optim/grad_norm"] > 0.5  # it was clipped
    torch.testing.assert_close(got["logprobs"], expected["logprobs"], rtol=0, atol=1e-5)
    assert_metrics(got["metrics"], expected["metrics"])
    assert all(gradient.abs().max() > 0 for gradient in expected["gradients"].values())
    if layout not in ("dp2", "cp2"):  # whose ranks have the sums of their own shares alone
        assert_close(got["gradients"], expected["gradients"], atol=1e-6)
    assert_metrics(got["next"], expected["next"])
    torch.testing.assert_close(got["end"], expected["end"], rtol=1e-4, atol=5e-5)
    assert_close(got["merged"], expected["merged"], atol=2e-6)
    assert max(got["gap"], expected["gap"]) < 1e-4
    assert got["resumed"]["again"] == got["resumed"]["further"] and got["read"]


@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_parts_of_the_whole_weights_codes(kind, one, many):
    """Rows of the layers whose outputs are split, columns of the others; of INT8 every rank has a row's one scale."""
    whole, parts = one[kind]["codes"], many[kind, "tp2"]["codes"]
    assert len(whole) == 8
    for name, tensor in whole.items():
        both = [part[name] for part in parts]
        if "linear_proj" in name or "linear_fc2" in name:
            same = kind == "int8" and name.endswith(" 1")
            assert torch.equal(both[0] if same else torch.cat(both, dim=1), tensor) and (not same or torch.equal(*both)), name
        else:  # [q q k v] of a group, or [gate; up], of each rank
            blocks = 2 if "fc1" in name else 1
            chunks = [part.chunk(blocks) for part in both]
            assert torch.equal(torch.cat([chunk[block] for block in range(blocks) for chunk in chunks]), tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_adapters_is_the_same_model_without_packing(kind, many):
    """Read over two ranks, the base is rounded as it was under the adapters: by the scales of whole rows."""
    assert_close(many[kind, "saved"], many[kind, "pp2"]["resumed"]["merged"], atol=2e-6)
