"""Stages of what a GPU computes: the machine and its ceilings, float32 against the CPU, single kernels against float32."""

from __future__ import annotations

import os
import platform as machine
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from gpu_stages.common import ON_CPU, Check, Figures, generate, loaded, relative, seconds, session
from grpo_ours import check_numbers, make_algorithm
from random_model import SIZES, random_prompts, write_model
from rollout_ours import copy_bandwidth
from torch import Tensor
from trl_grpo_reference import Spec

from aligner.models.modules.attention import all_runs, shared_attention, takes_all_runs
from aligner.models.modules.shared_prompts import key_spans
from aligner.parallel import mcore
from aligner.rollout.builtin import decode_layers, paged_kernels
from aligner.rollout.builtin.attention import DecodeBatch, GatheredAttention, PagedKV, plan_decode
from aligner.types import PolicyBatch

RECORDED = ("TF32", "PIP_CONSTRAINT", "NCCL_", "NVTE_", "PYTORCH_", "CUDA_", "TORCH_")


def environment(check: Check) -> Figures:
    """What is here, and the ceilings that the other figures are held against."""
    properties, driver = torch.cuda.get_device_properties(0), "unknown"
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=driver_version,persistence_mode,compute_mode", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    yield f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, compute capability {properties.major}.{properties.minor}"
    yield f"driver {driver}; CUDA of torch {torch.version.cuda}"
    yield f"Python {machine.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}, Megatron-Core {mcore.version}"
    yield f"at start allow_tf32={torch.backends.cuda.matmul.allow_tf32}, precision {torch.get_float32_matmul_precision()}"
    found = {name: value for name, value in sorted(os.environ.items()) if any(part in name for part in RECORDED)}
    yield f"environment: {', '.join(f'{name}={value}' for name, value in found.items()) or 'none of the variables that matter'}"
    yield "copy GB/s", copy_bandwidth() / 1e9
    side = check.number(8192, 64)
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    yield "bf16 matmul TFLOP/s", 2 * side**3 / seconds(lambda: torch.matmul(a, b)) / 1e12
    host = torch.empty(check.number(2**30, 2**20), dtype=torch.uint8).pin_memory()
    device = torch.empty_like(host, device="cuda")
    yield "pinned upload GB/s", host.numel() / seconds(lambda: device.copy_(host, non_blocking=True)) / 1e9
    one, launches = torch.zeros(1, device="cuda"), check.number(1000, 100)

    def launch() -> None:
        for _ in range(launches):
            one.add_(1)

    yield "launch of a kernel, us", seconds(launch) / launches * 1e6


def numbers(check: Check) -> Figures:
    """Loss, gradients, log-probs and samples in float32: this device against the CPU, on the same weights; and what TF32 would give."""
    model = check.folder / "model"
    write_model(SIZES["small"], model, positions=256, seed=0)
    sides = {"cpu": ("highest", ON_CPU), "cuda": ("highest", {}), "tf32": ("high", {})}
    started = {}
    for name, (precision, environ) in sides.items():
        command = [sys.executable, str(Path(__file__).parents[1] / "gpu_check_stages.py"), "numbers_side", str(model)]
        command += [str(check.folder / f"{name}.pt"), precision]
        started[name] = subprocess.Popen(command, env=os.environ | environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = {name: process.communicate()[0] for name, process in started.items()}
    if failed := [name for name, process in started.items() if process.returncode]:
        raise RuntimeError(f"{failed[0]}: {said[failed[0]][-3000:]}")
    found = {name: torch.load(check.folder / f"{name}.pt", map_location="cpu", weights_only=False) for name in sides}
    cpu, gpu = found["cpu"], found["cuda"]
    yield "float32 product in a run, relative error", gpu["product"]
    yield "loss, relative gap", abs(gpu["loss"] - cpu["loss"]) / abs(cpu["loss"])
    yield "gradients, largest relative gap of a tensor", _worst(gpu["gradients"], cpu["gradients"])
    yield "log-probs, largest gap", float((gpu["logprobs"] - cpu["logprobs"]).abs().max())
    same = [a == b for a, b in zip(gpu["tokens"], cpu["tokens"], strict=True)]
    yield "sampled responses that are equal", sum(same) / len(same)
    yield "with TF32: gradients, largest relative gap of a tensor", _worst(found["tf32"]["gradients"], cpu["gradients"])
    yield "with TF32: log-probs, largest gap", float((found["tf32"]["logprobs"] - cpu["logprobs"]).abs().max())


def _worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(relative(found[name], gradient) for name, gradient in wanted.items())


def numbers_side(model: str, output: str, precision: str) -> None:
    """One device's numbers of `numbers`, at this precision of float32 products, whatever that of a run is."""
    prompts = random_prompts(SIZES["small"], count=4, length=48, seed=1)
    spec = Spec(model=model, prompts=prompts, group_size=2, max_new_tokens=24, steps=1)
    settings = ["model.dtype=float32", f"model.path={model}", "algorithm.prompts_per_step=4", "algorithm.group_size=2"]
    settings += ["algorithm.mini_batch_size=8", "rollout.sampling.max_response_length=24", "rollout.max_batch_size=8"]
    settings += ["model.micro_batch_tokens=512", "model.packing=true", "model.share_prompts=true"]
    config = loaded("grpo", settings, Path(output).parent / f"{Path(output).stem}_run")
    with session(config) as layout:
        algorithm = make_algorithm(config, spec, layout)
        product = _product_error()
        torch.set_float32_matmul_precision(precision)
        loss = check_numbers(algorithm, spec)["loss"]
        gradients = {name: parameter.main_grad.float().cpu() for name, parameter in algorithm.policy.chunks[0].named_parameters()}
        tokens = torch.tensor(random_prompts(SIZES["small"], count=4, length=96, seed=2))
        mask = torch.ones(tokens.shape, dtype=torch.bool)
        mask[:, 0] = False
        advantages = torch.zeros(tokens.shape)
        of_rows: dict[str, Any] = {"old_logprobs": None, "advantages": advantages, "ref_logprobs": None}
        logprobs = algorithm.policy.logprobs(PolicyBatch(tokens=tokens, lengths=torch.full((4,), 96), loss_mask=mask, **of_rows)).cpu()
        responses = generate(algorithm.task.engine, prompts * 4, 24, temperature=1.0)
        found = {"loss": loss, "gradients": gradients, "logprobs": logprobs, "tokens": [list(r.tokens) for r in responses]}
        torch.save(found | {"product": product}, output)
        algorithm.task.judges.reward.close()


def _product_error() -> float:
    """Of a float32 product, as this process has set it up: 1e-7 where it is one, 3e-4 in TF32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = (torch.randn(512, 512, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    return relative(a.to(device) @ b.to(device), a.double() @ b.double())


def kernels(check: Check) -> Figures:
    """The kernels that a step is made of, in bfloat16, against float32 on the CPU: attention of runs, experts, pages."""
    yield from runs(check)
    yield from grouped_experts(check)
    yield "gathered pages, relative error", paged_error(GatheredAttention(16), check)
    weight = torch.empty(1, device="cuda", dtype=torch.bfloat16)
    chosen = paged_kernels.flash_attention(weight, (2, 6, 128))
    yield f"the engine attends to pages by {'gathering them' if chosen is None else chosen.name}"


def runs(check: Check) -> Figures:
    """FlashAttention's kernel for all runs of a packed row: grouped queries, prompts that rows share, causal at the ends."""
    heads, groups, dim = 12, 2, 128
    sizes = [(0, 37, -1), (37, 87, 0), (87, 148, 0), (148, 168, 0), (168, 296, -1), (296, 297, -1)]
    if not check.tiny:
        sizes += [(297, 297 + 2048, -1), (2345, 2345 + 300, 6), (2645, 2645 + 5, 6)]
    length, scale = sizes[-1][1], dim**-0.5
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(length, n, dim, generator=generator).bfloat16() for n in (heads, groups, groups, heads))
    found, wanted = [], []
    for is_gpu, into in ((True, found), (False, wanted)):
        inputs = [x.cuda() if is_gpu else x.float() for x in (query, key, value)]
        for x in inputs:
            x.requires_grad_()
        if is_gpu and not takes_all_runs(inputs[0]):
            raise RuntimeError("the kernel for all runs does not take these heads")
        q, k, v = inputs
        out = all_runs(q, k, v, key_spans(sizes, 0, 1).to(q.device), scale) if is_gpu else shared_attention(q, k, v, sizes, scale)
        out.backward(grad.to(out))
        into.extend([out, *(x.grad for x in inputs)])
    for name, one, other in zip(("output", "queries' gradient", "keys' gradient", "values' gradient"), found, wanted, strict=True):
        yield f"attention of runs: {name}, relative error", relative(one, other)


def grouped_experts(check: Check) -> Figures:
    """Grouped products of experts against products one by one in float32; one expert gets no token."""
    tokens, hidden, inner, count, top_k = check.number(512, 32), check.number(1024, 64), check.number(512, 32), 8, 2
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().cuda()

    up, down, x = random(count, 2 * inner, hidden) * hidden**-0.5, random(count, hidden, inner) * inner**-0.5, random(tokens, hidden)
    chosen = torch.rand(tokens, count - 1, generator=generator).topk(top_k).indices.cuda()
    weights = torch.full((tokens, top_k), 1 / top_k, device="cuda")
    if not decode_layers.multiplies_groups(up):
        yield "this device multiplies no groups: experts one by one"

    def activate(both: Tensor) -> Tensor:
        gate, rest = both.chunk(2, -1)
        return torch.nn.functional.silu(gate) * rest

    stack = decode_layers.Stack(up=decode_layers.Affine(weight=up, bias=None), down=decode_layers.Affine(weight=down, bias=None))
    found = decode_layers.mix_grouped(x, stack, (weights, chosen), activate, biased=True)
    wanted = torch.zeros(tokens, hidden)
    for number in range(count):
        one = activate(x.cpu().float() @ up[number].cpu().float().T) @ down[number].cpu().float().T
        wanted += one * (weights * (chosen == number)).sum(1, keepdim=True).cpu()
    yield "grouped experts, relative error", relative(found, wanted)


def paged_error(attention: Any, check: Check) -> float:
    """Of a decode step over pages in bfloat16, of sequences of several lengths, against the same in float32."""
    groups, share, dim, size = 2, 6, 128, attention.page_size
    lengths = [1, size, size + 1, 2 * size + 7] * check.number(8, 1)
    generator = torch.Generator().manual_seed(0)
    pages = torch.randperm(3 * len(lengths), generator=generator).view(-1, 3).int()
    keys, values = (torch.randn(1, pages.numel() + 1, size, groups, dim, generator=generator).bfloat16() for _ in range(2))
    queries = torch.randn(len(lengths), groups, share, dim, generator=generator).bfloat16()
    batch = DecodeBatch(tokens=torch.zeros(len(lengths), dtype=torch.int64), positions=torch.tensor(lengths) - 1, pages=pages)
    there = DecodeBatch(tokens=batch.tokens.cuda(), positions=batch.positions.cuda(), pages=batch.pages.cuda())
    found = attention.decode(queries.cuda(), PagedKV(keys=keys.cuda(), values=values.cuda()), 0, plan_decode(there, size))
    whole = PagedKV(keys=keys.float(), values=values.float())
    return relative(found, GatheredAttention(size).decode(queries.float(), whole, 0, plan_decode(batch, size)))


def flash_attn(check: Check) -> Figures:
    """The pages of the engine's cache by the package flash_attn."""
    yield "flash_attn over pages, relative error", _package_error(paged_kernels.load(paged_kernels.FLASH_2), "flash_attn", check)
    if (third := paged_kernels.load(paged_kernels.FLASH_3)) is not None:
        yield f"FlashAttention-3 imports too: relative error {paged_error(third, check):.2g}"


def varlen_attn(check: Check) -> Figures:
    """The same by torch's own kernel."""
    yield "varlen_attn over pages, relative error", _package_error(paged_kernels.load(paged_kernels.TORCH), "varlen_attn", check)


def _package_error(attention: Any, name: str, check: Check) -> float:
    if attention is None:
        raise RuntimeError(f"{name} imports, and is not one that the engine takes: see the log above")
    return paged_error(attention, check)
