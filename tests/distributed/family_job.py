"""Loads Hugging Face models into one layout: log-probs, the gradient of their sum, the tensors back, and greedy responses.

usage: family_job.py SETTINGS_JSON FOLDER NAME...    (FOLDER has a directory per model and `tokens.pt`; it gets `NAME.pt`)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from aligner.parallel import launch

VOCAB = 61


def exported(chunks) -> dict[str, torch.Tensor]:
    from aligner.models.weights import export_hf

    return {name: tensor.clone() for name, tensor in export_hf(chunks)}


def responses(policy, tokens: torch.Tensor, tp: int) -> dict[int, tuple]:
    from aligner.parallel.collectives import gather_objects
    from aligner.rollout.config import RolloutConfig
    from aligner.rollout.create import create_engine
    from aligner.types import Prompt, SamplingConfig

    prompts = [Prompt(id=row, tokens=tuple(tokens[row, : 5 + 6 * row].tolist()), source=f"test:{row}") for row in range(len(tokens))]
    engine = create_engine(policy, RolloutConfig(tp=tp), eos_id=VOCAB + 5)
    sampling = SamplingConfig(temperature=0.0, max_response_length=12)
    own = [(r.prompt.id, (r.tokens, r.logprobs)) for part in engine.generate(prompts, [1] * len(prompts), sampling) for r in part]
    return {number: rollout for part in gather_objects(own) for number, rollout in part}


def check_checkpoint(folder: Path, policy) -> None:
    """What is saved comes back into a model whose weights were something else."""
    from aligner.models.checkpoint import checkpoint

    before = exported(policy.chunks)
    request = checkpoint.SaveRequest(step=1, state={})
    saved = checkpoint.start_save(folder, policy.model, request, in_background=False).publish(60)
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(0.5)
    checkpoint.load(policy.model, saved)
    after = exported(policy.chunks)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def run(name: str, folder: Path, settings: dict, parallel, topology) -> dict:
    from aligner.losses.sft import sft_loss
    from aligner.models.config import Dtype, ModelConfig, Recompute
    from aligner.models.create import create_policy, read_architecture, training
    from aligner.models.training.optimizer import OptimizerConfig
    from aligner.types import LabeledBatch

    own = settings | {"recompute": Recompute(settings.get("recompute", "none"))}
    config = ModelConfig(path=str(folder / name), make_vocab_divisible_by=8, dtype=Dtype.float32, micro_batch_size=2, **own)
    optimizer = OptimizerConfig(lr=1e-6, min_lr=1e-6, warmup_steps=0, distributed=False, clip_grad=1e6)
    policy = create_policy(config, read_architecture(config, vocab_size=0), parallel, topology, training(config, optimizer, total_steps=2))
    tokens = torch.load(folder / "tokens.pt")
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    batch = LabeledBatch(tokens=tokens, lengths=torch.full((len(tokens),), tokens.shape[1]), loss_mask=mask)
    result = {"weights": exported(policy.chunks), "logprobs": policy.logprobs(batch)}
    result["responses"] = responses(policy, tokens, 2 if parallel.ep > 1 else parallel.tp)
    check_checkpoint(folder / "checkpoints" / name, policy)
    result["norm"] = policy.train_step(batch, sft_loss)["optim/grad_norm"].value()
    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    for p in (p for p in parameters if p.requires_grad):
        p.data = p.main_grad.data
    gradients = exported(policy.chunks)
    return result | {"gradients": {name: one for name, one in gradients.items() if not name.endswith("e_score_correction_bias")}}


def main() -> None:
    folder = Path(sys.argv[2])
    launch.initialize("gloo", timeout_seconds=120, fingerprint="families")
    from aligner.parallel.topology import ParallelConfig, initialize

    settings = json.loads(sys.argv[1])
    parallel = ParallelConfig(**settings["parallel"])
    topology = initialize(parallel, seed=11)
    for name in sys.argv[3:]:
        result = run(name, folder, settings["model"], parallel, topology)
        if dist.get_rank() == 0:
            torch.save(result, folder / f"{name}.pt")
    launch.shutdown()


if __name__ == "__main__":
    main()
