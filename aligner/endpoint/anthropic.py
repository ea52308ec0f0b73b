"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from aligner.endpoint.generation import Choice, Edge, Generation
from aligner.endpoint.requests import Ask, BadRequest, Fields, Model, objects, tools_of
from aligner.endpoint.text import CALL, CONTENT, REASONING, Piece

_DELTAS = {CALL: ("input_json_delta", "partial_json"), CONTENT: ("text_delta", "text"), REASONING: ("thinking_delta", "thinking")}
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
    found = _conversation(model, fields)
    fields.ignore(("model", "thinking", "output_config"))
    fields.end()
    return {"input_tokens": len(found["prompts"][0])}


def _conversation(model: Model, fields: Fields) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    if system := fields.take("system", (str, list)):
        turns.append({"role": "system", "content": _parts(system, "system")})
    for message in objects(messages := fields.require("messages", list), "messages"):
        turns += _turns(message)
    if messages and turns[-1]["role"] == "assistant":
        raise BadRequest("messages: the last one is the assistant's, expected the user's: no response is begun for the model", "messages")
    offered = []
    for own in objects(tools_of(fields) or (), "tools"):
        own.only("type", ("custom",), "tools are the client's own")
        schema = {"name": own.require("name", str), "description": own.take("description", str, "")}
        offered.append({"type": "function", "function": schema | {"parameters": own.require("input_schema", dict)}})
        own.ignore(("cache_control", "strict", "input_examples"))
    return model.conversation(turns, offered)


def _turns(message: Fields) -> list[dict[str, Any]]:
    """A message in OpenAI's form: the results of tools are messages of their own there, in front of what the user says."""
    role, content = message.require("role", str), message.require("content", (str, list))
    if role not in ("user", "assistant"):
        raise message.bad("role", role, "user or assistant")
    turn: dict[str, Any] = {"role": role, "content": _parts(content, f"{message.where}.content", "thinking", "tool_use", "tool_result")}
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
    for block in objects([{"type": "text", "text": content}] if isinstance(content, str) else content, where):
        kind = block.require("type", str)
        if kind not in ("text", "image", *more):
            raise block.bad("type", kind, ", ".join(("text", "image", *more)))
        block.ignore(("cache_control", "citations", "signature", "caller"))
        if kind in ("text", "thinking"):
            found.append({"type": kind, kind: block.require(kind, str)})
        elif kind == "image":
            source = Fields(block.require("source", dict), f"{block.where}.source")
            source.only("type", ("base64",), "nothing is loaded from elsewhere")
            url = f"data:{source.require('media_type', str)};base64,{source.require('data', str)}"
            found.append({"type": "image_url", "image_url": {"url": url}})
        elif kind == "tool_use":
            function = {"name": block.require("name", str), "arguments": block.require("input", dict)}
            found.append({"id": block.require("id", str), "type": "function", "function": function})
        else:
            block.ignore(("is_error",))
            said = _parts(block.take("content", (str, list), ""), f"{block.where}.content")
            found.append({"role": "tool", "tool_call_id": block.require("tool_use_id", str), "content": said})
    return found


def _block(piece: Piece) -> dict[str, Any]:
    if piece.kind == CALL:
        return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": json.loads(piece.arguments)}
    return {"type": "text", "text": piece.text} if piece.kind == CONTENT else {"type": "thinking", "thinking": piece.text, "signature": ""}


def _end(choice: Choice) -> dict[str, Any]:
    stopped = choice.reply.stopped
    reason = "stop_sequence" if stopped and not choice.reply.has_called else _STOP_REASONS[choice.finish_reason]
    return {"stop_reason": reason, "stop_sequence": stopped or None}


def _ids(generation: Generation) -> dict[str, Any]:
    (choice,) = generation.choices
    if not generation.ask.ids or choice.result is None:
        return {}
    return {"prompt_token_ids": list(choice.prompt), "token_ids": list(choice.result.tokens)}


def _begun(generation: Generation) -> dict[str, Any]:
    asked, said = generation.usage()
    message = {"id": f"msg_{generation.ask.id}", "type": "message", "role": "assistant", "model": generation.model.name, "content": []}
    message |= {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": asked, "output_tokens": said}}
    return message | {"weight_version": generation.version}


def whole(generation: Generation) -> dict[str, Any]:
    (choice,) = generation.choices
    content = [_block(piece) for piece in choice.reply.pieces]
    return _begun(generation) | {"content": content} | _end(choice) | _ids(generation)


async def stream(generation: Generation) -> AsyncIterator[dict[str, Any]]:
    (choice,) = generation.choices
    yield {"type": "message_start", "message": _begun(generation)}
    async for edge, index, piece in generation.blocks():
        if edge is Edge.begin:
            yield {"type": "content_block_start", "index": index, "content_block": _block(replace(piece, arguments="{}"))}
        elif edge is Edge.end:
            yield {"type": "content_block_stop", "index": index}
        else:
            kind, name = _DELTAS[piece.kind]
            delta = {"type": kind, name: piece.arguments if piece.kind == CALL else piece.text}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
    end = {"type": "message_delta", "delta": _end(choice), "usage": {"output_tokens": choice.reply.num_tokens}}
    yield end | _ids(generation) | {"weight_version": generation.version}
    yield {"type": "message_stop"}
