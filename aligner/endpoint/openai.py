"""OpenAI's completions and chat completions, and vLLM's tokens in, tokens out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from aligner.data.messages import text_of
from aligner.endpoint.generation import Choice, Generation
from aligner.endpoint.requests import MOST_CHOICES, Ask, BadRequest, Fields, Model, tools_of
from aligner.endpoint.text import CALL, CONTENT, REASONING, Piece

_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "logit_bias": (({},), "tokens are drawn by the model's own logits"),
    "response_format": (({"type": "text"},), "responses are not held to a form"),
    "suffix": (("",), "the model continues texts"),
    "store": ((False, True), ""),
    "truncate_prompt_tokens": ((), "prompts are never cut"),
}
_ONLY_CHOSEN = "the engine gives the log-probs of the tokens that it drew"


def _fixed(fields: Fields, *names: str) -> None:
    for name in names:
        fields.only(name, *_FIXED[name])


def _streamed(fields: Fields, ask: Ask) -> Ask:
    if (options := fields.take("stream_options", dict)) is not None:
        own = Fields(options, "stream_options")
        ask.usage = own.take("include_usage", bool, False)
        own.ignore(("continuous_usage_stats", "include_obfuscation"))
        own.end()
    fields.end()
    return ask


def _envelope(model: Model, ask: Ask, generation: Generation, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    about = {"id": f"{prefix}-{ask.id}", "object": kind, "created": ask.created, "model": model.name, "choices": choices}
    return about | {"weight_version": generation.version} | more


def _usage(generation: Generation) -> dict[str, int]:
    asked, said = generation.usage()
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


# ---- POST /inference/v1/generate


def parse_generate(model: Model, fields: Fields) -> Ask:
    prompt = model.tokens_of(fields.require("token_ids", list), "token_ids")
    params = Fields(fields.take("sampling_params", dict, {}), "sampling_params")
    stream = fields.take("stream", bool, False)
    own = model.settings(params, limits=("max_tokens",))
    n = model.choices(params)
    params.only("logprobs", (0, 1, True), _ONLY_CHOSEN)
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        params.only(name, (), "not of prompts")
    params.ignore(("spaces_between_special_tokens", "include_stop_str_in_output", "detokenize", "routed_experts_prompt_start"))
    params.end()
    fields.ignore(("model", "request_id", "priority", "cache_salt", "kv_transfer_params"))
    fields.only("features", (), "images come as parts of messages")
    fields.end()
    model.check(prompt, "token_ids")
    return Ask(**own | {"prompts": [prompt], "n": n, "stream": own["stream"] or stream})


def _token_content(ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    return {"content": [{"token": f"token_id:{one}", "logprob": p} for one, p in zip(ids, logprobs, strict=True)]}


async def whole_generate(model: Model, ask: Ask, generation: Generation) -> dict[str, Any]:
    choices = []
    for choice in await _ended(generation):
        result = choice.result
        own = {"index": choice.index, "token_ids": list(result.tokens), "finish_reason": result.finish_reason.value, "seed": choice.seed}
        own |= {"logprobs": _token_content(result.tokens, result.logprobs), "weight_version": result.weight_version}
        choices.append(own | ({"weight_versions": [list(one) for one in result.versions]} if result.versions else {}))
    return {"request_id": f"gen-{ask.id}", "choices": choices, "usage": _usage(generation), "weight_version": generation.version}


async def stream_generate(model: Model, ask: Ask, generation: Generation) -> AsyncIterator[dict[str, Any]]:
    async for step in generation.steps():
        if step.ids or step.is_last:
            own = {"index": step.choice.index, "token_ids": list(step.ids), "logprobs": _token_content(step.ids, step.logprobs)}
            reason = step.choice.result.finish_reason.value if step.is_last and step.choice.result else None
            choices = [own | {"finish_reason": reason}]
            yield {"request_id": f"gen-{ask.id}", "choices": choices, "weight_version": generation.version}


async def _ended(generation: Generation) -> list[Choice]:
    async for _ in generation.steps():
        pass
    return generation.choices


# ---- POST /v1/completions


def parse_completions(model: Model, fields: Fields) -> Ask:
    given = fields.require("prompt", (str, list))
    rows = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    special = fields.take("add_special_tokens", bool, True)
    logprobs = fields.take("logprobs", int)
    if logprobs is not None and not 0 <= logprobs <= 1:
        raise BadRequest(f"logprobs={logprobs}: {_ONLY_CHOSEN}; allowed: 0, 1", "logprobs")
    echo = fields.take("echo", bool, False)
    samples = not (echo and fields.peek("max_tokens") == 0)
    if not samples:
        fields.take("max_tokens", int)
    own = model.settings(fields, limits=("max_tokens",), usual=16)
    n = model.choices(fields)
    if echo and own["stream"]:
        raise BadRequest("echo: not with stream; allowed: one of them", "echo")
    if echo and logprobs is not None and model.score is None:
        raise BadRequest("echo: the log-probs of prompts are not known here; allowed: without logprobs", "echo")
    _fixed(fields, "logit_bias", "suffix", "response_format", "truncate_prompt_tokens")
    if not rows or len(rows) * n > MOST_CHOICES:
        raise BadRequest(f"prompt: {len(rows)} prompts times n={n}, expected 1 to {MOST_CHOICES} responses", "prompt")
    prompts = [_prompt(model, row, special) for row in rows]
    for prompt in prompts:
        model.check(prompt, "prompt", room=int(samples))
    return _streamed(fields, Ask(**own, prompts=prompts, n=n, logprobs=logprobs is not None, echo=echo, samples=samples))


def _prompt(model: Model, row: object, special: bool) -> tuple[int, ...]:
    if not isinstance(row, str):
        return model.tokens_of(row, "prompt")
    return tuple(model.tokenizer.encode(text_of(row, "prompt", empty=True), add_special=special))


def _legacy(model: Model, ids: Iterable[int], logprobs: Iterable[float | None], tops: Iterable[Any], offset: int = 0) -> dict[str, Any]:
    """The form of log-probs in completions."""
    tokens = [model.tokenizer.decode([one], skip_special=False) for one in ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {"tokens": tokens, "token_logprobs": list(logprobs), "top_logprobs": list(tops), "text_offset": offsets}


def _completion(model: Model, ask: Ask, choice: Choice, scored: Any) -> dict[str, Any]:
    """`scored`: the log-probs of the prompt, if they are asked for."""
    result = choice.result
    ids, drawn = (result.tokens, result.logprobs) if result is not None else ((), ())
    text, logprobs = choice.reply.joined(CONTENT), None
    names = [model.tokenizer.decode([one], skip_special=False) for one in ids] if ask.logprobs else []
    tops: list[dict[str, float] | None] = [{name: one} for name, one in zip(names, drawn, strict=False)]
    if ask.echo:
        text = model.tokenizer.decode(choice.prompt, skip_special=False) + text
    if ask.echo and ask.logprobs:
        own, best = scored
        before: list[dict[str, float] | None] = [None]
        for token, p, (likeliest, most) in zip(choice.prompt[1:], own, best, strict=True):
            other = {} if likeliest == token else {model.tokenizer.decode([likeliest], skip_special=False): most}
            before.append({model.tokenizer.decode([token], skip_special=False): p} | other)  # clients compare with the largest
        logprobs = _legacy(model, (*choice.prompt, *ids), [None, *own, *drawn], [*before, *tops])
    elif ask.logprobs:
        logprobs = _legacy(model, ids, drawn, tops)
    found = {"index": choice.index, "text": text, "finish_reason": choice.finish_reason, "logprobs": logprobs}
    found |= {"stop_reason": choice.reply.stopped or None}
    return found | ({"token_ids": list(ids), "prompt_token_ids": list(choice.prompt)} if ask.ids else {})


async def whole_completions(model: Model, ask: Ask, generation: Generation) -> dict[str, Any]:
    choices = await _ended(generation)
    scored: list[Any] = [None] * len(ask.prompts)
    if ask.echo and ask.logprobs and model.score is not None:
        scored = list(zip(*await generation.inbox.compute(model.score, ask.prompts), strict=True))
    found = [_completion(model, ask, choice, scored[choice.prompt_index]) for choice in choices]
    return _envelope(model, ask, generation, "text_completion", found, usage=_usage(generation))


async def stream_completions(model: Model, ask: Ask, generation: Generation) -> AsyncIterator[dict[str, Any]]:
    begun: set[int] = set()
    async for step in generation.steps():
        text = "".join(piece.text for piece in step.pieces)
        if not text and not step.is_last and not (ask.ids or ask.logprobs):
            continue
        own: dict[str, Any] = {"index": step.choice.index, "text": text, "logprobs": None}
        if ask.logprobs:
            names = [model.tokenizer.decode([one], skip_special=False) for one in step.ids]
            own["logprobs"] = _legacy(model, step.ids, step.logprobs, [{name: p} for name, p in zip(names, step.logprobs, strict=True)])
        own |= {"finish_reason": step.choice.finish_reason if step.is_last else None}
        if ask.ids:
            first = {} if step.choice.index in begun else {"prompt_token_ids": list(step.choice.prompt)}
            own |= {"token_ids": list(step.ids)} | first
            begun.add(step.choice.index)
        yield _envelope(model, ask, generation, "text_completion", [own])
    if ask.usage:
        yield _envelope(model, ask, generation, "text_completion", [], usage=_usage(generation))


# ---- POST /v1/chat/completions


def parse_chat(model: Model, fields: Fields) -> Ask:
    messages, tools = fields.require("messages", list), tools_of(fields)
    own = model.settings(fields, limits=("max_completion_tokens", "max_tokens"))
    n = model.choices(fields)
    logprobs = fields.take("logprobs", bool, False)
    fields.only("top_logprobs", (0,), _ONLY_CHOSEN)
    fields.only("modalities", (["text"],), "the model answers with text")
    fields.only("reasoning_effort", (), "how long the model thinks is its own")
    _fixed(fields, "logit_bias", "response_format", "store", "truncate_prompt_tokens")
    return _streamed(fields, Ask(**own, **model.conversation(messages, tools), n=n, logprobs=logprobs))


def chat_logprobs(model: Model, ids: Sequence[int], logprobs: Sequence[float]) -> list[dict[str, Any]]:
    """The form of log-probs in chats, of the tokens that were drawn."""
    names = [model.tokenizer.decode([one], skip_special=False) for one in ids]
    return [
        {"token": name, "logprob": p, "bytes": list(name.encode()), "top_logprobs": []} for name, p in zip(names, logprobs, strict=True)
    ]


def _call(piece: Piece) -> dict[str, Any]:
    return {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": piece.arguments}}


async def whole_chat(model: Model, ask: Ask, generation: Generation) -> dict[str, Any]:
    choices = []
    for choice in await _ended(generation):
        result, reply = choice.result, choice.reply
        calls, thought = [_call(piece) for piece in reply.pieces if piece.kind == CALL], reply.joined(REASONING)
        message: dict[str, Any] = {"role": "assistant", "content": reply.joined(CONTENT) or (None if calls else ""), "refusal": None}
        message |= ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thought} if thought else {})
        own = {"index": choice.index, "message": message, "finish_reason": choice.finish_reason, "stop_reason": reply.stopped or None}
        own["logprobs"] = {"content": chat_logprobs(model, result.tokens, result.logprobs), "refusal": None} if ask.logprobs else None
        choices.append(own | ({"token_ids": list(result.tokens)} if ask.ids else {}))
    more = {"prompt_token_ids": list(ask.prompts[0])} if ask.ids else {}
    return _envelope(model, ask, generation, "chat.completion", choices, usage=_usage(generation), **more)


async def stream_chat(model: Model, ask: Ask, generation: Generation) -> AsyncIterator[dict[str, Any]]:
    def chunk(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return _envelope(model, ask, generation, "chat.completion.chunk", choices, **more)

    first: dict[str, Any] = {"role": "assistant", "content": ""}
    ids = {"prompt_token_ids": list(ask.prompts[0])} if ask.ids else {}
    yield chunk([{"index": one.index, "delta": first, "finish_reason": None, "logprobs": None} for one in generation.choices], **ids)
    calls = dict.fromkeys(range(len(generation.choices)), 0)
    async for step in generation.steps():
        delta: dict[str, Any] = {}
        for kind, name in ((CONTENT, "content"), (REASONING, "reasoning_content")):
            if text := "".join(piece.text for piece in step.pieces if piece.kind == kind):
                delta[name] = text
        called = [_call(piece) for piece in step.pieces if piece.kind == CALL]
        if called:
            delta["tool_calls"] = [one | {"index": place} for place, one in enumerate(called, calls[step.choice.index])]
            calls[step.choice.index] += len(called)
        own: dict[str, Any] = {"index": step.choice.index, "delta": delta, "finish_reason": None, "logprobs": None}
        if ask.logprobs and step.ids:
            own["logprobs"] = {"content": chat_logprobs(model, step.ids, step.logprobs), "refusal": None}
        own |= {"token_ids": list(step.ids)} if ask.ids else {}
        if step.is_last:
            own |= {"finish_reason": step.choice.finish_reason, "stop_reason": step.choice.reply.stopped or None}
        if delta or step.is_last or (step.ids and (ask.ids or ask.logprobs)):
            yield chunk([own])
    if ask.usage:
        yield chunk([], usage=_usage(generation))


# ---- POST /tokenize, /detokenize


def tokenize(model: Model, fields: Fields) -> dict[str, Any]:
    """Of a text, or of messages."""
    fields.ignore(("model",))
    if (messages := fields.take("messages", list)) is not None:
        asks = fields.take("add_generation_prompt", bool, True)
        tools = fields.take("tools", list)
        fields.end()
        ids = list(model.conversation(messages, tools, asks=asks)["prompts"][0])
    else:
        text, special = fields.require("prompt", str), fields.take("add_special_tokens", bool, True)
        fields.end()
        ids = model.tokenizer.encode(text_of(text, "prompt", empty=True), add_special=special)
    return {"tokens": ids, "count": len(ids), "max_model_len": model.context}


def detokenize(model: Model, fields: Fields) -> dict[str, Any]:
    """The text of tokens, special ones spelled out."""
    fields.ignore(("model",))
    ids = model.tokens_of(fields.require("tokens", list), "tokens")
    fields.end()
    return {"prompt": model.tokenizer.decode(ids, skip_special=False)}
