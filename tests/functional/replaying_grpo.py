"""GRPO whose engine gives the responses in the file $REPLAYED, with transformers' log-probs of them; otherwise as `train_grpo.py`."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from aligner.jobs.start import program
from aligner.rollout.engine.lifecycle import PhasedEngine
from aligner.types import FinishReason, Prompt, Rollout, SamplingConfig

EOS = 2


def generate(_: PhasedEngine, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: SamplingConfig | None = None) -> Iterator:
    recorded = defaultdict(deque)
    for line in Path(os.environ["REPLAYED"]).read_text().splitlines():
        one = json.loads(line)
        recorded[one["prompt"]].append(one["ids"])
    model = AutoModelForCausalLM.from_pretrained(os.environ["MODEL"], dtype=torch.float32)
    for prompt, seed in zip(prompts, seeds, strict=True):
        ids = recorded[prompt.text].popleft()
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt.tokens, *ids]])).logits[0, len(prompt.tokens) - 1 : -1]
        yield [
            Rollout(
                prompt=prompt,
                response=tuple(ids),
                logprobs=tuple(logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()),
                finish_reason=FinishReason.stop if ids[-1] == EOS else FinishReason.length,
                policy_version=0,
                seed=seed,
            )
        ]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(os.environ["REPLAYED"]).parent))  # where the reward function is
    PhasedEngine.generate = generate
    program("grpo")()
