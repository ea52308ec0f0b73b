"""Megatron-Core's distributed optimizer, its learning-rate schedule and the loss scale of float16, from `OptimizerConfig`.

`HostAdam` is `optimizer.cpu_offload`: AdamW whose float32 weights, moments and computation are the host's, on Megatron-Core's
HybridDeviceOptimizer, which still splits groups, steps and sets learning rates. Mended here (0.16.1 and 0.19 have the same):

- It copies the whole model's parameters to page-locked memory before it is made again of this rank's shards: `open` makes copies once.
- It locks memory in powers of two, and loses the lock where it makes float32 of bfloat16: uploads would be slow, and wait.
- It takes no views of float32 weights, which heads of reward models and critics are, and copies nothing on a machine without CUDA.

With `optimizer.nvme_path` weights and moments are a file's (`aligner.models.training.nvme`), and each step streams them.

Megatron-Core's precision-aware mode goes with it: gradients reach it in the buffers that reduced them, the device keeps no float32 weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.modules.lora import LORA_B
from aligner.models.modules.scalar_head import HEAD, PolicyHead
from aligner.models.training.adam8bit import Adam8bit
from aligner.models.training.nvme import StateFile
from aligner.models.training.offload import LockedMemory
from aligner.models.training.optimizer import OptimizerConfig, OptimizerKind
from aligner.parallel import mcore, platform
from aligner.parallel.mcore import HybridDeviceOptimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")


class HostAdam(HybridDeviceOptimizer):
    """The first `offload_fraction` of the parameters' elements is updated on the host; the rest by torch's AdamW on the device."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        # The fused kernels on a GPU machine, the same as without offload on others: there the numbers are the same bit for bit.
        super().__init__(params, **defaults | {"gpu_optimizer_cls": torch.optim.AdamW, "fused": torch.cuda.is_available()})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, also for shards of float32 weights, which are not leaves."""
        for name, value in self.defaults.items():
            param_group.setdefault(name, value)
        self.param_groups.append(param_group)

    def _init_sub_optimizers(self) -> None:
        self.cpu_optimizers, self.gpu_optimizer = [], None  # until `open`

    def _register_load_state_dict_hooks(self) -> None:
        """States are read by `aligner.models.checkpoint.optimizer`, and nothing is made again for them."""

    def open(self, nvme_path: str = "") -> None:
        """Copy the weights, which Megatron-Core has cut by now, to the host, and get ready to step."""
        self._memory, self._folder = LockedMemory(), nvme_path
        self.file: StateFile | None = None
        super()._init_sub_optimizers()
        if self.file is not None:
            return
        hosts = list(self.cpu_copys_map_gpu_param)
        for inner, gradient in zip(hosts, self._memory.like(hosts), strict=True):
            self.cpu_copy_map_grad[inner] = inner.grad = gradient

    @torch.no_grad()
    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> tuple[Any, ...]:
        """Groups for the host and for the device; {shard: copy} and {copy: shard} of the host's, {shard: what is updated} of all."""
        everything = [p for group in self.param_groups for p in group["params"]]
        *before, total = accumulate((p.numel() for p in everything), initial=0)
        chosen = [p for p, first in zip(everything, before, strict=True) if first < offload_fraction * total]
        if self._folder:
            self.file = StateFile(Path(self._folder), [p.shape for p in chosen])
            copies = [self.file[number][0] for number in range(len(chosen))]
        else:
            copies = self._memory.like([torch.empty(p.shape, dtype=torch.float32, device="meta") for p in chosen])
        self._numbers = {copy: number for number, copy in enumerate(copies)}
        on_host = dict(zip(chosen, copies, strict=True))
        inner = {p: on_host[p].copy_(p) if p in on_host else p.detach().float() for p in everything}  # float32 weights are their own
        parts = []
        for is_host in (True, False):
            groups = [group | {"params": [inner[p] for p in group["params"] if (p in on_host) is is_host]} for group in self.param_groups]
            parts.append([group for group in groups if group["params"]])
        return *parts, on_host, {copy: p for p, copy in on_host.items()}, inner

    def _register_param_copy_back_gpu_hook(self) -> None:
        """After each step of a part: its weights to the model's, rounded on the device. The next part's step does not wait for it."""

        def show(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for inner in _parameters(optimizer):
                weight = self.inner_param_to_orig_param[inner].detach()
                weight.copy_(inner.to(weight.device, non_blocking=True))

        for optimizer in self.sub_optimizers:
            optimizer.register_step_post_hook(show)

    def begin(self, step: int) -> None:
        """A state of `step` steps whose moments are to be filled in."""
        for optimizer in self.sub_optimizers:
            for p in _parameters(optimizer):
                self._begin(optimizer, p, step)
        self._sync_sub_optimizers_state_to_hdo()

    def _begin(self, optimizer: torch.optim.Optimizer, p: Tensor, step: int) -> None:
        device = p.device if self.defaults["fused"] else None
        if self.file is None:
            moments = [torch.zeros_like(p) for _ in _MOMENTS]
        else:
            moments = self.file[self._numbers[p]][1:]  # zeros at first
        optimizer.state[p] = {"step": torch.tensor(float(step), device=device), **dict(zip(_MOMENTS, moments, strict=True))}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """As Megatron-Core's, or one parameter after the other as the file brings them."""
        if self.file is None:
            super().step(closure)
            return
        self._sync_hdo_param_groups_to_sub_optimizers()
        ready = []
        for optimizer in self.cpu_optimizers:  # each has one parameter
            (p,) = _parameters(optimizer)
            weight = self.cpu_copys_map_gpu_param[p]
            gradient = getattr(weight, "decoupled_grad", weight.grad)
            if gradient is not None:
                ready.append((optimizer, p, gradient))
        streamed = self.file.stream([self._numbers[p] for _, p, _ in ready])
        for (optimizer, p, gradient), (*held, room) in zip(ready, streamed, strict=True):
            if p not in optimizer.state:
                self._begin(optimizer, p, 0)
            state = optimizer.state[p]
            mapped = [p.data, *(state[name] for name in _MOMENTS)]
            p.data, p.grad = held[0], room.copy_(gradient)
            state |= zip(_MOMENTS, held[1:], strict=True)
            optimizer.step()
            platform.synchronize()  # the device has read the weight from the buffer, which another record gets
            p.data, p.grad = mapped[0], None
            state |= zip(_MOMENTS, mapped[1:], strict=True)
        self._sync_sub_optimizers_state_to_hdo()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def main_weights(optimizer: Any) -> list[Tensor]:
    """What Megatron-Core's (chained) optimizer updates, wherever it is: float32 tensors that may be views of the model's."""
    found: list[Tensor] = []
    for part in optimizer.chained_optimizers:
        own = part.optimizer
        found += own.param_to_fp32_param.values() if isinstance(own, HostAdam) else [p for g in part.param_groups for p in g["params"]]
    return [p.detach() for p in found]


def settle_files(optimizer: Any) -> None:
    """Raise AlignerError if state in files (`optimizer.nvme_path`) cannot be written or read."""
    for part in optimizer.chained_optimizers if optimizer is not None else ():
        if isinstance(part.optimizer, HostAdam) and part.optimizer.file is not None:
            part.optimizer.file.settle(read=True)


def build_optimizer(config: OptimizerConfig, runners: list[Any], dtype: torch.dtype, *, head: PolicyHead | None = None) -> Any:
    """Megatron's distributed optimizer (states sharded over data-parallel ranks) for the DDP-wrapped chunks of one model."""
    settings = mcore.OptimizerConfig(
        optimizer="adam" if config.kind is OptimizerKind.adam else "sgd",  # of which the class is another in the block below
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
    overrides = mcore.get_standard_config_overrides(settings)
    if config.loraplus_ratio > 1:
        if not runners[0].module.lora.is_on:
            raise ConfigError(f"optimizer.loraplus_ratio={config.loraplus_ratio:g}: is of adapters; needs model.lora.rank above 0")
        faster = {name: getattr(config, name.removeprefix("max_")) * config.loraplus_ratio for name in ("max_lr", "min_lr")}
        overrides[mcore.ParamKey(attr=LORA_B)] = faster
    if head is not None:
        overrides[mcore.ParamKey(name=f"*{HEAD}*")] = {"max_lr": head.lr, "min_lr": head.min_lr}
    with mcore.hybrid_optimizer(HostAdam), mcore.sgd_as(partial(_other_kind, config)):
        optimizer = mcore.get_megatron_optimizer(settings, runners, config_overrides=overrides, use_gloo_process_groups=False)
    for part in optimizer.chained_optimizers:
        part.keeps_average = config.ema_decay > 0
        if isinstance(part, mcore.DistributedOptimizer) and not part.is_stub_optimizer:
            _number_as_grouped(part)
            if config.cpu_offload:
                part.optimizer.open(config.nvme_path)
        elif config.kind is OptimizerKind.muon and part.optimizer is not None:
            part.optimizer.open([runner.module for runner in runners])
    return optimizer


def _other_kind(config: OptimizerConfig, groups: Any, *, lr: float, weight_decay: float, momentum: float) -> torch.optim.AdamW:
    settings: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.kind is OptimizerKind.muon:
        from aligner.models.training.muon import Muon  # imports all that knows Hugging Face's tensors

        return Muon(groups, momentum=config.muon_momentum, **settings)
    return Adam8bit(groups, **settings)


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


class LossScale:
    """The loss scale of a float16 model, the same on every rank: losses are multiplied by it before the backward pass, and gradients
    divided by it afterwards, so that small ones do not vanish (1710.03740, section 3.2). It has no effect for other models.

    It is halved if a gradient overflows, and that update is left out; it doubles after a number of updates without. A power of two, it
    rounds nothing.
    """

    def __init__(self, optimizer: Any = None) -> None:
        parts = [] if optimizer is None else optimizer.chained_optimizers
        # Every part of a chained optimizer has its own. They stay equal: an update is made in all parts or in none.
        self._scalers = [part.grad_scaler for part in parts if getattr(part, "grad_scaler", None) is not None]

    @property
    def is_on(self) -> bool:
        return bool(self._scalers)

    @property
    def value(self) -> float:
        """The factor; 1 if disabled."""
        return float(self._scalers[0].scale) if self._scalers else 1.0

    def back_off(self) -> bool:
        """After a gradient that is not finite: lower the scale. False if it is already at its minimum, or disabled."""
        if not self._scalers or self.value <= float(self._scalers[0].min_scale):
            return False
        for scaler in self._scalers:
            scaler.update(True)
        return True

    def state(self) -> dict[str, float] | None:
        """What a resumed run needs, JSON-able; None if disabled."""
        if not self._scalers:
            return None
        return {name: float(value) for name, value in self._scalers[0].state_dict().items()}

    def load_state(self, state: dict[str, float] | None) -> None:
        """Continue from a saved `state`. Keeps the initial scale if the saved model was not float16."""
        if state is None:
            return
        for scaler in self._scalers:
            counts = {name: int(value) for name, value in state.items() if name != "scale"}
            scaler.load_state_dict({"scale": torch.tensor([state["scale"]], dtype=torch.float), **counts})


EMA = "ema"  # key of a parameter's state


def averaging_step(optimizer: Any, decay: float) -> Any:
    """A step of Megatron-Core's (chained) optimizer, with an exponential moving average of its float32 weights (`optimizer.ema_decay`)
    unless `decay` is 0; what its `step` returns. Averages begin with the weights before the first step, in the state beside the moments."""
    held = list(_held(optimizer)) if decay else []
    starts = {weight: weight.detach().clone() for state, weight in held if EMA not in state.get(weight, {})}
    result = optimizer.step()
    for state, weight in held:
        if state.get(weight):  # without a gradient it has no moments yet, and is where it was
            state[weight].setdefault(EMA, starts.get(weight)).lerp_(weight.detach(), 1 - decay)
    return result


def make_room(optimizer: Any) -> None:
    """Averages of any contents beside the moments, to be read from a checkpoint."""
    for state, weight in _held(optimizer):
        state[weight][EMA] = torch.empty_like(weight, requires_grad=False)


@torch.no_grad()
def exchange(optimizer: Any) -> None:
    """Put the averages in the weights' place and the weights in theirs, in the optimizer and in this rank's share of the model."""
    for state, weight in _held(optimizer):
        if EMA in state.get(weight, {}):
            kept = weight.detach().clone()
            weight.copy_(state[weight][EMA])
            state[weight][EMA].copy_(kept)
    for part in (part for part in optimizer.chained_optimizers if not part.is_stub_optimizer):
        part._copy_main_params_to_model_params()


def _held(optimizer: Any) -> Iterator[tuple[dict[Tensor, Any], Tensor]]:
    """(states by weight, weight) of this rank's float32 weights."""
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            yield from ((part.optimizer.state, weight) for group in part.optimizer.param_groups for weight in group["params"])
