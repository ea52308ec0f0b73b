"""vLLM's side of the rollout comparison.

    <python with vllm> benchmarks/vllm_rollout_reference.py SPEC.json RESULT.json

SPEC.json holds the fields of `rollout_work.Spec`. It imports nothing of this project. Set for speed: no detokenizing, only final outputs,
no seeds of requests (its fastest sampling), log-probs of the sampled tokens as training needs them; `torch.compile` as vLLM has it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from rollout_work import Case, Side, Spec, run

MIB = 2**20


def cache_bytes(model: str, spec: Spec) -> int:
    """Keys and values of a full batch and a quarter more."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    size = {"float32": 4, "bfloat16": 2}[spec.dtype]
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size
    tokens = -(-spec.context // 128) * 128 * spec.largest_batch  # its pages have 128 tokens on the CPU
    return max(tokens * per_token * 5 // 4, 16 * MIB)


def make_side(spec: Spec) -> Side:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, whose CPU time is taken
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch
    import vllm
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    llm = vllm.LLM(
        model=spec.model,
        dtype=spec.dtype,
        skip_tokenizer_init=True,
        max_model_len=spec.context,
        max_num_seqs=spec.largest_batch,
        kv_cache_memory_bytes=cache_bytes(spec.model, spec),
        enable_prefix_caching=False,  # the prompts are all different
        generation_config="vllm",
        seed=0,
    )

    def params(limit: int, temperature: float) -> vllm.SamplingParams:
        return vllm.SamplingParams(
            temperature=temperature,
            max_tokens=limit,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def generate(prompts: Sequence[Sequence[int]], limits: Sequence[int], batch: int, temperature: float) -> list:
        """At most `batch` at a time: one engine serves all cases."""
        waiting = deque(enumerate(zip(prompts, limits, strict=True)))
        done: dict[str, Any] = {}
        while len(done) < len(prompts):
            while waiting and len(prompts) - len(waiting) - len(done) < batch:
                number, (prompt, limit) = waiting.popleft()
                llm.llm_engine.add_request(str(number), tokens_input(list(prompt)), params(limit, temperature))
            done |= {output.request_id: output.outputs[0] for output in llm.llm_engine.step() if output.finished}
        return [done[str(number)] for number in range(len(prompts))]

    def sample(case: Case) -> list[int]:
        return [len(one.token_ids) for one in generate(case.prompts, case.limits, case.batch, 1.0)]

    def greedy(prompts: Sequence[Sequence[int]], length: int):
        found = generate(prompts, [length] * len(prompts), len(prompts), 0.0)
        return [
            (list(one.token_ids), [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)]) for one in found
        ]

    return Side(
        sample=sample,
        greedy=greedy,
        versions={"vllm": vllm.__version__, "torch": torch.__version__},
        synchronize=torch.cuda.synchronize if spec.device == "cuda" else lambda: None,
    )


if __name__ == "__main__":
    run(make_side)
