"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from aligner.endpoint.generation import Generation
from aligner.endpoint.requests import Ask, BadRequest, Fields, Model, tools_of
from aligner.endpoint.text import CALL, CONTENT, Piece

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def parse(model: Model, fields: Fields) -> Ask:
    if fields.peek("max_tokens") is None:
        fields.require("max_tokens", int)
    fields.rename("stop_sequences", "stop")
    asked = _conversation(model, fields)
    own = model.settings(fields, limits=("max_tokens",))
    fields.only("thinking", ({"type": "disabled"},), "whether the model thinks is its own")
    fields.ignore(("container", "context_management"))
    fields.end()
    return Ask(**own, **asked)


def count_tokens(model: Model, fields: Fields) -> dict[str, Any]:
    """Those of a prompt."""
    found = _conversation(model, fields)
    fields.ignore(("model", "thinking", "output_config"))
    fields.end()
    return {"input_tokens": len(found["prompts"][0])}


def _conversation(model: Model, fields: Fields) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    if system := fields.take("system", (str, list)):
        turns.append({"role": "system", "content": _parts(system, "system")})
    for place, given in enumerate(messages := fields.require("messages", list)):
        turns += _turns(Fields(given, f"messages[{place}]"), f"messages[{place}].content")
    if messages and turns[-1]["role"] == "assistant":
        raise BadRequest("messages: the last one is the assistant's, expected the user's: no response is begun for the model", "messages")
    offered = []
    for place, given in enumerate(tools_of(fields) or ()):
        own = Fields(given, f"tools[{place}]")
        own.only("type", ("custom",), "tools are the client's own")
        schema = {"name": own.require("name", str), "description": own.take("description", str, "")}
        offered.append({"type": "function", "function": schema | {"parameters": own.require("input_schema", dict)}})
        own.ignore(("cache_control", "strict", "input_examples"))
        own.end()
    return model.conversation(turns, offered)


def _turns(message: Fields, where: str) -> list[dict[str, Any]]:
    """A message in OpenAI's form: the results of tools are messages of their own there, in front of what the user says."""
    role, content = message.require("role", str), message.require("content", (str, list))
    message.end()
    if role not in ("user", "assistant"):
        raise message.bad("role", role, "user or assistant")
    turn: dict[str, Any] = {"role": role, "content": _parts(content, where, "thinking", "tool_use", "tool_result")}
    parts = turn["content"]
    results = [part for part in parts if part.get("role") == "tool"]
    calls = [part for part in parts if "function" in part]
    turn["content"] = [part for part in parts if part.get("type") in ("text", "image_url")]
    turn |= {"tool_calls": calls} if calls else {}
    turn |= {"reasoning_content": "".join(part["thinking"] for part in parts if "thinking" in part)} if role == "assistant" else {}
    if all(part["type"] == "text" for part in turn["content"]):
        turn["content"] = "".join(part["text"] for part in turn["content"])
    return [*results, *([turn] if turn["content"] or calls or not results else [])]


def _parts(content: Any, where: str, *more: str) -> list[dict[str, Any]]:
    """Blocks as OpenAI's parts; a tool's call and its result as what they are in messages there."""
    found: list[dict[str, Any]] = []
    for place, given in enumerate([{"type": "text", "text": content}] if isinstance(content, str) else content):
        block = Fields(given, f"{where}[{place}]")
        kind = block.require("type", str)
        if kind not in ("text", "image", *more):
            raise block.bad("type", kind, ", ".join(("text", "image", *more)))
        block.ignore(("cache_control", "citations", "signature", "caller"))
        if kind in ("text", "thinking"):
            found.append({"type": kind, kind: block.require(kind, str)})
        elif kind == "image":
            source = Fields(block.require("source", dict), f"{where}[{place}].source")
            source.only("type", ("base64",), "nothing is loaded from elsewhere")
            url = f"data:{source.require('media_type', str)};base64,{source.require('data', str)}"
            found.append({"type": "image_url", "image_url": {"url": url}})
        elif kind == "tool_use":
            function = {"name": block.require("name", str), "arguments": block.require("input", dict)}
            found.append({"id": block.require("id", str), "type": "function", "function": function})
        else:
            block.ignore(("is_error",))
            said = _parts(block.take("content", (str, list), ""), f"{where}[{place}].content")
            found.append({"role": "tool", "tool_call_id": block.require("tool_use_id", str), "content": said})
        block.end()
    return found


def _block(piece: Piece) -> dict[str, Any]:
    if piece.kind == CALL:
        return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": json.loads(piece.arguments)}
    return {"type": "text", "text": piece.text} if piece.kind == CONTENT else {"type": "thinking", "thinking": piece.text, "signature": ""}


def _message(model: Model, ask: Ask, generation: Generation, *, ended: bool) -> dict[str, Any]:
    (choice,), (asked, said) = generation.choices, generation.usage()
    message = {"id": f"msg_{ask.id}", "type": "message", "role": "assistant", "model": model.name, "content": []}
    message |= {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": asked, "output_tokens": said}}
    message |= {"weight_version": generation.version}
    if ended and choice.result is not None:
        message |= {"content": [_block(piece) for piece in choice.reply.pieces], **_end(choice)}
        message |= {"prompt_token_ids": list(choice.prompt), "token_ids": list(choice.result.tokens)} if ask.ids else {}
    return message


def _end(choice: Any) -> dict[str, Any]:
    stopped = choice.reply.stopped
    reason = "stop_sequence" if stopped and not choice.reply.has_called else _STOP_REASONS[choice.finish_reason]
    return {"stop_reason": reason, "stop_sequence": stopped or None}


async def whole(model: Model, ask: Ask, generation: Generation) -> dict[str, Any]:
    async for _ in generation.steps():
        pass
    return _message(model, ask, generation, ended=True)


async def stream(model: Model, ask: Ask, generation: Generation) -> AsyncIterator[dict[str, Any]]:
    yield {"type": "message_start", "message": _message(model, ask, generation, ended=False)}
    place, kind = -1, ""
    (choice,) = generation.choices
    async for step in generation.steps():
        for piece in step.pieces:
            if piece.kind != kind or kind == CALL:
                if kind:
                    yield {"type": "content_block_stop", "index": place}
                place, kind = place + 1, piece.kind
                empty = _block(Piece(kind, name=piece.name, arguments="{}", id=piece.id))
                yield {"type": "content_block_start", "index": place, "content_block": empty}
            delta = {CALL: ("input_json_delta", "partial_json"), CONTENT: ("text_delta", "text")}.get(kind, ("thinking_delta", "thinking"))
            yield {
                "type": "content_block_delta",
                "index": place,
                "delta": {"type": delta[0], delta[1]: piece.arguments if kind == CALL else piece.text},
            }
    if kind:
        yield {"type": "content_block_stop", "index": place}
    end: dict[str, Any] = {"type": "message_delta", "delta": _end(choice), "usage": {"output_tokens": choice.reply.num_tokens}}
    if ask.ids and choice.result is not None:
        end |= {"prompt_token_ids": list(choice.prompt), "token_ids": list(choice.result.tokens)}
    yield end | {"weight_version": generation.version}
    yield {"type": "message_stop"}
