"""A stage of `gpu_check.py` for a package that is not here, with a stand-in in its place: `gpu_check_stages.py`'s arguments, and at the end
`stale` for an engine that keeps the first weights it is given, or `other` for layers that compute otherwise.

What the stage does with this project's own parts is tried so; of the packages it says nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tools", "benchmarks", "tests/fakes")]

import gpu_check_stages  # noqa: E402
import torch  # noqa: E402
from fake_foreign import FakeForeign  # noqa: E402
from gpu_stages import layers  # noqa: E402
from torch import Tensor  # noqa: E402

from aligner.models.config import Layers, Recompute  # noqa: E402
from aligner.rollout.engine import GenRequest, GenResult, Work  # noqa: E402
from aligner.rollout.vllm import engine  # noqa: E402
from aligner.types import FinishReason, LogprobKind, SamplingConfig  # noqa: E402

MODE = sys.argv.pop() if sys.argv[-1] in ("stale", "other") else ""


class TransformersEngine(FakeForeign):
    """An engine that samples with the model of transformers, in float32 on the CPU, from the weights that it was given."""

    def __init__(self, *_: Any, path: Path, max_sequence_length: int, **__: Any) -> None:
        super().__init__()
        self.max_sequence_length = max_sequence_length
        self._directory, self._first = path, {}

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        super().load(bucket)
        if MODE == "stale":
            self.weights |= {name: self._first.setdefault(name, self.weights[name]) for name, _ in bucket}

    def generate(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self._directory), dtype=torch.float32)
        model.load_state_dict({name: tensor.cpu().float() for name, tensor in self.weights.items()}, strict=False)
        while requests := work.take(8):
            yield [self._response(model.eval(), request, sampling) for request in requests]

    @torch.no_grad()
    def _response(self, model: Any, request: GenRequest, sampling: SamplingConfig) -> GenResult:
        generator, tokens, logprobs = torch.Generator().manual_seed(request.seed), list(request.tokens), []
        for _ in range(sampling.max_response_length):
            scores = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(torch.multinomial(scores.exp(), 1, generator=generator)))
            logprobs.append(float(scores[tokens[-1]]))
        return GenResult(
            index=request.index,
            tokens=tuple(tokens[len(request.tokens) :]),
            logprobs=tuple(logprobs),
            kind=LogprobKind.sampled,
            finish_reason=FinishReason.length,
            weight_version=self.version,
        )


if __name__ == "__main__":
    engine.VLLMEngine = TransformersEngine
    same = {"layers": Layers.torch, "recompute": Recompute.full}
    layers.SIDES = {"torch": {"layers": Layers.torch}, "transformer_engine": same, "fp8": same}
    layers.sft_steps = lambda *_: iter(())  # a stage of its own tries these
    if MODE == "other":
        original = layers.numbers_of
        layers.numbers_of = lambda algorithm, weights: original(algorithm, {name: w * 1.5 for name, w in weights.items()} or weights)
    gpu_check_stages.main()
