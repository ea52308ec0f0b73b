"""OpenAI's responses."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aligner.endpoint.generation import Edge, Generation
from aligner.endpoint.openai import chat_logprobs
from aligner.endpoint.requests import Ask, Fields, Model, objects, tools_of
from aligner.endpoint.text import CALL, CONTENT, Piece

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def parse(model: Model, fields: Fields) -> Ask:
    fields.only("previous_response_id", (), "no response is kept here; send the whole conversation as input")
    fields.only("conversation", (), "no conversation is kept here; send the whole one as input")
    fields.only("background", (False,), "responses are answered at once")
    fields.only("reasoning", ({},), "how the model thinks is its own")
    fields.only("text", ({}, {"format": {"type": "text"}}), "responses are not held to a form")
    fields.only("truncation", ("disabled",), "prompts are never cut")
    include = fields.take("include", list, [])
    if wrong := [one for one in include if one not in ("message.output_text.logprobs", "reasoning.encrypted_content")]:
        raise fields.bad("include", wrong[0], "message.output_text.logprobs")
    given = {"instructions": fields.take("instructions", str), "max_output_tokens": fields.peek("max_output_tokens")}
    turns = [{"role": "system", "content": given["instructions"]}] if given["instructions"] else []
    said = fields.require("input", (str, list))
    turns += [{"role": "user", "content": said}] if isinstance(said, str) else _turns(said)
    given |= {"tools": fields.peek("tools") or [], "tool_choice": fields.peek("tool_choice") or "auto"}
    given |= {"metadata": fields.peek("metadata") or {}}
    offered = tools_of(fields)
    if wrong := [one for one in offered or () if not isinstance(one, dict) or one.get("type") != "function"]:
        raise fields.bad("tools", wrong[0], "tools of type function: the client's own")
    asked = model.conversation(turns, [{name: one[name] for name in one if name not in ("type", "strict")} for one in offered or ()])
    own = model.settings(fields, limits=("max_output_tokens",))
    top = model.alternatives(fields, "top_logprobs") or 0
    fields.ignore(("store", "stream_options", "max_tool_calls", "verbosity"))
    fields.end()
    return Ask(**own, **asked, given=given, logprobs="message.output_text.logprobs" in include, top=top)


def _turns(items: list[Any]) -> list[dict[str, Any]]:
    """The items of a conversation as messages: an assistant's thinking, text and calls are one of them."""
    turns: list[dict[str, Any]] = []
    for item in objects(items, "input"):
        kind, where = item.take("type", str, "message"), item.where
        item.ignore(("id", "status", "phase", "namespace"))
        if kind == "message":
            turn = {"role": item.require("role", str), "content": _content(item.require("content", (str, list)), f"{where}.content")}
            _assistant(turns).update(turn) if turn["role"] == "assistant" and _is_begun(turns) else turns.append(turn)
        elif kind == "function_call":
            function = {"name": item.require("name", str), "arguments": item.require("arguments", str)}
            _assistant(turns).setdefault("tool_calls", []).append(
                {"id": item.require("call_id", str), "type": "function", "function": function}
            )
        elif kind == "function_call_output":
            output = _content(item.require("output", (str, list)), f"{where}.output")
            turns.append({"role": "tool", "tool_call_id": item.require("call_id", str), "content": output})
        elif kind == "reasoning":
            item.ignore(("encrypted_content",))
            thoughts = item.take("content", list) or item.take("summary", list, [])
            item.ignore(("summary",))
            turns.append({"role": "assistant", "content": "", "reasoning_content": _content(thoughts, f"{where}.content")})
        else:
            raise item.bad("type", kind, "message, function_call, function_call_output or reasoning")
    return turns


def _is_begun(turns: list[dict[str, Any]]) -> bool:
    """Whether the last turn is an assistant's that has not said anything yet."""
    return bool(turns) and turns[-1]["role"] == "assistant" and not turns[-1]["content"] and "tool_calls" not in turns[-1]


def _assistant(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's turn at the end, a new one if somebody else's is there."""
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": ""})
    return turns[-1]


def _content(content: Any, where: str) -> Any:
    """A text, or parts if there are images among it."""
    if isinstance(content, str):
        return content
    parts = []
    for part in objects(content, where):
        kind = part.require("type", str)
        part.ignore(("annotations", "logprobs", "detail"))
        if kind in _TEXTS:
            parts.append({"type": "text", "text": part.require("text", str)})
        elif kind == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": part.require("image_url", str)}})
        else:
            raise part.bad("type", kind, "input_text, output_text or input_image")
    return parts if any(part["type"] != "text" for part in parts) else "".join(part["text"] for part in parts)


def _item(ask: Ask, place: int, piece: Piece, drawn: Sequence[dict[str, Any]] = (), *, ended: bool = True) -> dict[str, Any]:
    about = {"status": "completed" if ended else "in_progress"}
    if piece.kind == CALL:
        arguments = piece.arguments if ended else ""
        call = {"type": "function_call", "id": f"fc_{ask.id}_{place}", "call_id": piece.id, "name": piece.name}
        return call | {"arguments": arguments} | about
    part = [_part(piece, drawn)] if ended else []
    if piece.kind == CONTENT:
        return {"type": "message", "id": f"msg_{ask.id}_{place}", "role": "assistant", "content": part} | about
    return {"type": "reasoning", "id": f"rs_{ask.id}_{place}", "summary": [], "content": part} | about


def _part(piece: Piece, drawn: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    if piece.kind == CONTENT:
        return {"type": "output_text", "text": piece.text, "annotations": [], "logprobs": list(drawn)}
    return {"type": "reasoning_text", "text": piece.text}


def _response(generation: Generation, *, ended: bool) -> dict[str, Any]:
    (choice,), (asked, said), ask = generation.choices, generation.usage(), generation.ask
    is_cut = ended and choice.finish_reason == "length"
    response: dict[str, Any] = {"id": f"resp_{ask.id}", "object": "response", "created_at": ask.created, "model": generation.model.name}
    response |= {"status": "incomplete" if is_cut else "completed" if ended else "in_progress", "error": None, "output": []} | ask.given
    response |= {"incomplete_details": {"reason": "max_output_tokens"} if is_cut else None, "parallel_tool_calls": True, "usage": None}
    response |= {"temperature": ask.sampling.temperature, "top_p": ask.sampling.top_p, "text": {"format": {"type": "text"}}}
    response |= {"previous_response_id": None, "truncation": "disabled", "weight_version": generation.version}
    if ended and choice.result is not None:
        output = [_item(ask, place, piece) for place, piece in enumerate(choice.reply.pieces)]
        if ask.logprobs and (texts := [one for one in output if one["type"] == "message"]):
            drawn = chat_logprobs(generation.model, choice.result.tokens, choice.result.logprobs, choice.tops)
            texts[-1]["content"][0]["logprobs"] = drawn
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        usage = {"input_tokens": asked, "output_tokens": said, "total_tokens": asked + said}
        response |= {"output": output, "usage": usage | details}
        response |= {"prompt_token_ids": list(choice.prompt), "token_ids": list(choice.result.tokens)} if ask.ids else {}
    return response


def whole(generation: Generation) -> dict[str, Any]:
    return _response(generation, ended=True)


async def stream(generation: Generation) -> AsyncIterator[dict[str, Any]]:
    (choice,), ask, numbers = generation.choices, generation.ask, itertools.count()
    told, drawn = 0, list[dict[str, Any]]()  # tokens in deltas, and the log-probs of a text: of all that was drawn since the one before

    def event(kind: str, **more: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(numbers), **more}

    for kind in ("created", "in_progress"):
        yield event(kind, response=_response(generation, ended=False))
    async for edge, place, piece in generation.blocks():
        new: list[dict[str, Any]] = []
        if edge is Edge.begin:
            drawn = []
        elif piece.kind == CONTENT and ask.logprobs:
            parts, told = slice(told, choice.reply.num_tokens), choice.reply.num_tokens
            new = chat_logprobs(generation.model, choice.ids[parts], choice.logprobs[parts], choice.tops[parts])
            drawn += new
        item = _item(ask, place, piece, drawn, ended=edge is Edge.end)
        at: dict[str, Any] = {"item_id": item["id"], "output_index": place}
        in_part, is_text = at | {"content_index": 0}, piece.kind == CONTENT
        name = "output_text" if is_text else "reasoning_text"
        if edge is Edge.begin:
            yield event("output_item.added", output_index=place, item=item)
        if edge is Edge.begin and piece.kind != CALL:
            yield event("content_part.added", **in_part, part=_part(piece))
        elif edge is Edge.grow and piece.kind == CALL:
            yield event("function_call_arguments.delta", **at, delta=piece.arguments)
        elif edge is Edge.grow or new:  # at the end for tokens without a text
            grown = piece.text if edge is Edge.grow else ""
            yield event(f"{name}.delta", **in_part, delta=grown, **({"logprobs": new} if is_text else {}))
        if edge is Edge.end and piece.kind == CALL:
            yield event("function_call_arguments.done", **at, arguments=piece.arguments, name=piece.name)
        elif edge is Edge.end:
            yield event(f"{name}.done", **in_part, text=piece.text, **({"logprobs": drawn} if is_text else {}))
            yield event("content_part.done", **in_part, part=_part(piece, drawn))
        if edge is Edge.end:
            yield event("output_item.done", output_index=place, item=item)
    yield event("incomplete" if choice.finish_reason == "length" else "completed", response=_response(generation, ended=True))
