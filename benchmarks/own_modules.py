"""Rollouts of a model that has no layers here, against `transformers`' left-padded `generate` in batches of as many rows.

    python benchmarks/own_modules.py [--rounds 3] [--rows 64] [--seats 8]

Both sides sample from the same module, in turns, so that a noisy machine slows both. Equal lengths: every response has the longest length.
Varied: many are short and few are long, a mean of 37 %; a batch of `generate` then takes as many steps as its longest row, as it would
with end tokens there.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import transformers

from aligner.models.config import Dtype, ModelConfig
from aligner.models.create import create_policy, read_architecture
from aligner.models.training.trainable import Training
from aligner.parallel import launch, platform
from aligner.parallel.topology import ParallelConfig, initialize
from aligner.rollout.builtin.own_modules import OwnModulesEngine
from aligner.rollout.config import RolloutConfig
from aligner.rollout.engine import GenRequest, ListedWork
from aligner.types import SamplingConfig

PROMPT, LONGEST, VOCAB = 32, 64, 4000


def requests(rows: int, varied: bool) -> list[GenRequest]:
    generator = torch.Generator().manual_seed(0)
    spread = (LONGEST * torch.linspace(0.1, 1, rows).square()).ceil().long()[torch.randperm(rows, generator=generator)].tolist()
    limits = spread if varied else [LONGEST] * rows
    lengths = torch.randint(PROMPT // 2, PROMPT + 1, (rows,), generator=generator).tolist()
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [GenRequest(index=i, tokens=tuple(p), seed=i, limit=limit) for i, (p, limit) in enumerate(zip(prompts, limits, strict=True))]


def ours(engine: OwnModulesEngine, given: list[GenRequest]) -> int:
    sampling = SamplingConfig(max_response_length=LONGEST)
    return sum(len(result.tokens) for part in engine.generate(ListedWork(given), sampling) for result in part)


@torch.no_grad()
def theirs(model: torch.nn.Module, given: list[GenRequest], seats: int) -> int:
    model.eval()
    for start in range(0, len(given), seats):
        batch = given[start : start + seats]
        width, longest = max(len(one.tokens) for one in batch), max(one.limit for one in batch)
        tokens = torch.tensor([[0] * (width - len(one.tokens)) + list(one.tokens) for one in batch])
        mask = torch.tensor([[0] * (width - len(one.tokens)) + [1] * len(one.tokens) for one in batch])
        settings = transformers.GenerationConfig(max_new_tokens=longest, min_new_tokens=longest, do_sample=True, top_k=0, pad_token_id=0)
        model.generate(tokens, attention_mask=mask, generation_config=settings)
    return sum(one.limit for one in given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 3), ("rows", 64), ("seats", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    launch.initialize(platform.backend(), timeout_seconds=60, fingerprint="benchmark", environ={"ALIGNER_LAUNCH": "single"})
    topology = initialize(ParallelConfig(), seed=1)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = transformers.GraniteConfig(vocab_size=VOCAB, max_position_embeddings=256, eos_token_id=VOCAB - 1, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        model = ModelConfig(path=str(Path(folder)), dtype=Dtype.float32)
        policy = create_policy(model, read_architecture(model, vocab_size=0), ParallelConfig(), topology, Training(optimizer=None))
    engine = OwnModulesEngine(policy.chunks[0], RolloutConfig(max_batch_size=options.seats), eos_id=-1)
    print("| lengths | ours, tokens/s | generate, tokens/s | ratio, by round |\n|---|---|---|---|")
    for varied in (False, True):
        given, speeds = requests(options.rows, varied), ([], [])
        for _ in range(options.rounds):
            started = time.perf_counter()
            speeds[0].append(ours(engine, given) / (time.perf_counter() - started))
            started = time.perf_counter()
            speeds[1].append(theirs(policy.chunks[0].hf, given, options.seats) / (time.perf_counter() - started))
        ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(*speeds, strict=True))
        name = "varied" if varied else "equal"
        print(f"| {name} | {sum(speeds[0]) / options.rounds:,.0f} | {sum(speeds[1]) / options.rounds:,.0f} | {ratios} |", flush=True)
    launch.shutdown()


if __name__ == "__main__":
    main()
