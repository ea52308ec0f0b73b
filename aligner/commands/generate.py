"""`aligner generate`: responses to prompts of the command line, or of a file; and sampling as `chat` and `eval` do it."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from aligner.commands.parts import GenerateOptions, ReadOptions, SamplingOptions
from aligner.data.config import Overlong, PromptDataConfig
from aligner.data.encoding import PromptStyle, encode_prompt
from aligner.data.prompts import load_prompts
from aligner.data.tokenizer import Tokenizer
from aligner.errors import AlignerError, ConfigError, DataError, describe_os_error
from aligner.jobs.serving_policy import OpenPolicy, open_policy
from aligner.online.collect import sample_seeds
from aligner.rollout.engine import GenResult
from aligner.rollout.live import LiveRequest
from aligner.types import Prompt, Rollout, SamplingConfig

AHEAD = 4  # times the engine's batch that waits in its queue: it never runs dry, and a file of any size is in memory in parts


def generate(model: str, prompts: Sequence[str], options: GenerateOptions) -> int:
    """Print a response to each prompt, or write those to the records of a file. Raises ConfigError, or DataError listing bad lines."""
    if bool(prompts) == bool(options.input):
        raise ConfigError("aligner generate: give PROMPT or --input FILE" + (", not both" if prompts else ""))
    if bool(options.input) != bool(options.output):
        raise ConfigError("aligner generate: --input and --output go together")
    sampling = sampling_of(options)
    with open_policy(model, max_batch_size=options.batch_size, seed=options.seed) as policy:
        if options.input:
            return _to_file(policy, options, sampling)
        style = PromptStyle(apply_chat_template=is_chat(policy.tokenizer, options))
        asked = [encode_prompt(policy.tokenizer, text, style) for text in prompts]
        found = [Prompt(id=number, tokens=tuple(ids), source=f"prompt {number + 1}") for number, ids in enumerate(asked)]
        for number, rollout in enumerate(responses(policy, found, options, sampling)):
            if len(prompts) * options.samples > 1:
                print(f"{'' if not number else chr(10)}[{rollout.prompt.source}, sample {number % options.samples + 1}]")
            print(text_of(policy.tokenizer, rollout), flush=True)
    return 0


def sampling_of(options: SamplingOptions) -> SamplingConfig:
    """How responses are drawn. Raises ConfigError."""
    drawn = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k, "stop_strings": list(options.stop)}
    return SamplingConfig(max_response_length=options.max_tokens, **drawn)


def is_chat(tokenizer: Tokenizer, options: ReadOptions) -> bool:
    """Whether a plain text is asked as a user's message."""
    return tokenizer.has_chat_template and not options.plain


def read_prompts(policy: OpenPolicy, path: Path, options: ReadOptions) -> list[Prompt]:
    """The prompts of a file, with the fields of their records. Raises DataError listing all bad lines."""
    how: dict[str, Any] = {"max_prompt_length": policy.live.max_sequence_length - 1, "overlong": Overlong.refuse}
    how |= {"answer_field": options.answer_field, "apply_chat_template": is_chat(policy.tokenizer, options)}
    prompts, _ = load_prompts(str(path), PromptDataConfig(train=str(path), **how), policy.tokenizer)
    return list(islice(prompts, options.limit or None))


def responses(
    policy: OpenPolicy, prompts: Sequence[Prompt], options: SamplingOptions, sampling: SamplingConfig, *, start: int = 0
) -> Iterator[Rollout]:
    """`options.samples` responses to each prompt, in order, from the `start`-th on; each from a seed of its own."""
    count = options.samples
    seeds = sample_seeds(options.seed, 0, len(prompts) * count)
    waiting: deque[tuple[int, Future[GenResult]]] = deque()
    rows = iter(range(start, len(seeds)))

    def submit(rows: Iterable[int]) -> None:
        for row in rows:
            prompt = prompts[row // count]
            request = LiveRequest(tokens=prompt.tokens, seed=seeds[row], sampling=sampling, extras=prompt.extras)
            waiting.append((row, policy.live.submit(request)))

    submit(islice(rows, AHEAD * options.batch_size))
    while waiting:
        row, answer = waiting.popleft()
        result = answer.result()
        submit(islice(rows, 1))
        yield Rollout(
            prompt=prompts[row // count],
            response=result.tokens,
            logprobs=result.logprobs,
            finish_reason=result.finish_reason,
            policy_version=result.weight_version,
            seed=seeds[row],
            logprob_kind=result.kind,
        )


def text_of(tokenizer: Tokenizer, rollout: Rollout) -> str:
    """The response's text, without what ends it."""
    return tokenizer.decode_after(rollout.prompt.tokens, rollout.response)


def _to_file(policy: OpenPolicy, options: GenerateOptions, sampling: SamplingConfig) -> int:
    """The records in their order, one for each response. What an interrupted call has written is not sampled again."""
    path, output = Path(options.input or ""), Path(options.output or "")
    prompts = read_prompts(policy, path, options)
    if taken := next((prompt for prompt in prompts if options.field_name in prompt.columns), None):
        raise DataError(f"{taken.source}: has a field {options.field_name!r} already; allowed: --field NAME of another")
    asked = [(prompt.tokens, sorted(prompt.extras)) for prompt in prompts]
    made_of = repr((policy.name, asdict(sampling), options.seed, options.samples, options.field_name, options.logprobs, asked))
    part = output.with_name(f".{output.name}.{hashlib.sha256(made_of.encode()).hexdigest()[:12]}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("a+b") as file, closing(responses(policy, prompts, options, sampling, start=_kept(file))) as rollouts:
            for rollout in rollouts:
                file.write(json.dumps(_record(policy.tokenizer, rollout, options), ensure_ascii=False).encode(errors="replace") + b"\n")
                file.flush()
            os.fsync(file.fileno())
        part.replace(output)
    except OSError as error:
        raise AlignerError(f"the responses could not be written: {describe_os_error(error, part)}") from error
    print(f"{len(prompts) * options.samples:,} responses to {len(prompts):,} prompts written to {output}")
    return 0


def _kept(file: Any) -> int:
    """The number of whole lines; cuts off what follows them."""
    file.seek(0)
    size = count = 0
    for line in file:
        if line.endswith(b"\n"):
            size, count = size + len(line), count + 1
    file.truncate(size)
    return count


def _record(tokenizer: Tokenizer, rollout: Rollout, options: GenerateOptions) -> dict[str, Any]:
    made: dict[str, Any] = {options.field_name: text_of(tokenizer, rollout), "finish_reason": rollout.finish_reason.value}
    if options.logprobs:
        made |= {"token_ids": list(rollout.response), "logprobs": list(rollout.logprobs)}
    return {**rollout.prompt.columns, **made}
