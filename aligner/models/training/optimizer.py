"""Settings of the optimizer and its learning-rate schedule. Light: imports no Megatron-Core."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from aligner.errors import AT_LEAST_1, FINITE, ConfigError, Range, check_range

MAX_LR = 10.0  # a step of Adam moves a weight by about the learning rate


class Decay(str, Enum):
    """Shape of the learning rate after the warm-up; the member names are Megatron-Core's."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class OptimizerKind(str, Enum):
    """What makes updates of gradients."""

    adam = "adam"
    adam8bit = "adam8bit"
    muon = "muon"


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay; NeMo-Aligner's PPO values are the defaults."""

    kind: OptimizerKind = OptimizerKind.adam  # adam8bit: moments in 8 bits (bitsandbytes); muon: hidden matrices by Muon, the rest by adam
    lr: float = 9e-7  # learning rate after the warm-up
    min_lr: float = 9e-8  # learning rate at the end of the decay
    decay: Decay = Decay.cosine  # shape of the learning rate after the warm-up
    warmup_fraction: float = 0.1  # part of the run's optimizer steps, rounded up, during which the learning rate rises from 0 to lr
    warmup_steps: int = -1  # the warm-up as a number of optimizer steps; -1: use warmup_fraction
    decay_steps: int = 0  # 0: the run's number of optimizer steps
    weight_decay: float = 0.1  # decoupled: each step takes lr * this off every weight; 0: none
    beta1: float = 0.9  # decay of the mean of gradients (Adam)
    beta2: float = 0.98  # decay of the mean of squared gradients (Adam)
    eps: float = 1e-8  # added to the root of the mean of squared gradients (Adam)
    muon_momentum: float = 0.95  # with kind=muon: decay of the mean of gradients of matrices
    loraplus_ratio: float = 1.0  # learning rate of adapters' B's over that of their A's (LoRA+, 2402.12354, takes 16); 1: the same
    clip_grad: float = 1.0  # longest gradient (global L2 norm); a longer one is scaled down to it; 0: off
    ema_decay: float = 0.0  # of a moving average of the weights, which validations on data and exports have; 0: none
    distributed: bool = True  # shard the optimizer's state over data-parallel ranks
    precision_aware: bool = False  # moments in bfloat16 (needs Transformer Engine)
    initial_loss_scale: float = 1024.0  # with model.dtype=float16: initial factor of the loss, a power of two; an overflow halves it
    min_loss_scale: float = 1.0  # with model.dtype=float16: smallest factor; gradients that still overflow count as not finite (guard)
    loss_scale_window: int = 500  # with model.dtype=float16: updates in a row without an overflow, after which the factor doubles
    offload: bool = False  # between training phases the optimizer's state and the gradients wait in host memory
    cpu_offload: bool = False  # the host holds the optimizer's state and main weights, and updates them there (Megatron-Core's)
    cpu_offload_fraction: float = 1.0  # part of the parameters that optimizer.cpu_offload moves; the rest is updated on the GPU
    nvme_path: str = ""  # with optimizer.cpu_offload: folder of a local disk that holds state and main weights; empty: host memory does

    def __post_init__(self) -> None:
        self._check_kind()
        if not (0 < self.lr <= MAX_LR and 0 <= self.min_lr <= self.lr):
            raise ConfigError(f"optimizer.lr={self.lr}, min_lr={self.min_lr}: need 0 <= min_lr <= lr and 0 < lr <= {MAX_LR:g}")
        if not 1 <= self.loraplus_ratio <= MAX_LR / self.lr:
            raise ConfigError(f"optimizer.loraplus_ratio={self.loraplus_ratio}: must be at least 1, and at most {MAX_LR:g} / lr")
        if self.warmup_steps < -1:
            raise ConfigError(f"optimizer.warmup_steps={self.warmup_steps}: must not be negative (-1: use optimizer.warmup_fraction)")
        check_range(self, "optimizer", FINITE, "decay_steps", "clip_grad")
        check_range(self, "optimizer", AT_LEAST_1, "loss_scale_window")
        below_1: Range = (lambda beta: 0 <= beta < 1, "must be at least 0 and below 1")
        check_range(self, "optimizer", below_1, "warmup_fraction", "beta1", "beta2", "ema_decay", "muon_momentum")
        check_range(self, "optimizer", (lambda eps: 0 < eps < 1, "must be above 0 and below 1"), "eps")
        check_range(self, "optimizer", (lambda part: 0 < part <= 1, "must be above 0 and at most 1"), "cpu_offload_fraction")
        powers: Range = (lambda scale: 0 < scale < math.inf and math.frexp(scale)[0] == 0.5, "must be a power of two")
        check_range(self, "optimizer", powers, "initial_loss_scale", "min_loss_scale", note=", so that scaling rounds nothing")
        if not 0 <= self.lr * self.weight_decay < 1:
            raise ConfigError(f"optimizer.weight_decay={self.weight_decay}: must not be negative, and lr * weight_decay must be below 1")
        if self.min_loss_scale > self.initial_loss_scale:
            raise ConfigError(
                f"optimizer.min_loss_scale={self.min_loss_scale}: must be at most initial_loss_scale={self.initial_loss_scale}"
            )
        if self.precision_aware and not self.distributed:
            raise ConfigError("optimizer.precision_aware=true: needs optimizer.distributed=true")
        if self.ema_decay and (not self.distributed or self.precision_aware or self.cpu_offload):
            raise ConfigError(
                f"optimizer.ema_decay={self.ema_decay}: needs optimizer.distributed=true, precision_aware=false and cpu_offload=false, "
                "whose float32 weights are all on the device; allowed otherwise: 0"
            )
        if self.ema_decay and self.kind is not OptimizerKind.adam:
            raise ConfigError(f"optimizer.ema_decay={self.ema_decay}: not with optimizer.kind={self.kind.value}; allowed beside it: adam")
        if self.cpu_offload and not self.distributed:
            raise ConfigError("optimizer.cpu_offload=true: needs optimizer.distributed=true")
        if self.nvme_path and not (self.cpu_offload and self.cpu_offload_fraction == 1):
            raise ConfigError(f"optimizer.nvme_path={self.nvme_path}: needs optimizer.cpu_offload=true and cpu_offload_fraction=1")
        if self.cpu_offload and self.precision_aware:
            raise ConfigError("optimizer.cpu_offload=true: its moments are float32; allowed beside it: optimizer.precision_aware=false")

    @property
    def may_move_to_host(self) -> bool:
        """Whether `cpu_offload` may be set."""
        return self.kind is OptimizerKind.adam and self.distributed and not self.precision_aware

    def _check_kind(self) -> None:
        never: dict[str, object] = {"precision_aware": False, "cpu_offload": False}
        others = {
            OptimizerKind.adam8bit: never | {"distributed": True},
            OptimizerKind.muon: never | {"distributed": False, "loraplus_ratio": 1.0},
        }
        for name, allowed in others.get(self.kind, {}).items():
            if getattr(self, name) != allowed:
                typed = f"optimizer.kind={self.kind.value}: not with optimizer.{name}={str(getattr(self, name)).lower()}"
                raise ConfigError(f"{typed}; allowed beside it: {str(allowed).lower()}")

    def warmup(self, total_steps: int) -> int:
        """Optimizer steps of the warm-up in a run of `total_steps`."""
        return math.ceil(Fraction(repr(self.warmup_fraction)) * total_steps) if self.warmup_steps < 0 else self.warmup_steps

    def shortfall(self, total_steps: int) -> str:
        """A warning if a run of `total_steps` ends within its warm-up; empty if it does not."""
        if (warmup := self.warmup(total_steps)) <= total_steps:
            return ""
        reached = f"the run has {total_steps} optimizer steps, so the learning rate rises to {self.lr * total_steps / warmup:g} only"
        return f"warning: optimizer.warmup_steps={warmup}, optimizer.lr={self.lr:g}: {reached}"
