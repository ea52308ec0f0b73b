"""The transformers sides of the rollout comparison: `generate` with a dynamic or a static cache, and continuous batching.

    <python with torch and transformers> benchmarks/transformers_rollout_reference.py SPEC.json RESULT.json

SPEC.json holds the fields of `rollout_work.Spec`; `mode` is dynamic, static or continuous. It imports nothing of this project. `generate`
takes the requests as batches in their order, each until its longest response is done, as it would if the model ended the responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout_work import Case, Side, Spec, run

WAIT_SECONDS = 600


def make_side(spec: Spec) -> Side:
    """Raises ValueError where the mode is unknown."""
    import torch
    import transformers

    torch.set_num_threads(spec.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(spec.model, dtype=getattr(torch, spec.dtype)).to(spec.device).eval()
    model.generation_config.eos_token_id = None  # nothing but its limit ends a response
    modes: dict[str, Any] = {"dynamic": Batches(model, spec, None), "static": Batches(model, spec, "static")}
    modes["continuous"] = Continuous(model, spec)
    if spec.mode not in modes:
        raise ValueError(f"spec.mode={spec.mode!r}: must be one of {', '.join(modes)}")
    sampler = modes[spec.mode]
    return Side(
        sample=sampler.sample,
        greedy=sampler.greedy,
        versions={"transformers": transformers.__version__, "torch": torch.__version__},
        synchronize=torch.cuda.synchronize if spec.device == "cuda" else lambda: None,
    )


class Batches:
    """`generate`, a batch at a time."""

    def __init__(self, model, spec: Spec, cache: str | None) -> None:
        self.model, self.spec, self.cache = model, spec, cache

    def _generate(self, prompts: Sequence[Sequence[int]], length: int, **how):
        import torch

        tokens = torch.tensor(prompts, device=self.spec.device)  # of one length: no padding
        if self.cache:
            how["cache_implementation"] = self.cache
        return self.model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=length, pad_token_id=0, return_dict_in_generate=True, **how
        )

    def sample(self, case: Case) -> list[int]:
        counts = []
        for start in range(0, len(case.prompts), case.batch):
            part = slice(start, start + case.batch)
            longest = max(case.limits[part])
            result = self._generate(case.prompts[part], longest, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
            made = result.sequences.shape[1] - len(case.prompts[start])
            counts += [min(made, limit) for limit in case.limits[part]]
        return counts

    def greedy(self, prompts: Sequence[Sequence[int]], length: int) -> list[tuple[list[int], list[float] | None]]:
        import torch

        result = self._generate(prompts, length, do_sample=False, output_logits=True)
        tokens = result.sequences[:, -length:]
        logprobs = torch.stack(result.logits, dim=1).float().log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0]
        return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))


class Continuous:
    """Continuous batching, with a limit for each request."""

    def __init__(self, model, spec: Spec) -> None:
        self.model, self.spec = model, spec

    def _run(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], batch: int, *, do_sample: bool) -> list[list[int]]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        page = 32
        pages = -(-self.spec.context // page) + 1
        settings = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=pages * batch,
            max_batch_tokens=max(batch, max(map(len, prompts))),
            max_requests_per_batch=batch,
        )
        how = GenerationConfig(max_new_tokens=max(limits), do_sample=do_sample, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1)
        how.pad_token_id = 0
        tokens: dict[str, list[int]] = {}
        opened = self.model.continuous_batching_context_manager(
            generation_config=how, continuous_batching_config=settings, timeout=WAIT_SECONDS
        )
        with opened as manager:
            for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
                manager.add_request(list(prompt), request_id=str(number), max_new_tokens=limit, eos_token_id=-1)
            while len(tokens) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error:
                        raise RuntimeError(f"continuous batching: request {result.request_id}: {result.error}")
                    tokens[result.request_id] = result.generated_tokens
                elif result is None and not manager.is_running():
                    raise RuntimeError(f"continuous batching ended after {len(tokens)} of {len(prompts)} requests")
        return [tokens[str(number)] for number in range(len(prompts))]

    def sample(self, case: Case) -> list[int]:
        return [len(response) for response in self._run(case.prompts, case.limits, case.batch, do_sample=True)]

    def greedy(self, prompts: Sequence[Sequence[int]], length: int) -> list[tuple[list[int], list[float] | None]]:
        return [(response, None) for response in self._run(prompts, [length] * len(prompts), len(prompts), do_sample=False)]


if __name__ == "__main__":
    run(make_side)
