"""What a rank holds, exchanges and computes of a model whose weights are frozen under adapters, by hand."""

from __future__ import annotations

from dataclasses import replace

import plan_parts
import pytest
from hf_models import HF_MODELS, SIZES
from plan_parts import work
from transformers import AutoConfig

from aligner.models.config import Architecture, Dtype, LoraConfig, LoraTarget, ModelConfig
from aligner.models.families import architecture_from_hf
from aligner.parallel.topology import ParallelConfig
from aligner.planner import layers, memory, times
from aligner.planner.config import ClusterConfig, Device
from aligner.planner.dry_run import measure_block
from aligner.planner.estimate import Replication, approximate_state_bytes, plan_component, state_bytes
from aligner.planner.search import Estimator
from aligner.planner.workload import BlockBytes, Component, Parameter, Phase, StateBytes
from aligner.rollout.config import Refit, RolloutConfig


def test_frozen_weights_have_neither_gradients_nor_optimizer_state() -> None:
    weight = Parameter(name="linear.weight", numel=1000, itemsize=2, is_frozen=True)
    adapter = Parameter(name="linear.adapter.a", numel=30, itemsize=2, is_adapter=True)
    one = Replication(distributed=False, dense_shards=2, expert_shards=2, bucket_elements=None)
    # 1,030 weights of 2 bytes; 30 gradients of 4; 30 times two moments and a main weight of 4 each.
    expected = StateBytes(weights=2060, gradients=120, optimizer=360)
    assert state_bytes([weight, adapter], one) == expected
    assert approximate_state_bytes([weight, adapter], one) == expected
    spread = Replication(distributed=True, dense_shards=2, expert_shards=2, bucket_elements=None)
    # The adapter's buffer ends at a multiple of 128, of which each shard owns 64: the first one all 30.
    assert state_bytes([weight, adapter], spread) == StateBytes(weights=2256, gradients=512, optimizer=360)


def component(rank: int) -> Component:
    """Two layers of 64 wide on four ranks, tp 2; each step has a reference pass."""
    own = work(Phase.ref_logprobs, Phase.train, rows=8, length=64, response_length=32, update_rows=8)
    return plan_parts.component(
        name="trainer",
        num_ranks=4,
        architecture=Architecture(num_layers=2, hidden_size=64, vocab_size=256),
        model={"micro_batch_size": 2, "lora": LoraConfig(rank=rank), "make_vocab_divisible_by": 128},
        parallel={"tp": 2, "sequence_parallel": True},
        work=own,
        has_reference=True,
    )


def test_the_reference_and_what_is_exchanged_are_the_adapters_alone() -> None:
    block = BlockBytes(layer=1, ends=2, backward=3, forward=4, kept=5)
    sizes = plan_parts.sizes(weights=10_000, gradients=400, optimizer=900, block=block)
    found = {m.phase: m.parts for m in memory.phase_memory(component(4), sizes, ClusterConfig(), (0,))}
    # 100 trained elements have 400 bytes of gradients and 200 of bfloat16 weights.
    assert found[Phase.ref_logprobs]["reference"] == 200
    assert memory.host_memory(component(4), sizes, ClusterConfig(device=Device.gpu, gpus_per_node=4))["reference"] == 800
    assert all(parts["gather buffer"] == 5 and parts["weights"] == 10_000 for parts in found.values())
    full = {m.phase: m.parts for m in memory.phase_memory(component(0), sizes, ClusterConfig(), (0,))}
    assert full[Phase.ref_logprobs]["reference"] == 10_000
    # The vocabulary's 128 rows of this rank have no gradient: 4 bytes for a product, which is added to the sum over micro-batches.
    assert full[Phase.train]["logits"] - found[Phase.train]["logits"] == 128 * 64 * 4
    seconds = [{t.phase: t.parts for t in times.phase_times(component(rank), sizes, ClusterConfig())} for rank in (0, 4)]
    with_weights, adapters = (time[Phase.train]["data parallel"] for time in seconds)
    assert adapters < with_weights
    linear, quadratic = layers.layer_flops(component(4), 64)
    head = 2 * 64 * 256
    assert times.model_flops(component(4), 10, 64) == 10 * (2 * (2 * linear + 3 * quadratic) + 2 * head)


def refits() -> list[tuple[memory.Sizes, float]]:
    """The sizes and the seconds of a refit: adapters alone, then merged ones. Two layers of 64 wide at tp 2, rank 4 on q, k, v and the
    attention's output."""
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}

    def plan(engine: str = "vllm", refit: Refit = Refit.auto, **lora: object) -> tuple[memory.Sizes, float]:
        own = plan_parts.component(
            num_ranks=4,
            architecture=Architecture(**sizes, ffn_hidden_size=128),
            model={"lora": LoraConfig(rank=4, targets=[LoraTarget.qkv, LoraTarget.proj], **lora)},
            parallel={"tp": 2},
            engine=plan_parts.engine(tp=2, settings=RolloutConfig(engine=engine, refit=refit)),
        )
        cluster = ClusterConfig(device=Device.cpu, gpus_per_node=4, hbm_gb_per_second=1, nvlink_gb_per_second=1)
        made = plan_component(own, cluster)
        assert Estimator(cluster).sizes(own).adapters == made.sizes.adapters
        return made.sizes, times.refit_seconds(own, own.engine, made.sizes, cluster)

    alone = [plan(refit=refit) for refit in (Refit.auto, Refit.adapters)]
    return alone + [plan(**merged) for merged in ({"refit": Refit.merged}, {"dora": True}, {"engine": "tensorrt_llm"})]


@pytest.mark.cpu  # the simulated GPU cannot hold a plan's fake tensors
def test_a_refit_of_vllm_sends_the_adapters_alone(on_ranks) -> None:
    """Merged, it sends all weights. In a process of its own, which has joined no world."""
    (found,) = on_ranks(refits, 1)
    # Of a layer: A's of q, k, v and proj [4, 64] each; B's of q [64, 4], k and v [32, 4] each, of proj [64, 4]. Two bytes a number.
    pairs = 2 * (4 * 4 * 64 + 4 * (64 + 32 + 32 + 64)) * 2
    copied, sent = 1e9 * 0.7, 1e9 * 0.7  # bytes a second that are reached
    for made, seconds in found[:2]:
        assert made.adapters == pairs == 7168 and seconds == pytest.approx(2 * pairs / copied + pairs / sent)
    for made, seconds in found[2:]:
        whole = made.engine_weights
        assert made.adapters == 0 and seconds == pytest.approx(2 * whole / copied + 2 * whole / sent) and whole > 10 * pairs


@pytest.mark.cpu  # the simulated GPU cannot hold a plan's fake tensors
def test_the_dense_twins_of_mixtures_have_adapters_where_the_experts_have(on_ranks) -> None:
    """In a process of its own: the layers are run in a fake world. Families whose files have no dense feed-forward layer included."""
    (kept,) = on_ranks(kept_by_layers, 1)
    assert set(kept) == {"mixtral", "qwen3_moe", "gpt_oss"}
    for family, (attention, dense, experts) in kept.items():
        assert attention == dense, family  # fc1 and fc2 are of dense layers
        assert experts is None if family == "gpt_oss" else experts > attention, family


def kept_by_layers() -> dict[str, list[int | None]]:
    """Bytes that a layer keeps, by family: adapters of the attention, of that and the feed-forward layers, of that and the experts."""
    found = {}
    for family in ("mixtral", "qwen3_moe", "gpt_oss"):
        architecture = architecture_from_hf(AutoConfig.for_model(**(SIZES | HF_MODELS[family])).to_dict())
        found[family] = [
            measure_block(
                replace(
                    component(4),
                    architecture=architecture,
                    model=ModelConfig(dtype=Dtype.bfloat16, lora=LoraConfig(rank=4, targets=[LoraTarget(target) for target in targets])),
                    parallel=ParallelConfig(),
                ),
                2,
                32,
                Device.cpu,
            ).layer
            if family != "gpt_oss" or "experts" not in targets
            else None
            for targets in (["qkv"], ["qkv", "fc1", "fc2"], ["qkv", "experts"])
        ]
    return found
