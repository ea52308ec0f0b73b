"""OpenAI's completions and chat completions, and vLLM's tokens in, tokens out."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aligner.data.messages import text_of
from aligner.endpoint.generation import Choice, Generation
from aligner.endpoint.requests import MOST_CHOICES, Ask, BadRequest, Fields, Model, tools_of
from aligner.endpoint.text import CALL, CONTENT, REASONING, Piece
from aligner.rollout.engine import Likeliest

_TEXTS = {CONTENT: "content", REASONING: "reasoning_content"}


def _rest(fields: Fields, ask: Ask) -> Ask:
    """What completions and chats have in common besides `Model.settings`."""
    fields.only("logit_bias", ({},), "tokens are drawn by the model's own logits")
    fields.only("response_format", ({"type": "text"},), "responses are not held to a form")
    fields.only("truncate_prompt_tokens", (), "prompts are never cut")
    if (options := fields.take("stream_options", dict)) is not None:
        own = Fields(options, "stream_options")
        ask.usage = own.take("include_usage", bool, False)
        own.ignore(("continuous_usage_stats", "include_obfuscation"))
        own.end()
    fields.end()
    return ask


def _envelope(generation: Generation, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    prefix, ask = "chatcmpl" if kind.startswith("chat") else "cmpl", generation.ask
    about = {"id": f"{prefix}-{ask.id}", "object": kind, "created": ask.created, "model": generation.model.name, "choices": choices}
    return about | {"weight_version": generation.version} | more


def _usage(generation: Generation) -> dict[str, int]:
    asked, said = generation.usage()
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


def _name(model: Model, token: int) -> str:
    return model.tokenizer.decode([token], skip_special=False)


# ---- POST /inference/v1/generate


def parse_generate(model: Model, fields: Fields) -> Ask:
    prompt = model.tokens_of(fields.require("token_ids", list), "token_ids")
    params = Fields(fields.take("sampling_params", dict, {}), "sampling_params")
    stream = fields.take("stream", bool, False)
    own = model.settings(params, limits=("max_tokens",))
    n = model.choices(params)
    params.only("logprobs", (0, 1, True), "only those of the drawn tokens here")
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


def whole_generate(generation: Generation) -> dict[str, Any]:
    choices = []
    for choice in generation.choices:
        result = choice.result
        own = {"index": choice.index, "token_ids": list(result.tokens), "finish_reason": result.finish_reason.value, "seed": choice.seed}
        own |= {"logprobs": _token_content(result.tokens, result.logprobs), "weight_version": result.weight_version}
        choices.append(own | ({"weight_versions": [list(one) for one in result.versions]} if result.versions else {}))
    about = {"usage": _usage(generation), "weight_version": generation.version}
    return {"request_id": f"gen-{generation.ask.id}", "choices": choices, **about}


async def stream_generate(generation: Generation) -> AsyncIterator[dict[str, Any]]:
    async for step in generation.steps():
        if step.ids or step.is_last:
            own = {"index": step.choice.index, "token_ids": list(step.ids), "logprobs": _token_content(step.ids, step.logprobs)}
            reason = step.choice.result.finish_reason.value if step.is_last and step.choice.result else None
            choices = [own | {"finish_reason": reason}]
            yield {"request_id": f"gen-{generation.ask.id}", "choices": choices, "weight_version": generation.version}


# ---- POST /v1/completions


def parse_completions(model: Model, fields: Fields) -> Ask:
    given = fields.require("prompt", (str, list))
    rows = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    special = fields.take("add_special_tokens", bool, True)
    echo = fields.take("echo", bool, False)
    samples = not (echo and fields.peek("max_tokens") == 0)
    if not samples:
        fields.take("max_tokens", int)
    own = model.settings(fields, limits=("max_tokens",), usual=16)
    n, top = model.choices(fields), model.alternatives(fields, "logprobs")
    if echo and own["stream"]:
        raise BadRequest("echo: not with stream; allowed: one of them", "echo")
    if echo and top is not None and model.score is None:
        raise BadRequest("echo: the log-probs of prompts are not known here; allowed: without logprobs", "echo")
    fields.only("suffix", ("",), "the model continues texts")
    if not rows or len(rows) * n > MOST_CHOICES:
        raise BadRequest(f"prompt: {len(rows)} prompts times n={n}, expected 1 to {MOST_CHOICES} responses", "prompt")
    prompts = [_prompt(model, row, special) for row in rows]
    for prompt in prompts:
        model.check(prompt, "prompt", room=int(samples))
    return _rest(fields, Ask(**own, prompts=prompts, n=n, logprobs=top is not None, top=top or 0, echo=echo, samples=samples))


def _prompt(model: Model, row: object, special: bool) -> tuple[int, ...]:
    if not isinstance(row, str):
        return model.tokens_of(row, "prompt")
    return tuple(model.tokenizer.encode(text_of(row, "prompt", empty=True), add_special=special))


def _legacy(
    model: Model, ids: Sequence[int], logprobs: Sequence[float | None], tops: Sequence[Likeliest], offset: int = 0
) -> dict[str, Any]:
    """The form of log-probs in completions: of each token, and by name of it and of the likeliest in its place."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, p, likeliest in zip(ids, logprobs, tops or [[]] * len(ids), strict=True):
        name = _name(model, token)
        found["tokens"].append(name)
        found["token_logprobs"].append(p)
        found["top_logprobs"].append(None if p is None else {_name(model, one): q for one, q in reversed(likeliest)} | {name: p})
        found["text_offset"].append(offset)
        offset += len(name)
    return found


def _completion(generation: Generation, choice: Choice) -> dict[str, Any]:
    model, ask, result, prompt = generation.model, generation.ask, choice.result, choice.prompt
    text = choice.reply.joined(CONTENT)
    drawn = [] if result is None else list(result.tokens)
    ids, logprobs, tops = drawn, [] if result is None else [*result.logprobs], choice.tops
    if ask.echo:
        text = model.tokenizer.decode(prompt, skip_special=False) + text
    if ask.echo and choice.known is not None:
        own, likeliest = choice.known
        ids, logprobs = [*prompt, *ids], [None, *own, *logprobs]
        tops = [[], *likeliest, *(tops or [[]] * len(drawn))]
    found = {"index": choice.index, "text": text, "finish_reason": choice.finish_reason, "stop_reason": choice.reply.stopped or None}
    found |= {"logprobs": _legacy(model, ids, logprobs, tops) if ask.logprobs else None}
    return found | ({"token_ids": drawn, "prompt_token_ids": list(prompt)} if ask.ids else {})


def whole_completions(generation: Generation) -> dict[str, Any]:
    found = [_completion(generation, choice) for choice in generation.choices]
    return _envelope(generation, "text_completion", found, usage=_usage(generation))


async def stream_completions(generation: Generation) -> AsyncIterator[dict[str, Any]]:
    ask, begun, offsets = generation.ask, set[int](), Counter[int]()
    async for step in generation.steps():
        text = "".join(piece.text for piece in step.pieces)
        if not text and not step.is_last and not (ask.ids or ask.logprobs):
            continue
        own: dict[str, Any] = {"index": step.choice.index, "text": text, "logprobs": None}
        if ask.logprobs:
            own["logprobs"] = _legacy(generation.model, step.ids, step.logprobs, step.tops, offsets[step.choice.index])
            offsets[step.choice.index] += sum(map(len, own["logprobs"]["tokens"]))
        own |= {"finish_reason": step.choice.finish_reason if step.is_last else None}
        if ask.ids:
            first = {} if step.choice.index in begun else {"prompt_token_ids": list(step.choice.prompt)}
            own |= {"token_ids": list(step.ids)} | first
            begun.add(step.choice.index)
        yield _envelope(generation, "text_completion", [own])
    if ask.usage:
        yield _envelope(generation, "text_completion", [], usage=_usage(generation))


# ---- POST /v1/chat/completions


def parse_chat(model: Model, fields: Fields) -> Ask:
    messages, tools = fields.require("messages", list), tools_of(fields)
    own = model.settings(fields, limits=("max_completion_tokens", "max_tokens"))
    n = model.choices(fields)
    logprobs = fields.take("logprobs", bool, False)
    top = model.alternatives(fields, "top_logprobs") or 0
    if top and not logprobs:
        raise BadRequest(f"top_logprobs={top}: beside log-probs only; allowed: with logprobs=true", "top_logprobs")
    fields.only("modalities", (["text"],), "the model answers with text")
    fields.only("reasoning_effort", (), "how long the model thinks is its own")
    fields.take("store", bool)
    return _rest(fields, Ask(**own, **model.conversation(messages, tools), n=n, logprobs=logprobs, top=top))


def chat_logprobs(model: Model, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Likeliest]) -> list[dict[str, Any]]:
    """The form of log-probs in chats: of the tokens that were drawn, and of the likeliest in their places."""

    def about(token: int, p: float) -> dict[str, Any]:
        return {"token": (name := _name(model, token)), "logprob": p, "bytes": list(name.encode())}

    each = zip(ids, logprobs, tops or [[]] * len(ids), strict=True)
    return [about(token, p) | {"top_logprobs": [about(*one) for one in likeliest]} for token, p, likeliest in each]


def _said(pieces: Sequence[Piece]) -> dict[str, Any]:
    """What pieces add to a message; of each kind what there is."""
    texts = {name: "".join(piece.text for piece in pieces if piece.kind == kind) for kind, name in _TEXTS.items()}
    calls = [
        {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": piece.arguments}}
        for piece in pieces
        if piece.kind == CALL
    ]
    return {name: text for name, text in texts.items() if text} | ({"tool_calls": calls} if calls else {})


def whole_chat(generation: Generation) -> dict[str, Any]:
    model, ask, choices = generation.model, generation.ask, []
    for choice in generation.choices:
        result, said = choice.result, _said(choice.reply.pieces)
        message = {"role": "assistant", "content": None if "tool_calls" in said else "", "refusal": None} | said
        own = {"index": choice.index, "message": message, "finish_reason": choice.finish_reason, "logprobs": None}
        own |= {"stop_reason": choice.reply.stopped or None} | ({"token_ids": list(result.tokens)} if ask.ids else {})
        if ask.logprobs:
            content = chat_logprobs(model, result.tokens, result.logprobs, choice.tops)
            own["logprobs"] = {"content": content, "refusal": None}
        choices.append(own)
    more = {"prompt_token_ids": list(ask.prompts[0])} if ask.ids else {}
    return _envelope(generation, "chat.completion", choices, usage=_usage(generation), **more)


async def stream_chat(generation: Generation) -> AsyncIterator[dict[str, Any]]:
    def chunk(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return _envelope(generation, "chat.completion.chunk", choices, **more)

    ask, first = generation.ask, {"role": "assistant", "content": ""}
    ids = {"prompt_token_ids": list(ask.prompts[0])} if ask.ids else {}
    yield chunk([{"index": one.index, "delta": first, "finish_reason": None, "logprobs": None} for one in generation.choices], **ids)
    calls = [0] * len(generation.choices)
    async for step in generation.steps():
        place, delta = step.choice.index, _said(step.pieces)
        for call in delta.get("tool_calls", ()):
            call["index"] = calls[place]
            calls[place] += 1
        own: dict[str, Any] = {"index": place, "delta": delta, "finish_reason": None, "logprobs": None}
        if ask.logprobs and step.ids:
            own["logprobs"] = {"content": chat_logprobs(generation.model, step.ids, step.logprobs, step.tops), "refusal": None}
        own |= {"token_ids": list(step.ids)} if ask.ids else {}
        if step.is_last:
            own |= {"finish_reason": step.choice.finish_reason, "stop_reason": step.choice.reply.stopped or None}
        if delta or step.is_last or (step.ids and (ask.ids or ask.logprobs)):
            yield chunk([own])
    if ask.usage:
        yield chunk([], usage=_usage(generation))


# ---- POST /tokenize, /detokenize


def tokenize(model: Model, fields: Fields) -> dict[str, Any]:
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
