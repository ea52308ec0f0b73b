"""One layout, every kind of model: two training steps on a fixed batch, for `objectives` and `preferences` one with each loss of theirs.
Rank 0 writes losses, gradients and weights to a file.

usage: layout_job.py SPEC OUTPUT      (SPEC: JSON of the fields of `Spec`)
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from aligner.parallel import launch

ROWS, WIDTH, VOCAB = 8, 24, 61
KINDS = ("ppo", "dpo", "value", "reward", "sft")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is run."""

    parallel: dict = field(default_factory=dict)  # fields of ParallelConfig
    model: dict = field(default_factory=dict)  # fields of ModelConfig
    distributed_optimizer: bool = False
    experts: bool = False  # a mixture of experts instead of a dense model
    num_layers: int = 2
    kinds: tuple[str, ...] = KINDS


def make_batch(kind: str):
    from aligner.types import LabeledBatch, PolicyBatch, PreferenceBatch, ValueBatch

    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, VOCAB, (ROWS, WIDTH), generator=generator)
    lengths = torch.tensor([24, 9, 17, 12, 20, 7, 24, 15])
    positions = torch.arange(WIDTH)
    mask = (positions >= 4) & (positions < lengths[:, None])
    for row, other in ((1, 0), (3, 2), (5, 0), (6, 0), (7, 2)):  # the same prompts, of four tokens
        tokens[row, :4] = tokens[other, :4]
    tokens = torch.where(positions < lengths[:, None], tokens, 0)
    floats = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2)]
    common = {"tokens": tokens, "lengths": lengths, "loss_mask": mask}
    if kind == "ppo":
        return PolicyBatch(**common, old_logprobs=floats[0] * 0.1 - 4.0, advantages=floats[1])
    if kind == "objectives":  # an advantage per response; ratios on both sides of every clip range
        others = [torch.randn(ROWS, WIDTH, generator=generator) * 0.2 - 4.0 for _ in range(2)]
        advantages = floats[1][:, :1] * mask
        others = {"ref_logprobs": others[0], "rollout_logprobs": others[1]}
        return PolicyBatch(**common, old_logprobs=floats[0] * 0.3 - 4.0, advantages=advantages, **others)
    if kind == "value":
        return ValueBatch(**common, old_values=floats[0], returns=floats[1])
    if kind in ("reward", "dpo"):
        reference = floats[0] * 0.1 - 4.0 if kind == "dpo" else None
        return PreferenceBatch(**common, margins=torch.zeros(ROWS // 2), ref_logprobs=reference)
    if kind == "preferences":
        margins = torch.tensor([0.5, -1.0, 2.0, 1.5])
        return PreferenceBatch(**common, margins=margins, ref_logprobs=floats[0] * 0.1 - 4.0)
    if kind == "kto":
        labels = torch.tensor([1.0, -1, -1, 1, -1, 1, 1, -1])[:, None]
        return LabeledBatch(**common, labels=labels, ref_logprobs=floats[0] * 0.1 - 4.0)
    return LabeledBatch(**common)


def make_architecture(kind: str, experts: bool, num_layers: int):
    from aligner.models.config import Architecture, Family

    sizes = {"num_layers": num_layers, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 48}
    # Weights of this size give attention and router something to distinguish, and so gradients that are not rounding.
    sizes |= {"vocab_size": VOCAB, "max_position_embeddings": 64, "tied_embeddings": kind != "sft", "initializer_range": 0.1}
    if experts:
        return Architecture(family=Family.mixtral, num_experts=4, experts_per_token=2, expert_ffn_hidden_size=24, **sizes)
    return Architecture(family=Family.qwen2, qkv_bias=True, **sizes)


def make_model(kind: str, spec: Spec, topology, optimizer):
    from aligner.models.config import Dtype, ModelConfig, Recompute
    from aligner.models.create import create_policy, create_reward_model, create_value_model, training
    from aligner.parallel.topology import ParallelConfig

    parallel = ParallelConfig(**spec.parallel)
    settings = {"micro_batch_size": 1 if kind in ("dpo", "preferences", "reward") else 2} | spec.model
    if "recompute" in settings:
        settings["recompute"] = Recompute(settings["recompute"])
    config = ModelConfig(dtype=Dtype.float32, make_vocab_divisible_by=8, logits_chunk_size=16, **settings)
    create = {"value": create_value_model, "reward": create_reward_model}.get(kind, create_policy)
    temperature = 0.8 if kind in ("ppo", "objectives") else 1.0
    how = training(config, optimizer, total_steps=10, temperature=temperature)
    return create(config, make_architecture(kind, spec.experts, spec.num_layers), parallel, topology, how)


def make_losses(kind: str) -> list:
    """The loss of each training step."""
    from aligner.losses.aggregation import Aggregation
    from aligner.losses.policy import policy_loss
    from aligner.losses.preference import dpo_loss
    from aligner.losses.reward import BradleyTerry, bradley_terry_loss
    from aligner.losses.sft import sft_loss
    from aligner.losses.unpaired import kto_loss
    from aligner.losses.value import value_loss

    if kind == "objectives":
        return objectives()
    if kind == "preferences":
        return preferences()
    losses = {
        "ppo": partial(policy_loss, clip_eps_low=0.2, clip_eps_high=0.2, entropy_coef=0.01, aggregation=Aggregation.token_mean),
        "dpo": partial(dpo_loss, beta=0.1),
        "value": partial(value_loss, clip=0.2),
        "reward": partial(bradley_terry_loss, variant=BradleyTerry.standard),
        "sft": sft_loss,
        "kto": partial(kto_loss, kl=0.7, beta=0.1, undesirable_weight=1.5, sft_coef=0.3),
    }
    return [losses[kind]] * 2


def objectives() -> list:
    """Every objective, aggregation, KL term and kind of correction, each at least once."""
    from aligner.losses.aggregation import Aggregation
    from aligner.losses.correction import Correction, CorrectionConfig, Level
    from aligner.losses.kl import KLEstimator
    from aligner.losses.policy import policy_loss
    from aligner.losses.surrogates import Objective

    by_token, by_sequence = Aggregation.token_mean, Aggregation.sequence_mean
    by_constant = Aggregation.sequence_sum_constant
    sequences = CorrectionConfig(kind=Correction.truncate, level=Level.sequence_mean, high=1.01)
    settings = [
        {"objective": Objective.ppo, "aggregation": by_sequence, "dual_clip": 1.5, "kl_coef": 0.1, "kl_estimator": KLEstimator.k3},
        {"objective": Objective.gspo, "aggregation": by_sequence, "kl_coef": 0.1, "kl_estimator": KLEstimator.k2},
        {"objective": Objective.gspo_token, "aggregation": by_token, "correction": CorrectionConfig(kind=Correction.band)},
        {"objective": Objective.cispo, "aggregation": by_token, "correction": CorrectionConfig(kind=Correction.mask)},
        {"objective": Objective.gmpo, "aggregation": by_sequence, "kl_coef": 0.1, "kl_estimator": KLEstimator.abs},
        {"objective": Objective.sapo, "aggregation": by_constant, "correction": sequences},
        {"objective": Objective.reinforce, "aggregation": by_constant, "kl_coef": 0.1, "kl_estimator": KLEstimator.k1},
    ]
    return [partial(policy_loss, clip_eps_low=0.2, clip_eps_high=0.28, aggregation_constant=float(WIDTH), **one) for one in settings]


def preferences() -> list:
    """Losses of sums and of means, with a reference, without one, and of margins."""
    from aligner.losses.pairs import DPOVariant
    from aligner.losses.preference import dpo_loss

    settings = [
        {"variant": DPOVariant.ipo, "sft_coef": 0.5},
        {"variant": DPOVariant.rpo_bwd_kl, "eta": 2.0},
        {"variant": DPOVariant.apo_zero, "average_logprobs": True, "beta": 2.0, "sft_coef": 0.5},
        {"variant": DPOVariant.simpo, "gamma": 0.5, "beta": 2.0},
        {"variant": DPOVariant.orpo},
    ]
    return [partial(dpo_loss, **({"beta": 0.3} | one)) for one in settings]


def gradients(chunks) -> dict[str, torch.Tensor]:
    """Full gradients by Hugging Face name: the gradient buffers put in the weights' place and exported."""
    from aligner.models.weights import export_hf

    parameters = [p for chunk in chunks for p in chunk.parameters()]
    weights = [p.data for p in parameters]
    for p in parameters:
        p.data = p.main_grad.data
    full = {name: tensor.clone() for name, tensor in export_hf(chunks)}
    for p, data in zip(parameters, weights, strict=True):
        p.data = data
    return full


def train(kind: str, spec: Spec, topology) -> dict:
    from aligner.models.optimizer import OptimizerConfig
    from aligner.models.weights import export_hf

    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-3, warmup_steps=0, distributed=spec.distributed_optimizer, clip_grad=0.5, eps=1e-4)
    model = make_model(kind, spec, topology, optimizer)
    batch = make_batch(kind)
    outputs = {"value": "values", "reward": "scores"}.get(kind, "logprobs")
    result: dict = {"outputs": [getattr(model, outputs)(batch)], "metrics": [], "gradients": []}
    for loss in make_losses(kind):
        metrics = model.train_step(batch, loss)
        result["metrics"].append({name: metric.value() for name, metric in metrics.items()})
        if not spec.distributed_optimizer:  # a distributed optimizer's rank holds its own shard of the reduced gradient only
            result["gradients"].append(gradients(model.model.chunks))
    result["weights"] = {name: tensor.clone() for name, tensor in export_hf(model.model.chunks)}
    result["outputs"].append(getattr(model, outputs)(batch))
    return result


def main() -> None:
    fields = json.loads(sys.argv[1])
    spec = Spec(**(fields | {"kinds": tuple(fields.get("kinds", KINDS))}))
    launch.initialize("gloo", timeout_seconds=120, fingerprint="layout", collective_timeout_seconds=120)
    from aligner.parallel.topology import ParallelConfig, initialize

    topology = initialize(ParallelConfig(**spec.parallel), seed=11)
    results = {kind: train(kind, spec, topology) for kind in spec.kinds}
    if dist.get_rank() == 0:
        torch.save(results, Path(sys.argv[2]))
    launch.shutdown()


if __name__ == "__main__":
    main()
