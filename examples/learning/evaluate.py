"""How good a trained model is and how far it has gone from its start: measured in one way for every algorithm, by none of their code.

Both models are Hugging Face exports and run in transformers, in lock-step on the responses that the trained one samples. The KL is exact
for every token, sum over the vocabulary of p (log p - log q), then a mean over the response tokens: no estimator's noise.

    python examples/learning/evaluate.py START TRAINED PROMPTS.jsonl aligner.rewards.builtin:happy_words --max-response-length 48
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from aligner.data.config import PromptDataConfig
from aligner.data.prompts import load_prompts
from aligner.data.tokenizer import Tokenizer, load_tokenizer
from aligner.rewards.load import load_reward_function
from aligner.types import Prompt

Reward = Callable[[list[str], list[str], list[str | None]], list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Means over `num_samples` responses: their reward; per response token, the KL to the start in nats and the start's own surprise.

    `samples` are what the means are of, all of a prompt one after the other."""

    reward: float
    kl: float
    nll: float  # -log p of the response's tokens under the start model: how much like its own text it finds them
    num_samples: int
    samples: Sequence[Sample] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One response: its reward, tokens (the end token included), and the sums of KL and surprise over them."""

    reward: float
    num_tokens: int
    kl: float
    nll: float


def read_prompts(path: Path, tokenizer: Tokenizer, *, max_length: int = 64) -> list[Prompt]:
    """The different prompts of a file, as a run with the default data settings reads them."""
    prompts, _ = load_prompts(str(path), PromptDataConfig(train=str(path), max_prompt_length=max_length), tokenizer)
    return list({prompt.tokens: prompt for prompt in prompts}.values())


def measure(
    trained: Path, start: Path, prompts: Sequence[Prompt], reward: Reward, *, max_response_length: int, samples: int = 16, seed: int = 0
) -> Measured:
    """Sample `samples` responses to every prompt from the model at `trained`, at temperature 1."""
    tokenizer = load_tokenizer(str(trained))
    logging.disable_progress_bar()
    policy, reference = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (trained, start))
    rows = [prompt for prompt in prompts for _ in range(samples)]
    generator = torch.Generator().manual_seed(seed)
    responses, sums = [], []
    for begin in range(0, len(rows), 512):
        part = rows[begin : begin + 512]
        sampled, kl, nll, alive = _sample(policy, reference, part, max_response_length, tokenizer, generator)
        responses += [tokenizer.decode(row[keep].tolist()) for row, keep in zip(sampled, alive, strict=True)]
        sums += zip(alive.sum(1).tolist(), kl.tolist(), nll.tolist(), strict=True)
    scores = reward([row.text for row in rows], responses, [row.answer for row in rows])
    found = [Sample(reward=score, num_tokens=count, kl=kl, nll=nll) for score, (count, kl, nll) in zip(scores, sums, strict=True)]
    return _means(found)


def _means(samples: Sequence[Sample]) -> Measured:
    tokens = sum(sample.num_tokens for sample in samples)
    return Measured(
        reward=sum(sample.reward for sample in samples) / len(samples),
        kl=sum(sample.kl for sample in samples) / tokens,
        nll=sum(sample.nll for sample in samples) / tokens,
        num_samples=len(samples),
        samples=samples,
    )


@torch.inference_mode()
def _sample(
    policy: torch.nn.Module,
    reference: torch.nn.Module,
    rows: Sequence[Prompt],
    max_response_length: int,
    tokenizer: Tokenizer,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Responses [B, T], the sums of KL and of surprise over the tokens of each [B], and which are theirs [B, T] (end token included)."""
    width = max(len(row.tokens) for row in rows)
    tokens = torch.full((len(rows), width), tokenizer.pad_id)
    shown = torch.zeros_like(tokens)
    for row, prompt in enumerate(rows):
        tokens[row, width - len(prompt.tokens) :] = torch.tensor(prompt.tokens)
        shown[row, width - len(prompt.tokens) :] = 1
    alive, kept = torch.ones(len(rows), dtype=torch.bool), []
    kl, nll = torch.zeros(2, len(rows), dtype=torch.float64)
    steppers, drawn = (_Stepper(policy), _Stepper(reference)), tokens
    for _ in range(max_response_length):
        logp, logq = (stepper.next_logprobs(drawn, shown) for stepper in steppers)
        drawn = torch.multinomial(logp.exp(), 1, generator=generator)
        kl += (logp.exp() * (logp - logq)).sum(-1).double() * alive
        nll -= logq.gather(1, drawn).squeeze(1).double() * alive
        tokens, shown = torch.cat([tokens, drawn], dim=1), torch.cat([shown, torch.ones_like(drawn)], dim=1)
        kept.append(alive)
        alive = alive & (drawn.squeeze(1) != tokenizer.eos_id)
    return tokens[:, width:], kl, nll, torch.stack(kept, dim=1)


class _Stepper:
    """A model that is fed a batch a column at a time."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._cache = DynamicCache()

    def next_logprobs(self, new: Tensor, shown: Tensor) -> Tensor:
        """Log-probs [B, V] of what follows the columns `new`, the last ones of `shown` [B, S], which is 0 for padding before prompts."""
        positions = (shown.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
        outputs = self._model(
            input_ids=new, attention_mask=shown, position_ids=positions, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        return outputs.logits[:, -1].float().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", type=Path, help="Hugging Face directory of the model that training started from")
    parser.add_argument("trained", type=Path, help="the run's export")
    parser.add_argument("prompts", type=Path, help="jsonl file of prompts")
    parser.add_argument("reward", help="a plain reward function, package.module:name or path/to/file.py:name")
    parser.add_argument("--max-response-length", type=int, required=True, metavar="N")
    parser.add_argument("--samples", type=int, default=4, metavar="N", help="per prompt (default: 4)")
    arguments = parser.parse_args()
    reward = load_reward_function(arguments.reward)
    prompts = read_prompts(arguments.prompts, load_tokenizer(str(arguments.start)))
    print("model     reward  KL/token  perplexity of its samples under the start")
    for name, model in (("start", arguments.start), ("trained", arguments.trained)):
        found = measure(
            model, arguments.start, prompts, reward, max_response_length=arguments.max_response_length, samples=arguments.samples
        )
        print(f"{name:8}  {found.reward:6.3f}  {found.kl:8.4f}  {math.exp(found.nll):10.3f}")


if __name__ == "__main__":
    main()
