"""What the stages of `gpu_check.py` share: sizes, sessions, seconds, the plan, and runs of `aligner launch local`."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from aligner.commands.plan.command import load
from aligner.loop.loop import Clock
from aligner.models import create
from aligner.models.config import Layers
from aligner.models.modules import build
from aligner.models.training.trainable import Training
from aligner.parallel import platform, topology
from aligner.parallel.mcore import parallel_state
from aligner.rollout.engine import GenRequest, ListedWork
from aligner.run.session import open_session
from aligner.types import PolicyBatch, SamplingConfig

ROOT = Path(__file__).resolve().parents[2]
Figures = Iterator[tuple[str, float] | str]  # (name of a figure, value), or a line for the log and the table
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "SIMULATED_CUDA": "0"}  # of a process that is to see no GPU, simulated ones (tests) neither
PEAK_FLOPS = 989.5e12  # bfloat16, dense: H100 and H200 SXM data sheets; MFU is of this
QWEN = [f"model.architecture.{name}" for name in ("family=qwen2", "qkv_bias=true", "vocab_size=151936", "max_position_embeddings=32768")]
MODELS = {
    "0.5b": [*QWEN, *(f"model.architecture.{name}" for name in ("num_layers=24", "hidden_size=896", "ffn_hidden_size=4864"))]
    + ["model.architecture.num_attention_heads=14", "model.architecture.num_key_value_heads=2"],
    "1.5b": ["model=qwen2_5_1_5b"],
    "7b": ["model=qwen2_5_7b"],
    "tiny": [*QWEN[:2], "model.architecture.vocab_size=512", "model.architecture.max_position_embeddings=512", "model.seq_length=512"]
    + [f"model.architecture.{name}" for name in ("num_layers=2", "hidden_size=64", "ffn_hidden_size=128", "num_attention_heads=4")]
    + ["model.architecture.num_key_value_heads=2"],
}


class Check:
    """What a stage works with: a folder of its own, and whether everything is tiny."""

    def __init__(self, folder: Path, *, tiny: bool) -> None:
        self.folder, self.tiny = folder, tiny

    def model(self, size: str) -> list[str]:
        """Settings of the model of this size."""
        return MODELS["tiny" if self.tiny else size]

    def number(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full


def cluster() -> list[str]:
    """The cluster of the plan: one GPU of the kind that is here."""
    is_large = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > 100 * 2**30
    kind = "dgx_h200" if is_large else "dgx_h100"
    return [f"cluster={kind}", "cluster.gpus_per_node=1"]


def seconds(action: Callable[[], object], repeats: int = 5, warm: int = 2) -> float:
    """Median wall seconds of an action, until the device has done it."""
    found = []
    for _ in range(warm + repeats):
        platform.synchronize()
        started = time.perf_counter()
        action()
        platform.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found[warm:])


def relative(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference, of the norm of what is wanted; both may be anywhere, in any type."""
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-12))


def free() -> None:
    """Give back the device memory of what is referred to no more."""
    gc.collect()
    platform.synchronize()
    platform.release_cached()


def is_deterministic() -> None:
    """From now on the kernels of this process repeat their bits. Before anything is computed."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)


@contextmanager
def random_on_device() -> Iterator[None]:
    """Random weights are drawn on the device; a run draws them on the host, the same for every layout: a minute for 7B."""

    def fill(chunks: Sequence[torch.nn.Module], seed: int) -> None:
        torch.manual_seed(seed)
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                with torch.no_grad():
                    parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(float("norm" in name))

    with mock.patch.object(build, "initialise", fill):
        yield


def loaded(recipe: str, settings: Sequence[str], folder: Path, *, ranks: int = 1) -> Any:
    """The composed config of a run on this GPU."""
    return load(recipe, [*cluster(), f"num_processes={ranks}", *settings, f"run.directory={folder}"])


@contextmanager
def session(config: Any, *, component: str = "actor") -> Iterator[topology.Topology]:
    """The process group and layout of a run of these settings, set up as a run sets them up. One after another in a process."""
    with open_session(config, config.run, config.parallel, component=component) as opened:
        yield opened.topology
        parallel_state.destroy_model_parallel()


@contextmanager
def relaid(parallel: topology.ParallelConfig) -> Iterator[topology.Topology]:
    """In the block the session's ranks have another layout, with its seed."""
    parallel_state.destroy_model_parallel()
    yield topology.initialize(parallel, seed=1)


def frozen_policy(config: Any, layout: topology.Topology) -> Any:
    """A policy with random weights, without an optimizer."""
    frozen = Training(
        optimizer=None,
        micro_batch_size=1,
        micro_batch_tokens=config.model.micro_batch_tokens,
        packing=config.model.packing,
    )
    with random_on_device():
        return create.create_policy(config.model, create.read_architecture(config.model, vocab_size=0), config.parallel, layout, frozen)


def random_tokens(vocabulary: int, rows: int, length: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(2, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(engine: Any, prompts: Sequence[Sequence[int]], length: int, *, temperature: float) -> list:
    """Responses of `length` tokens in the order of the prompts."""
    requests = [GenRequest(index=i, tokens=tuple(prompt), seed=i, limit=length) for i, prompt in enumerate(prompts)]
    engine = getattr(engine, "engine", engine)
    sampling = SamplingConfig(temperature=temperature, max_response_length=length)
    return sorted((one for part in engine.generate(ListedWork(requests), sampling) for one in part), key=lambda one: one.index)


def batch_of(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> PolicyBatch:
    """Rows of a prompt and its response, of which the response's tokens count."""
    rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    longest = max(map(len, rows))
    tokens, mask = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        mask[number, len(prompts[number]) : len(row)] = True
    return PolicyBatch(
        tokens=tokens,
        lengths=torch.tensor(list(map(len, rows))),
        loss_mask=mask,
        old_logprobs=None,
        advantages=torch.zeros(tokens.shape),
        ref_logprobs=None,
    )


def gaps(policy: Any, prompts: Sequence[Sequence[int]], responses: Sequence[tuple[Any, Any]]) -> tuple[float, float]:
    """(mean, largest) difference of the log-probs of an engine's (tokens, log-probs) and those of the policy."""
    batch = batch_of(prompts, [tokens for tokens, _ in responses])
    trained = policy.logprobs(batch)[batch.loss_mask]
    differences = (trained - torch.tensor([value for _, logprobs in responses for value in logprobs])).abs()
    return float(differences.mean()), float(differences.max())


def planned(recipe: str, settings: Sequence[str], folder: Path) -> dict[str, Any]:
    """`aligner plan` of the same settings: bytes that torch's allocator holds at most, seconds by phase, FLOPs of a training phase.

    Without what a job does between its phases, which is not done here.
    """
    output = folder / "plan.json"
    command = [sys.executable, "-m", "aligner.cli", "plan", recipe, *cluster(), "num_processes=1", *settings, "--json", str(output)]
    done = subprocess.run(command, env=os.environ | ON_CPU, cwd=ROOT, capture_output=True, text=True, check=False)
    if not output.exists():
        raise RuntimeError(f"aligner plan: {(done.stdout + done.stderr)[-2000:]}")
    one = next(iter(json.loads(output.read_text())["components"].values()))
    outside = ("context and communicators", "lost between blocks")
    peak = max(m["bytes"] - sum(m["parts"].get(part, 0) for part in outside) for m in one["memory"])
    times = {phase: found["total"] - found["parts"].get("changes of phase", 0.0) for phase, found in one["seconds"].items()}
    flops = one["train_flops_per_second_per_rank"] * one["seconds"]["train"]["total"]
    return {"peak": peak, "seconds": times, "flops": flops}


def timed_steps(algorithm: Any, warm: int, steps: int, phases: Sequence[str]) -> dict[str, float]:
    """Median seconds of phases of a step."""
    found: list[Mapping[str, float]] = []
    for number in range(1, warm + steps + 1):
        clock = Clock()
        algorithm.step(number, clock)
        platform.synchronize()
        found.append(dict(clock.seconds))
    return {phase: statistics.median(one[f"time/{phase}"] for one in found[warm:]) for phase in phases}


def against_plan(name: str, plan: Mapping[str, Any], phases: Mapping[str, float]) -> Figures:
    for phase, planned_seconds in plan["seconds"].items():
        if phase in phases:
            yield f"{name}: {phase}, s", phases[phase]
            yield f"{name}: {phase}, of the planned time", phases[phase] / planned_seconds
    yield f"{name}: MFU of training", plan["flops"] / phases["train"] / PEAK_FLOPS
    yield f"{name}: peak memory, of the plan's", torch.cuda.max_memory_allocated() / plan["peak"]


def torch_layers() -> list[str]:
    return [f"model.layers={Layers.torch.value}"]


def digits(*, hidden: int) -> list[str]:
    """A small model over the tokens of the examples' sums."""
    sizes = {"num_layers": 2, "hidden_size": hidden, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 2 * hidden}
    sizes |= {"vocab_size": 18, "max_position_embeddings": 32}
    model = [f"model.architecture.{name}={size}" for name, size in sizes.items()]
    return [*model, "model.tokenizer=examples/nlp/data/digits/tokenizer", "model.make_vocab_divisible_by=2", "run.export_hf=false"]
