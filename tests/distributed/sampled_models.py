"""Random models with order-one logits as Hugging Face directories, what engines sample from them, and a batch to train them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from aligner.models.config import Architecture, ModelConfig
from aligner.models.create import create_policy, read_architecture
from aligner.models.modules.build import build_model
from aligner.models.training.optimizer import OptimizerConfig
from aligner.models.training.trainable import Training
from aligner.models.weights import save_hf
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.config import RolloutConfig
from aligner.rollout.create import create_engine
from aligner.types import LabeledBatch, Prompt, SamplingConfig

VOCAB, WIDTH = 61, 20
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 48}
SIZES |= {"vocab_size": VOCAB, "max_position_embeddings": 64, "initializer_range": 0.25}
SAMPLING = {"temperature": 0.9, "top_k": 40, "top_p": 0.98}


def make_inputs() -> dict[str, Any]:
    """Prompts (one of them twice) with seeds, and a batch of labelled rows."""
    generator = torch.Generator().manual_seed(8)
    prompts = [torch.randint(8, VOCAB, (length,), generator=generator).tolist() for length in (4, 11, 1, 7, 16)]
    lengths = torch.tensor([20, 9, 14, 6])
    positions = torch.arange(WIDTH)
    tokens = torch.randint(3, VOCAB, (4, WIDTH), generator=generator) * (positions < lengths[:, None])
    batch = LabeledBatch(tokens=tokens, lengths=lengths, loss_mask=(positions >= 3) & (positions < lengths[:, None]))
    return {"prompts": [*prompts, prompts[1]], "seeds": [1, 2, 3, 4, 5, 6], "batch": batch}


def write_model(directory: Path, **fields: Any) -> Path:
    """A model of SIZES but for these fields of its architecture; the same weights whatever was built before."""
    chunks = build_model(Architecture(**SIZES | fields), ModelConfig(), ParallelConfig(), load=False, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in chunks[0].named_parameters():
            if "bias" in key or "norm" in key:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    save_hf(chunks, directory, writer=True)
    return directory


def make_policy(directory: Path, topology, parallel: ParallelConfig, *, rows: int = 2, **fields: Any):
    """With micro-batches of so many rows; `fields` are of ModelConfig."""
    config = ModelConfig(path=str(directory), **{"make_vocab_divisible_by": 8} | fields)
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0, eps=1e-3)
    training = Training(optimizer=optimizer, total_steps=4, micro_batch_size=rows, temperature=0.9)
    return create_policy(config, read_architecture(config, vocab_size=0), parallel, topology, training)


def make_engine(policy, *, length: int = 24, stops: tuple[int, ...] = (5, 6, 7), sampling: dict[str, Any] = SAMPLING, **settings: Any):
    """`follow_up` is of `create_engine`, other settings are of RolloutConfig."""
    given = {"follow_up": settings.pop("follow_up")} if "follow_up" in settings else {}
    how = SamplingConfig(**sampling, max_response_length=length, stop_token_ids=list(stops))
    return create_engine(policy, RolloutConfig(**{"sampling": how, "max_batch_size": 4} | settings), eos_id=2, **given)


def prompts_of(inputs: dict[str, Any]) -> list[Prompt]:
    return [Prompt(id=i, tokens=tuple(tokens), source=f"p:{i}") for i, tokens in enumerate(inputs["prompts"])]


def sample(engine, inputs: dict[str, Any]) -> list:
    return [rollout for part in engine.generate(prompts_of(inputs), inputs["seeds"]) for rollout in part]
