"""The simulated GPU itself: right numbers, real devices' refusals, and what is counted."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

pytestmark = pytest.mark.simulated_cuda


@pytest.fixture
def counts():
    from simulated_cuda.device import counts

    counts.waits.clear()
    counts.captures.clear()
    return counts


def kinds(counts) -> dict[str, int]:
    found: dict[str, int] = {}
    for (what, _), count in counts.waits.items():
        found[what] = found.get(what, 0) + count
    return found


@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
def test_every_attention_kernel_is_the_definition(kernel: str):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(1)
    dtype = torch.float32 if kernel in ("EFFICIENT_ATTENTION", "MATH") else torch.bfloat16
    host = [torch.randn(2, heads, 6, 16).to(dtype).requires_grad_() for heads in (4, 4, 4)]
    device = [x.detach().cuda().requires_grad_() for x in host]
    scores = host[0].float() @ host[1].float().transpose(-1, -2) / 4 + torch.full((6, 6), -torch.inf).triu(1)
    expected = scores.softmax(-1) @ host[2].float()
    expected.square().sum().backward()
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        out = functional.scaled_dot_product_attention(*device, is_causal=True)
    out.float().square().sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.float().cpu(), expected.detach(), rtol=tolerance, atol=tolerance)
    for one, other in zip(host, device, strict=True):
        torch.testing.assert_close(other.grad.float().cpu(), one.grad.float(), rtol=2 * tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_that_is_aligned_with_the_last_key(dtype: torch.dtype):
    from torch.nn.attention.bias import causal_lower_right

    torch.manual_seed(1)
    host = [torch.randn(1, 3, length, 8, requires_grad=True) for length in (5, 9, 9)]
    device = [x.detach().to("cuda", dtype).requires_grad_() for x in host]
    scores = host[0] @ host[1].transpose(-1, -2) * 0.3 + torch.full((5, 9), -torch.inf).triu(5)
    expected = scores.softmax(-1) @ host[2]
    expected.square().sum().backward()
    out = functional.scaled_dot_product_attention(*device, attn_mask=causal_lower_right(5, 9), scale=0.3)
    out.float().square().sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.float().cpu(), expected.detach(), rtol=tolerance, atol=tolerance)
    for one, other in zip(host, device, strict=True):
        torch.testing.assert_close(other.grad.float().cpu(), one.grad, rtol=2 * tolerance, atol=2 * tolerance)


def test_a_device_in_force_is_that_of_new_tensors():
    with torch.device("meta"):
        assert torch.tensor([1.0]).device.type == torch.as_tensor([1.0]).device.type == "meta"


def test_tensors_of_two_devices_are_refused():
    from simulated_cuda.device import SimulationError

    with pytest.raises(SimulationError, match="same device: aten::add.Tensor|same device: aten::add"):
        torch.ones(3, device="cuda") + torch.ones(3)
    assert (torch.ones(3, device="cuda") + torch.tensor(1.0)).tolist() == [2, 2, 2]  # one number of the host is allowed


def test_an_operator_outside_the_simulation_is_an_error():
    from torch.utils._python_dispatch import _disable_current_modes

    x = torch.ones(3, device="cuda")
    with _disable_current_modes(), pytest.raises(RuntimeError, match="the simulated CUDA device runs no kernels"):
        x + 1


def test_a_graph_computes_again_from_its_inputs(counts):
    from simulated_cuda.device import SimulationError

    graph, x = torch.cuda.CUDAGraph(), torch.ones(3, device="cuda")
    with torch.cuda.graph(graph):
        y = (x * 2 + 1).sum()
    x.fill_(5)
    graph.replay()
    assert float(y) == 33 and sum(counts.captures.values()) == 1
    for waits in (lambda: float(x.sum()), lambda: x[x > 1], lambda: torch.tensor([1.0, 2.0], device="cuda")):
        with pytest.raises(SimulationError, match="while a CUDA graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            waits()


def test_what_waits_for_the_device_is_counted(counts):
    x = torch.arange(6.0, device="cuda")
    assert kinds(counts) == {}
    bool(x.any())
    x[x > 2]
    x.cpu()
    x[x > 2] = 0.0  # a masked_fill
    torch.cuda.synchronize()
    assert kinds(counts) == {"_local_scalar_dense": 1, "boolean index": 1, "copy to the host": 1, "synchronize": 1}


def test_copies_wait_unless_they_are_pinned_and_told_not_to(counts):
    pageable, pinned = torch.ones(4), torch.ones(4).pin_memory()
    x = pageable.to("cuda", non_blocking=True)
    x.copy_(pinned)
    assert kinds(counts) == {"pageable copy": 1, "blocking copy": 1}
    x.copy_(pinned, non_blocking=True)
    pinned.copy_(x, non_blocking=True)
    assert sum(kinds(counts).values()) == 2
    pageable.copy_(x, non_blocking=True)
    assert kinds(counts)["copy to the host"] == 1


def test_random_numbers_follow_the_generator_of_the_device():
    torch.cuda.manual_seed(3)
    first, state = torch.rand(4, device="cuda"), torch.cuda.get_rng_state()
    second = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), second) and not torch.equal(first, second)
    before = torch.get_rng_state()
    own = torch.Generator(device="cuda").manual_seed(3)
    assert torch.equal(torch.rand(4, device="cuda", generator=own), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_memory_is_what_the_allocator_says():
    before = torch.cuda.memory_allocated()
    x = torch.empty(1 << 20, dtype=torch.float32, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4 << 20
    del x
    assert torch.cuda.memory_allocated() == before
    free, total = torch.cuda.mem_get_info()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")
    assert free <= total and torch.cuda.device_count() == 8 and torch.cuda.get_device_capability() == (9, 0)
