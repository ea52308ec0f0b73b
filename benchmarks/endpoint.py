"""Generation through the policy's endpoint against the same requests to its engine in process: tokens a second, and their ratio.

    python benchmarks/endpoint.py [--size small] [--requests 64] [--batch 32] [--length 128] [--stream] [--rounds 3]

Both sides get all requests at once, with the same seeds, and their tokens must be equal. The client is a process of its own, which shares
the machine's cores with the engine: on two busy cores the ratio is a lower bound. The ratio of CPU time is that of the engine's process
alone, endpoint included, and hardly depends on what else the machine does. Rounds alternate; the target is a ratio of 0.9.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from random_model import SIZES, write_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from aligner.endpoint.app import Endpoint
from aligner.endpoint.requests import Model
from aligner.jobs.serving_policy import OpenPolicy, open_policy
from aligner.rollout.live import LiveRequest
from aligner.servers.access import Access
from aligner.servers.config import ServerConfig
from aligner.types import SamplingConfig

KEY = "5e" * 32
PROMPT = 64  # tokens


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A word for every id."""
    words = {f"w{number}": number for number in range(vocab_size)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="w1").save_pretrained(directory)


def prompts(number: int, vocab_size: int) -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(2, vocab_size) for _ in range(PROMPT)] for _ in range(number)]


def in_process(policy: OpenPolicy, rows: list[list[int]], length: int, stream: bool) -> tuple[float, list[list[int]]]:
    def told(*_: Any) -> None:
        pass

    sampling, start = SamplingConfig(max_response_length=length), time.perf_counter()
    how = {"sampling": sampling, "on_tokens": told if stream else None}
    answers = [policy.live.submit(LiveRequest(tokens=tuple(row), seed=seed, **how)) for seed, row in enumerate(rows)]
    found = [list(answer.result().tokens) for answer in answers]
    return time.perf_counter() - start, found


def client(connection: Any, url: str, rows: list[list[int]], length: int, stream: bool) -> None:
    """The client's process: asks for all rows at once whenever it is told to."""

    async def one(session: aiohttp.ClientSession, seed: int, row: list[int]) -> list[int]:
        body = {"prompt": row, "max_tokens": length, "seed": seed, "stream": stream, "return_token_ids": True}
        async with session.post(f"{url}/v1/completions", json=body, headers={"x-api-key": KEY}) as answer:
            if not stream:
                return (await answer.json())["choices"][0]["token_ids"]
            lines = [json.loads(line[6:]) async for line in answer.content if line.startswith(b"data: {")]
            return [token for line in lines for choice in line["choices"] for token in choice["token_ids"]]

    async def every() -> None:
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            while await asyncio.to_thread(connection.recv):
                start = time.perf_counter()
                found = await asyncio.gather(*(one(session, seed, row) for seed, row in enumerate(rows)))
                connection.send((time.perf_counter() - start, found))

    asyncio.run(every())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--stream", action="store_true", help="tokens as they come, on both sides")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="directory for endpoint.json")
    options = parser.parse_args()
    size = SIZES[options.size]
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_model(size, directory, positions=PROMPT + options.length, seed=0)
        write_tokenizer(directory, size.vocab_size)
        rows = prompts(options.requests, size.vocab_size)
        with open_policy(folder, max_batch_size=options.batch) as policy:
            model = Model(name="random", tokenizer=policy.tokenizer, live=policy.live)
            limits = ServerConfig(max_requests=options.requests, max_connections=options.requests)
            with Endpoint(model, Access(KEY), limits) as endpoint:
                here, there = multiprocessing.get_context("spawn").Pipe()
                how = (there, endpoint.url, rows, options.length, options.stream)
                process = multiprocessing.get_context("spawn").Process(target=client, args=how, daemon=True)
                process.start()
                rates: dict[str, list[float]] = {"in process": [], "endpoint": []}
                cpu: list[float] = []
                for number in range(options.rounds + 1):  # the first one warms up
                    start = time.process_time()
                    seconds, expected = in_process(policy, rows, options.length, options.stream)
                    between = time.process_time()
                    here.send(True)
                    other, found = here.recv()
                    end = time.process_time()
                    if found != expected:
                        sys.exit("error: the endpoint's tokens are others than the engine's")
                    tokens = sum(map(len, expected))
                    if number:
                        rates["in process"].append(tokens / seconds)
                        rates["endpoint"].append(tokens / other)
                        cpu.append((between - start) / (end - between))
                here.send(False)
                process.join()
    ratios = [ours / engine for ours, engine in zip(rates["endpoint"], rates["in process"], strict=True)]
    for name, values in rates.items():
        print(f"{name:<12} {statistics.median(values):,.0f} tokens/s")
    for name, values in (("ratio", ratios), ("of CPU time", cpu)):
        print(f"{name:<12} {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
    if options.output is not None:
        (options.output / "endpoint.json").write_text(json.dumps({**rates, "ratios": ratios, "cpu_ratios": cpu}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
