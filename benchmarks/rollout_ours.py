"""Our side of the rollout comparison: the engine that a job has, on a policy with the given weights.

    <python of this project's environment> benchmarks/rollout_ours.py SPEC.json RESULT.json

SPEC.json holds the fields of `rollout_work.Spec`; `mode` is a value of `rollout.kernels` (empty: auto). On a GPU the result also has the
bandwidth of a large copy, which is the limit that decoding is held against.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rollout_work import Case, Side, Spec, run

COPIED_BYTES = 2**30


def make_side(spec: Spec) -> Side:
    import torch

    from aligner.models import create
    from aligner.models.config import Dtype, ModelConfig
    from aligner.models.training.trainable import Training
    from aligner.parallel import launch, platform, topology
    from aligner.parallel.mcore import version
    from aligner.rollout.config import Kernels, RolloutConfig
    from aligner.rollout.create import create_engine
    from aligner.rollout.engine import GenRequest, ListedWork
    from aligner.types import SamplingConfig

    torch.set_num_threads(spec.threads)
    launch.initialize(platform.backend(), timeout_seconds=60.0, fingerprint="rollout benchmark")
    parallel = topology.ParallelConfig()
    config = ModelConfig(path=spec.model, dtype=Dtype(spec.dtype))
    layout = topology.initialize(parallel, seed=0)
    frozen = Training(optimizer=None, total_steps=1, micro_batch_size=1, temperature=1.0)
    policy = create.create_policy(config, create.read_architecture(config, vocab_size=0), parallel, layout, frozen)
    engines: dict[int, Any] = {}
    kernels = Kernels(spec.mode or "auto")

    def generate(prompts: Sequence[Sequence[int]], limits: Sequence[int], batch: int, temperature: float) -> list:
        engine = engines.get(batch)
        if engine is None:
            settings = RolloutConfig(max_batch_size=batch, kernels=kernels)
            engines.clear()  # and its cache
            engine = engines[batch] = create_engine(policy, settings, eos_id=-1).engine
        requests = [
            GenRequest(index=index, tokens=tuple(prompt), seed=index, limit=limit)
            for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        sampling = SamplingConfig(temperature=temperature, max_response_length=max(limits))
        results = [result for part in engine.generate(ListedWork(requests), sampling) for result in part]
        return sorted(results, key=lambda result: result.index)

    def sample(case: Case) -> list[int]:
        return [len(result.tokens) for result in generate(case.prompts, case.limits, case.batch, 1.0)]

    def greedy(prompts: Sequence[Sequence[int]], length: int) -> list[tuple[list[int], list[float] | None]]:
        found = generate(prompts, [length] * len(prompts), len(prompts), 0.0)
        return [(list(result.tokens), list(result.logprobs)) for result in found]

    versions = {"megatron-core": version, "torch": torch.__version__}
    if spec.device == "cuda":
        versions |= {"device": torch.cuda.get_device_name(), "copy_bytes_per_second": str(round(copy_bandwidth()))}
    return Side(
        sample=sample,
        greedy=greedy,
        versions=versions,
        synchronize=platform.synchronize,
    )


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of the best of several copies of 1 GiB on the GPU."""
    import torch

    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(8):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * COPIED_BYTES / min(seconds)


if __name__ == "__main__":
    run(make_side)
