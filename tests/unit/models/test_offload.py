"""What sleeps in host memory leaves the device, and comes back as it was."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from model_steps import make_batch

from aligner.losses.sft import sft_loss
from aligner.models.config import Dtype
from aligner.models.training.offload import HostMemory, LockedMemory, optimizer_tensors
from aligner.models.training.optimizer import OptimizerConfig
from aligner.types import TokenBatch

pytestmark = pytest.mark.usefixtures("topology")


def policy(make_model, *, offload: bool, distributed: bool, dtype: str):
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-3, offload=offload, distributed=distributed)
    return make_model("policy", optimizer=optimizer, config={"dtype": Dtype(dtype)}, training={"micro_batch_size": 2})


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sleep_frees_and_training_goes_on_bit_for_bit(make_model, distributed, dtype):
    kept = policy(make_model, offload=False, distributed=distributed, dtype=dtype)
    slept = policy(make_model, offload=True, distributed=distributed, dtype=dtype)
    for step in range(3):
        kept.train_step(make_batch("policy", step), sft_loss)
        slept.train_step(make_batch("policy", step), sft_loss)
        slept.sleep()
        gradients = [b.grad_data.untyped_storage().nbytes() for b in slept.model.runners[0].buffers]
        assert gradients and not any(gradients)
        assert torch.equal(slept.logprobs(make_batch("policy", 9)), kept.logprobs(make_batch("policy", 9)))  # weights stay
    for ours, theirs in zip(slept.module.parameters(), kept.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_moments_and_main_weights_leave(make_model):
    model = policy(make_model, offload=True, distributed=True, dtype="bfloat16").model
    model.sleep()
    model.wake()
    assert not model.host._away
    awake = [t.untyped_storage().nbytes() for t in optimizer_tensors(model.optimizer)]
    assert all(awake)
    model.sleep()
    assert not any(t.untyped_storage().nbytes() for t in optimizer_tensors(model.optimizer))
    model.sleep()  # twice is once
    model.wake()
    assert [t.untyped_storage().nbytes() for t in optimizer_tensors(model.optimizer)] == awake


def test_without_the_option_nothing_moves(make_model):
    model = policy(make_model, offload=False, distributed=True, dtype="float32").model
    model.sleep()
    assert not model.host._away and all(b.grad_data.untyped_storage().nbytes() for b in model.runners[0].buffers)


@pytest.mark.cpu
def test_host_memory_that_the_device_reads_is_as_large_as_the_tensors(monkeypatch):
    """Its pages are locked where they are, once, and let go with the object: torch's own would be of the next power of two."""
    calls: list[tuple[str, int, int]] = []

    def register(address: int, size: int, flags: int) -> int:
        calls.append(("lock", address, size))
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: calls.append(("unlock", address, 0)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    kept = [torch.arange(5000, dtype=torch.float32), torch.arange(3, dtype=torch.float32)]
    memory = HostMemory(kept=lambda: kept)
    for _ in range(2):
        memory.move_out()
        assert [tensor.untyped_storage().nbytes() for tensor in kept] == [0, 0]
        memory.move_in()
        assert torch.equal(kept[0], torch.arange(5000.0)) and torch.equal(kept[1], torch.arange(3.0))
    assert [(name, size) for name, _, size in calls] == [("lock", 20000), ("lock", 12)]  # the second move used the same
    assert all(address % 4096 == 0 for _, address, _ in calls)  # no page is shared with anything else
    locked = [address for _, address, _ in calls]
    del memory
    gc.collect()
    assert [(name, address) for name, address, _ in calls[2:]] == [("unlock", address) for address in locked]


def test_copies_side_by_side_are_apart():
    tensors = [torch.arange(3.0).bfloat16(), torch.arange(5.0), torch.zeros(0, 4), torch.arange(7).view(1, 7), torch.tensor(True)]
    memory = LockedMemory()
    copies = memory.like(tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
    assert copies[0].is_pinned() == torch.cuda.is_available()


@pytest.mark.cpu
def test_memory_that_cannot_be_locked_is_said(monkeypatch):
    def refuse(code: int) -> None:
        raise RuntimeError(f"CUDA error {code}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    tensor = torch.arange(4.0)
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        HostMemory(kept=lambda: [tensor]).move_out()
    assert torch.equal(tensor, torch.arange(4.0))  # nothing has left


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("offload", [True, False])
def test_a_model_that_leaves_the_device_takes_everything(make_model, trains, offload):
    """Between any two calls: what it computes stays the same to the last bit."""
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-3, offload=offload) if trains else None
    stays, moves = (make_model("policy", optimizer=optimizer, training={"micro_batch_size": 2}) for _ in range(2))

    def on_device() -> list[int]:
        model = moves.model
        tensors = [p.data for chunk in model.chunks for p in chunk.parameters()]
        if trains:
            tensors += [buffer.grad_data for buffer in model.runners[0].buffers]
            tensors += [value for state in model.optimizer.chained_optimizers[0].optimizer.state.values() for value in state.values()]
        return [tensor.untyped_storage().nbytes() for tensor in tensors if tensor.dim()]

    for step in range(2):
        for model in (stays, moves):
            if trains:
                model.train_step(make_batch("policy", step), sft_loss)
        before = on_device()
        moves.model.leave_device()
        moves.model.leave_device()
        assert before and not any(on_device())
        moves.model.enter_device()
        assert torch.equal(moves.logprobs(make_batch("policy", 9)), stays.logprobs(make_batch("policy", 9)))
        assert offload or on_device() == before
    for ours, theirs in zip(moves.module.parameters(), stays.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("distributed", [True, False])
def test_a_float32_head_stays_where_the_weights_are(make_model, distributed):
    """The optimizer of a bfloat16 model trains it in place: its tensors are the model's own, not main weights."""
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-3, offload=True, distributed=distributed)
    model = make_model("value", optimizer=optimizer, config={"dtype": Dtype.bfloat16}, training={"micro_batch_size": 2})
    tokens = TokenBatch(tokens=make_batch("policy", 0).tokens, lengths=make_batch("policy", 0).lengths)
    before = model.values(tokens)
    model.model.sleep()
    assert torch.equal(model.values(tokens), before)
    model.model.leave_device()
    assert not any(p.untyped_storage().nbytes() for p in model.model.module.parameters())
    model.model.enter_device()
    assert torch.equal(model.values(tokens), before)
