"""Small models of every kind in any layout, with a batch and the losses that are taken of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aligner.algorithms.distill import distillation_terms
from aligner.algorithms.process_reward_model import process_loss
from aligner.losses.aggregation import Aggregation
from aligner.losses.correction import Correction, CorrectionConfig, Level
from aligner.losses.distillation import Divergence
from aligner.losses.kl import KLEstimator
from aligner.losses.policy import Objective, policy_loss
from aligner.losses.preference import DPOVariant, dpo_loss, kto_loss
from aligner.losses.reward import BradleyTerry, bradley_terry_loss, regression_loss
from aligner.losses.sft import pretraining_loss, sft_loss, steerlm_loss
from aligner.losses.value import value_loss
from aligner.models.config import Architecture, Dtype, Family, LoraConfig, LoraTarget, ModelConfig, Recompute
from aligner.models.create import create_policy, create_reward_model, create_value_model, training
from aligner.models.modules.peft import CONFIG_FILE, WEIGHTS_FILE, export_adapters, peft_config, projections
from aligner.models.modules.scalar_head import HeadGradient, PolicyHead, Pooling, ScalarHead
from aligner.models.weights import export_hf, policy_head
from aligner.parallel.topology import ParallelConfig
from aligner.protocols import Added
from aligner.types import DistillationBatch, LabeledBatch, PolicyBatch, PreferenceBatch, Routes, StepBatch, ValueBatch

ROWS, WIDTH, VOCAB = 8, 24, 61


@dataclass(frozen=True, kw_only=True)
class Spec:
    parallel: dict = field(default_factory=dict)  # fields of ParallelConfig
    model: dict = field(default_factory=dict)  # fields of ModelConfig
    distributed_optimizer: bool = False
    experts: bool = False  # a mixture of experts instead of a dense model
    biases: bool = False  # of a mixture: experts are chosen with biases that follow the load, beside a shared one
    num_layers: int = 2
    lora: dict = field(default_factory=dict)  # fields of LoraConfig; `path` is where an adapter is to be written before


def make_batch(kind: str):
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
    if kind == "routed":  # whoever sampled these chose at random: of 4 experts 2, but none for the last tokens
        routes = torch.rand(ROWS, WIDTH, 4, 4, generator=generator).argsort(dim=3)[..., :2].to(torch.uint8)
        routes[5, :4] = routes[0, :4]  # these two share a prompt, rows 0, 1 and 6 have other experts for the same one
        routes[positions + 1 >= lengths[:, None]] = 255
        return PolicyBatch(**common, old_logprobs=floats[0] * 0.1 - 4.0, advantages=floats[1], extras={"routes": Routes(routes)})
    if kind == "head":
        targets = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2)]
        return PolicyBatch(**common, old_logprobs=floats[0] * 0.1 - 4.0, advantages=floats[1], old_values=targets[0], returns=targets[1])
    if kind in ("ppo", "ptx"):
        return PolicyBatch(**common, old_logprobs=floats[0] * 0.1 - 4.0, advantages=floats[1])
    if kind == "objectives":  # an advantage per response; ratios on both sides of every clip range
        others = [torch.randn(ROWS, WIDTH, generator=generator) * 0.2 - 4.0 for _ in range(2)]
        advantages = floats[1][:, :1] * mask
        others = {"ref_logprobs": others[0], "rollout_logprobs": others[1]}
        return PolicyBatch(**common, old_logprobs=floats[0] * 0.3 - 4.0, advantages=advantages, **others)
    if kind == "distill":
        named = torch.rand(ROWS, WIDTH, VOCAB, generator=generator).argsort(dim=2)[..., :5] * mask[..., None]
        logprobs = -3 * torch.rand(ROWS, WIDTH, 5, generator=generator) * mask[..., None]
        return DistillationBatch(**common, teacher_tokens=named, teacher_logprobs=logprobs)
    if kind == "value":
        return ValueBatch(**common, old_values=floats[0], returns=floats[1])
    if kind == "steps":  # every fourth token ends a step; one in three was not judged
        ends = mask & (positions % 4 == 3) & (torch.rand(ROWS, WIDTH, generator=generator) < 0.7)
        labels = torch.rand(ROWS, WIDTH, generator=generator).round(decimals=1) * ends
        return StepBatch(**(common | {"loss_mask": ends}), step_labels=labels)
    if kind == "regression":  # of two attributes; rows have one label or both
        labels = 4 * torch.rand(ROWS, 2, generator=generator)
        labels[[0, 2, 5], 0] = labels[[1, 6], 1] = -100.0
        return LabeledBatch(**common, labels=labels)
    if kind == "steerlm":
        coefficients = torch.randn(ROWS, 1, generator=generator)
        return LabeledBatch(**common, labels=coefficients)
    if kind in ("reward", "dpo"):
        reference = floats[0] * 0.1 - 4.0 if kind == "dpo" else None
        return PreferenceBatch(**common, margins=torch.zeros(ROWS // 2), ref_logprobs=reference)
    if kind in ("preferences", "reward_mean"):
        margins = torch.tensor([0.5, -1.0, 2.0, 1.5])
        return PreferenceBatch(**common, margins=margins, ref_logprobs=floats[0] * 0.1 - 4.0 if kind == "preferences" else None)
    if kind == "kto":
        labels = torch.tensor([1.0, -1, -1, 1, -1, 1, 1, -1])[:, None]
        return LabeledBatch(**common, labels=labels, ref_logprobs=floats[0] * 0.1 - 4.0)
    return LabeledBatch(**common)


def make_added(kind: str) -> list[Added]:
    """What is learnt besides the batch: text of other lengths, more rows on one replica than on the other; values by a head on the policy,
    whose loss counts tokens where the policy's counts sequences."""
    if kind not in ("ptx", "head"):
        return []
    own = [Added(batch=None, loss=partial(value_loss, clip=0.2), coef=0.6)] if kind == "head" else []
    generator, lengths, positions = torch.Generator().manual_seed(8), torch.tensor([30, 5, 28, 11, 19]), torch.arange(30)
    mask = (positions >= 1) & (positions < lengths[:, None])
    tokens = torch.randint(3, VOCAB, (5, 30), generator=generator).where(positions < lengths[:, None], 0)
    text = LabeledBatch(tokens=tokens, lengths=lengths, loss_mask=mask)
    return [*own, Added(batch=text, loss=pretraining_loss, coef=0.7)]


def make_architecture(kind: str, experts: bool, num_layers: int, biases: bool = False):
    sizes = {"num_layers": num_layers, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 48}
    # Weights of this size give attention and router something to distinguish, and so gradients that are not rounding.
    sizes |= {"vocab_size": VOCAB, "max_position_embeddings": 64, "tied_embeddings": kind != "sft", "initializer_range": 0.1}
    if biases:
        own = {"router_sigmoid": True, "router_bias": True, "shared_ffn_hidden_size": 24, "tied_embeddings": False}
        sizes |= own | {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24}
        return Architecture(family=Family.glm4_moe, **sizes)
    if experts:
        return Architecture(family=Family.mixtral, num_experts=4, experts_per_token=2, expert_ffn_hidden_size=24, **sizes)
    return Architecture(family=Family.qwen2, qkv_bias=True, **sizes)


def make_model(kind: str, spec: Spec, topology, optimizer):
    parallel = ParallelConfig(**spec.parallel)
    settings = {"micro_batch_size": 1 if kind in ("dpo", "preferences", "reward", "reward_mean") else 2} | spec.model
    if "recompute" in settings:
        settings["recompute"] = Recompute(settings["recompute"])
    if spec.lora:
        settings["lora"] = LoraConfig(**(spec.lora | {"targets": [LoraTarget(target) for target in spec.lora["targets"]]}))
    config = ModelConfig(dtype=Dtype.float32, make_vocab_divisible_by=8, logits_chunk_size=16, **settings)
    heads = {
        "reward": ScalarHead(),
        "reward_mean": ScalarHead(pooling=Pooling.mean),
        "regression": ScalarHead(outputs=("good", "long")),
        "steps": ScalarHead(outputs=("step",), pooling=Pooling.tokens),
    }
    create = create_value_model if kind == "value" else partial(create_reward_model, head=heads[kind]) if kind in heads else create_policy
    temperature = 0.8 if kind in ("ppo", "ptx", "objectives") else 1.0
    alpha = 5.0 if kind == "noisy" else 0.0
    values = PolicyHead(gradient=HeadGradient.joint, lr=5e-3, min_lr=5e-3) if kind == "head" else None
    own = {"replay_routes": kind == "routed", "neftune_alpha": alpha, "value_head": values}
    how = training(config, optimizer, total_steps=10, temperature=temperature, **own)
    return create(config, make_architecture(kind, spec.experts, spec.num_layers, spec.biases), parallel, topology, how)


def write_adapter(spec: Spec) -> None:
    """A PEFT directory at `spec.lora["path"]`, whose B's are not zero."""
    architecture = make_architecture("dpo", spec.experts, spec.num_layers)
    lora = LoraConfig(**(spec.lora | {"targets": [LoraTarget(target) for target in spec.lora["targets"]]}))
    hidden, inner = architecture.hidden_size, architecture.expert_ffn_hidden_size or architecture.ffn_hidden_size
    rows = {"q_proj": hidden, "k_proj": hidden // 2, "v_proj": hidden // 2, "o_proj": hidden, "down_proj": hidden, "w2": hidden}
    generator, tensors = torch.Generator().manual_seed(5), {}
    for one in projections(architecture, lora):
        kind = one.name.rsplit(".", 1)[1]
        inputs = inner if kind in ("down_proj", "w2") else hidden
        tensors[f"base_model.model.{one.name}.lora_A.weight"] = torch.randn(lora.rank, inputs, generator=generator) * 0.2
        tensors[f"base_model.model.{one.name}.lora_B.weight"] = torch.randn(rows.get(kind, inner), lora.rank, generator=generator) * 0.2
        if lora.dora:
            tensors[f"base_model.model.{one.name}.lora_magnitude_vector"] = 0.5 + torch.rand(rows.get(kind, inner), generator=generator)
    directory = Path(lora.path)
    directory.mkdir()
    save_file(tensors, directory / WEIGHTS_FILE)
    (directory / CONFIG_FILE).write_text(json.dumps(peft_config(architecture, lora, base="")))


def make_steps(kind: str) -> list:
    found = [(make_batch(kind), loss) for loss in make_losses(kind)]
    if kind == "preferences":  # of single responses too
        found += [(make_batch("kto"), make_losses("kto")[0]), (make_batch("steerlm"), steerlm_loss)]
    return found


def make_losses(kind: str) -> list:
    """Those that are taken of one batch."""
    if kind == "objectives":
        return objectives()
    if kind == "preferences":
        return preferences()
    if kind == "distill":
        return [partial(distillation_terms, ce_coef=0.3, divergence=one, temperature=1.5) for one in Divergence]
    if kind == "reward_mean":
        return [partial(bradley_terry_loss, variant=one, centre_coef=0.1) for one in (BradleyTerry.margin, BradleyTerry.scaled)]
    ppo = partial(policy_loss, clip_eps_low=0.2, clip_eps_high=0.2, entropy_coef=0.01, aggregation=Aggregation.token_mean)
    losses = {
        "ppo": ppo,
        "ptx": ppo,
        "head": partial(policy_loss, clip_eps_low=0.2, clip_eps_high=0.2, aggregation=Aggregation.sequence_mean),
        "routed": partial(policy_loss, clip_eps_low=0.2, clip_eps_high=0.2, aggregation=Aggregation.token_mean),
        "dpo": partial(dpo_loss, beta=0.1),
        "value": partial(value_loss, clip=0.2),
        "reward": partial(bradley_terry_loss, variant=BradleyTerry.standard),
        "sft": sft_loss,
        "noisy": sft_loss,
        "regression": partial(regression_loss, attributes=("good", "long")),
        "steps": process_loss,
        "kto": partial(kto_loss, kl=0.7, beta=0.1, undesirable_weight=1.5, sft_coef=0.3),
    }
    return [losses[kind]] * 2


def objectives() -> list:
    """Every objective, aggregation, KL term and kind of correction, each at least once."""
    by_token, by_sequence = Aggregation.token_mean, Aggregation.sequence_mean
    by_constant = Aggregation.sequence_sum_constant
    sequences = CorrectionConfig(kind=Correction.tis, level=Level.sequence_mean, high=1.01)
    settings = [
        {"objective": Objective.ppo, "aggregation": by_sequence, "dual_clip": 1.5, "kl_coef": 0.1, "kl_estimator": KLEstimator.k3},
        {"objective": Objective.gspo, "aggregation": by_sequence, "kl_coef": 0.1, "kl_estimator": KLEstimator.k2},
        {"objective": Objective.gspo_token, "aggregation": by_token, "correction": CorrectionConfig(kind=Correction.icepop)},
        {"objective": Objective.cispo, "aggregation": by_token, "correction": CorrectionConfig(kind=Correction.mis)},
        {"objective": Objective.gmpo, "aggregation": by_sequence, "kl_coef": 0.1, "kl_estimator": KLEstimator.abs},
        {"objective": Objective.sapo, "aggregation": by_constant, "correction": sequences},
        {"objective": Objective.reinforce, "aggregation": by_constant, "kl_coef": 0.1, "kl_estimator": KLEstimator.k1},
    ]
    return [partial(policy_loss, clip_eps_low=0.2, clip_eps_high=0.28, aggregation_constant=float(WIDTH), **one) for one in settings]


def preferences() -> list:
    """Every loss of pairs: of sums and of means, with a reference, without one, and of margins."""
    own = {
        DPOVariant.ipo: {"sft_coef": 0.5},
        DPOVariant.rpo_bwd_kl: {"eta": 2.0},
        DPOVariant.apo_zero: {"average_logprobs": True, "beta": 2.0, "sft_coef": 0.5},
        DPOVariant.simpo: {"gamma": 0.5, "beta": 2.0},
        DPOVariant.dpop: {"dpop_coef": 5.0},
    }
    smoothing = {variant: 0.1 for variant in DPOVariant if variant.takes_smoothing}
    return [
        partial(dpo_loss, **({"beta": 0.3, "variant": one, "label_smoothing": smoothing.get(one, 0.0)} | own.get(one, {})))
        for one in DPOVariant
    ]


def gradients(chunks) -> dict[str, torch.Tensor]:
    """Full gradients by Hugging Face's, or PEFT's, name: the gradient buffers put in the weights' place and exported."""
    parameters = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
    weights = [p.data for p in parameters]
    for p in parameters:
        p.data = p.main_grad.data
    full = exported(chunks)
    if chunks[0].lora.is_on:
        heads = {name: full[name] for name in policy_head(chunks)}
        full = heads | {name: tensor.clone() for name, tensor in export_adapters(chunks)}
    for p, data in zip(parameters, weights, strict=True):
        p.data = data
    return full


def exported(chunks) -> dict[str, torch.Tensor]:
    full = {name: tensor.clone() for name, tensor in export_hf(chunks)}
    return full | {name: tensor.clone() for name, tensor in policy_head(chunks).items()}


def train_step(model, batch, loss, added=()) -> dict[str, float]:
    return {name: metric.value() for name, metric in model.train_step(batch, loss, added).items()}


def assert_metrics(got: dict[str, float], expected: dict[str, float]) -> None:
    assert got == pytest.approx(expected, rel=2e-5, abs=2e-6)


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, atol: float, rtol: float = 1e-4) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
