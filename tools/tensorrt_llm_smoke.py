"""Tries the TensorRT-LLM engine on a GPU against `transformers`, step by step: once in the real image, and for each kind of model.

    python tools/tensorrt_llm_smoke.py MODEL                         # a Hugging Face directory; one GPU, a few minutes
    srun --ntasks=1 --gpus-per-task=1 python tools/tensorrt_llm_smoke.py MODEL --sleep

1. the contract against the installed sources; 2. the model is built and refitted from its own weights, and decodes greedily like
transformers, with its log-probs; 3. all weights are negated and refitted: the same again, which weights that did not arrive would not pass;
4. the weights are refitted as they were: the first tokens come again (through captured CUDA graphs); 5. with --sleep: memory is given back,
taken again, refitted, and the tokens are still the same; the memory that came free is shown.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tensorrt_llm_diff  # beside this file
import torch
from torch import Tensor

from aligner.errors import AlignerError, EngineError
from aligner.rollout.config import CudaGraphs, RolloutConfig, Sampler, TensorRTLLMConfig
from aligner.rollout.engine import ALL_MEMORY, ForeignEngine, GenRequest, GenResult, ListedWork
from aligner.rollout.engine.foreign import weight_buckets
from aligner.rollout.engine.manifest import Manifest, TensorSpec
from aligner.rollout.tensorrt_llm.engine import TensorRTLLMEngine
from aligner.types import LogprobKind, SamplingConfig

NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 8, 24, 16
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}  # nats; two correct bfloat16 implementations differ by tenths
MIB = 2**20


class Trial:
    """A reference model of transformers and an engine that is refitted from it."""

    def __init__(self, reference: Any, engine: ForeignEngine, *, temperature: float, tolerance: float, bucket_mib: int = 256) -> None:
        self.reference = reference
        self.engine = engine
        self._temperature = temperature
        self._tolerance = tolerance
        self._bucket_bytes = bucket_mib * MIB
        self._version = 0
        vocabulary = reference.config.vocab_size
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(3, vocabulary, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
        self.requests = [GenRequest(index=i, tokens=tuple(row[: PROMPT_TOKENS - i]), seed=i) for i, row in enumerate(rows)]

    def refit(self) -> None:
        """Give the engine the reference's current weights."""
        tensors = dict(self._named())
        self._version += 1
        specs = {name: TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in tensors.items()}
        try:
            manifest = Manifest(tensors=specs)
            self.engine.begin_refit(manifest)
            for bucket in weight_buckets(iter(tensors.items()), bucket_bytes=self._bucket_bytes, manifest=manifest):
                self.engine.load(bucket)
            self.engine.finish_refit(self._version)
        except BaseException:
            self.engine.abort_refit()
            raise

    @torch.no_grad()
    def negate(self) -> None:
        """Change every weight of the reference so that no number stays as it was."""
        for parameter in self.reference.parameters():
            parameter.neg_()

    def responses(self, temperature: float) -> list[GenResult]:
        """A response to every prompt; temperature 0: the likeliest tokens."""
        sampling = SamplingConfig(temperature=temperature, max_response_length=NUM_TOKENS)
        results = [one for part in self.engine.generate(ListedWork(self.requests), sampling) for one in part]
        return sorted(results, key=lambda one: one.index)

    def agree(self) -> str:
        """Compare greedy choices and sampled log-probs with the reference's. Raises EngineError if they differ by more than rounding."""
        worst_choice = worst_gap = 0.0
        for result in self.responses(0.0):
            logits = self._logits(result)
            chosen = logits.gather(-1, torch.tensor(result.tokens, device=logits.device)[:, None])[:, 0]
            worst_choice = max(worst_choice, float((logits.max(-1).values - chosen).max()))  # 0 where it is the likeliest
        for result in self.responses(self._temperature):
            scale = 1.0 if result.kind == LogprobKind.raw else self._temperature
            expected = (self._logits(result) / scale).log_softmax(-1)
            tokens = torch.tensor(result.tokens, device=expected.device)
            gap = expected.gather(-1, tokens[:, None])[:, 0] - torch.tensor(result.logprobs, device=expected.device)
            worst_gap = max(worst_gap, float(gap.abs().max()))
        said = f"greedy tokens within {worst_choice:.1e} of the likeliest logit, log-probs within {worst_gap:.1e}"
        if not max(worst_choice, worst_gap) <= self._tolerance:
            raise EngineError(f"{said}; allowed: {self._tolerance}")
        return said

    @torch.no_grad()
    def _logits(self, result: GenResult) -> Tensor:
        """The reference's logits before each token of a response, [tokens, vocabulary]."""
        prompt = self.requests[result.index].tokens
        device = next(self.reference.parameters()).device
        tokens = torch.tensor([prompt + result.tokens], device=device)
        return self.reference(tokens).logits[0, len(prompt) - 1 : -1].float()

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self.reference.named_parameters())


def steps(trial: Trial, *, sleeps: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    """The checks, in their order, each with its name."""
    first: list[GenResult] = []

    def refitted() -> str:
        trial.refit()
        first.extend(trial.responses(0.0))
        return trial.agree()

    def negated() -> str:
        trial.negate()
        trial.refit()
        return trial.agree()

    def restored() -> str:
        trial.negate()
        trial.refit()
        again = [one.tokens for one in trial.responses(0.0)]
        same = sum(tokens == one.tokens for tokens, one in zip(again, first, strict=True))
        if same < len(first):
            raise EngineError(f"{len(first) - same} of {len(first)} greedy responses differ from those before the weights were negated")
        return f"{same} greedy responses as before"

    def slept() -> str:
        before = _free_bytes()
        trial.engine.sleep(ALL_MEMORY)
        freed = _free_bytes() - before
        trial.engine.wake(ALL_MEMORY)
        trial.refit()
        return f"{freed / 2**30:.1f} GiB came free; {trial.agree()}"

    yield "refit", refitted
    yield "refit, all weights negated", negated
    yield "refit, restored", restored
    if sleeps:
        yield "sleep, wake, refit", slept


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def run(trial: Trial, *, sleeps: bool) -> bool:
    """Go through the steps and print what each found; whether all passed."""
    passed = True
    for name, check in steps(trial, sleeps=sleeps):
        try:
            print(f"ok    {name}: {check()}", flush=True)
        except AlignerError as error:
            passed = False
            print(f"FAIL  {name}: {error}", flush=True)
    return passed


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module. 0: all passed; 1: something failed; 2: nothing could be tried."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face directory with config.json and weights")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--sampler", choices=[one.value for one in Sampler], default=Sampler.trtllm.value)
    parser.add_argument("--no-cuda-graphs", action="store_true")
    parser.add_argument("--sleep", action="store_true", help="build for giving memory back, and try it")
    parser.add_argument("--allow-drafts", action="store_true", help="try a version whose contract is a draft")
    chosen = parser.parse_args(arguments)
    settings = TensorRTLLMConfig(
        sampler=Sampler(chosen.sampler),
        cuda_graphs=CudaGraphs.never if chosen.no_cuda_graphs else CudaGraphs.auto,
        kv_memory_fraction=0.3,
        allow_drafts=chosen.allow_drafts,
    )
    config = RolloutConfig(max_batch_size=NUM_PROMPTS, offload=chosen.sleep, tensorrt_llm=settings)
    dtype = getattr(torch, chosen.dtype)
    with TemporaryDirectory(prefix="aligner-engine-") as home:
        shutil.copy(chosen.model / "config.json", home)
        try:
            engine = TensorRTLLMEngine(config, path=Path(home), dtype=dtype, eos_id=0, max_sequence_length=4 * PROMPT_TOKENS)
        except AlignerError as error:
            print(error, file=sys.stderr)
            return 2
        same = tensorrt_llm_diff.main([]) == 0
        engine.start()
        try:
            from transformers import AutoModelForCausalLM

            reference = AutoModelForCausalLM.from_pretrained(chosen.model, torch_dtype=dtype).to("cuda").eval()
            trial = Trial(reference, engine, temperature=0.8, tolerance=TOLERANCE[dtype])
            passed = run(trial, sleeps=chosen.sleep)
        finally:
            engine.shutdown()
    return 0 if passed and same else 1


if __name__ == "__main__":
    sys.exit(main())
