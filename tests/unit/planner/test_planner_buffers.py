"""Megatron-Core's buffer layout worked out by hand."""

from __future__ import annotations

from aligner.planner.estimate import Replication, approximate_state_bytes, lay_out, state_bytes
from aligner.planner.workload import Parameter, StateBytes


def parameters(*sizes: int, itemsize: int = 2, **marks: bool) -> list[Parameter]:
    return [Parameter(name=str(i), numel=size, itemsize=itemsize, **marks) for i, size in enumerate(sizes)]


def test_plain_buffer_has_no_padding() -> None:
    buffer = lay_out(parameters(10, 5), distributed=False, shards=4, bucket_elements=None)
    assert buffer.numel == 15
    assert buffer.parameters == ((0, 5), (5, 15))  # in reverse order
    assert buffer.buckets == ((0, 15),)


def test_distributed_buffer_aligns_parameters_and_the_end() -> None:
    # 5 elements at 0, the next at 64; 64 + 100 = 164, rounded up to a multiple of lcm(3, 128) = 384.
    buffer = lay_out(parameters(100, 5), distributed=True, shards=3, bucket_elements=None)
    assert buffer.parameters == ((0, 5), (64, 164))
    assert buffer.numel == 384
    # Shards of 128: 5 + (128 - 64), 164 - 128, nothing.
    assert buffer.owned(3) == [69, 36, 0]


def test_buckets_close_when_they_are_full() -> None:
    # Reversed: 30, 200, 7. After 200 the bucket holds 64 + 200 = 264 >= 256: it ends at 384, where the last one starts.
    buffer = lay_out(parameters(7, 200, 30), distributed=True, shards=1, bucket_elements=256)
    assert buffer.buckets == ((0, 384), (384, 512))
    assert buffer.parameters == ((0, 30), (64, 264), (384, 391))
    assert buffer.owned(1) == [237]


def test_a_tied_embedding_gets_a_bucket_of_its_own() -> None:
    tied = Parameter(name="embedding", numel=100, itemsize=2, own_bucket=True)
    buffer = lay_out([tied, *parameters(10)], distributed=True, shards=1, bucket_elements=None)
    assert buffer.buckets == ((0, 128), (128, 256))
    assert buffer.parameters == ((0, 10), (128, 228))


def test_state_of_a_bfloat16_model() -> None:
    replication = Replication(distributed=True, dense_shards=2, expert_shards=1, bucket_elements=None)
    # 200 elements in a buffer of 256: 2 bytes each of weights, 4 of gradients; the fuller shard holds 128 at 12 bytes.
    assert state_bytes(parameters(200), replication) == StateBytes(weights=512, gradients=1024, optimizer=128 * 12)
    assert state_bytes(parameters(200), replication, dp_rank=1).optimizer == 72 * 12
    assert approximate_state_bytes(parameters(200), replication) == StateBytes(weights=400, gradients=800, optimizer=1200)


def test_float32_weights_are_their_own_main_weights() -> None:
    replication = Replication(distributed=False, dense_shards=8, expert_shards=8, bucket_elements=None)
    assert state_bytes(parameters(10, itemsize=4), replication) == StateBytes(weights=40, gradients=40, optimizer=80)


def test_experts_have_buffers_and_shards_of_their_own() -> None:
    replication = Replication(distributed=True, dense_shards=4, expert_shards=1, bucket_elements=None)
    mixed = [*parameters(512), *parameters(256, is_expert=True)]
    # Dense: 512 over 4 shards; expert: 256 whole.
    assert state_bytes(mixed, replication) == StateBytes(weights=1536, gradients=3072, optimizer=(128 + 256) * 12)
