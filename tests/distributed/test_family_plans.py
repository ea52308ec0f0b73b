"""The planner runs layers of every family on fake tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hf_models import HF_MODELS, SIZES
from transformers import AutoConfig

from aligner.models.config import Dtype, ModelConfig
from aligner.models.families import architecture_from_hf
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel.topology import ParallelConfig
from aligner.planner import dry_run
from aligner.planner.config import Device
from aligner.planner.workload import Component, Head, Phase, Work


def plans(names: Iterable[str]) -> dict[str, list[int]]:
    """Of two tensor-parallel ranks, by model: the bytes that a layer keeps on CPU and GPU, and the elements of a rank's weights."""
    found = {}
    for name in names:
        config = json.loads(AutoConfig.for_model(**(SIZES | HF_MODELS[name])).to_json_string(use_diff=False))
        component = Component(
            name="trainer",
            head=Head.language,
            num_ranks=2,
            architecture=architecture_from_hf(config),
            model=ModelConfig(dtype=Dtype.bfloat16),
            parallel=ParallelConfig(tp=2, sequence_parallel=True, etp=2 if "experts" in str(config) else 1),
            optimizer=OptimizerConfig(),
            work=Work(phases=(Phase.train,), rows=8, length=64, response_length=32, update_rows=8, num_updates=1),
        )
        kept = [dry_run.measure_block(component, 2, 64, device).layer for device in (Device.cpu, Device.gpu)]
        found[name] = [*kept, sum(one.numel for part in dry_run.shard_parameters(component, 0) for one in part)]
    return found


def test_a_layer_of_each_kind_is_planned(on_ranks):
    found = on_ranks(plans, 1, ["llama", "mixtral", "qwen3_next", "gpt_neox"])[0]
    assert all(min(numbers) > 5000 for numbers in found.values())
    # By hand, gpt_neox untied: a rank of two has half of 64 rows (61 and padding to 128 make 128) of two embeddings, and of two layers half
    # of 3 x 32 x 32 + 96, of 32 x 32, of 2 x 32 x 48 + 48; whole are two biases of 32 and two norms of 64 in each, and the last norm.
    layer = (3 * 32 * 32 + 96 + 32 * 32 + 2 * 32 * 48 + 48) // 2 + 2 * 32 + 2 * 64
    assert found["gpt_neox"][2] == 2 * 64 * 32 + 2 * layer + 64


@pytest.mark.slow
def test_a_layer_of_every_family_is_planned(on_ranks):
    found = on_ranks(plans, 1, list(HF_MODELS))[0]
    assert found.keys() == HF_MODELS.keys()
    assert all(min(numbers) > 5000 for numbers in found.values())
