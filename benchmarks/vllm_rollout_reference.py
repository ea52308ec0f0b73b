"""vLLM's side of the rollout comparison.

    <python with vllm> benchmarks/vllm_rollout_reference.py SPEC.json RESULT.json

SPEC.json holds the fields of `rollout_work.Spec`. It imports nothing of this project. Set for speed: no detokenizing, only final outputs,
no seeds of requests (its fastest sampling), log-probs of the sampled tokens as training needs them; `torch.compile` as vLLM has it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

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

    def generate(prompts: Sequence[Sequence[int]], limits: Sequence[int], temperature: float):
        how = [
            vllm.SamplingParams(
                temperature=temperature,
                max_tokens=limit,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for limit in limits
        ]
        done = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], how, use_tqdm=False)
        return [output.outputs[0] for output in done]

    def sample(case: Case) -> list[int]:
        llm.llm_engine.engine_core.engine_core.scheduler.max_num_running_reqs = case.batch  # else an engine for each batch
        return [len(one.token_ids) for one in generate(case.prompts, case.limits, 1.0)]

    def greedy(prompts: Sequence[Sequence[int]], length: int):
        found = generate(prompts, [length] * len(prompts), 0.0)
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
