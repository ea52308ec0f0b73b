"""Stages of speed: decoding against the memory's bandwidth, steps of SFT and GRPO against the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from gpu_stages.common import (
    Check,
    Figures,
    against_plan,
    free,
    frozen_policy,
    generate,
    loaded,
    planned,
    random_on_device,
    random_tokens,
    seconds,
    session,
    timed_steps,
)
from gpu_stages.rollouts import grpo
from rollout_ours import copy_bandwidth
from sft_ours import make_algorithm as make_sft
from trl_grpo_reference import Spec as GRPOSpec
from trl_sft_reference import Spec as SFTSpec

from aligner.models.config import Layers
from aligner.parallel.topology import Topology
from aligner.rollout.config import RolloutConfig
from aligner.rollout.create import create_engine
from aligner.rollout.engine.foreign import weight_buckets
from aligner.rollout.engine.manifest import hf_manifest


def speed(check: Check) -> Figures:
    """The 1.5B model: decoding, a stream of whole tensors to another engine, and SFT with torch's layers against the plan."""
    config = loaded("grpo", check.model("1.5b"), check.folder / "decode")
    with session(config) as layout:
        yield from decoded(check, config, layout, "1.5b", (1, 32), streams=True)
        free()
    yield from sft_steps(check, Layers.torch, "torch's")


def decode(check: Check) -> Figures:
    """Other models and batches."""
    sizes = {"0.5b": (32,), "1.5b": (128,), "7b": (32,)}
    configs = {size: loaded("grpo", check.model(size), check.folder / "decode") for size in sizes}
    with session(configs["0.5b"]) as layout:
        for size, batches in sizes.items():
            yield from decoded(check, configs[size], layout, size, batches)
            free()


def decoded(check: Check, config: Any, layout: Topology, size: str, batches: Sequence[int], *, streams: bool = False) -> Figures:
    """Seconds of a decode step of a model of this size, from two lengths of response, against the bandwidth limit."""
    bandwidth = copy_bandwidth()
    prompt, short, long = (check.number(512, 16), check.number(64, 4), check.number(192, 12))
    policy = frozen_policy(config, layout)
    architecture = policy.chunks[0].architecture
    for batch in batches:
        name, rows = f"decode {size}, batch {batch}", check.number(batch, min(batch, 4))
        engine = create_engine(policy, RolloutConfig(max_batch_size=rows), eos_id=-1)
        prompts = random_tokens(architecture.vocab_size, rows, prompt)
        times = {
            length: seconds(lambda n=length, e=engine, p=prompts: generate(e, p, n, temperature=1.0), check.number(2, 1), 1)
            for length in (short, long)
        }
        step = (times[long] - times[short]) / (long - short)
        weights = sum(p.numel() for chunk in policy.chunks for p in chunk.parameters())
        weights -= 0 if architecture.tied_embeddings else architecture.vocab_size * architecture.hidden_size  # looked up, not read
        per_token = 2 * architecture.num_layers * architecture.num_key_value_heads * architecture.head_dim
        limit = 2 * (weights + rows * (prompt + (short + long) / 2) * per_token) / bandwidth
        yield f"{name}: step, ms", step * 1e3
        yield f"{name}: tokens/s", rows / step
        yield f"{name}: of the bandwidth limit", limit / step
        engine.shutdown()
    if streams:
        yield from streamed(policy, bandwidth)


def streamed(policy: Any, bandwidth: float) -> Figures:
    """Whole tensors under Hugging Face names into another engine's buffers, as a part of the speed of a copy."""
    chunk = policy.chunks[0]
    manifest = hf_manifest(chunk.architecture, chunk.config.params_dtype)
    buffers = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda") for name, tensor in manifest.tensors.items()}

    def stream() -> None:
        for bucket in weight_buckets(policy.export_weights(), bucket_bytes=256 * 2**20, manifest=manifest):
            for name, tensor in bucket:
                buffers[name].copy_(tensor)

    yield "refit by whole tensors, of a copy's speed", 2 * manifest.num_bytes / bandwidth / seconds(stream, 2, 1)


def sft_steps(check: Check, layers: Layers, whose: str) -> Figures:
    """Steps of SFT with these layers: model FLOPs utilization, time and peak memory against the plan."""
    length, rows = check.number(2048, 64), check.number(16, 4)
    settings = [*check.model("1.5b"), "model.packing=true", f"model.micro_batch_tokens={4 * length}"]
    settings += [f"data.max_length={length}", f"algorithm.batch_size={rows}"]
    folder = check.folder / f"sft_{layers.value}"
    folder.mkdir()
    plan = planned("sft", settings, folder)
    config = loaded("sft", [*settings, f"model.layers={layers.value}"], folder / "run")
    tokens = random_tokens(config.model.architecture.vocab_size, rows, length)
    spec = SFTSpec(model="", rows=tokens, prompt_lengths=[1] * rows, steps=check.number(4, 1), warmup_steps=check.number(2, 0))
    with session(config, component="trainer") as layout, random_on_device():
        algorithm = make_sft(config, spec, layout)
        torch.cuda.reset_peak_memory_stats()
        step = timed_steps(algorithm, spec.warmup_steps, spec.steps, ("train",))["train"]
    yield f"SFT 1.5b, {whose} layers: tokens/s", rows * length / step
    yield from against_plan(f"SFT 1.5b, {whose} layers", plan, {"train": step})


def grpo_speed(check: Check) -> Figures:
    """Steps of GRPO with the 1.5B model against the plan, and with offload."""
    prompt, response = check.number(256, 16), check.number(512, 16)
    settings = [*check.model("1.5b"), "model.packing=true", "model.share_prompts=true", f"data.max_prompt_length={prompt}"]
    settings += [f"model.micro_batch_tokens={check.number(12288, 128)}", f"rollout.sampling.max_response_length={response}"]
    settings += ["algorithm.prompts_per_step=8", "algorithm.group_size=8", "algorithm.mini_batch_size=64", "rollout.max_batch_size=64"]
    settings += ["algorithm.kl_coef=0.04"]
    plan = planned("grpo", settings, check.folder)
    config = loaded("grpo", settings, check.folder / "run")
    prompts = random_tokens(config.model.architecture.vocab_size, 8, prompt)
    spec = GRPOSpec(
        model="", prompts=prompts, group_size=8, max_new_tokens=response, steps=check.number(2, 1), warmup_steps=check.number(1, 0)
    )
    away = replace(config, optimizer=replace(config.optimizer, offload=True), rollout=replace(config.rollout, offload=True))
    found = {}
    with session(config) as layout:
        for name, one in {"GRPO 1.5b": config, "GRPO 1.5b with offload": away}.items():
            with grpo(one, spec, layout) as algorithm:
                torch.cuda.reset_peak_memory_stats()
                found[name] = timed_steps(algorithm, spec.warmup_steps, spec.steps, ("generate", "ref_logprobs", "train"))
                if one is config:
                    yield from against_plan(name, plan, found[name])
            del algorithm
            free()
    plain, moved = found.values()
    yield from ((f"GRPO 1.5b with offload: {phase}, of without", moved[phase] / plain[phase]) for phase in ("train", "generate"))
