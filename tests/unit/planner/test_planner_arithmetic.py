"""Schedules, memory and time against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import plan_parts
import pytest
from plan_parts import architecture, memory_of, work

from aligner.errors import ConfigError
from aligner.models.config import Dtype, LoraConfig, Recompute
from aligner.models.training.optimizer import OptimizerConfig, OptimizerKind
from aligner.parallel.micro_batches import MicroBatching, plan
from aligner.parallel.topology import ParallelConfig
from aligner.planner import engine_memory, estimate, layers, memory, times, workload
from aligner.planner.config import ClusterConfig, Device
from aligner.planner.estimate import check, engine_weight_bytes
from aligner.planner.workload import GIB, BlockBytes, Component, Engine, Parameter, Phase, ResponseLengths, StateBytes
from aligner.rollout.config import EngineKind, Kernels, Precision, RolloutConfig, RoutingReplay, VerifyRefit, VLLMConfig
from aligner.types import SamplingConfig

CLUSTER = ClusterConfig(
    device=Device.gpu,
    gpus_per_node=8,
    gpu_memory_gib=80,
    bf16_tflops=100,
    hbm_gb_per_second=1000,
    nvlink_gb_per_second=100,
    network_gb_per_second=10,
    reserved_gib=1,
    communicator_gib=0.5,
    achievable_flops=0.5,
    achievable_bandwidth=0.5,
    achievable_link=0.5,
    collective_microseconds=0,
    network_microseconds=0,
    launch_microseconds=0,
    host_layer_microseconds=0,
    host_pass_milliseconds=0,
)
WORK = work(Phase.generate, Phase.logprobs, Phase.ref_logprobs, Phase.train, update_rows=32, num_updates=2)


def component(**changes) -> Component:
    changes["model"] = {"micro_batch_size": 2} | changes.get("model", {})
    return plan_parts.component(**{"num_ranks": 16, "work": WORK} | changes)


@pytest.mark.parametrize(
    ("parallel", "layers"),
    [
        ({}, [8]),
        ({"pp": 4}, [2, 2, 2, 2]),
        ({"pp": 4, "first_stage_layers": 1, "last_stage_layers": 1}, [1, 3, 3, 1]),
        ({"pp": 2, "first_stage_layers": 5}, [5, 3]),
    ],
)
def test_layers_of_a_stage(parallel: dict, layers: list[int]) -> None:
    assert workload.stage_layers(8, ParallelConfig(**parallel)) == layers


def test_micro_batches_in_flight() -> None:
    plain, interleaved = ParallelConfig(pp=4), ParallelConfig(pp=4, vpp=2)
    assert [workload.in_flight(plain, stage, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert [workload.in_flight(plain, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    # Warm-up of 2 (pp - stage - 1) + (vpp - 1) pp chunk passes, and one more.
    assert [workload.in_flight(interleaved, stage, 16) for stage in range(4)] == [11, 9, 7, 5]
    assert workload.in_flight(interleaved, 0, 4) == 8


def test_micro_batches() -> None:
    cut = workload.micro_batches
    assert cut(component(), 32) == workload.MicroBatches(count=1, rows=2, length=256)  # 16 replicas of 2 rows
    assert cut(component(parallel={"tp": 8}), 32) == workload.MicroBatches(count=8, rows=2, length=256)
    by_tokens = component(parallel={"tp": 8}, model={"micro_batch_tokens": 1000})  # 3 rows of 256 tokens
    assert cut(by_tokens, 32) == workload.MicroBatches(count=6, rows=3, length=256)
    # Groups of pp: 6 passes become 8. Lengths: a multiple of 2 cp = 6 (258).
    assert cut(component(parallel={"pp": 4, "vpp": 2, "tp": 2}, model={"micro_batch_tokens": 1000}), 32).count == 8
    assert cut(component(num_ranks=3, parallel={"cp": 3}), 32).length == 258


def test_delta_nets_have_states_instead_of_keys_and_values() -> None:
    """As above with 6 of 8 layers delta nets of 4 key heads of 8 numbers and 8 value heads of 16, and windows of 4 tokens."""
    sizes = {"linear_key_heads": 4, "linear_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_conv_size": 4}
    engine = plan_parts.engine(tp=2, max_batch_size=4, prefill_chunk_tokens=100, kv_cache_tokens=1000)
    plain = component(parallel={"tp": 2}, engine=engine)
    own = replace(plain, architecture=replace(plain.architecture, linear_attention_layers=[0, 1, 2, 4, 5, 6], **sizes))
    token = 2 * 2 * 2 * 8 * 2  # keys and values, layers, heads of a rank, numbers, bytes
    state = 6 * (4 * (8 // 2) * 8 * 16 + 3 * (2 * 4 * 8 + 8 * 16) // 2 * 2)  # layers; a rank's states; three rows of its channels
    assert engine_memory.kv_bytes_per_token(own, engine) == token and engine_memory.state_bytes(own, engine) == state
    assert engine_memory.cache_bytes(own, engine) == 1000 * token + 4 * state
    linear, quadratic = layers.layer_flops(own, 100)
    attention, feed_forward = 2 * (2 * 64 * 64 + 2 * 64 * 32), 2 * 3 * 64 * 128
    rule = 8 * (3 * 8 * 16 + 64 * (2 * 8 + 12 + 16))
    delta = 2 * (64 * (2 * 32 + 2 * 128 + 2 * 8) + 128 * 64 + 4 * (64 + 128) + rule)
    assert linear == attention / 4 + delta * 3 / 4 + feed_forward and quadratic == 2 * 64 * 100 / 4


def test_a_cache_and_weights_in_one_byte() -> None:
    """8 layers, 4 groups of 8 numbers, keys and values in bfloat16; a matrix of 64 x 256 in each layer."""
    engine = plan_parts.engine(kv_cache_tokens=1000)
    kept = replace(engine, settings=RolloutConfig(precision=Precision.int8, cache_precision=Precision.fp8))
    own = component(engine=kept)
    assert engine_memory.kv_bytes_per_token(own, engine) == 8 * 2 * 4 * 8 * 2
    assert engine_memory.kv_bytes_per_token(own, kept) == 8 * 2 * 4 * (8 + 2)  # a byte each, and a scale in bfloat16
    linears = [Parameter(name=f"decoder.layers.{n}.mlp.linear_fc1.weight", numel=64 * 256, itemsize=2) for n in range(8)]
    others = [Parameter(name="embedding.word_embeddings.weight", numel=1000, itemsize=2)]
    shards = [[[*linears, *others]]]
    weights, rounded = engine_weight_bytes(own, shards), engine_weight_bytes(own, shards, only_rounded=True)
    assert (weights, rounded) == (8 * 64 * 256 * 2 + 2000, 8 * 64 * 256 * 2)
    assert engine_weight_bytes(replace(own, engine=engine), shards, only_rounded=True) == 0
    sizes = replace(plan_parts.sizes(engine_weights=weights), engine_rounded=rounded)
    assert memory.engine_bytes(own, sizes) == 8 * 64 * 256  # in place: a copy beside the policy's
    apart = component(engine=kept, parallel={"pp": 2})
    assert memory.engine_bytes(apart, sizes) == 8 * 64 * 256 + 2000
    assert memory.engine_bytes(component(engine=engine, parallel={"pp": 2}), replace(sizes, engine_rounded=0)) == weights
    assert not component(engine=kept, model={"lora": LoraConfig(rank=2)}).engine_holds_weights  # adapters are beside the copy


def test_engine_weights_of_its_own() -> None:
    engine = plan_parts.engine(tp=2)
    assert not component(parallel={"tp": 2}, engine=engine).engine_holds_weights
    assert component(parallel={"tp": 4}, engine=engine).engine_holds_weights
    assert component(parallel={"tp": 2, "pp": 2}, engine=engine).engine_holds_weights
    assert not component(parallel={"tp": 2, "cp": 2}, engine=engine).engine_holds_weights
    assert not component().engine_holds_weights
    ahead = component(parallel={"tp": 2}, engine=replace(engine, asynchronous=True))
    assert ahead.engine_holds_weights and not ahead.engine_reshards
    foreign = component(parallel={"tp": 2}, engine=replace(engine, settings=RolloutConfig(engine=EngineKind.vllm)))
    assert foreign.engine_holds_weights and not foreign.engine_reshards


def test_memory_of_every_phase() -> None:
    state = StateBytes(weights=GIB, gradients=2 * GIB, optimizer=3 * GIB)
    block = BlockBytes(layer=1000, ends=500_000, backward=70, forward=80)
    own = component(parallel={"tp": 4, "pp": 2}, engine=Engine(tp=4, max_batch_size=4, bucket_bytes=10, offload=True), has_reference=True)
    sizes = plan_parts.sizes(state, state, block=block, engine_weights=5 * GIB)
    found = {(m.phase, m.stage): m.parts for m in memory.phase_memory(own, sizes, CLUSTER, (0, 1))}
    first = found[Phase.train, 0]
    assert (first["weights"], first["gradients"], first["optimizer"]) == (GIB, 2 * GIB, 3 * GIB)
    # Two micro-batches in flight, each of 4 layers and an input and output of 2 x 256 x 64 bfloat16 numbers.
    assert first["activations"] == 2 * (4 * 1000 + 2 * 512 * 64 * 2)
    assert found[Phase.train, 1]["activations"] == (4 * 1000 + 2 * 512 * 64 * 2) + (500_000 - 2 * 512 * 64 * 2)
    assert "engine weights" not in first and "logits" not in first and "logits" in found[Phase.train, 1]
    # Communicators: the world, tp, pp and dp of 2.
    assert first["context and communicators"] == 3 * GIB
    assert found[Phase.ref_logprobs, 0]["reference"] == GIB
    generate = found[Phase.generate, 0]
    # The policy's weights take turns with the engine's: their copying, not the sampling, is the fuller moment here.
    assert (generate["engine weights"], generate["weights"], generate["refit buckets"]) == (5 * GIB, GIB, 20)
    assert "KV cache" not in generate
    light = replace(sizes, stages=(replace(state, weights=100), state))
    sampling = memory_of(Phase.generate, own, light, CLUSTER)
    assert "weights" not in sampling and "refit buckets" not in sampling
    assert memory.host_memory(own, sizes, CLUSTER)["policy weights (while sampling)"] == 8 * GIB
    staying = replace(own, engine=replace(own.engine, offload=False))
    generate = memory_of(Phase.generate, staying, sizes, CLUSTER)
    assert generate["KV cache"] == sampling["KV cache"] and generate["refit buckets"] == 20
    # 16 ranks / 4 = 4 replicas, 16 sequences each, 4 at a time; 8 layers, one head of 8 numbers, keys and values, 2 bytes. A page
    # of 256 tokens for each sequence and one to spare.
    assert generate["KV cache"] == 4 * 512 * 8 * 8 * 2 * 2
    # While others compute it stays where it is, for the graphs of the next generation; with offload, or without graphs, it does not.
    phases = memory.phase_memory(staying, sizes, CLUSTER, (0, 1))
    assert all(m.parts["KV cache"] == generate["KV cache"] for m in phases)
    launched = replace(staying, engine=replace(staying.engine, settings=RolloutConfig(cuda_graphs=False)))
    others = [memory.phase_memory(launched, sizes, CLUSTER, (0,)), memory.phase_memory(own, sizes, CLUSTER, (0,))]
    others.append(memory.phase_memory(staying, sizes, ClusterConfig(device=Device.cpu), (0,)))
    assert all("KV cache" not in m.parts for found in others for m in found if m.phase != Phase.generate)
    ahead = replace(staying, engine=replace(staying.engine, asynchronous=True))  # it samples in every phase
    assert all(m.parts["KV cache"] == generate["KV cache"] for m in memory.phase_memory(ahead, sizes, CLUSTER, (0, 1)))
    package = RolloutConfig(engine=EngineKind.tensorrt_llm)  # in processes of its own, fed full tensors
    apart = component(engine=Engine(tp=1, max_batch_size=4, bucket_bytes=10, offload=True, settings=package))
    alone = {m.phase: m.parts for m in memory.phase_memory(apart, sizes, CLUSTER, (0,))}
    assert alone[Phase.train]["context and communicators"] == 3 * GIB  # two processes, two communicators
    assert alone[Phase.generate]["engine weights"] == 5 * GIB and "engine weights" not in alone[Phase.train]
    overlapping = replace(own, parallel=replace(own.parallel, sequence_parallel=True, tp_comm_overlap=True))
    train = memory_of(Phase.train, overlapping, sizes, CLUSTER)
    assert train["exchange buffers"] == 8 * 512 * 64 * 2  # the hidden states of 512 tokens of 64 bfloat16 numbers, eight times
    offloading = replace(own, optimizer=OptimizerConfig(offload=True))
    away = {(m.phase, m.stage): m.parts for m in memory.phase_memory(offloading, sizes, CLUSTER, (0,))}
    assert "optimizer" not in away[Phase.generate, 0] and "optimizer" in away[Phase.train, 0]
    host = memory.host_memory(offloading, sizes, CLUSTER)
    assert host["reference"] == 8 * GIB and host["optimizer (between training phases)"] == 24 * GIB
    assert host["checkpoint being read or written"] == 24 * GIB  # 8 ranks of a node, 3 GiB of state each
    copying = memory.host_memory(replace(offloading, saves_asynchronously=True), sizes, CLUSTER)
    assert copying["checkpoint being read or written"] == 24 * GIB + 8 * GIB // own.dp  # and the weights, shared among dp
    assert "checkpoint being read or written" not in memory.host_memory(replace(own, optimizer=None), sizes, CLUSTER)


def test_links_and_collectives() -> None:
    k = layers.Kernels(cluster=CLUSTER, itemsize=2)
    assert k.link(8) == 50e9 and k.link(9) == 5e9
    assert k.all_gather(100e9, 4, 4) == pytest.approx(75 / 50)
    assert k.all_reduce(1e9, 1, 1) == 0
    # Four ranks, one on each node: through their ports alone. Sixteen on two nodes: an eighth of it through each port, the rest inside.
    assert k.all_reduce(100e9, 4, 32) == pytest.approx(2 * 75 / 5)
    assert k.all_gather(80e9, 16, 16) == pytest.approx(10 * (1 / 2) / 5 + 80 * (7 / 8) / 50)
    # Of 16 GB in 16 equal parts, eight go to the other node and seven to neighbours.
    assert k.all_to_all(16e9, 16, 16) == pytest.approx(8 / 5 + 7 / 50)
    assert k.all_to_all(8e9, 8, 8) == pytest.approx(7 / 50) and k.send(5e9, 9) == pytest.approx(1)


def test_latencies_and_an_oversubscribed_network() -> None:
    slow = replace(CLUSTER, collective_microseconds=10, network_microseconds=20, leaf_nodes=2, oversubscription=4)
    k = layers.Kernels(cluster=slow, itemsize=2)
    assert k.latency(8) == pytest.approx(10e-6) and k.latency(16) == pytest.approx(30e-6) and k.latency(64) == pytest.approx(70e-6)
    assert k.link(16) == 5e9 and k.link(17) == 1.25e9


def test_kernels_by_shape() -> None:
    """50 TFLOP/s, 500 GB/s. A product of 1000 rows of 2000 x 3000: 12 GFLOP, and (2 + 6 + 3) million numbers of 2 bytes."""
    k = layers.Kernels(cluster=CLUSTER, itemsize=2)
    assert k.product(1000, 2000, 3000) == pytest.approx(12e9 / 50e12 + 22e6 / 500e9)
    assert k.product(1, 2000, 3000) > 0.9 * 12e6 / 500e9  # of one row only the matrix counts
    assert k.product(10, 20, 30, matrices=7) == pytest.approx(7 * k.product(10, 20, 30))
    # 10 tokens, 100 keys, 8 heads of 16 + 16 numbers: 2 FLOPs each, at achievable_attention of the peak.
    attention = layers.Kernels(cluster=replace(CLUSTER, achievable_attention=0.25), itemsize=2).attention(10, 100, 8, 32)
    assert attention == pytest.approx(2 * 10 * 100 * 8 * 32 / 25e12)
    assert k.together(3.0, 2.0) == 3.0 and layers.Kernels(cluster=replace(CLUSTER, device=Device.cpu), itemsize=4).together(3.0, 2.0) == 5.0


def training(cluster: ClusterConfig = CLUSTER, **changes) -> dict[str, float]:
    """Seconds of the training phase, by cause."""
    own = component(**changes)
    sizes = plan_parts.sizes(*[StateBytes(weights=0, gradients=0, optimizer=0)] * own.parallel.pp)
    (train,) = (t for t in times.phase_times(own, sizes, cluster) if t.phase == Phase.train)
    return dict(train.parts)


def test_recomputation_and_bubble_cost_time() -> None:
    none, full = training(), training(model={"recompute": Recompute.full})
    assert full["layers"] == pytest.approx(none["layers"] * 4 / 3)
    assert full["attention"] == pytest.approx(none["attention"] * 4.5 / 3.5)
    # 2 updates x 1 micro-batch of 2 x 256 tokens through 8 layers: products 3 times, attention 3.5 times, at half of 100 TFLOP/s and 40 %.
    linear, quadratic = layers.layer_flops(component(), 256)
    assert none["attention"] == pytest.approx(2 * 512 * 8 * 3.5 * quadratic / 40e12)
    k = layers.Kernels(cluster=CLUSTER, itemsize=2)
    shapes = ((64, 128), (64, 64), (64, 128), (64, 128), (128, 64))  # queries, keys and values; output; gate, up and down
    assert none["layers"] == pytest.approx(2 * 8 * 3 * sum(k.product(512, *shape) for shape in shapes), rel=1e-3)
    assert none["layers"] > 2 * 512 * 8 * 3 * linear / 50e12  # what the FLOPs alone would take
    piped = training(parallel={"pp": 4})  # 4 replicas, 4 micro-batches: a bubble of 3 more
    others = sum(seconds for name, seconds in piped.items() if name not in ("pipeline bubble", "stragglers", "data parallel", "optimizer"))
    assert piped["pipeline bubble"] == pytest.approx(3 / 4 * others)


def test_what_waits_in_host_memory_is_moved() -> None:
    """30 GB there and back at 80 % of 25 GB/s. Components that take turns on the same GPUs move theirs anyway."""
    sizes = plan_parts.sizes(weights=20 * 10**9, optimizer=30 * 10**9, engine_weights=10**9)
    cluster = replace(CLUSTER, host_gb_per_second=25.0, achievable_link=0.8)

    def seconds(phase: Phase, **changes) -> float:
        own = component(num_ranks=4, **changes)
        return next(time.total for time in times.phase_times(own, sizes, cluster) if time.phase == phase)

    away = OptimizerConfig(offload=True)
    assert seconds(Phase.train, optimizer=away) - seconds(Phase.train) == pytest.approx(2 * 30 / 20)
    turns = frozenset([Phase.train])
    assert seconds(Phase.train, optimizer=away, turns=turns) == seconds(Phase.train, turns=turns)
    # Of an engine with its own weights, the policy's 20 GB.
    engines = [Engine(tp=1, max_batch_size=8, bucket_bytes=0, offload=offload) for offload in (False, True)]
    kept, moved = (seconds(Phase.generate, engine=engine, parallel={"tp": 2}) for engine in engines)
    assert moved - kept == pytest.approx(2 * 20 / 20)
    in_turns = component(engine=engines[1], turns=frozenset([Phase.generate]))
    assert times.policy_away_seconds(in_turns, engines[1], sizes, cluster) == 0


def test_moments_in_8_bits_take_less_of_the_device_and_as_much_of_a_checkpoint() -> None:
    """1024 bfloat16 parameters: 4 bytes of main weights and 2 codes each, and a float32 scale of each moment for 256 of them."""
    own = component(num_ranks=1, optimizer=OptimizerConfig(kind=OptimizerKind.adam8bit))
    parameters = [Parameter(name="weight", numel=1024, itemsize=2)]
    placed = estimate.replication(own, CLUSTER, stage=0)
    state = estimate.state_bytes(parameters, placed)
    assert state.optimizer == estimate.approximate_state_bytes(parameters, placed).optimizer == 1024 * (4 + 2) + 2 * 4 * 4
    full = estimate.state_bytes(parameters, estimate.replication(component(num_ranks=1), CLUSTER, stage=0))
    assert full.optimizer == 1024 * 12
    sizes = {kind: plan_parts.sizes(weights=2048, optimizer=one.optimizer) for kind, one in (("8", state), ("32", full))}
    hosts = [memory.host_memory(own, sizes["8"], CLUSTER), memory.host_memory(component(num_ranks=1), sizes["32"], CLUSTER)]
    assert {host["checkpoint being read or written"] for host in hosts} == {1024 * 12}


def test_muon_keeps_one_moment_of_a_matrix_on_every_replica() -> None:
    own = component(num_ranks=2, optimizer=OptimizerConfig(kind=OptimizerKind.muon, distributed=False))
    parameters = [Parameter(name="table", numel=64, itemsize=2), Parameter(name="matrix", numel=1024, itemsize=2, is_matrix=True)]
    placed = estimate.replication(own, CLUSTER, stage=0)
    assert estimate.state_bytes(parameters, placed).optimizer == 64 * 12 + 1024 * 8
    assert estimate.approximate_state_bytes(parameters, placed).optimizer == 64 * 12 + 1024 * 8


def test_an_optimizer_on_the_host_takes_its_memory_and_time() -> None:
    """A rank with 1e9 bfloat16 parameters of its own: 12 bytes of state each, 16 with the gradient, of which 28 are read or written.

    8 ranks of a node share 224 GB/s: 1e9 x 28 / 28e9 = 1 s; 8 bytes over the link of 20 GB/s take 0.4 s meanwhile. Twice a step."""
    sizes = plan_parts.sizes(weights=2 * 10**9, gradients=4 * 10**9, optimizer=12 * 10**9)
    cluster = replace(CLUSTER, host_gb_per_second=25.0, achievable_link=0.8, host_memory_gb_per_second=224.0)
    on_device, on_host, a_quarter = (
        component(num_ranks=8, optimizer=OptimizerConfig(cpu_offload=on, cpu_offload_fraction=part))
        for on, part in ((False, 1.0), (True, 1.0), (True, 0.25))
    )

    def parts(own: Component) -> dict[str, int]:
        return memory_of(Phase.train, own, sizes, cluster)

    def seconds(own: Component) -> dict[str, float]:
        return dict(next(time.parts for time in times.phase_times(own, sizes, cluster) if time.phase == Phase.train))

    assert [parts(own).get("optimizer", 0) for own in (on_device, on_host, a_quarter)] == [12 * 10**9, 0, 9 * 10**9]
    assert {parts(own)["gradients"] for own in (on_device, on_host)} == {4 * 10**9}
    hosts = [memory.host_memory(own, sizes, cluster).get("optimizer (updated by the host)", 0) for own in (on_device, on_host, a_quarter)]
    assert hosts == [0, 8 * 16 * 10**9, 8 * 4 * 10**9]
    read = {memory.host_memory(own, sizes, cluster)["checkpoint being read or written"] for own in (on_device, on_host)}
    assert len(read) == 1  # the state is as large wherever it is
    assert seconds(on_host)["optimizer on the host"] == pytest.approx(2 * 1.0)
    assert seconds(a_quarter)["optimizer on the host"] == pytest.approx(2 * 0.25)
    on_disk = component(num_ranks=8, optimizer=OptimizerConfig(cpu_offload=True, nvme_path="/scratch"))
    vocabulary = on_disk.architecture.vocabulary_width * memory.padded_vocabulary(on_disk)  # of two buffers, each for four numbers
    assert memory.host_memory(on_disk, sizes, cluster)["optimizer (updated by the host)"] == 8 * 2 * 16 * vocabulary
    assert memory.disk_optimizer(on_disk, sizes, cluster) == 8 * 12 * 10**9 and not memory.disk_optimizer(on_host, sizes, cluster)
    disk = replace(cluster, nvme_gb_per_second=12.0)  # 192 GB of a node, read and written twice a step
    assert seconds(on_disk)["optimizer on the host"] == pytest.approx(2 * 2 * 8 * 12 / 2)  # at the 2 GB/s of a machine that says nothing
    assert times.host_update_seconds(on_disk, sizes, disk) == pytest.approx(2 * 16.0)
    slow_link = replace(cluster, host_gb_per_second=5.0)  # 4 GB/s: the transfers take longer than the arithmetic
    assert times.host_update_seconds(on_host, sizes, slow_link) == pytest.approx(2 * 2.0)
    moved = 2 * 12 * 10**9 / 500e9  # what Adam on the device reads and writes of its state
    assert seconds(on_device)["optimizer"] - seconds(on_host)["optimizer"] == pytest.approx(2 * moved)
    assert memory.resting_bytes(on_host, sizes) == 6 * 10**9
    assert memory_of(Phase.train, on_host, sizes, replace(cluster, device=Device.cpu))["host copies"] == 16 * 10**9  # the same memory


def test_the_host_and_the_slowest_rank() -> None:
    """One layer's kernels take the host 10 ms to start; with the backward pass 2.5 times that, for 8 layers and 2 updates."""
    waiting = training(replace(CLUSTER, host_layer_microseconds=10_000, host_pass_milliseconds=0))
    computing = sum(seconds for name, seconds in waiting.items() if name not in ("waiting for the host", "data parallel", "optimizer"))
    assert computing + waiting["waiting for the host"] == pytest.approx(2 * 8 * 2.5 * 10e-3)
    # Each of 2 x 512 tokens takes each layer's small kernels 3 us more, forward and, at twice that, backward.
    short = training(replace(CLUSTER, layer_token_microseconds=3))["small kernels"] - training()["small kernels"]
    assert short == pytest.approx(2 * 512 * 8 * 3 * 3e-6)
    slow, even = training(replace(CLUSTER, straggling=0.1)), training()
    assert slow["stragglers"] == pytest.approx(0.1 * (sum(even.values()) - even.get("data parallel", 0) - even.get("optimizer", 0)))


def test_micro_batches_are_those_of_the_run() -> None:
    """Prompts of 10 tokens and 4 responses: two replicas, rows packed into 40 tokens."""
    lengths = ResponseLengths(mean=15, spread=0.5, prompt=10)
    own_work = work(Phase.train, rows=4, length=50, response_length=40, update_rows=4, lengths=lengths)
    own = component(num_ranks=2, work=own_work, model={"micro_batch_tokens": 40, "packing": True})
    whole = [10 + length for length in own_work.responses(4)]
    dealt = plan(whole, MicroBatching(tokens=40, packed=True), num_replicas=2)
    fullest = max(dealt, key=lambda batches: sum(whole[row] for batch in batches for row in batch))
    found = layers.passes(own, 4)
    tokens = [whole[row] for batch in fullest for row in batch]
    assert found.count == len(fullest) and found.tokens * found.count == pytest.approx(sum(tokens))
    assert found.length == pytest.approx(sum(length**2 for length in tokens) / sum(tokens))
    assert found.selected / found.tokens == pytest.approx(15 / 25)
    padded = layers.passes(replace(own, model=replace(own.model, packing=False, micro_batch_tokens=0, micro_batch_size=2)), 4)
    first = [max(whole[:2])] * 2, [max(whole[2:])] * 2
    assert padded.tokens == max(map(sum, first)) and padded.count == 1


def test_experts_and_decoding() -> None:
    """Of 8 experts, 2 for each token: one sequence reads 2 of them, two sequences on average 3.5."""
    a = architecture(num_experts=8, experts_per_token=2, expert_ffn_hidden_size=32)
    engine = plan_parts.engine()
    own = component(architecture=a, engine=engine, num_ranks=1)
    experts = 8 * 8 * 3 * 64 * 32 * 2  # layers, experts, matrices, sizes, bytes
    assert times.expert_bytes(own, 10**9, 1) == experts and times.expert_bytes(component(engine=engine), 10**9, 1) == 0
    cluster = replace(CLUSTER, engine_step_milliseconds=0, engine_sequence_microseconds=0, achievable_experts=1.0)
    sizes = plan_parts.sizes(engine_weights=10_000_000)
    step = times.decode_step(own, engine, sizes, cluster)
    chosen = step(2, 0) - step(1, 0)
    flops = (8 * layers.layer_flops(own, 1)[0] + 2 * 64 * memory.padded_vocabulary(own)) / 50e12
    logits = 6 * memory.padded_vocabulary(own) * 4 / 500e9
    assert chosen == pytest.approx(experts * (0.4375 - 0.25) / 500e9 + flops + logits)
    cached = engine_memory.kv_bytes_per_token(own, engine) / 500e9 + 2 * 8 * (8 + 8) * 8 / 40e12
    assert step(1, 1000) - step(1, 0) == pytest.approx(1000 * cached)
    slow = replace(cluster, launch_microseconds=100, host_layer_microseconds=500)
    assert times.decode_step(own, engine, sizes, slow)(1, 0) == pytest.approx(2 * 8 * 100e-6)  # of mixtures twice
    eager = replace(engine, settings=RolloutConfig(cuda_graphs=False))
    assert times.decode_step(own, eager, sizes, slow)(1, 0) == pytest.approx(2 * 8 * 500e-6)
    # Other packages' graphs are by their own settings; TensorRT-LLM's are lost where memory sleeps.
    package = replace(engine, settings=RolloutConfig(engine=EngineKind.tensorrt_llm, cuda_graphs=False))
    assert times.decode_step(own, package, sizes, slow)(1, 0) == pytest.approx(2 * 8 * 100e-6) and not package.graphs_lost
    sleeping = replace(package, offload=True, on_gpu=True)
    assert times.decode_step(own, sleeping, sizes, slow)(1, 0) == pytest.approx(2 * 8 * 500e-6)
    assert "decodes without CUDA graphs" in sleeping.graphs_lost and not sleeping.records_graphs
    for eager_vllm in (False, True):
        settings = RolloutConfig(engine=EngineKind.vllm, vllm=VLLMConfig(enforce_eager=eager_vllm))
        assert replace(engine, settings=settings).uses_graphs is not eager_vllm


def test_refused_sizes_name_the_component() -> None:
    with pytest.raises(ConfigError, match="^actor: parallel.tp=3: does not divide the model's num_attention_heads=8"):
        check(component(parallel={"tp": 3}))
    with pytest.raises(ConfigError, match="^actor: .*does not divide the 16 ranks"):
        check(component(parallel={"pp": 8, "tp": 4}))
    with pytest.raises(ConfigError, match="mini-batches of 4 are smaller than the 16 data-parallel replicas"):
        check(component(work=replace(component().work, update_rows=4)))
    with pytest.raises(ConfigError, match="rollout.tp=3: does not divide the 16 ranks"):
        check(component(engine=plan_parts.engine(tp=3, max_batch_size=1)))
    foreign = RolloutConfig(engine=EngineKind.tensorrt_llm, verify_refit=VerifyRefit.checksum)  # and so no search proposes it
    with pytest.raises(ConfigError, match="^actor: rollout.verify_refit=checksum: rollout.engine=tensorrt_llm reads no"):
        check(component(engine=plan_parts.engine(tp=2, max_batch_size=1, settings=foreign)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"gpus_per_node": 0}, "cluster.gpus_per_node=0: must be above 0"),
        ({"achievable_flops": 1.5}, "cluster.achievable_flops=1.5: a fraction of the peak, at most 1"),
        ({"fragmentation": 1.0}, "cluster.fragmentation=1.0: must be below 1"),
    ],
)
def test_bad_clusters(change: dict, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig(**change)
    assert str(caught.value) == text


def test_memory_of_generation() -> None:
    """Hidden size 64, feed-forward 128, 8 layers, 4 key-value heads of 8 numbers, bfloat16; 2 replicas' worth of 32 sequences each."""
    engine = plan_parts.engine(tp=8, max_batch_size=4, prefill_chunk_tokens=100)
    own = component(parallel={"tp": 8}, engine=engine)
    token = 2 * 8 * 1 * 8 * 2  # keys and values, layers, heads of a rank (4 on 8 ranks: one each), numbers, bytes
    assert (
        engine_memory.cache_tokens(own, engine) == 4 * 2 * 256
    )  # of 256 tokens, the last of which is never looked at, and a page to spare
    assert engine_memory.cache_tokens(own, replace(engine, settings=RolloutConfig(kernels=Kernels.torch))) == 4 * (256 + 16)
    assert engine_memory.cache_tokens(replace(own, model=replace(own.model, dtype=Dtype.float32)), engine) == 4 * (256 + 16)
    assert engine_memory.cache_tokens(own, replace(engine, kv_cache_tokens=1000)) == 1000
    mixture = replace(own, architecture=replace(own.architecture, num_experts=256, experts_per_token=3, expert_ffn_hidden_size=8))
    recording = replace(engine, kv_cache_tokens=1000, settings=RolloutConfig(routing_replay=RoutingReplay.measure))
    assert engine_memory.cache_bytes(mixture, recording) == 1000 * (token + 8 * 3 * 2)  # layers, experts of a token, bytes
    # Prompts of 128 tokens in chunks of 100: three hidden states and three parts of the inner ones; keys, values and mask of 128 tokens.
    chunk = 100 * (3 * 64 + 3 * 128 // 8) * 2
    assert engine_memory.prefill_bytes(own, engine) == chunk + 128 * token // 8 + 100 * 128 * 3
    whole = replace(engine, prefill_chunk_tokens=2048)  # four prompts in one chunk, and nothing before it
    assert engine_memory.prefill_bytes(own, whole) == 4 * 128 * (3 * 64 + 3 * 128 // 8) * 2
    sizes = plan_parts.sizes()
    parts = memory_of(Phase.generate, own, sizes, CLUSTER)
    assert parts["KV cache"] == 4 * 512 * token
    # Logits in float32: products, themselves, exponentials, these in blocks, and the parts and the whole of eight ranks.
    logits = 4 * memory.padded_vocabulary(own) * (4 + 3 * 4 + 2 * 4)
    assert parts["prefill and sampling"] == chunk + 128 * token // 8 + 100 * 128 * 3 + logits
    reshaped = RolloutConfig(sampling=SamplingConfig(temperature=0.7, top_p=0.9))
    assert (
        engine_memory.logit_bytes(own, replace(engine, tp=1)) == 12
        and engine_memory.logit_bytes(own, replace(engine, settings=reshaped)) == 36
    )


def test_seconds_of_a_vision_tower() -> None:
    """Two sequences with an image of 128 features, of 4 patches each: 1,024 patches, of which a layer sees all 512 of an image,
    another one 16. At 1 TFLOP/s and 1 TB/s."""
    own = plan_parts.component()
    fast = ClusterConfig(bf16_tflops=1.0, achievable_flops=1.0, achievable_attention=1.0, hbm_gb_per_second=1e3, achievable_bandwidth=1.0)
    sizes = dict.fromkeys(("kept", "held", "working", "forward", "fixed"), 0)
    sizes |= {"patches": 4, "depth": 2, "width": 8, "windowed": 1, "window": 16}
    tower = workload.Tower(flops=1000, trained_flops=3000, **sizes)
    products, scores, moved = 256 * 1000, 4 * 1024 * (512 + 16) * 8, layers.HIDDEN_PASSES * 1024 * 8 * 2 * 2
    expected = (products + scores + moved) * 1e-12
    k = layers.kernels(own, fast)
    assert times.tower_seconds(own, tower, 2, k) == pytest.approx(expected)
    assert times.tower_seconds(own, tower, 2, k, trains=True) == pytest.approx(3 * expected)
    assert times.tower_seconds(own, None, 2, k) == 0
