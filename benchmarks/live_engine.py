"""Throughput of requests from other threads, one by one, against the engine's own generation of the same requests, as a ratio.

    python benchmarks/live_engine.py [--size large] [--batch 32] [--clients 64] [--settings 1] [--stream]

Both sides alternate in one process on one engine. Clients are threads that ask again when they are answered. With `--settings` the requests
of the live engine have so many different temperatures. How to read it: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from random_model import GPU_SIZES, SIZES, random_prompts, write_model
from rollout_work import response_limits

WAVES = 4  # requests for each sequence that is decoded at a time


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=[*SIZES, *GPU_SIZES], default="small")
    parser.add_argument("--batch", type=int, default=32, help="sequences decoded at a time")
    parser.add_argument("--clients", type=int, default=64, help="that ask at a time")
    parser.add_argument("--settings", type=int, default=1, help="different temperatures among the requests")
    parser.add_argument("--stream", action="store_true", help="clients hear each token")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each side, after one that warms up")
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--response-length", type=int, default=96, help="the longest; the mean is a third")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args(arguments)


def make_engine(model: Path, chosen: argparse.Namespace) -> Any:
    from aligner.models import create
    from aligner.models.config import Dtype, ModelConfig
    from aligner.models.training.trainable import Training
    from aligner.parallel import launch, platform, topology
    from aligner.rollout.config import RolloutConfig
    from aligner.rollout.create import create_engine

    launch.initialize(platform.backend(), timeout_seconds=60.0, fingerprint="live engine benchmark")
    parallel = topology.ParallelConfig()
    config = ModelConfig(path=str(model), dtype=Dtype(chosen.dtype))
    layout = topology.initialize(parallel, seed=0)
    frozen = Training(optimizer=None, total_steps=1, micro_batch_size=1, temperature=1.0)
    policy = create.create_policy(config, create.read_architecture(config, vocab_size=0), parallel, layout, frozen)
    return create_engine(policy, RolloutConfig(max_batch_size=chosen.batch), eos_id=-1)


def in_process(engine: Any, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> int:
    """Tokens of the engine's own generation."""
    from aligner.rollout.engine import GenRequest, ListedWork
    from aligner.types import SamplingConfig

    requests = [
        GenRequest(index=index, tokens=tuple(prompt), seed=index, limit=limit)
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    sampling = SamplingConfig(max_response_length=max(limits))
    return sum(len(result.tokens) for part in engine.serve(ListedWork(requests), sampling) for result in part)


def from_threads(live: Any, prompts: Sequence[Sequence[int]], limits: Sequence[int], chosen: argparse.Namespace) -> int:
    """Tokens that as many clients got, each of which asks as soon as it is answered."""
    from aligner.rollout.live import LiveRequest
    from aligner.types import SamplingConfig

    left, counts, lock = list(enumerate(zip(prompts, limits, strict=True))), [], threading.Lock()
    heard: list[int] = []

    def client() -> None:
        while True:
            with lock:
                if not left:
                    return
                index, (prompt, limit) = left.pop(0)
            how = SamplingConfig(max_response_length=limit, temperature=1 + 0.01 * (index % chosen.settings))
            listen = (lambda tokens, *_: heard.extend(tokens)) if chosen.stream else None
            counts.append(len(live.submit(LiveRequest(tokens=tuple(prompt), seed=index, sampling=how, on_tokens=listen)).result().tokens))

    clients = [threading.Thread(target=client) for _ in range(chosen.clients)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    assert not chosen.stream or len(heard) == sum(counts)
    return sum(counts)


def timed(action: Callable[[], int], expected: int) -> tuple[float, float]:
    """(wall, CPU) seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    if (made := action()) != expected:
        raise RuntimeError(f"{made} tokens where {expected} were asked for")
    return time.perf_counter() - wall, time.process_time() - cpu


def main(arguments: list[str]) -> None:
    chosen = parse(arguments)
    size, count = (SIZES | GPU_SIZES)[chosen.size], WAVES * chosen.batch
    limits = response_limits("varied", count=count, longest=chosen.response_length, mean=chosen.response_length // 3, seed=chosen.batch)
    prompts = random_prompts(size, count=count, length=chosen.prompt_length, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        write_model(size, Path(folder), positions=chosen.prompt_length + chosen.response_length, seed=0)
        engine = make_engine(Path(folder), chosen)
    from aligner.rollout.live import LiveEngine

    live, over, sides = LiveEngine(engine), threading.Event(), {"in process": [], "live": []}
    for _ in range(1 + chosen.rounds):
        sides["in process"].append(timed(lambda: in_process(engine, prompts, limits), sum(limits)))
        over.clear()
        thread = threading.Thread(target=live.run, args=(over.is_set,))
        thread.start()
        sides["live"].append(timed(lambda: from_threads(live, prompts, limits, chosen), sum(limits)))
        over.set()
        thread.join()
    rates = {name: [sum(limits) / statistics.median(run[kind] for run in runs[1:]) for kind in (0, 1)] for name, runs in sides.items()}
    ratios = [own / base for own, base in zip(rates["live"], rates["in process"], strict=True)]
    print(json.dumps({"settings": vars(chosen), "tokens_per_second": rates, "ratio_wall": ratios[0], "ratio_cpu": ratios[1]}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
