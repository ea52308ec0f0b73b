"""Stages of Transformer Engine's layers and of TRL: each beside ours on the same weights."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_stages.common import Check, Figures, free, loaded, random_tokens, session
from gpu_stages.speed import sft_steps
from gpu_stages.training import make
from random_model import GPU_SIZES, SIZES, random_prompts, write_model
from sides import run_side
from torch import Tensor
from trl_grpo_reference import Spec as GRPOSpec
from trl_sft_reference import Spec as SFTSpec

from aligner.data.collate import supervised_batch
from aligner.losses.sft import sft_loss
from aligner.models.config import Dtype, Layers
from aligner.models.modules.chunk import global_name
from aligner.models.training import forward

# Settings of `model` by what is compared; a test puts others in their place, where there is no Transformer Engine.
SIDES: dict[str, dict[str, Any]] = {
    "torch": {"layers": Layers.torch},
    "transformer_engine": {"layers": Layers.transformer_engine},
    "fp8": {"layers": Layers.transformer_engine, "fp8": True},
}


def transformer_engine(check: Check) -> Figures:
    """Transformer Engine's layers against torch's on packed rows of the same weights: log-probs and each gradient; fp8; then its speed."""
    length, rows = check.number(1024, 64), check.number(8, 4)
    settings = [*check.model("0.5b"), "model.packing=true", f"model.micro_batch_tokens={4 * length}", f"data.max_length={length}"]
    config = loaded("sft", [*settings, f"algorithm.batch_size={rows}"], check.folder / "run")
    tokens = [row[: length - 11 * number] for number, row in enumerate(random_tokens(config.model.architecture.vocab_size, rows, length))]
    spec = SFTSpec(model="", rows=tokens, prompt_lengths=[1] * rows, steps=1)
    found: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
    weights: dict[str, Tensor] = {}
    with session(config, component="trainer") as layout:
        for name, changes in SIDES.items():
            algorithm = make(replace(config, model=replace(config.model, **changes)), spec, layout)
            found[name] = numbers_of(algorithm, weights)
            del algorithm
            free()
            if name != "torch":
                yield from compared(name, found[name], found["torch"])
    yield from sft_steps(check, SIDES["transformer_engine"]["layers"], "Transformer Engine's")


def numbers_of(algorithm: Any, weights: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """(log-probs of the rows' tokens, each gradient by its global name), on the CPU. `weights` are those of the first that was asked."""
    policy, chunk = algorithm.model, algorithm.model.chunks[0]
    parameters = {global_name(chunk, name): parameter for name, parameter in chunk.named_parameters()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights.setdefault(name, parameter.detach().clone()))
    batch = supervised_batch(algorithm.train, 0)
    logprobs = policy.logprobs(batch)[batch.loss_mask]
    model = policy.model
    for runner in model.runners:
        runner.zero_grad_buffer()
    parts = model._micro_batches(batch, model._plan(batch))
    forward.forward_backward(model.runners, parts, policy._outputs, sft_loss, counts=True)
    return logprobs, {name: parameter.main_grad.float().cpu() for name, parameter in parameters.items()}


def compared(name: str, ours: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> Figures:
    if ours[1].keys() != wanted[1].keys():
        raise RuntimeError(f"{name} has other parameters: {sorted(ours[1].keys() ^ wanted[1].keys())[:6]}")
    gap = (ours[0] - wanted[0]).abs()
    yield f"{name} against torch: log-probs, mean gap", float(gap.mean())
    yield f"{name} against torch: log-probs, largest gap", float(gap.max())
    cosines = {one: cosine(gradient, wanted[1][one]) for one, gradient in ours[1].items()}
    least = min(cosines, key=cosines.__getitem__)
    yield f"{name} against torch: least cosine of a gradient", cosines[least]
    yield f"{name}: that is of {least}"


def cosine(a: Tensor, b: Tensor) -> float:
    """Of two gradients; 1 where both are zero."""
    sizes = float(a.norm()), float(b.norm())
    return (
        float(torch.dot(a.flatten().double(), b.flatten().double())) / (sizes[0] * sizes[1]) if all(sizes) else float(sizes[0] == sizes[1])
    )


def trl(check: Check) -> Figures:
    """A GRPO step of TRL on the same weights, prompts and lengths: autocast to bfloat16 over float32 weights there, as ours keeps them."""
    size, prompt, response = SIZES["small"] if check.tiny else GPU_SIZES["0.5b"], check.number(128, 8), check.number(128, 8)
    write_model(size, check.folder / "model", positions=prompt + response, seed=0)
    spec = GRPOSpec(
        model=str(check.folder / "model"),
        prompts=random_prompts(size, count=8, length=prompt, seed=1),
        group_size=8,
        max_new_tokens=response,
        steps=check.number(2, 1),
        micro_batch_size=16,
        dtype=Dtype.bfloat16.value,
        device="cuda",
    )
    spec_file, result = check.folder / "spec.json", check.folder / "result.json"
    spec_file.write_text(json.dumps({name: getattr(spec, name) for name in spec.__slots__}))
    sides = ("grpo_ours.py", "trl_grpo_reference.py")
    ours, theirs = (run_side(Path(sys.executable), side, spec_file, result, threads=1, device="cuda") for side in sides)
    for phase in ("total", "generation", "train"):
        yield f"TRL / ours: {phase}", theirs["median"][phase]["wall_seconds"] / ours["median"][phase]["wall_seconds"]
