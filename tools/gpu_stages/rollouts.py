"""Stages that sample: the gap between engine and trainer with graphs, shared prompts and offload; vLLM and TensorRT-LLM as engines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_stages.common import (
    Check,
    Figures,
    free,
    frozen_policy,
    gaps,
    generate,
    loaded,
    random_on_device,
    random_tokens,
    session,
    torch_layers,
)
from grpo_ours import make_algorithm
from random_model import GPU_SIZES, SIZES, write_model
from trl_grpo_reference import Spec

from aligner.loop.loop import Clock
from aligner.rollout.config import RolloutConfig
from aligner.rollout.create import create_engine
from aligner.types import Prompt

NUMBERS = ("policy/loss", "rollout/reward", "rollout/logprob_gap", "rollout/logprob_gap_max")  # of forward passes, which repeat their bits


def gap(check: Check) -> Figures:
    """A GRPO step of 0.5B in bfloat16: engine against trainer, prompts shared and not; graphs and offload change no bit."""
    prompt, response = check.number(128, 16), check.number(128, 12)
    settings = [*check.model("0.5b"), *torch_layers(), "model.packing=true", f"model.micro_batch_tokens={8 * (prompt + response)}"]
    settings += [f"data.max_prompt_length={prompt}", f"rollout.sampling.max_response_length={response}", "rollout.max_batch_size=32"]
    settings += ["algorithm.prompts_per_step=4", "algorithm.group_size=8", "algorithm.mini_batch_size=32", "algorithm.kl_coef=0.0"]
    config = loaded("grpo", settings, check.folder / "run")
    prompts = random_tokens(config.model.architecture.vocab_size, 4, prompt)
    spec = Spec(model="", prompts=prompts, group_size=8, max_new_tokens=response, beta=0.0)
    found = {}
    with session(config) as layout:
        for name, changes in {"shared": True, "separate": False}.items():
            one = replace(config, model=replace(config.model, share_prompts=changes))
            with grpo(one, spec, layout) as algorithm:
                found[name] = algorithm.step(1, Clock()).metrics
                if name == "shared":
                    yield from graphs_change_nothing(algorithm.policy, prompts * 2, response)
                    awake = torch.cuda.memory_allocated()
            del algorithm
            free()
            yield f"gap with {name} prompts, mean", found[name]["rollout/logprob_gap"]
            yield f"gap with {name} prompts, largest", found[name]["rollout/logprob_gap_max"]
        offloaded = replace(config, model=replace(config.model, share_prompts=True))
        offloaded.optimizer, offloaded.rollout = replace(config.optimizer, offload=True), replace(config.rollout, offload=True)
        with grpo(offloaded, spec, layout) as algorithm:
            found["offload"] = algorithm.step(1, Clock()).metrics
            algorithm.policy.sleep()
            algorithm.task.engine.sleep()
            free()
            yield (
                "offload: numbers of a step that are equal",
                sum(found["offload"][n] == found["shared"][n] for n in NUMBERS) / len(NUMBERS),
            )
            yield "offload: device memory asleep, of awake", torch.cuda.memory_allocated() / awake
            locked = algorithm.policy.model.host._memory._locked
            yield "offload: page-locked host memory, GiB", sum(storage.nbytes() for storage in locked) / 2**30


@contextmanager
def grpo(config: Any, spec: Spec, layout: Any) -> Any:
    """A GRPO algorithm on the prompts of `spec`, with random weights."""
    with random_on_device():
        algorithm = make_algorithm(config, spec, layout)
    try:
        yield algorithm
    finally:
        algorithm.task.judges.reward.close()
        algorithm.task.engine.shutdown()


def graphs_change_nothing(policy: Any, prompts: Sequence[Sequence[int]], length: int) -> Figures:
    """Samples and log-probs with decode graphs and without: bit for bit the same."""
    found = []
    for graphs in (True, False):
        engine = create_engine(policy, RolloutConfig(max_batch_size=len(prompts), cuda_graphs=graphs), eos_id=-1)
        found.append([(one.tokens, one.logprobs) for one in generate(engine, prompts, length, temperature=1.0)])
        engine.shutdown()
    yield "responses with and without graphs that are equal", sum(a == b for a, b in zip(*found, strict=True)) / len(prompts)


def vllm(check: Check) -> Figures:
    """`rollout.engine=vllm`: refit, sample, gap; the same with all weights negated; asleep, awake and with the first weights again."""
    prompt, response, count = check.number(128, 16), check.number(64, 8), check.number(32, 4)
    settings = [*check.model("0.5b"), *torch_layers(), f"rollout.sampling.max_response_length={response}", "rollout.engine=vllm"]
    settings += [f"rollout.max_batch_size={count}", "rollout.offload=true", f"rollout.kv_cache_tokens={count * (prompt + response + 128)}"]
    settings += [f"model.seq_length={check.number(512, 128)}", f"data.max_prompt_length={prompt}"]
    config = loaded("grpo", settings, check.folder / "run")
    with session(config) as layout:
        policy = frozen_policy(config, layout)
        rows = random_tokens(policy.chunks[0].architecture.vocab_size, count, prompt)
        prompts = [Prompt(id=number, tokens=tuple(row), source=f"prompt {number}") for number, row in enumerate(rows)]
        engine = create_engine(policy, config.rollout, eos_id=-1)
        yield f"{engine.capabilities.name}: log-probs are {engine.capabilities.logprobs.value}"

        def sampled(version: int) -> tuple[list[Any], float]:
            engine.refit(version)
            engine.wake()
            awake = torch.cuda.mem_get_info()[0]
            rollouts = [one for part in engine.generate(prompts, list(range(count))) for one in part]
            engine.sleep()
            free()
            return sorted(rollouts, key=lambda one: one.prompt.id), (torch.cuda.mem_get_info()[0] - awake) / 2**30

        before: list[tuple[int, ...]] = []
        for version, name in enumerate(("first weights", "negated", "first weights again"), 1):
            if version > 1:
                negate(policy)
            rollouts, freed = sampled(version)
            tokens = [one.response for one in rollouts]
            mean, largest = gaps(policy, rows, [(one.response, one.logprobs) for one in rollouts])
            yield f"vLLM, {name}: gap to the trainer, mean", mean
            yield f"vLLM, {name}: gap to the trainer, largest", largest
            before = before or tokens
        yield "vLLM: responses of the first weights that come again", sum(a == b for a, b in zip(before, tokens, strict=True)) / count
        yield "vLLM: device memory that sleep gives back, GiB", freed
        engine.shutdown()


@torch.no_grad()
def negate(policy: Any) -> None:
    """Change every weight, so that an engine that has kept one is noticed."""
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            parameter.neg_()


def tensorrt_llm(check: Check) -> Figures:
    """TensorRT-LLM in its own process, refitted over CUDA IPC, decoding like transformers, asleep and awake."""
    model = check.folder / "model"
    write_model(SIZES["small"] if check.tiny else GPU_SIZES["0.5b"], model, positions=256, seed=0, dtype="bfloat16")
    command = [sys.executable, str(Path(__file__).parents[1] / "tensorrt_llm_smoke.py"), str(model), "--sleep"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    yield from (line for line in done.stdout.splitlines() if line.startswith(("ok ", "FAIL ")))
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
    yield "TensorRT-LLM: refits, decodes and sleeps", 1.0
