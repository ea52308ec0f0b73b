"""vLLM itself where several ranks share a replica, over gloo: each hands its own worker full tensors, and all schedule the same."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import world
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from vision_models import write_seeing
from vision_rows import Rows

from aligner.data.collate import rollout_batch
from aligner.models import create
from aligner.models.config import Architecture, Dtype, Family, LoraConfig, LoraTarget, ModelConfig
from aligner.models.families import architecture_to_hf
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.config import EngineKind, Refit, RolloutConfig, VLLMConfig
from aligner.rollout.create import create_engine
from aligner.rollout.engine import GenRequest, ListedWork
from aligner.rollout.engine.manifest import hf_manifest
from aligner.rollout.vllm.engine import VLLMEngine
from aligner.types import Prompt, SamplingConfig

# Heads of 32 dimensions, as vLLM's kernels want; a tied output layer, whose rows are split too.
SIZES = Architecture(
    family=Family.qwen2,
    num_layers=2,
    hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    ffn_hidden_size=64,
    vocab_size=64,
    max_position_embeddings=64,
    qkv_bias=True,
    tied_embeddings=True,
)


def sampled(directory: Path) -> dict[int, list[tuple]]:
    """What a replica of all ranks samples after each of two refits, by version."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        (directory / "config.json").write_text(json.dumps(architecture_to_hf(SIZES) | {"dtype": "float32"}))
    dist.barrier()
    sampling = SamplingConfig(max_response_length=6)
    model = {"path": directory, "architecture": SIZES, "dtype": torch.float32, "max_sequence_length": 64, "eos_id": 2}
    config = RolloutConfig(sampling=sampling, max_batch_size=3, vllm=VLLMConfig(enforce_eager=True))
    manifest = hf_manifest(SIZES, torch.float32)
    engine = VLLMEngine(config, **model, tp=dist.get_world_size(), weight_bytes=manifest.num_bytes)
    engine.start()
    found: dict[int, list[tuple]] = {}
    for version in (1, 2):
        drawn = torch.Generator().manual_seed(version)
        engine.begin_refit(manifest)
        for name, spec in manifest.tensors.items():
            engine.load([(name, 0.2 * torch.randn(spec.shape, generator=drawn))])
        engine.finish_refit(version)
        requests = [GenRequest(index=i, tokens=(3, 4, 5 + i), seed=i) for i in range(4)]
        results = [result for part in engine.generate(ListedWork(requests), sampling) for result in part]
        found[version] = sorted((one.index, one.tokens, tuple(round(value, 3) for value in one.logprobs)) for one in results)
    engine.shutdown()
    dist.barrier()  # training's groups are still there
    dist.destroy_process_group()
    return found


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_two_ranks_sample_as_one_does(on_ranks, tmp_path):
    alone, first, second = (found for count in (1, 2) for found in on_ranks(sampled, count, tmp_path, timeout=400, fresh=True))
    assert len(alone[1]) == 4 and alone == first == second
    assert alone[1] != alone[2]


def seen(directory: Path) -> list[tuple]:
    """What a replica of all ranks samples for rows with no, one and two images, with the weights of a policy that is split over them."""
    model = ModelConfig(path=str(directory), dtype=Dtype.float32, images=True)
    layout = ParallelConfig(tp=int(os.environ["WORLD_SIZE"]))
    with world({"tp": layout.tp}, seed=1) as topology:
        rows = Rows("qwen3_vl", directory)
        training = create.training(model, None, vision=rows.vision)
        policy = create.create_policy(model, create.read_architecture(model, vocab_size=0), layout, topology, training)
        sampling = SamplingConfig(max_response_length=6, temperature=0.0)
        config = RolloutConfig(engine=EngineKind.vllm, sampling=sampling, max_batch_size=3, vllm=VLLMConfig(enforce_eager=True))
        engine = create_engine(policy, config, eos_id=rows.end)
        engine.refit(policy.version)
        prompts = rows.prompts()
        found = [one for part in engine.generate(prompts, range(len(prompts))) for one in part]
        engine.shutdown()
    return sorted((one.seed, one.response, tuple(round(value, 3) for value in one.logprobs)) for one in found)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_two_ranks_see_as_one_does(on_ranks, tmp_path):
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}}
    write_seeing("qwen3_vl", tmp_path, num_attention_heads=2, num_key_value_heads=2, head_dim=32, **rope)
    alone, first, second = (found for count in (1, 2) for found in on_ranks(seen, count, tmp_path, timeout=400, fresh=True))
    assert len(alone) == 4 and alone == first == second


def adapted(directory: Path) -> list[tuple]:
    """What a replica of all ranks samples with the adapters alone of a policy that is split over them."""
    targets = [LoraTarget.qkv, LoraTarget.proj, LoraTarget.fc1, LoraTarget.fc2]
    lora = LoraConfig(rank=4, alpha=8.0, path=str(directory / "adapter"), targets=targets)
    model = ModelConfig(path=str(directory / "base"), dtype=Dtype.float32, lora=lora)
    layout = ParallelConfig(tp=int(os.environ["WORLD_SIZE"]))
    with world({"tp": layout.tp}, seed=1) as topology:
        policy = create.create_policy(model, create.read_architecture(model, vocab_size=0), layout, topology, create.training(model, None))
        sampling = SamplingConfig(max_response_length=6, temperature=0.0)
        how = {"engine": EngineKind.vllm, "sampling": sampling, "max_batch_size": 3, "vllm": VLLMConfig(enforce_eager=True)}
        engine = create_engine(policy, RolloutConfig(**how, refit=Refit.adapters), eos_id=2)
        engine.refit(1)
        engine.refit(2)
        prompts = [Prompt(id=number, tokens=(3, 4, 5 + number), source="test") for number in range(4)]
        rollouts = [one for part in engine.generate(prompts, range(4)) for one in part]
        found = sorted((one.seed, one.response, tuple(round(value, 3) for value in one.logprobs)) for one in rollouts)
        rows = rollout_batch(sorted(rollouts, key=lambda one: one.seed), 0)
        torch.testing.assert_close(rows.rollout_logprobs, policy.logprobs(rows) * rows.loss_mask, rtol=0, atol=1e-4)
        own = engine.refitted_bytes
        engine.shutdown()
    return [*found, own]


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_two_ranks_sample_with_adapters_alone_as_one_does(on_ranks, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, initializer_range=0.2, **sizes)).float()
    model.save_pretrained(tmp_path / "base")
    linears = {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and name.endswith("_proj")}
    pairs = {f"{name}.lora_A": torch.randn(4, one.in_features) * 0.2 for name, one in linears.items()}
    pairs |= {f"{name}.lora_B": torch.randn(one.out_features, 4) * 0.2 for name, one in linears.items()}
    (tmp_path / "adapter").mkdir()
    save_file({f"base_model.model.{name}.weight": pair for name, pair in pairs.items()}, tmp_path / "adapter/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": sorted({name.rsplit(".")[-1] for name in linears})}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    alone, first, second = (found for count in (1, 2) for found in on_ranks(adapted, count, tmp_path, timeout=400, fresh=True))
    assert len(alone) == 5 and alone == first == second
    assert alone[-1] < 0.2 * sum(parameter.nbytes for parameter in model.parameters())
