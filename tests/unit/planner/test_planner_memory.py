"""What a layer of fused modules keeps, caches that shrink, other engines, CUDA graphs and the CPU: against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import plan_parts
import pytest
from plan_parts import architecture, memory_of, work
from rich.console import Console

from aligner.errors import ConfigError
from aligner.models.architecture.divisible import check_divisible, uneven_stages
from aligner.models.checkpoint.hf_files import MAX_FILE_BYTES
from aligner.models.config import Activation, Architecture, Dtype, Layers, Normalization, Recompute
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel.topology import ParallelConfig
from aligner.planner import dry_run, engine_memory, layers, memory, report, search
from aligner.planner.config import ClusterConfig, Device
from aligner.planner.estimate import Scales, predict, with_fitting_cache
from aligner.planner.simulation import Simulated
from aligner.planner.workload import GIB, BlockBytes, Component, Engine, Phase, StateBytes, stage_layers
from aligner.rollout.config import EngineKind, RolloutConfig, TensorRTLLMConfig

GPU = ClusterConfig(device=Device.gpu, gpus_per_node=8, gpu_memory_gib=80, reserved_gib=1)
GPT = Architecture(  # of Korthikanti et al.: 175 thousand million parameters
    num_layers=96,
    hidden_size=12288,
    num_attention_heads=96,
    num_key_value_heads=96,
    ffn_hidden_size=4 * 12288,
    vocab_size=51200,
    max_position_embeddings=2048,
    gated_mlp=False,
    activation=Activation.gelu,
    normalization=Normalization.layer_norm,
)
LLAMA = architecture(num_key_value_heads=2, head_dim=8, ffn_hidden_size=192)
MIXTURE = replace(LLAMA, num_experts=16, experts_per_token=4, expert_ffn_hidden_size=48)


WORK = work(Phase.generate, Phase.train, length=257)


def component(architecture: Architecture, **changes) -> Component:
    return plan_parts.component(**{"architecture": architecture, "work": WORK} | changes)


def kept_tensors(own: Component, tokens: int) -> dict[str, int]:
    return layers.FusedLayer(own, tokens).kept()


def test_a_layer_of_gpt_keeps_what_is_published() -> None:
    """34 s b h / t less the two masks of what is dropped, which is nothing here; statistics and log-sum-exps come to 0.1 % of it."""
    s, h, t = 2048, 12288, 8
    tensors = kept_tensors(component(GPT, parallel={"tp": t, "sequence_parallel": True}), s)
    small = {name for name in tensors if "statistics" in name or name == "log-sum-exp"}
    assert sum(size for name, size in tensors.items() if name not in small) == (34 - 2) * s * h // t
    assert sum(tensors[name] for name in small) == 2 * 2 * 4 * s // t + 4 * s * 96 // t
    # Equation 2 without sequence parallelism: 10 + 24 / t, less the same masks.
    whole = kept_tensors(component(GPT, parallel={"tp": t}), s)
    assert sum(size for name, size in whole.items() if name not in small) == (10 - 2) * s * h + 24 * s * h // t


def test_tensors_of_grouped_queries_and_swiglu() -> None:
    """100 tokens on two ranks with sequence parallelism: 50 between the layers; 4 heads and a group of 8 numbers, 96 of 192 inner ones."""
    own = component(LLAMA, parallel={"tp": 2, "sequence_parallel": True})
    assert kept_tensors(own, 100) == {
        "first norm's input": 50 * 64 * 2,
        "first norm's output": 50 * 64 * 2,
        "first norm's statistics": 50 * 4,
        "queries": 100 * 4 * 8 * 2,
        "keys": 100 * 8 * 2,
        "values": 100 * 8 * 2,
        "log-sum-exp": 100 * 4 * 4,
        "attention's output": 100 * 4 * 8 * 2,
        "second norm's input": 50 * 64 * 2,
        "second norm's output": 50 * 64 * 2,
        "second norm's statistics": 50 * 4,
        "first product's output": 100 * 2 * 96 * 2,
        "second product's input": 100 * 96 * 2,
    }
    kept = sum(kept_tensors(own, 100).values())
    normed = replace(own, architecture=replace(LLAMA, qk_norm=True))
    assert sum(kept_tensors(normed, 100).values()) - kept == 100 * (4 + 1) * (8 * 2 + 4)
    gelu = replace(own, architecture=replace(LLAMA, activation=Activation.gelu_tanh))  # which is not fused
    assert sum(kept_tensors(gelu, 100).values()) - kept == 100 * 96 * 2
    eight = replace(own, model=replace(own.model, fp8=True))  # three inputs of products in half the bytes, the projection's besides
    assert kept - sum(kept_tensors(eight, 100).values()) == 2 * 50 * 64 + 100 * 96 - 100 * 4 * 8
    sharing = {"packing": True, "micro_batch_tokens": 514, "share_prompts": True}
    shared = replace(own, model=replace(own.model, **sharing))  # 129 tokens of prompt for every 128 of a response
    assert sum(kept_tensors(shared, 100).values()) - kept == 2 * (200 - 100) * 8 * 2


def test_tensors_of_experts() -> None:
    """100 tokens on two ranks with sequence parallelism: 50 on a rank, each with 4 of 16 experts, 48 wide and whole on their ranks."""
    found = kept_tensors(component(MIXTURE, parallel={"tp": 2, "sequence_parallel": True, "ep": 2}), 100)
    assert found["permuted tokens"] == 200 * 64 * 2 and found["permuted probabilities"] == 200 * 4
    assert found["first product's output"] == 200 * 2 * 48 * 2 and found["second product's input"] == 200 * 48 * 2
    assert found["router's logits and probabilities"] == 50 * 16 * 8 and found["routes and places of rows"] == 50 * 16 * 5
    split = kept_tensors(component(MIXTURE, parallel={"tp": 2, "sequence_parallel": True, "etp": 2}), 100)
    assert split["permuted tokens"] == 400 * 64 * 2 and split["first product's output"] == 400 * 2 * 24 * 2


def test_recomputation_of_fused_layers() -> None:
    def block(recompute: Recompute) -> BlockBytes:
        own = component(LLAMA, parallel={"tp": 2, "sequence_parallel": True}, model={"recompute": recompute})
        return layers.block_bytes(own, 2, 50)

    none, selective, full = (block(recompute) for recompute in Recompute)
    assert full.layer == 50 * 64 * 2 and full.backward - none.backward == none.layer - full.layer
    assert none.layer - selective.layer == 100 * 4 * 4 and selective.backward - none.backward == 100 * 4 * 4 + 100 * 4 * 8 * 2
    # Two residuals, and around the activation the first product's output and the second's input.
    assert none.forward == 2 * 6400 + 38400 + 19200 and none.backward == none.forward


@pytest.mark.parametrize(
    ("architecture", "model", "uses"),
    [
        (LLAMA, {}, True),
        (LLAMA, {"dtype": Dtype.float32}, False),
        (LLAMA, {"layers": Layers.torch}, False),
        (LLAMA, {"batch_invariant": True}, False),
        (replace(LLAMA, attention_softcap=30.0), {}, False),
    ],
)
def test_whose_layers_are_planned(architecture: Architecture, model: dict, uses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are measured, which takes a process that is in no world."""
    measured = BlockBytes(layer=1, ends=2, backward=3, forward=4)
    monkeypatch.setattr(dry_run, "measure_block", lambda *_: measured)
    own = component(architecture, model=model)
    assert layers.uses_transformer_engine(own) == uses
    passes = memory.train_micro_batches(own)
    found = Scales(Device.gpu).block(own, passes)
    assert found == (layers.block_bytes(own, passes.rows, passes.length) if uses else measured)


def engine(**changes) -> Engine:
    return plan_parts.engine(**{"max_batch_size": 4, "on_gpu": True} | changes)


def planned(own: Component, gpu_memory_gib: float, *, weights: int = 0, reserved_gib: float = 0.0):
    cluster = replace(GPU, gpu_memory_gib=gpu_memory_gib, reserved_gib=reserved_gib, communicator_gib=0.0)
    sizes = plan_parts.sizes(weights=weights, engine_weights=weights)
    return with_fitting_cache(predict(own, cluster, sizes, stage_parameters=(1,), model_parameters=1), cluster), cluster


def test_a_cache_shrinks_to_what_is_left() -> None:
    """8 layers, 2 groups of 8 numbers, keys and values, 2 bytes: 512 bytes a token. 8 replicas with 8 rows each, 4 at a time."""
    own = component(LLAMA, engine=engine())
    assert engine_memory.kv_bytes_per_token(own, own.engine) == 512
    assert engine_memory.cache_tokens(own, own.engine) == 4 * 2 * 256 and engine_memory.seats(own, own.engine) == 4
    whole, _ = planned(own, 1.0)
    assert whole.component == own and report.cache_line(whole) is None  # it fits
    without_cache = whole.peak.total - 4 * 2 * 256 * 512
    # A decode step copies one of the eight layers; there is room for three pages and the copy, not for four.
    found, cluster = planned(own, (without_cache + 3 * 256 * 512 + 1000) / GIB)
    shrunk = found.component.engine
    assert found.fits and shrunk.kv_cache_tokens == 3 * 256 and shrunk.wanted_cache_tokens == 2048
    assert engine_memory.seats(found.component, shrunk) == 3 and found.seconds > found.wanted_seconds > 0
    line = report.cache_line(found)
    assert "rollout.kv_cache_tokens=768" in line and "in place of 2048: 3 of 4 sequences" in line
    assert "rollout.kv_cache_tokens=768" in report.settings(found.component)
    run = Simulated(phases={"generate": found.seconds}, useful=1.0, run_seconds=1.0, preemptions=0)
    job = report.JobPlan(name="x", cluster=cluster, components=(found,), problems=(), run=run)
    out = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    report.show(job, out)
    assert line[:40] in out.export_text()
    tight, _ = planned(own, (without_cache + 255 * 512) / GIB)
    assert not tight.fits and tight.component == own  # not even one sequence
    stated, _ = planned(replace(own, engine=replace(own.engine, kv_cache_tokens=2048)), (without_cache + 1000) / GIB)
    assert not stated.fits and stated.component.engine.kv_cache_tokens == 2048


def test_caches_of_other_engines() -> None:
    """Their wrappers ask for room for the whole context, for as many sequences as may be decoded at a time."""
    vllm = engine(max_batch_size=100, settings=RolloutConfig(engine=EngineKind.vllm))
    own = component(LLAMA, engine=vllm, model={"seq_length": 500})
    assert engine_memory.cache_tokens(own, vllm) == 100 * 512 + 128  # pages of 128 tokens, and one for itself
    assert engine_memory.cache_tokens(own, replace(vllm, kv_cache_tokens=1000)) == 1128
    trt = engine(max_batch_size=100, settings=RolloutConfig(engine=EngineKind.tensorrt_llm))
    assert engine_memory.cache_tokens(own, trt) == 100 * 500
    # 1 GiB less 16 MiB of a policy's and 16 MiB of the engine's weights: nine tenths of it have room for all, a hundredth has not.
    small = replace(trt, settings=RolloutConfig(engine=EngineKind.tensorrt_llm, tensorrt_llm=TensorRTLLMConfig(kv_memory_fraction=0.01)))
    found, _ = planned(replace(own, engine=small), 1.0, weights=16 * 2**20)
    free = int(0.01 * (2**30 - 2 * 16 * 2**20))
    assert found.component.engine.kv_cache_tokens == free // 512 // 256 * 256
    assert planned(replace(own, engine=trt), 1.0, weights=16 * 2**20)[0].component.engine.kv_cache_tokens == 0


def test_vllm_starts_beside_the_policy() -> None:
    """With `rollout.offload` its fullest moment may be its start: the policy's weights and gradients, its own weights, and the cache."""
    sizes = plan_parts.sizes(weights=GIB, gradients=4 * GIB, engine_weights=GIB)
    vllm = engine(offload=True, settings=RolloutConfig(engine=EngineKind.vllm))
    own = component(LLAMA, engine=vllm, optimizer=OptimizerConfig(offload=True))
    parts = memory_of(Phase.generate, own, sizes, GPU)
    assert (parts["weights"], parts["gradients"], parts["engine weights"]) == (GIB, 4 * GIB, GIB) and "KV cache" in parts
    built_in = replace(own, engine=replace(vllm, tp=2, settings=RolloutConfig()))
    parts = memory_of(Phase.generate, built_in, sizes, GPU)
    assert "gradients" not in parts


def test_buffers_of_graphs_stay_while_others_compute() -> None:
    """4 rows, three hidden states of 64 and three parts of 192, bfloat16; the float32 logits of 1000 tokens, which the product
    with the output layer writes."""
    sizes = plan_parts.sizes()

    def buffers(own_engine: Engine) -> list[int]:
        own = component(LLAMA, engine=own_engine)
        return [m.parts.get("graph buffers", 0) for m in memory.phase_memory(own, sizes, GPU, (0,))]

    layer = 4 * 3 * (64 + 192) * 2
    assert buffers(engine()) == [layer, layer + 4 * 1000 * 4]
    assert buffers(engine(max_batch_size=8, offload=True)) == [2 * layer, 0]  # they are forgotten
    assert buffers(engine(settings=RolloutConfig(cuda_graphs=False))) == [0, 0]
    vllm = RolloutConfig(engine=EngineKind.vllm)
    assert buffers(engine(offload=True, settings=vllm))[1] > 0  # its sleep is of weights and cache


def test_resident_memory_on_the_cpu() -> None:
    block = BlockBytes(layer=1000, ends=0, backward=0, forward=0)
    sizes = plan_parts.sizes(weights=100, gradients=200, optimizer=400, block=block)
    cluster = ClusterConfig(reserved_gib=1, gpus_per_node=2)
    own_work = work(Phase.train, rows=8, update_rows=8)
    own = component(LLAMA, num_ranks=2, work=own_work, has_reference=True, optimizer=OptimizerConfig(offload=True))
    (moment,) = memory.phase_memory(own, sizes, cluster, (0,))
    assert moment.parts["reference"] == 100 and moment.parts["host copies"] == 400 and moment.parts["context and communicators"] == GIB
    assert moment.parts["lost between blocks"] == moment.parts["activations"] // 2  # lengths differ from micro-batch to micro-batch
    host = memory.host_memory(own, sizes, cluster)
    assert memory.EXPORTED_FILE_BYTES == MAX_FILE_BYTES
    assert host["ranks at their fullest"] == 2 * moment.total and "reference" not in host and host["file of the export"] == 100
    sampling = replace(own, engine=engine(on_gpu=False))
    assert "lost between blocks" not in memory.phase_memory(sampling, sizes, cluster, (0,))[0].parts


@pytest.mark.parametrize(("layers", "pp", "first", "last"), [(94, 8, 11, 11), (95, 8, 12, 11), (10, 4, 2, 2), (9, 8, 2, 1), (7, 2, 3, 0)])
def test_uneven_stages(layers: int, pp: int, first: int, last: int) -> None:
    found = {"first_stage_layers": 0, "last_stage_layers": 0} | uneven_stages(layers, pp)
    assert found == {"first_stage_layers": first, "last_stage_layers": last}


def test_uneven_stages_are_possible() -> None:
    for count in range(2, 100):
        for pp in range(2, count + 1):
            if stages := uneven_stages(count, pp):
                parallel = ParallelConfig(pp=pp, **stages)
                check_divisible(replace(LLAMA, num_layers=count), parallel)
                assert sum(stage_layers(count, parallel)) == count and min(stage_layers(count, parallel)) > 0
            else:
                assert count % pp == 0
    with pytest.raises(
        ConfigError, match=r"pp=4: .*; allowed: 1, 2, 5, 10, or parallel.first_stage_layers=2 parallel.last_stage_layers=2$"
    ):
        check_divisible(replace(LLAMA, num_layers=10), ParallelConfig(pp=4))


def test_advice_names_uneven_pipelines_and_smaller_caches() -> None:
    own = component(replace(LLAMA, num_layers=10), engine=engine(max_batch_size=8))
    offered = {setting: changed for setting, changed in search._changes(own, GPU)}
    uneven = offered["parallel.pp=4 parallel.first_stage_layers=2 parallel.last_stage_layers=2"]
    assert stage_layers(10, uneven.parallel) == [2, 3, 3, 2] and "parallel.pp=2" in offered
    assert offered["rollout.kv_cache_tokens=2048"].engine.kv_cache_tokens == 2048  # half of 8 sequences' two pages of 256


def test_copies_of_weights_in_8_bits() -> None:
    """Two stages: a rank has 3000 weights of layers, besides its half of the embedding's rows, or of the output layer's."""
    own = component(LLAMA, parallel={"tp": 2, "pp": 2}, model={"fp8": True})
    rows = memory.padded_vocabulary(own) // 2 * 64
    by_stage = [memory.copies_in_8_bits(own, 2 * (rows + 3000), stage) for stage in (0, 1)]
    assert by_stage == [2 * 3000, 2 * 3000]  # by rows and by columns, a byte each
    frozen = replace(own, optimizer=None)
    assert memory.copies_in_8_bits(frozen, 2 * (rows + 3000), 0) == 3000
    assert memory.copies_in_8_bits(replace(own, model=replace(own.model, fp8=False)), 2 * (rows + 3000), 0) == 0
    state = StateBytes(weights=2 * (rows + 3000), gradients=0, optimizer=0)
    sizes = plan_parts.sizes(state, state)
    assert {m.parts["weights in 8 bits"] for m in memory.phase_memory(own, sizes, GPU, (0, 1))} == {6000}
