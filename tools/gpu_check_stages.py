"""The stages of `gpu_check.py`, each run in a process of its own: `gpu_check_stages.py STAGE FOLDER RESULT.json [tiny]`.

A stage yields (name of a figure, value) as it finds them; RESULT.json is written after each, so what a stage has measured is kept where it
fails later or runs out of time. The process loads its packages and then waits for a line on its standard input, so that a stage can load
while the one before it measures. `tiny` is for trying the check itself: everything as small as it can be.
"""

from __future__ import annotations

import importlib.util
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
from grpo_ours import check_numbers, make_algorithm
from random_model import GPU_SIZES, SIZES, random_prompts, write_model
from rollout_ours import copy_bandwidth
from sft_ours import make_algorithm as make_sft
from trl_grpo_reference import Spec as GRPOSpec
from trl_sft_reference import Spec as SFTSpec

from aligner.jobs.plan import load
from aligner.loop.loop import Clock
from aligner.loop.session import open_session
from aligner.models import build, create
from aligner.models.config import Dtype, Layers
from aligner.models.trainable import Training
from aligner.parallel import launch, platform, topology
from aligner.rollout.config import RolloutConfig
from aligner.rollout.create import create_engine
from aligner.rollout.engine import GenRequest, ListedWork
from aligner.rollout.foreign import weight_buckets
from aligner.rollout.manifest import hf_manifest
from aligner.types import PolicyBatch, SamplingConfig

ROOT = Path(__file__).resolve().parents[1]
Figures = Iterator[tuple[str, float]]
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
CLUSTER = ["cluster=dgx_h200", "cluster.gpus_per_node=1", "num_processes=1"]


class Check:
    """What a stage works with: a folder of its own, and whether everything is tiny."""

    def __init__(self, folder: Path, *, tiny: bool) -> None:
        self.folder, self.tiny = folder, tiny

    def model(self, size: str) -> list[str]:
        """Settings of the model of this size."""
        return MODELS["tiny" if self.tiny else size]

    def number(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full


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


def environment(check: Check) -> Figures:
    """The ceilings that the other figures are held against."""
    yield "copy GB/s", copy_bandwidth() / 1e9
    side = check.number(8192, 64)
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    yield "bf16 matmul TFLOP/s", 2 * side**3 / seconds(lambda: torch.matmul(a, b)) / 1e12
    host = torch.empty(check.number(2**30, 2**20), dtype=torch.uint8).pin_memory()
    device = torch.empty_like(host, device="cuda")
    yield "pinned upload GB/s", host.numel() / seconds(lambda: device.copy_(host, non_blocking=True)) / 1e9
    one = torch.zeros(1, device="cuda")

    def thousand() -> None:
        for _ in range(1000):
            one.add_(1)

    yield "launch of a kernel, us", seconds(thousand) * 1e3


def numbers(check: Check) -> Figures:
    """Loss, gradients, log-probs and samples in float32: this device against the CPU, on the same weights."""
    model = check.folder / "model"
    write_model(SIZES["small"], model, positions=256, seed=0)
    found = []
    for name, environ in (("cpu", ON_CPU), ("cuda", {})):
        output = check.folder / f"{name}.pt"
        command = [sys.executable, __file__, "numbers_side", str(model), str(output)]
        done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name}: {(done.stdout + done.stderr)[-3000:]}")
        found.append(torch.load(output, map_location="cpu", weights_only=False))
    cpu, gpu = found
    yield "loss, relative gap", abs(gpu["loss"] - cpu["loss"]) / abs(cpu["loss"])
    gaps = [float((gpu["gradients"][n] - g).norm() / g.norm().clamp_min(1e-12)) for n, g in cpu["gradients"].items()]
    yield "gradients, largest relative gap of a tensor", max(gaps)
    yield "log-probs, largest gap", float((gpu["logprobs"] - cpu["logprobs"]).abs().max())
    same = [a == b for a, b in zip(gpu["tokens"], cpu["tokens"], strict=True)]
    yield "sampled responses that are equal", sum(same) / len(same)


def numbers_side(model: str, output: str) -> None:
    """One device's numbers of `numbers`."""
    prompts = random_prompts(SIZES["small"], count=4, length=48, seed=1)
    spec = GRPOSpec(model=model, prompts=prompts, group_size=2, max_new_tokens=24, steps=1)
    settings = ["model.dtype=float32", f"model.path={model}", "algorithm.prompts_per_step=4", "algorithm.group_size=2"]
    settings += ["algorithm.mini_batch_size=8", "rollout.sampling.max_response_length=24", "rollout.max_batch_size=8"]
    settings += ["model.micro_batch_tokens=512"]
    with grpo_algorithm(settings, spec, Path(output).parent / f"{Path(output).stem}_run") as algorithm:
        loss = check_numbers(algorithm, spec)["loss"]
        chunk = algorithm.policy.chunks[0]
        gradients = {name: parameter.main_grad.float().cpu() for name, parameter in chunk.named_parameters()}
        tokens = torch.tensor(random_prompts(SIZES["small"], count=4, length=96, seed=2))
        mask = torch.ones(tokens.shape, dtype=torch.bool)
        mask[:, 0] = False
        batch = PolicyBatch(
            tokens=tokens,
            lengths=torch.full((4,), 96),
            loss_mask=mask,
            old_logprobs=None,
            advantages=torch.zeros(tokens.shape),
            ref_logprobs=None,
        )
        logprobs = algorithm.policy.logprobs(batch).cpu()
        responses = generate(algorithm.task.engine, prompts * 4, 24, temperature=1.0)
        found = {"loss": loss, "gradients": gradients, "logprobs": logprobs, "tokens": [list(r.tokens) for r in responses]}
        torch.save(found, output)


@contextmanager
def grpo_algorithm(settings: Sequence[str], spec: GRPOSpec, folder: Path) -> Iterator[Any]:
    """A GRPO algorithm on the given prompts, with the settings of a run of `aligner train grpo`."""
    config = load("grpo", [*CLUSTER, *settings, "model.packing=true", "model.share_prompts=true", f"run.directory={folder}"])
    with open_session(config, config.run, config.parallel, component="actor") as session, random_on_device():
        algorithm = make_algorithm(config, spec, session.topology)
        yield algorithm
        algorithm.task.reward.close()


def generate(engine: Any, prompts: Sequence[Sequence[int]], length: int, *, temperature: float) -> list:
    """Responses of `length` tokens in the order of the prompts."""
    requests = [GenRequest(index=i, tokens=tuple(prompt), seed=i, limit=length) for i, prompt in enumerate(prompts)]
    engine = getattr(engine, "engine", engine)
    sampling = SamplingConfig(temperature=temperature, max_response_length=length)
    return sorted((one for part in engine.generate(ListedWork(requests), sampling) for one in part), key=lambda one: one.index)


def frozen_policy(settings: Sequence[str], layout: topology.Topology) -> Any:
    """A policy in bfloat16 with random weights, without an optimizer."""
    config = load("grpo", [*CLUSTER, *settings])
    frozen = Training(optimizer=None, total_steps=1, micro_batch_size=1, temperature=1.0)
    with random_on_device():
        return create.create_policy(config.model, create.read_architecture(config.model, vocab_size=0), config.parallel, layout, frozen)


def decode(check: Check) -> Figures:
    """The built-in engine's decoding against the bandwidth limit; graphs on and off; a stream of whole tensors to another engine."""
    launch.initialize(platform.backend(), timeout_seconds=60.0, fingerprint="gpu check")
    layout = topology.initialize(topology.ParallelConfig(), seed=0)
    bandwidth = copy_bandwidth()
    prompt, short, long = (check.number(512, 16), check.number(64, 4), check.number(192, 12))
    for size, batch in (("0.5b", 32), ("1.5b", 1), ("1.5b", 32), ("1.5b", 128), ("7b", 32)):
        name, measured = f"decode {size}, batch {batch}", (size, batch)
        batch = check.number(batch, min(batch, 4))
        policy = frozen_policy(check.model(size), layout)
        architecture = policy.chunks[0].architecture
        engine = create_engine(policy, RolloutConfig(max_batch_size=batch), eos_id=-1).engine
        prompts = torch.randint(2, architecture.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(0)).tolist()
        times = {
            length: seconds(lambda n=length, e=engine, p=prompts: generate(e, p, n, temperature=1.0), 2, 1) for length in (short, long)
        }
        step = (times[long] - times[short]) / (long - short)
        weights = sum(p.numel() for chunk in policy.chunks for p in chunk.parameters())
        weights -= 0 if architecture.tied_embeddings else architecture.vocab_size * architecture.hidden_size  # looked up, not read
        per_token = 2 * architecture.num_layers * architecture.num_key_value_heads * architecture.head_dim
        limit = 2 * (weights + batch * (prompt + (short + long) / 2) * per_token) / bandwidth
        yield f"{name}: step, ms", step * 1e3
        yield f"{name}: of the bandwidth limit", limit / step
        if measured == ("1.5b", 32):
            yield from graphs_change_nothing(policy, prompts, short)
            yield from streamed(policy, bandwidth)
        engine.shutdown()
        del policy, engine
        torch.cuda.empty_cache()


def graphs_change_nothing(policy: Any, prompts: Sequence[Sequence[int]], length: int) -> Figures:
    """Samples and log-probs with decode graphs and without: bit for bit the same."""
    found = []
    for graphs in (True, False):
        engine = create_engine(policy, RolloutConfig(max_batch_size=len(prompts), cuda_graphs=graphs), eos_id=-1).engine
        found.append([(one.tokens, one.logprobs) for one in generate(engine, prompts, length, temperature=1.0)])
        engine.shutdown()
    yield "responses with and without graphs that are equal", sum(a == b for a, b in zip(*found, strict=True)) / len(prompts)


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


def planned(recipe: str, settings: Sequence[str], folder: Path) -> dict[str, Any]:
    """`aligner plan` of the same settings: bytes that torch's allocator holds at most, seconds by phase, FLOPs of a training phase."""
    output = folder / "plan.json"
    command = [sys.executable, "-m", "aligner.cli", "plan", recipe, *CLUSTER, *settings, "--json", str(output)]
    done = subprocess.run(command, env=os.environ | ON_CPU, cwd=ROOT, capture_output=True, text=True, check=False)
    if not output.exists():
        raise RuntimeError(f"aligner plan: {(done.stdout + done.stderr)[-2000:]}")
    one = next(iter(json.loads(output.read_text())["components"].values()))
    outside = ("context and communicators", "lost between blocks")
    peak = max(m["bytes"] - sum(m["parts"].get(part, 0) for part in outside) for m in one["memory"])
    times = {phase: found["total"] for phase, found in one["seconds"].items()}
    return {"peak": peak, "seconds": times, "flops": one["train_flops_per_second_per_rank"] * times["train"]}


def sft(check: Check) -> Figures:
    """Steps of SFT with torch's layers: model FLOPs utilization, time and peak memory against the plan."""
    yield from sft_steps(check, Layers.torch)


def sft_transformer_engine(check: Check) -> Figures:
    """The same with Transformer Engine's, where it imports."""
    if importlib.util.find_spec("transformer_engine") is not None:
        yield from sft_steps(check, Layers.transformer_engine)


def grpo(check: Check) -> Figures:
    """Steps of GRPO against the plan, and the gap between the engine's log-probs and the trainer's."""
    yield from grpo_steps(check, "GRPO 1.5b", [])


def sft_steps(check: Check, layers: Layers) -> Figures:
    length, rows = check.number(2048, 64), check.number(16, 4)
    settings = [*check.model("1.5b"), f"model.layers={layers.value}", "model.packing=true", f"model.micro_batch_tokens={4 * length}"]
    settings += [f"data.max_length={length}", f"algorithm.batch_size={rows}"]
    folder = check.folder / f"sft_{layers.value}"
    folder.mkdir()
    plan = planned("sft", [setting for setting in settings if not setting.startswith("model.layers")], folder)
    config = load("sft", [*CLUSTER, *settings, f"run.directory={folder}/run"])
    vocabulary = config.model.architecture.vocab_size
    tokens = torch.randint(2, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0)).tolist()
    spec = SFTSpec(model="", rows=tokens, prompt_lengths=[1] * rows, steps=check.number(4, 1), warmup_steps=2)
    with open_session(config, config.run, config.parallel, component="trainer") as session, random_on_device():
        algorithm = make_sft(config, spec, session.topology)
        torch.cuda.reset_peak_memory_stats()
        step = timed_steps(algorithm, spec.warmup_steps, spec.steps, ("train",))["train"]
    yield from against_plan(f"SFT 1.5b, {layers.value} layers", plan, {"train": step})


def grpo_steps(check: Check, name: str, more: Sequence[str]) -> Figures:
    prompt, response = check.number(256, 16), check.number(512, 16)
    settings = [*check.model("1.5b"), *more, "model.packing=true", "model.share_prompts=true", f"data.max_prompt_length={prompt}"]
    settings += [f"model.micro_batch_tokens={check.number(12288, 128)}", f"rollout.sampling.max_response_length={response}"]
    settings += ["algorithm.prompts_per_step=8", "algorithm.group_size=8", "algorithm.mini_batch_size=64", "rollout.max_batch_size=64"]
    folder = check.folder / name.replace(" ", "_")
    folder.mkdir()
    plan = planned("grpo", [*settings, "algorithm.kl_coef=0.04"], folder)
    vocabulary = load("grpo", [*CLUSTER, *settings]).model.architecture.vocab_size
    prompts = torch.randint(2, vocabulary, (8, prompt), generator=torch.Generator().manual_seed(0)).tolist()
    spec = GRPOSpec(model="", prompts=prompts, group_size=8, max_new_tokens=response, steps=check.number(2, 1), warmup_steps=1)
    with grpo_algorithm([*settings, "algorithm.kl_coef=0.04"], spec, folder / "run") as algorithm:
        torch.cuda.reset_peak_memory_stats()
        phases = timed_steps(algorithm, spec.warmup_steps, spec.steps, ("generate", "ref_logprobs", "train"))
        yield from against_plan(name, plan, phases)
        if not more:
            yield "bfloat16 gap of engine and trainer, mean", phases["gap"]
            yield "bfloat16 gap of engine and trainer, largest", phases["largest gap"]


def timed_steps(algorithm: Any, warm: int, steps: int, phases: Sequence[str]) -> dict[str, float]:
    """Median seconds of phases of a step; of rollouts also the gap of log-probs between engine and trainer."""
    found: list[Mapping[str, float]] = []
    for number in range(1, warm + steps + 1):
        clock = Clock()
        metrics = algorithm.step(number, clock).metrics
        platform.synchronize()
        found.append({**metrics, **clock.seconds})
    timed = found[warm:]
    medians = {phase: statistics.median(one[f"time/{phase}"] for one in timed) for phase in phases}
    if "rollout/logprob_gap" in timed[-1]:
        medians |= {"gap": timed[-1]["rollout/logprob_gap"], "largest gap": timed[-1]["rollout/logprob_gap_max"]}
    return medians


def against_plan(name: str, plan: Mapping[str, Any], phases: Mapping[str, float]) -> Figures:
    for phase, planned_seconds in plan["seconds"].items():
        if phase in phases:
            yield f"{name}: {phase}, s", phases[phase]
            yield f"{name}: {phase}, of the planned time", phases[phase] / planned_seconds
    yield f"{name}: MFU of training", plan["flops"] / phases["train"] / PEAK_FLOPS
    yield f"{name}: peak memory, of the plan's", torch.cuda.max_memory_allocated() / plan["peak"]


def offload(check: Check) -> Figures:
    """The same GRPO steps with the optimizer's state and the engine's memory in host memory where they are not needed."""
    yield from grpo_steps(check, "GRPO 1.5b with offload", ["optimizer.offload=true", "rollout.offload=true"])


def layouts(check: Check) -> Figures:
    """Two ranks that share the GPU, collectives over the host: losses of SFT in float32 against one rank's."""
    data = check.folder / "sft.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "response": str((a + b) % 10)}) + "\n" for a in range(10) for b in range(3)))
    losses = {}
    for name, settings in {"one": [], "tp 2": ["parallel.tp=2", "parallel.sequence_parallel=true"], "pp 2": ["parallel.pp=2"]}.items():
        ranks = 1 if name == "one" else 2
        command = [f"data.train={data}", "model.dtype=float32", "algorithm.batch_size=8", "data.max_length=16", "model.micro_batch_size=2"]
        command += [f"num_processes={ranks}", f"run.ranks_per_gpu={ranks}", "loop.max_steps=4", *settings, *digits(hidden=64)]
        run = recipe("sft", command, check.folder / name.replace(" ", "_"))
        losses[name] = [one["sft/loss"] for one in run]
        if name != "one":
            gaps = [abs(a - b) / abs(b) for a, b in zip(losses[name], losses["one"], strict=True)]
            yield f"{name} on one GPU, largest relative gap of a loss", max(gaps)


def ppo(check: Check) -> Figures:
    """PPO with its servers on one GPU, all components taking turns; it learns to say what is rewarded."""
    steps = check.number(20, 2)
    settings = ["placement=colocated", f"loop.max_steps={steps}", "loop.save_every=0", "guard.learnt_nothing=warn"]
    if servers := os.environ.get("GPU_CHECK_SERVERS"):
        settings += [f"critic.environment={servers}", f"reward.environment={servers}"]
    run = recipe("ppo_smoke_cpu", [*settings, *digits(hidden=256)], check.folder / "run")
    yield "PPO: step, s", statistics.median(one["time/step"] for one in run[1:])
    yield "PPO: reward of the last steps", statistics.mean(one["rollout/reward"] for one in run[-3:])


def digits(*, hidden: int) -> list[str]:
    """A small model over the tokens of the examples' sums."""
    sizes = {"num_layers": 2, "hidden_size": hidden, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 2 * hidden}
    sizes |= {"vocab_size": 18, "max_position_embeddings": 32}
    model = [f"model.architecture.{name}={size}" for name, size in sizes.items()]
    return [*model, "model.tokenizer=examples/nlp/data/digits/tokenizer", "model.make_vocab_divisible_by=2", "run.export_hf=false"]


def recipe(name: str, settings: Sequence[str], directory: Path) -> list[dict[str, float]]:
    """The metrics of a run that `aligner launch local` started."""
    common = ["logging.tensorboard=false", "logging.progress=plain", "cluster.gpus_per_node=1", f"run.directory={directory}"]
    command = [sys.executable, "-m", "aligner.cli", "launch", "local", name, "cluster=dgx_h200", *common, *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-3000:]}")
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def trl(check: Check) -> Figures:
    """A GRPO step of TRL on the same weights, prompts and lengths: autocast to bfloat16 over float32 weights there, as ours keeps them."""
    if importlib.util.find_spec("trl") is None:
        return
    from sides import run_side

    size, prompt, response = SIZES["small"] if check.tiny else GPU_SIZES["0.5b"], check.number(128, 8), check.number(256, 8)
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


def vllm(check: Check) -> Figures:
    """vLLM's generation on the same weights and prompts, where it imports."""
    if importlib.util.find_spec("vllm") is None:
        return
    from sides import run_side

    size, prompt, response, batch = SIZES["small"] if check.tiny else GPU_SIZES["0.5b"], check.number(512, 8), check.number(256, 8), 32
    write_model(size, check.folder / "model", positions=prompt + response, seed=0, dtype="bfloat16")
    prompts = random_prompts(size, count=batch, length=prompt, seed=1)
    case = {"lengths": "fixed", "batch": batch, "prompts": prompts, "limits": [response] * batch}
    spec = {"model": str(check.folder / "model"), "cases": [case], "greedy": prompts[:2], "greedy_length": 8, "repeats": 2}
    spec_file, result = check.folder / "spec.json", check.folder / "result.json"
    spec_file.write_text(json.dumps(spec | {"device": "cuda", "dtype": "bfloat16"}))
    sides = ("rollout_ours.py", "vllm_rollout_reference.py")
    found = [run_side(Path(sys.executable), side, spec_file, result, threads=1, device="cuda")["cases"][0]["median"] for side in sides]
    yield "vLLM / ours: generation 0.5b, batch 32", found[1]["wall_seconds"] / found[0]["wall_seconds"]


def tensorrt_llm(check: Check) -> Figures:
    """TensorRT-LLM in its own process, refitted over CUDA IPC, decoding like transformers, asleep and awake; where it imports."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        return
    model = check.folder / "model"
    write_model(SIZES["small"] if check.tiny else GPU_SIZES["0.5b"], model, positions=256, seed=0, dtype="bfloat16")
    command = [sys.executable, str(Path(__file__).with_name("tensorrt_llm_smoke.py")), str(model), "--sleep"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
    yield "TensorRT-LLM: refits, decodes and sleeps", 1.0


STAGES = {
    stage.__name__: stage
    for stage in (environment, numbers, decode, sft, sft_transformer_engine, grpo, offload, layouts, ppo, trl, vllm, tensorrt_llm)
}


def main() -> None:
    if sys.argv[1] == "numbers_side":
        numbers_side(*sys.argv[2:4])
        return
    name, folder, result = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    sys.stdin.readline()
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no GPU")
    found: dict[str, float] = {}
    for figure, value in STAGES[name](Check(folder, tiny="tiny" in sys.argv[4:])):
        found[figure] = value
        written = result.with_suffix(".part")
        written.write_text(json.dumps(found))
        os.replace(written, result)


if __name__ == "__main__":
    main()
