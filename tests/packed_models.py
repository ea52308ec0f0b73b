"""What tests of adapters and packed weights share: a batch, steps of training, what PEFT computes, what bitsandbytes stores, and codes."""

from __future__ import annotations

import torch
from hf_models import VOCAB

from aligner.losses.sft import sft_loss
from aligner.models.config import Quantization
from aligner.models.modules.linear import PackedWeight, linear_weight
from aligner.models.modules.peft import export_adapters
from aligner.models.training.optimizer import OptimizerConfig
from aligner.types import LabeledBatch, Prompt, SamplingConfig


def make_batch() -> LabeledBatch:
    generator = torch.Generator().manual_seed(2)
    tokens, lengths = torch.randint(3, VOCAB, (4, 12), generator=generator), torch.tensor([12, 7, 10, 12])
    positions = torch.arange(12)
    mask = (positions >= 3) & (positions < lengths[:, None])
    return LabeledBatch(tokens=torch.where(positions < lengths[:, None], tokens, 0), lengths=lengths, loss_mask=mask)


def adam() -> OptimizerConfig:
    return OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0, clip_grad=0.0)


def train(policy, steps: int) -> list[float]:
    return [policy.train_step(make_batch(), sft_loss)["sft/loss"].value() for _ in range(steps)]


def hf_logprobs(model, batch: LabeledBatch) -> torch.Tensor:
    """[B, S] of a model of transformers or PEFT, as a policy gives them."""
    found = torch.log_softmax(model(batch.tokens).logits[:, :-1].float(), dim=-1).gather(-1, batch.tokens[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(found, (1, 0)) * batch.loss_mask


def adapter_gradients(policy) -> dict[str, torch.Tensor]:
    """By PEFT's names."""
    trained = [p for p in policy.module.parameters() if p.requires_grad]
    weights = [p.data for p in trained]
    for p in trained:
        p.data = p.main_grad.data
    found = {name: tensor.detach().cpu().clone() for name, tensor in export_adapters(policy.chunks)}
    for p, data in zip(trained, weights, strict=True):
        p.data = data
    return found


def rounded(weight: torch.Tensor, kind: Quantization, nested: bool = False) -> torch.Tensor:
    """What bitsandbytes stores of a whole weight, by its operators; `nested`: with double quantization."""
    import bitsandbytes.functional

    if nested:
        quantised, state = bitsandbytes.functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        return bitsandbytes.functional.dequantize_4bit(quantised, state).view(weight.shape)

    if kind is Quantization.int8:
        codes, largest, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight)
        return codes * (largest / 127)[:, None]
    codes, scales = torch.ops.bitsandbytes.quantize_4bit(weight, 64, "nf4", torch.uint8)
    return torch.ops.bitsandbytes.dequantize_4bit(codes, scales, 64, "nf4", list(weight.shape), torch.float32)


def packed(policy) -> list[PackedWeight]:
    found = [linear_weight(p) for p in policy.module.parameters()]
    return [weight for weight in found if isinstance(weight, PackedWeight)]


def codes(policy) -> list[torch.Tensor]:
    return [tensor.clone() for weight in packed(policy) for tensor in weight.storage]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def rollouts_of(engine, policy) -> list:
    prompts = [Prompt(id=n, tokens=(3 + n, 7, 9), source="test") for n in range(3)]
    sampling = SamplingConfig(max_response_length=8)
    return [rollout for part in engine.generate(prompts, [1, 2, 3], sampling) for rollout in part]
