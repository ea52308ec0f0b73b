"""vLLM over all ranks of this run, as one replica: prints what it samples after each of two refits. The argument is a directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

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


def main(directory: Path) -> None:
    """See the module."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        (directory / "config.json").write_text(json.dumps(architecture_to_hf(SIZES) | {"dtype": "float32"}))
    dist.barrier()
    sampling = SamplingConfig(max_response_length=6)
    config = RolloutConfig(sampling=sampling, max_batch_size=3, vllm=VLLMConfig(enforce_eager=True))
    model = {"path": directory, "architecture": SIZES, "dtype": torch.float32, "max_sequence_length": 64, "eos_id": 2}
    engine = VLLMEngine(config, **model, tp=dist.get_world_size())
    engine.start()
    manifest = hf_manifest(SIZES, torch.float32)
    for version in (1, 2):
        drawn = torch.Generator().manual_seed(version)
        engine.begin_refit(manifest)
        for name, spec in manifest.tensors.items():
            engine.load([(name, 0.2 * torch.randn(spec.shape, generator=drawn))])
        engine.finish_refit(version)
        requests = [GenRequest(index=i, tokens=(3, 4, 5 + i), seed=i) for i in range(4)]
        results = [result for part in engine.generate(ListedWork(requests), sampling) for result in part]
        for result in sorted(results, key=lambda one: one.index):
            print("sampled", version, result.index, result.tokens, [round(value, 3) for value in result.logprobs], flush=True)
    engine.shutdown()
    dist.barrier()  # training's groups are still there
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
