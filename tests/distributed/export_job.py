"""Trains a language model, a reward model and one with adapters for a step each in one layout, and exports them as a run does at its end.

usage: export_job.py PARALLEL_JSON FOLDER

FOLDER/<name>/export (and `adapter`) is what Hugging Face's libraries are to load; FOLDER/<name>.pt what the model itself says of the tokens
in FOLDER/tokens.pt: the log-probs of every token, [B, S, V], in the place of position t + 1 at t; or scores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from layout_job import VOCAB, Spec, make_batch, make_losses, make_model

from aligner.parallel import launch

LORA = {"rank": 3, "alpha": 6.0, "targets": ["qkv", "proj", "fc1", "fc2"], "path": ""}
MODELS = {"policy": ("dpo", {}), "reward": ("reward", {}), "lora": ("dpo", LORA)}


def says(kind: str, model, tokens: torch.Tensor) -> torch.Tensor:
    """What Hugging Face's model is asked too."""
    from aligner.types import LabeledBatch, TokenBatch

    lengths = torch.full((len(tokens),), tokens.shape[1])
    if kind == "reward":
        return model.scores(TokenBatch(tokens=tokens, lengths=lengths))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    named, logprobs = model.topk(LabeledBatch(tokens=tokens, lengths=lengths, loss_mask=mask), VOCAB, below=VOCAB)
    return torch.zeros_like(logprobs).scatter_(2, named, logprobs)[:, 1:]


def train_and_export(name: str, parallel: dict, folder: Path, topology) -> None:
    from aligner.models.modules.peft import save_peft
    from aligner.models.training.optimizer import OptimizerConfig
    from aligner.models.weights import save_hf

    kind, lora = MODELS[name]
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0, distributed=True)
    model = make_model(kind, Spec(parallel=parallel, lora=lora), topology, optimizer)
    chunks, first = model.model.chunks, dist.get_rank() == 0
    tokens = torch.load(folder / "tokens.pt")
    if lora:  # what the adapters belong to
        save_hf(chunks, folder / name / "base", writer=first)
    before = says(kind, model, tokens)
    for _ in range(3):
        model.train_step(make_batch(kind), make_losses(kind)[0])
    after = says(kind, model, tokens)
    assert (after - before).abs().max() > 1e-2
    save_hf(chunks, folder / name / "export", writer=first)
    if lora:
        save_peft(chunks, folder / name / "adapter", writer=first)
    if first:
        torch.save(after, folder / f"{name}.pt")


def main() -> None:
    parallel, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    launch.initialize("gloo", timeout_seconds=120, fingerprint="export", collective_timeout_seconds=120)
    from aligner.parallel.topology import ParallelConfig, initialize

    topology = initialize(ParallelConfig(**parallel), seed=11)
    for name in MODELS:
        train_and_export(name, parallel, folder, topology)
    launch.shutdown()


if __name__ == "__main__":
    main()
