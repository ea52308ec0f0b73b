"""Which GPUs a rank may see whose rollout engine would take the first one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from aligner.errors import ConfigError
from aligner.parallel import platform
from aligner.parallel.platform import block_of


def test_a_rank_sees_its_blocks_devices() -> None:
    eight = [str(number) for number in range(8)]
    assert [block_of(eight, rank, 1) for rank in (0, 7)] == [["0"], ["7"]]
    assert [block_of(eight, rank, 4) for rank in (0, 3, 4)] == [["0", "1", "2", "3"]] * 2 + [["4", "5", "6", "7"]]
    assert block_of(["GPU-a", "GPU-c"], 1, 1) == ["GPU-c"]  # names of the scheduler's own


def test_a_node_with_too_few_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"local rank 2, in a block of 2, has no GPUs among 0,1,2 \(CUDA_VISIBLE_DEVICES\)"):
        block_of(["0", "1", "2"], 2, 2)


@pytest.mark.parametrize(
    ("exchanges", "asynchronous", "driver", "name", "before", "after"),
    [
        (True, False, True, "CUDA_DEVICE_MAX_CONNECTIONS", None, "1"),
        (True, False, True, "CUDA_DEVICE_MAX_CONNECTIONS", "32", "32"),  # the user's
        (True, True, True, "CUDA_DEVICE_MAX_CONNECTIONS", None, None),  # two streams of kernels at a time
        (False, False, True, "CUDA_DEVICE_MAX_CONNECTIONS", None, None),  # nothing to overlap
        (True, False, False, "CUDA_DEVICE_MAX_CONNECTIONS", None, None),  # no GPU
        (False, True, True, "NCCL_NVLS_ENABLE", None, "0"),
        (False, True, True, "NCCL_NVLS_ENABLE", "1", "1"),
        (False, True, False, "NCCL_NVLS_ENABLE", None, None),
    ],
)
def test_variables_of_cuda_and_nccl(exchanges, asynchronous, driver, name, before, after, monkeypatch, tmp_path):
    monkeypatch.setattr(platform, "_DRIVER", str(tmp_path if driver else tmp_path / "absent"))
    monkeypatch.setattr(platform.os, "environ", {} if before is None else {name: before})
    platform.prepare_environment(exchanges=exchanges, asynchronous=asynchronous, hands_memory=True)
    assert platform.os.environ.get(name) == after


def test_ranks_share_a_gpu_only_where_that_is_asked_for(monkeypatch):
    taken: list[int] = []
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, set_device=taken.append)
    monkeypatch.setattr(platform, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(platform.host_collectives, "install", lambda: None)
    monkeypatch.setattr(platform.os, "environ", {})
    for rank in range(2):
        platform.select_device(rank)
    message = (
        r"^run\.ranks_per_gpu=1: local rank 4 finds no free one of this machine's 2 GPUs; allowed: at most 2 ranks of a component "
        r"here, or ranks that share GPUs: run\.ranks_per_gpu=3$"
    )
    with pytest.raises(ConfigError, match=message):
        platform.select_device(4)
    for rank in range(4):
        platform.select_device(rank, ranks_per_gpu=2)
    with pytest.raises(ConfigError, match=r"^run\.ranks_per_gpu=2: local rank 4 .* at most 4 ranks .* run\.ranks_per_gpu=3$"):
        platform.select_device(4, ranks_per_gpu=2)
    assert taken == [0, 1, 0, 1, 0, 1]
    monkeypatch.setattr(platform.os, "environ", {"CUDA_VISIBLE_DEVICES": "6,7"})  # the block of a replica, of eight
    platform.select_device(7)
    assert taken[-1] == 1


@pytest.mark.parametrize(
    ("before", "hands_memory", "torch_version", "after"),
    [
        ({}, False, "2.11.0+cu130", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({}, False, "2.10.0a0+b4e4ee8", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),  # of NVIDIA's image
        ({}, False, "2.8.0", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ({}, True, "2.11.0", {}),  # a wrapped engine would refuse them, or could not open them
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, False, "2.11.0", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
        ({"PYTORCH_ALLOC_CONF": ""}, False, "2.8.0", {"PYTORCH_ALLOC_CONF": ""}),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, True, "2.11.0", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
    ],
)
def test_segments_expand_where_nobody_else_opens_them(before, hands_memory, torch_version, after, monkeypatch, tmp_path):
    monkeypatch.setattr(platform, "_DRIVER", str(tmp_path))
    monkeypatch.setattr(platform.torch, "__version__", torch.torch_version.TorchVersion(torch_version))
    monkeypatch.setattr(platform.os, "environ", dict(before))
    read = platform.prepare_environment(exchanges=False, asynchronous=False, hands_memory=hands_memory)
    assert platform.os.environ == {"NCCL_NVLS_ENABLE": "0"} | after == read


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
def test_torch_reads_what_is_set_after_its_import():
    code = (
        "import os; from aligner.parallel import platform; import torch; platform._DRIVER = os.getcwd(); "
        "platform.prepare_environment(exchanges=False, asynchronous=False, hands_memory=False); "
        "torch.cuda.init(); print(torch.cuda.memory._snapshot()['allocator_settings']['expandable_segments'])"
    )
    environ = {name: value for name, value in os.environ.items() if name not in platform._ALLOCATOR}
    said = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert said.stdout.split()[-1] == "True" and "deprecated" not in said.stderr


def test_what_components_ask_of_the_environment(monkeypatch):
    from aligner.parallel.topology import ParallelConfig
    from aligner.run import session

    asked: list[tuple[bool, bool, bool]] = []
    monkeypatch.setattr(session.platform, "prepare_environment", lambda **options: asked.append(tuple(options.values())))
    installed: list[str] = []
    monkeypatch.setattr(session, "find_spec", lambda package: package in installed or None)

    def rollout(engine: str, staleness: int = 0) -> SimpleNamespace:
        return SimpleNamespace(engine=engine, asynchronous=SimpleNamespace(max_staleness=staleness))

    def run(parallel: ParallelConfig, sampler: SimpleNamespace | None = None) -> SimpleNamespace:
        return SimpleNamespace(parallel=parallel, sampler=sampler)

    actor, critic, alone = ParallelConfig(tp=2), ParallelConfig(cp=2), ParallelConfig()
    for config, parallel in (
        (run(actor), actor),
        (run(actor, rollout("megatron", 2)), actor),
        (run(actor, rollout("vllm", 2)), critic),  # which samples nothing
        (run(alone), ParallelConfig(pp=2)),
        *((run(alone, rollout(engine)), alone) for engine in ("vllm", "tensorrt_llm", "somebody's", "auto")),
    ):
        session.prepare_environment(config, parallel)
    installed.append("vllm")
    session.prepare_environment(run(alone, rollout("auto")), alone)
    assert asked == [
        *((True, False, False), (True, True, False), (True, False, False), (False, False, False)),
        *((False, False, True), (False, False, True), (False, False, True), (False, False, False)),
        (False, False, True),
    ]


NODES = {0: "0-3,8-11\n", 1: "4-7,12-15\n"}


@pytest.mark.parametrize(
    ("node", "given", "bound", "reason"),
    [
        ("1\n", range(16), {4, 5, 6, 7, 12, 13, 14, 15}, ""),
        ("0\n", range(2, 6), {2, 3}, ""),  # of what the scheduler gave it
        ("1\n", range(4), None, r"^it was given processors 0 to 3, and GPU 0000:1b:00\.0 is beside others \(node 1: 4-7,12-15\)$"),
        ("-1\n", range(16), None, r"does not report which processors are beside GPU 0000:1b:00\.0 \(node -1\)$"),
        ("7\n", range(16), None, r"does not report where GPU 0000:1b:00\.0 is \(.*node7/cpulist"),
        ("what\n", range(16), None, r"does not report where GPU 0000:1b:00\.0 is \(invalid literal"),
        (None, range(16), None, r"does not report where GPU 0000:1b:00\.0 is \(.*numa_node"),
    ],
)
def test_a_rank_stays_beside_its_gpu(node, given, bound, reason, monkeypatch, tmp_path):
    made: list[set[int]] = []
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    cuda = SimpleNamespace(is_available=lambda: True, current_device=lambda: 3, get_device_properties=lambda number: gpu)
    monkeypatch.setattr(platform, "torch", SimpleNamespace(cuda=cuda, __version__="2.11.0"))
    monkeypatch.setattr(platform.os, "sched_getaffinity", lambda pid: set(given))
    monkeypatch.setattr(platform.os, "sched_setaffinity", lambda pid, wanted: made.append(wanted))
    assert platform.bind_to_node(tmp_path) == "" and not made  # one node, or none
    for number, processors in NODES.items():
        (tmp_path / f"devices/system/node/node{number}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{number}/cpulist").write_text(processors)
    folder = tmp_path / "bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    if node is not None:
        (folder / "numa_node").write_text(node)
    said = platform.bind_to_node(tmp_path)
    assert made == ([] if bound is None else [bound])
    assert re.search(reason, said) if reason else said == ""
    del gpu.pci_bus_id
    assert platform.bind_to_node(tmp_path) == "torch 2.11.0 does not report where the GPU is"
    cuda.is_available = lambda: False
    assert platform.bind_to_node(tmp_path) == ""
