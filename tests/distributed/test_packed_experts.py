"""Packed experts over two ranks, expert by expert and split, equal the single process: log-probs, gradients, updates, the merged model,
what the engine samples, and a resume bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layout_models import assert_close, assert_metrics, exported, gradients, make_batch, make_losses, train_step
from ranks import joined, laid_out

from aligner.data.collate import rollout_batch
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype, LoraConfig, LoraTarget, ModelConfig, Quantization
from aligner.models.create import create_policy, read_architecture, training
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel.collectives import gather_objects
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.config import RolloutConfig
from aligner.rollout.create import create_engine
from aligner.types import Prompt, SamplingConfig

LAYOUTS = {
    "ep2": {"ep": 2},
    "tp2_sp_etp2": {"tp": 2, "sequence_parallel": True, "etp": 2},
    "tp2_sp_ep2": {"tp": 2, "sequence_parallel": True, "ep": 2},
}
KINDS = ("nf4", "int8", "double")  # the last: NF4 with scales of 8 bits
OPTIMIZER = {"lr": 1e-3, "min_lr": 1e-3, "warmup_steps": 0, "clip_grad": 0.5, "eps": 1e-4}
TARGETS = [LoraTarget.qkv, LoraTarget.proj, LoraTarget.experts]


def write_base(folder: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    routing = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": 32}
    config = Qwen3MoeConfig(vocab_size=61, max_position_embeddings=64, initializer_range=0.1, **sizes, **routing)
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder / "base")


def start(kind: str, folder: Path, topology, parallel: dict):
    lora = LoraConfig(rank=4, alpha=8.0, targets=TARGETS)
    settings = {"dtype": Dtype.float32, "make_vocab_divisible_by": 8, "logits_chunk_size": 16, "micro_batch_size": 1, "lora": lora}
    config = ModelConfig(
        path=str(folder / "base"),
        quantization=Quantization("nf4" if kind == "double" else kind),
        double_quantization=kind == "double",
        **settings,
    )
    how = training(config, OptimizerConfig(**OPTIMIZER, distributed=True), total_steps=10)
    return create_policy(config, read_architecture(config, vocab_size=0), ParallelConfig(**parallel), topology, how)


def sampled_gap(policy) -> float:
    """How far the engine's log-probs of what it samples are from the policy's."""
    engine = create_engine(policy, RolloutConfig(), eos_id=2, decode=None)
    engine.refit(1)
    prompts = [Prompt(id=n, tokens=(3 + n, 7, 9), source="test") for n in range(4)]
    rollouts = [one for part in engine.generate(prompts, [1, 2, 3, 4], SamplingConfig(max_response_length=6)) for one in part]
    engine.shutdown()
    everywhere = {one.prompt.id: one for part in gather_objects(rollouts) for one in part}
    batch = rollout_batch([everywhere[number] for number in range(len(prompts))], 0)
    return float(((policy.logprobs(batch) - batch.rollout_logprobs) * batch.loss_mask).abs().max())


def train(kind: str, folder: Path, topology, name: str, parallel: dict) -> dict:
    policy, batch, (loss, _) = start(kind, folder, topology, parallel), make_batch("dpo"), make_losses("dpo")
    train_step(policy, batch, loss)  # B's are zero before
    found = {"logprobs": policy.logprobs(batch), "metrics": train_step(policy, batch, loss), "gradients": gradients(policy.model.chunks)}
    saved = folder / f"{kind}_{name}"
    checkpoint.save(saved, policy.model, checkpoint.SaveRequest(step=2, state={}))
    found |= {"gap": sampled_gap(policy), "merged": exported(policy.model.chunks), "further": train_step(policy, batch, loss)}
    again = start(kind, folder, topology, parallel)
    checkpoint.load(again.model, checkpoint.resolve(saved))
    return found | {"again": train_step(again, batch, loss), "end": policy.logprobs(batch)}


def merged_from(saved: Path, topology, parallel: dict) -> dict[str, torch.Tensor]:
    """What a checkpoint of adapters is as a model, read without packing."""
    config = ModelConfig(path=str(saved), dtype=Dtype.float32, make_vocab_divisible_by=8)
    policy = create_policy(config, read_architecture(config, vocab_size=0), ParallelConfig(**parallel), topology, training(config, None))
    return exported(policy.model.chunks)


def in_every_layout(folder: Path) -> dict:
    results: dict = {}
    with joined():
        for name, parallel in LAYOUTS.items():
            for kind in KINDS:
                with laid_out(parallel, seed=1) as topology:
                    results[kind, name] = train(kind, folder, topology, name, parallel)
                    results[kind, name]["saved"] = merged_from(folder / f"{kind}_ep2", topology, parallel)
        return results if dist.get_rank() == 0 else {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("packed_experts")
    write_base(directory)
    return directory


@pytest.fixture(scope="module")
def one(folder, topology) -> dict[str, dict]:
    return {kind: train(kind, folder, topology, "one", {}) for kind in KINDS}


@pytest.fixture(scope="module")
def many(folder, on_ranks) -> dict:
    return on_ranks(in_every_layout, 2, folder)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_experts_equal_the_single_process(kind, layout, one, many):
    expected, got = one[kind], many[kind, layout]
    torch.testing.assert_close(got["logprobs"], expected["logprobs"], rtol=0, atol=1e-5)
    assert_metrics(got["metrics"], expected["metrics"])
    # Of other layers each replica has the sums of its own shares alone.
    whole = {name: tensor for name, tensor in expected["gradients"].items() if layout != "ep2" or ".experts." in name}
    assert len(whole) >= 2 * 2 * 4 * 3
    assert_close({name: got["gradients"][name] for name in whole}, whole, atol=1e-5)
    assert_close(got["merged"], expected["merged"], atol=2e-6)
    torch.testing.assert_close(got["end"], expected["end"], rtol=1e-4, atol=5e-5)
    assert max(got["gap"], expected["gap"]) < 1e-4
    assert got["again"] == got["further"] and expected["again"] == expected["further"]
    assert_close(got["saved"], many[kind, "ep2"]["merged"], atol=2e-6)
