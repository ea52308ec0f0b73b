"""One layout, every kind of model: two training steps on a fixed batch. Rank 0 writes losses, gradients and weights to a file.

usage: layout_job.py TP SEQUENCE_PARALLEL DISTRIBUTED_OPTIMIZER OUTPUT
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from aligner.parallel import launch

ROWS, WIDTH, VOCAB = 8, 24, 61
KINDS = ("policy", "value", "reward", "sft")


def make_batch(kind: str):
    from aligner.types import LabeledBatch, PolicyBatch, PreferenceBatch, ValueBatch

    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, VOCAB, (ROWS, WIDTH), generator=generator)
    lengths = torch.tensor([24, 9, 17, 12, 20, 7, 24, 15])
    positions = torch.arange(WIDTH)
    mask = (positions >= 4) & (positions < lengths[:, None])
    tokens = torch.where(positions < lengths[:, None], tokens, 0)
    floats = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2)]
    common = {"tokens": tokens, "lengths": lengths, "loss_mask": mask}
    if kind == "policy":
        return PolicyBatch(**common, old_logprobs=floats[0] * 0.1 - 4.0, advantages=floats[1])
    if kind == "value":
        return ValueBatch(**common, old_values=floats[0], returns=floats[1])
    if kind == "reward":
        return PreferenceBatch(**common, margins=torch.zeros(ROWS // 2))
    return LabeledBatch(**common)


def make_model(kind: str, topology, parallel, optimizer):
    from aligner.losses.aggregation import Aggregation
    from aligner.losses.policy import ppo_policy_loss
    from aligner.losses.reward import BradleyTerry, bradley_terry_loss
    from aligner.losses.sft import sft_loss
    from aligner.losses.value import value_loss
    from aligner.models.build import LanguageModel, ScalarModel
    from aligner.models.config import Architecture, Dtype, Family, ModelConfig
    from aligner.models.policy import MegatronPolicy
    from aligner.models.reward import MegatronRewardModel
    from aligner.models.trainable import TrainableModel, Training
    from aligner.models.value import MegatronValueModel

    architecture = Architecture(
        family=Family.qwen2,
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        ffn_hidden_size=48,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        tied_embeddings=kind != "sft",
        qkv_bias=True,
    )
    config = ModelConfig(dtype=Dtype.float32, make_vocab_divisible_by=8, logits_chunk_size=16)
    builder = ScalarModel if kind in ("value", "reward") else LanguageModel
    module = builder(architecture, config, parallel, load=False)
    trainable = TrainableModel(module, topology, Training(micro_batch_size=2, optimizer=optimizer, total_steps=10))
    if kind == "value":
        return MegatronValueModel(trainable), partial(value_loss, clip=0.2), trainable
    if kind == "reward":
        return MegatronRewardModel(trainable), partial(bradley_terry_loss, variant=BradleyTerry.standard), trainable
    if kind == "sft":
        return MegatronPolicy(trainable), sft_loss, trainable
    loss = partial(ppo_policy_loss, clip_eps_low=0.2, clip_eps_high=0.2, entropy_coef=0.01, aggregation=Aggregation.token_mean)
    return MegatronPolicy(trainable, temperature=0.8), loss, trainable


def gradients(module) -> dict[str, torch.Tensor]:
    """Full gradients by Hugging Face name: the gradient buffers put in the weights' place and exported."""
    from aligner.models.weights import export_hf

    weights = [p.data for p in module.parameters()]
    for p in module.parameters():
        p.data = p.main_grad.data
    full = {name: tensor.clone() for name, tensor in export_hf(module)}
    for p, data in zip(module.parameters(), weights, strict=True):
        p.data = data
    return full


def train(kind: str, topology, parallel, distributed: bool) -> dict:
    from aligner.models.optimizer import OptimizerConfig
    from aligner.models.weights import export_hf

    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-3, warmup_steps=0, distributed=distributed, clip_grad=0.5)
    model, loss, trainable = make_model(kind, topology, parallel, optimizer)
    batch = make_batch(kind)
    result: dict = {"metrics": [], "gradients": []}
    for _ in range(2):
        metrics = model.train_step(batch, loss)
        result["metrics"].append({name: metric.value() for name, metric in metrics.items()})
        if not distributed:  # a distributed optimizer's rank holds its own shard of the reduced gradient only
            result["gradients"].append(gradients(trainable.module))
    result["weights"] = {name: tensor.clone() for name, tensor in export_hf(trainable.module)}
    outputs = {"policy": "logprobs", "sft": "logprobs", "value": "values", "reward": "scores"}
    result["outputs"] = getattr(model, outputs[kind])(batch)
    return result


def main() -> None:
    tp, sequence_parallel, distributed, output = sys.argv[1:5]
    launch.initialize("gloo", timeout_seconds=60, fingerprint="layout")
    from aligner.parallel.topology import ParallelConfig, initialize

    parallel = ParallelConfig(tp=int(tp), sequence_parallel=sequence_parallel == "1")
    topology = initialize(parallel, seed=11)
    results = {kind: train(kind, topology, parallel, distributed == "1") for kind in KINDS}
    if dist.get_rank() == 0:
        torch.save(results, Path(output))
    launch.shutdown()


if __name__ == "__main__":
    main()
