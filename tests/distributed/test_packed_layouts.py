"""Weights in 4 and 8 bits in every layout, experts too: the codes, log-probs, gradients, steps and samples of a single process, a resume
bit for bit, and the same model without packing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

SP = {"tp": 2, "sequence_parallel": True}
# By model: fields of ParallelConfig, fields of ModelConfig, ranks of a replica of the engine (0: as in training). The checkpoint of a
# model's first layout is read in all of them.
LAYOUTS: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any], int]]] = {
    "dense": {
        "pp2": ({"pp": 2}, {}, 0),
        "tp2": ({"tp": 2}, {}, 0),
        "tp2_sp": (SP, {"recompute": Recompute.full}, 1),
        "dp2": ({}, {}, 2),
        "cp2": ({"cp": 2}, {}, 0),
    },
    "experts": {
        "ep2": ({"ep": 2}, {}, 0),
        "tp2_sp_etp2": (SP | {"etp": 2}, {}, 0),
        "tp2_sp_ep2": (SP | {"ep": 2}, {}, 0),
    },
}
KINDS = {"dense": ("nf4", "int8"), "experts": ("nf4", "int8", "double")}  # the last: NF4 with scales of 8 bits
CASES = [(model, kind, layout) for model, kinds in KINDS.items() for kind in kinds for layout in LAYOUTS[model]]
CASES = [case for case in CASES if case[:2] != ("dense", "int8") or case[2] in ("pp2", "tp2")]
TARGETS = {"dense": ("qkv", "proj", "fc1", "fc2"), "experts": ("qkv", "proj", "experts")}
SIZES = {"vocab_size": 61, "max_position_embeddings": 64, "initializer_range": 0.1, "hidden_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def write_models(folder: Path) -> None:
    """A random Llama with biases, an adapter on it that is not zero, by PEFT, and a mixture of experts."""
    from peft import LoraConfig as PeftConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(intermediate_size=256, attention_bias=True, mlp_bias=True, **SIZES)).float()
    model.save_pretrained(folder / "dense")
    names = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    adapted = get_peft_model(model, PeftConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder / "adapter")
    torch.manual_seed(1)
    experts = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": 32}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts)).float().save_pretrained(folder / "experts")


def start(model: str, kind: str, folder: Path, topology, parallel: dict, fields: dict, base: str = ""):
    path = str(folder / "adapter") if model == "dense" else ""
    lora = LoraConfig(rank=4, alpha=8.0, path=path, targets=[LoraTarget(one) for one in TARGETS[model]])
    settings = {"dtype": Dtype.float32, "make_vocab_divisible_by": 8, "logits_chunk_size": 16, "micro_batch_size": 1, "lora": lora}
    packed = {"quantization": Quantization("nf4" if kind == "double" else kind), "double_quantization": kind == "double"}
    config = ModelConfig(path=str(folder / (base or model)), **settings, **packed, **fields)
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-3, warmup_steps=0, clip_grad=0.5, eps=1e-4, distributed=True)
    how = training(config, optimizer, total_steps=10)
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


def train(model: str, kind: str, folder: Path, topology, layout: str = "") -> dict:
    """A step, a checkpoint, and the step behind it, also by a model that was resumed from there."""
    parallel, fields, tp = LAYOUTS[model].get(layout, ({}, {}, 0))
    policy, batch, (loss, _) = start(model, kind, folder, topology, parallel, fields), make_batch("dpo"), make_losses("dpo")
    if model == "experts":
        train_step(policy, batch, loss)  # B's are zero before
    found = {"codes": gather_objects(codes(policy)), "logprobs": policy.logprobs(batch)}
    found |= {"metrics": train_step(policy, batch, loss), "gradients": gradients(policy.model.chunks)}
    saved = checkpoint.save(folder / f"{model}_{kind}_{layout}", policy.model, checkpoint.SaveRequest(step=1, state={}))
    found |= {"gap": sampled_gap(policy, tp), "merged": exported(policy.model.chunks), "further": train_step(policy, batch, loss)}
    again = start(model, kind, folder, topology, parallel, fields)
    checkpoint.load(again.model, saved)
    return found | {"again": train_step(again, batch, loss), "end": policy.logprobs(batch)}


def save_whole(model: str, folder: Path, topology) -> None:
    """A checkpoint of a model's weights in its files."""
    config = ModelConfig(path=str(folder / model), dtype=Dtype.float32, make_vocab_divisible_by=8)
    policy = create_policy(config, read_architecture(config, vocab_size=0), ParallelConfig(), topology, training(config, None))
    checkpoint.save(folder / f"{model}_whole", policy.model, checkpoint.SaveRequest(step=0, state={}))


def reads_a_checkpoint(model: str, kind: str, folder: Path, topology, layout: str) -> bool:
    """Whether every rank has of a checkpoint, written by one process, what it has of the files."""
    parallel, fields, _ = LAYOUTS[model][layout]
    found, expected = (all_codes(start(model, kind, folder, topology, parallel, fields, base)) for base in (f"{model}_whole", ""))
    same = found.keys() == expected.keys() and all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    return all(gather_objects(same))


def merged_from(saved: Path, topology, parallel: dict) -> dict[str, torch.Tensor]:
    """What a checkpoint of adapters is as a model, read without packing."""
    config = ModelConfig(path=str(saved), dtype=Dtype.float32, make_vocab_divisible_by=8)
    policy = create_policy(config, read_architecture(config, vocab_size=0), ParallelConfig(**parallel), topology, training(config, None))
    return exported(policy.model.chunks)


def in_every_layout(folder: Path) -> dict:
    results: dict = {}
    with joined():
        for model, kind, layout in CASES:
            parallel, first = LAYOUTS[model][layout][0], next(iter(LAYOUTS[model]))
            with laid_out(parallel, seed=1) as topology:
                found = train(model, kind, folder, topology, layout)
                found["read"] = reads_a_checkpoint(model, kind, folder, topology, layout)
                results[model, kind, layout] = found | {"saved": merged_from(folder / f"{model}_{kind}_{first}", topology, parallel)}
        return results if dist.get_rank() == 0 else {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("packed")
    write_models(directory)
    return directory


@pytest.fixture(scope="module")
def one(folder, topology) -> dict[tuple[str, str], dict]:
    for model in KINDS:
        save_whole(model, folder, topology)
    return {(model, kind): train(model, kind, folder, topology) for model, kinds in KINDS.items() for kind in kinds}


@pytest.fixture(scope="module")
def many(folder, one, on_ranks) -> dict:
    return on_ranks(in_every_layout, 2, folder)[0]


@pytest.mark.parametrize(("model", "kind", "layout"), CASES)
def test_packed_weights_equal_the_single_process(model, kind, layout, one, many):
    expected, got = one[model, kind], many[model, kind, layout]
    torch.testing.assert_close(got["logprobs"], expected["logprobs"], rtol=0, atol=1e-5)
    assert expected["metrics"]["optim/grad_norm"] > 0.5 or model == "experts"  # it was clipped
    for step in ("metrics", "further"):
        assert_metrics(got[step], expected[step])
    # Of what it shares with another one each replica has the sums of its own shares alone.
    own = {name: each for name, each in expected["gradients"].items() if layout not in ("dp2", "cp2", "ep2") or ".experts." in name}
    assert all(gradient.abs().max() > 0 for gradient in own.values()) and (len(own) >= 2 * 2 * 4 * 3 or model == "dense")
    assert_close({name: got["gradients"][name] for name in own}, own, atol=1e-6 if model == "dense" else 1e-5)
    assert_close(got["merged"], expected["merged"], atol=2e-6)
    torch.testing.assert_close(got["end"], expected["end"], rtol=1e-4, atol=5e-5)
    assert max(got["gap"], expected["gap"]) < 1e-4
    assert got["again"] == got["further"] and expected["again"] == expected["further"] and got["read"]
    # Without packing, the base is rounded as it was under the adapters: by the scales of whole rows.
    assert_close(got["saved"], many[model, kind, next(iter(LAYOUTS[model]))]["merged"], atol=2e-6)


@pytest.mark.parametrize("kind", KINDS["dense"])
def test_shards_are_parts_of_the_whole_weights_codes(kind, one, many):
    """Rows of the layers whose outputs are split, columns of the others; of INT8 every rank has a row's one scale."""
    (whole,), parts = one["dense", kind]["codes"], many["dense", kind, "tp2"]["codes"]
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
