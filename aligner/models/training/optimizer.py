"""Megatron-Core's distributed optimizer and learning-rate schedule from a small config."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any

import torch

from aligner.errors import ConfigError

MAX_LR = 10.0  # a step of Adam moves a weight by about the learning rate


class Decay(str, Enum):
    """Shape of the learning rate after the warm-up; the member names are Megatron-Core's."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay; NeMo-Aligner's PPO values are the defaults."""

    lr: float = 9e-7  # learning rate after the warm-up
    min_lr: float = 9e-8  # learning rate at the end of the decay
    decay: Decay = Decay.cosine  # shape of the learning rate after the warm-up
    warmup_fraction: float = 0.1  # part of the run's optimizer steps, rounded up, in which the learning rate rises from 0 to lr
    warmup_steps: int = -1  # the same as a number of optimizer steps; -1: as warmup_fraction says
    decay_steps: int = 0  # 0: the run's number of optimizer steps
    weight_decay: float = 0.1  # decoupled: each step takes lr * this off every weight; 0: none
    beta1: float = 0.9  # decay of the mean of gradients (Adam)
    beta2: float = 0.98  # decay of the mean of squared gradients (Adam)
    eps: float = 1e-8  # added to the root of the mean of squared gradients (Adam)
    clip_grad: float = 1.0  # longest gradient (global L2 norm); a longer one is scaled down to it; 0: off
    distributed: bool = True  # shard the optimizer's state over data-parallel ranks
    precision_aware: bool = False  # moments in bfloat16 (needs Transformer Engine)
    initial_loss_scale: float = 1024.0  # of model.dtype=float16: the loss's factor at first, a power of two; an overflow halves it
    min_loss_scale: float = 1.0  # of model.dtype=float16: a gradient that overflows even with this is one that is not finite (guard)
    loss_scale_window: int = 500  # of model.dtype=float16: updates in a row without an overflow, after which the factor doubles
    offload: bool = False  # between training phases the optimizer's state and the gradients wait in host memory
    cpu_offload: bool = False  # the host holds the optimizer's state and main weights, and updates them there (Megatron-Core's)
    cpu_offload_fraction: float = 1.0  # part of the parameters that optimizer.cpu_offload moves; the rest is updated on the GPU

    def __post_init__(self) -> None:
        if not (0 < self.lr <= MAX_LR and 0 <= self.min_lr <= self.lr):
            raise ConfigError(f"optimizer.lr={self.lr}, min_lr={self.min_lr}: need 0 <= min_lr <= lr and 0 < lr <= {MAX_LR:g}")
        if self.warmup_steps < -1:
            raise ConfigError(f"optimizer.warmup_steps={self.warmup_steps}: must not be negative (-1: as optimizer.warmup_fraction says)")
        if not 0 <= self.warmup_fraction < 1:
            raise ConfigError(f"optimizer.warmup_fraction={self.warmup_fraction}: must be at least 0 and below 1")
        for name in ("decay_steps", "clip_grad"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"optimizer.{name}={getattr(self, name)}: must be finite and not negative")
        if not 0 <= self.lr * self.weight_decay < 1:
            raise ConfigError(f"optimizer.weight_decay={self.weight_decay}: must not be negative, and lr * weight_decay must be below 1")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optimizer.{name}={getattr(self, name)}: must be at least 0 and below 1")
        if not 0 < self.eps < 1:
            raise ConfigError(f"optimizer.eps={self.eps}: must be above 0 and below 1")
        for name in ("initial_loss_scale", "min_loss_scale"):
            if not 0 < getattr(self, name) < math.inf or math.frexp(getattr(self, name))[0] != 0.5:
                raise ConfigError(f"optimizer.{name}={getattr(self, name)}: must be a power of two, so that scaling rounds nothing")
        if self.min_loss_scale > self.initial_loss_scale:
            raise ConfigError(
                f"optimizer.min_loss_scale={self.min_loss_scale}: must be at most initial_loss_scale={self.initial_loss_scale}"
            )
        if self.loss_scale_window < 1:
            raise ConfigError(f"optimizer.loss_scale_window={self.loss_scale_window}: must be at least 1")
        if self.precision_aware and not self.distributed:
            raise ConfigError("optimizer.precision_aware=true: needs optimizer.distributed=true")
        if not 0 < self.cpu_offload_fraction <= 1:
            raise ConfigError(f"optimizer.cpu_offload_fraction={self.cpu_offload_fraction}: must be above 0 and at most 1")
        if self.cpu_offload and not self.distributed:
            raise ConfigError("optimizer.cpu_offload=true: needs optimizer.distributed=true")
        if self.cpu_offload and self.precision_aware:
            raise ConfigError("optimizer.cpu_offload=true: its moments are float32; allowed beside it: optimizer.precision_aware=false")

    def warmup(self, total_steps: int) -> int:
        """Optimizer steps of the warm-up in a run of `total_steps`."""
        return math.ceil(Fraction(repr(self.warmup_fraction)) * total_steps) if self.warmup_steps < 0 else self.warmup_steps

    def shortfall(self, total_steps: int) -> str:
        """A warning if a run of `total_steps` ends within its warm-up; empty if it does not."""
        if (warmup := self.warmup(total_steps)) <= total_steps:
            return ""
        reached = f"the run has {total_steps} optimizer steps, so the learning rate rises to {self.lr * total_steps / warmup:g} only"
        return f"warning: optimizer.warmup_steps={warmup}, optimizer.lr={self.lr:g}: {reached}"


def build_optimizer(config: OptimizerConfig, runners: list[Any], dtype: torch.dtype) -> Any:
    """Megatron's distributed optimizer (states sharded over data-parallel ranks) for the DDP-wrapped chunks of one model."""
    from aligner.models.training.host_adam import HostAdam
    from aligner.parallel import mcore

    settings = mcore.OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        initial_loss_scale=config.initial_loss_scale,
        min_loss_scale=config.min_loss_scale,
        loss_scale_window=config.loss_scale_window,
        hysteresis=1,  # every overflow halves the scale
        params_dtype=dtype,
        use_distributed_optimizer=config.distributed,
        use_precision_aware_optimizer=config.precision_aware,
        optimizer_cpu_offload=config.cpu_offload,
        optimizer_offload_fraction=config.cpu_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=config.cpu_offload,
        **({"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16} if config.precision_aware else {}),
    )
    if config.cpu_offload:  # set afterwards: Megatron-Core asks for Transformer Engine's version first, which this does without
        settings.use_precision_aware_optimizer = settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        settings.store_param_remainders = False
    with mcore.hybrid_optimizer(HostAdam):
        optimizer = mcore.get_megatron_optimizer(settings, runners, use_gloo_process_groups=False)
    for part in optimizer.chained_optimizers:
        if isinstance(part, mcore.DistributedOptimizer) and not part.is_stub_optimizer:
            _number_as_grouped(part)
            if config.cpu_offload:
                part.optimizer.open()
    return optimizer


def _number_as_grouped(part: Any) -> None:
    """Let the places of parameters in their groups, by which states are saved and read, be those of the groups.

    Megatron-Core (to 0.19) numbers a group's parameters as its buffers hold them, but the group holds those in float32 first: with the
    float32 head of a reward model or critic on a bfloat16 model, every parameter was given another one's state.
    """
    places = part.model_param_group_index_map
    for group in {group for group, _ in places.values()}:
        members = sorted((p for p, (own, _) in places.items() if own == group), key=lambda p: (p.dtype != torch.float32, places[p][1]))
        places.update({parameter: (group, number) for number, parameter in enumerate(members)})


def build_scheduler(config: OptimizerConfig, optimizer: Any, total_steps: int) -> Any:
    """Warm-up, then decay to `min_lr` over `decay_steps` (default: `total_steps`) optimizer steps."""
    from aligner.parallel import mcore

    warmup = config.warmup(total_steps)
    decay_steps = max(config.decay_steps or total_steps, warmup + 1)
    return mcore.OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.decay.value,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
        # A resumed run keeps its place in the schedule; the schedule itself is the config's, which may have grown.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
