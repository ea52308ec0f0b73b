"""vLLM itself where several ranks share a replica, over gloo: each hands its own worker full tensors, and all schedule the same."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from aligner.models.config import Architecture, Family
from aligner.models.families import architecture_to_hf
from aligner.rollout.config import RolloutConfig, VLLMConfig
from aligner.rollout.engine import GenRequest, ListedWork
from aligner.rollout.engine.manifest import hf_manifest
from aligner.rollout.vllm.engine import VLLMEngine
from aligner.types import SamplingConfig

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
