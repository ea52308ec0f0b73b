"""One refit case, on all of its ranks: time and memory of giving the engine the policy's weights, and of a plain copy of the same bytes.

    torchrun --nproc-per-node RANKS benchmarks/refit_ours.py SPEC.json RESULT.json

SPEC.json: `model` (a Hugging Face directory), `parallel` (the training layout), `tp` (the engine's ranks), `streamed` (whole tensors under
Hugging Face names into buffers, as an engine of another package gets them), `bucket_mib`, `repeats`. Rank 0 writes the result.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rollout_work import peak_memory, reset_peak_memory

from aligner.models import create
from aligner.models.config import ModelConfig
from aligner.models.training.trainable import Training
from aligner.parallel import launch, platform, topology
from aligner.parallel.collectives import gather_objects
from aligner.rollout.builtin.megatron import MegatronEngine
from aligner.rollout.config import RolloutConfig
from aligner.rollout.engine.foreign import weight_buckets
from aligner.rollout.engine.manifest import hf_manifest

MIB = 2**20


def make_refit(spec: dict[str, Any]) -> Callable[[], int]:
    """A refit, which returns the bytes that it copied into the engine's weights on this rank."""
    parallel = topology.ParallelConfig(**spec["parallel"])
    layout = topology.initialize(parallel, seed=0)
    config = ModelConfig(path=spec["model"])
    architecture = create.read_architecture(config, vocab_size=0)
    frozen = Training(optimizer=None, total_steps=1, micro_batch_size=1, temperature=1.0)
    policy = create.create_policy(config, architecture, parallel, layout, frozen)
    if not spec["streamed"]:
        engine = MegatronEngine(policy.chunks, RolloutConfig(tp=spec["tp"], refit_bucket_mib=spec["bucket_mib"]), eos_id=-1)
        return lambda: engine.refit(1)
    manifest = hf_manifest(architecture, policy.chunks[0].config.params_dtype)
    buffers = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device=platform.device()) for name, tensor in manifest.tensors.items()}

    def stream() -> int:
        for bucket in weight_buckets(policy.export_weights(), bucket_bytes=spec["bucket_mib"] * MIB, manifest=manifest):
            for name, tensor in bucket:
                buffers[name].copy_(tensor)
            del bucket, tensor
        return manifest.num_bytes

    return stream


def timed(action: Callable[[], object], repeats: int) -> list[float]:
    """Median (wall, CPU) seconds of an action that all ranks begin together."""
    runs = []
    for _ in range(repeats):
        dist.barrier()
        platform.synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        action()
        platform.synchronize()
        runs.append((time.perf_counter() - wall, time.process_time() - cpu))
    return [statistics.median(column) for column in zip(*runs, strict=True)]


def copy_seconds(num_bytes: int, repeats: int) -> list[float]:
    """Of copying so many bytes from one tensor to another: (wall, CPU)."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=platform.device())
    target = torch.ones_like(source)
    return timed(lambda: target.copy_(source), repeats)


def wire_seconds(num_bytes: int, bucket_bytes: int, repeats: int) -> list[float]:
    """Of sending half of these bytes each way between two ranks, bucket by bucket, and nothing else: (wall, CPU)."""
    rank, part = dist.get_rank(), bucket_bytes // 2
    own = torch.ones(part, dtype=torch.uint8, device=platform.device())
    other = torch.empty_like(own)

    def exchange() -> None:
        for _ in range(-(-num_bytes // bucket_bytes)):
            sent, received = dist.P2POp(dist.isend, own, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)
            for request in dist.batch_isend_irecv([sent, received]):
                request.wait()

    return timed(exchange, repeats)


def extra_memory(action: Callable[[], object]) -> int:
    """How far memory rises above where it was before the action, in bytes: of the device, or of this process."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before does not hide what is needed now
    reset_peak_memory()
    before = peak_memory()
    action()
    return peak_memory() - before


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """This rank's figures."""
    refit = make_refit(spec)
    num_bytes = refit()  # allocates
    result = {"num_bytes": num_bytes, "refit": timed(refit, spec["repeats"]), "copy": copy_seconds(num_bytes, spec["repeats"])}
    result["wire"] = wire_seconds(num_bytes, spec["bucket_mib"] * MIB, spec["repeats"]) if dist.get_world_size() > 1 else None
    return result | {"extra_bytes": extra_memory(refit), "bucket_bytes": spec["bucket_mib"] * MIB}


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: refit_ours.py SPEC.json RESULT.json")
    torch.set_num_threads(1)
    launch.initialize(platform.backend(), timeout_seconds=60.0, fingerprint="refit benchmark")
    results = gather_objects(run(json.loads(Path(sys.argv[1]).read_text())))
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps({"torch": torch.__version__, "ranks": results}) + "\n")
    launch.shutdown()


if __name__ == "__main__":
    main()
