"""OpenAI's responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from aligner.endpoint.generation import Generation
from aligner.endpoint.openai import chat_logprobs
from aligner.endpoint.requests import Ask, Fields, Model, tools_of
from aligner.endpoint.text import CALL, CONTENT, Piece

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def parse(model: Model, fields: Fields) -> Ask:
    fields.only("previous_response_id", (), "no response is kept here; send the whole conversation as input")
    fields.only("conversation", (), "no conversation is kept here; send the whole one as input")
    fields.only("background", (False,), "responses are answered at once")
    fields.only("reasoning", ({},), "how the model thinks is its own")
    fields.only("text", ({}, {"format": {"type": "text"}}), "responses are not held to a form")
    fields.only("truncation", ("disabled",), "prompts are never cut")
    fields.only("top_logprobs", (0,), "the engine gives the log-probs of the tokens that it drew")
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
    fields.ignore(("store", "stream_options", "max_tool_calls", "verbosity"))
    fields.end()
    return Ask(**own, **asked, given=given, logprobs="message.output_text.logprobs" in include)


def _turns(items: list[Any]) -> list[dict[str, Any]]:
    """The items of a conversation as messages: an assistant's thinking, text and calls are one of them."""
    turns: list[dict[str, Any]] = []
    for place, given in enumerate(items):
        item = Fields(given, where := f"input[{place}]")
        kind = item.take("type", str, "message")
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
        item.end()
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
    for place, given in enumerate(content):
        part = Fields(given, f"{where}[{place}]")
        kind = part.require("type", str)
        part.ignore(("annotations", "logprobs", "detail"))
        if kind in _TEXTS:
            parts.append({"type": "text", "text": part.require("text", str)})
        elif kind == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": part.require("image_url", str)}})
        else:
            raise part.bad("type", kind, "input_text, output_text or input_image")
        part.end()
    return parts if any(part["type"] != "text" for part in parts) else "".join(part["text"] for part in parts)


def _item(ask: Ask, place: int, piece: Piece, *, ended: bool = True) -> dict[str, Any]:
    about = {"status": "completed" if ended else "in_progress"}
    if piece.kind == CALL:
        arguments = piece.arguments if ended else ""
        call = {"type": "function_call", "id": f"fc_{ask.id}_{place}", "call_id": piece.id, "name": piece.name}
        return call | {"arguments": arguments} | about
    part = [_part(piece)] if ended else []
    if piece.kind == CONTENT:
        return {"type": "message", "id": f"msg_{ask.id}_{place}", "role": "assistant", "content": part} | about
    return {"type": "reasoning", "id": f"rs_{ask.id}_{place}", "summary": [], "content": part} | about


def _part(piece: Piece) -> dict[str, Any]:
    if piece.kind == CONTENT:
        return {"type": "output_text", "text": piece.text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": piece.text}


def _response(model: Model, ask: Ask, generation: Generation, *, ended: bool) -> dict[str, Any]:
    (choice,), (asked, said), sampling = generation.choices, generation.usage(), ask.sampling
    is_cut = ended and choice.finish_reason == "length"
    response: dict[str, Any] = {"id": f"resp_{ask.id}", "object": "response", "created_at": ask.created, "model": model.name, **ask.given}
    response |= {"status": "incomplete" if is_cut else "completed" if ended else "in_progress", "error": None, "output": []}
    response |= {"incomplete_details": {"reason": "max_output_tokens"} if is_cut else None, "parallel_tool_calls": True}
    response |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "text": {"format": {"type": "text"}}, "usage": None}
    response |= {"previous_response_id": None, "truncation": "disabled", "weight_version": generation.version}
    if ended and choice.result is not None:
        output = [_item(ask, place, piece) for place, piece in enumerate(choice.reply.pieces)]
        if ask.logprobs and (texts := [one for one in output if one["type"] == "message"]):
            texts[-1]["content"][0]["logprobs"] = chat_logprobs(model, choice.result.tokens, choice.result.logprobs)
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        usage = {"input_tokens": asked, "output_tokens": said, "total_tokens": asked + said}
        response |= {"output": output, "usage": usage | details}
        response |= {"prompt_token_ids": list(choice.prompt), "token_ids": list(choice.result.tokens)} if ask.ids else {}
    return response


async def whole(model: Model, ask: Ask, generation: Generation) -> dict[str, Any]:
    async for _ in generation.steps():
        pass
    return _response(model, ask, generation, ended=True)


async def stream(model: Model, ask: Ask, generation: Generation) -> AsyncIterator[dict[str, Any]]:
    number = 0

    def event(kind: str, **more: Any) -> dict[str, Any]:
        nonlocal number
        number += 1
        return {"type": f"response.{kind}", "sequence_number": number - 1, **more}

    for kind in ("created", "in_progress"):
        yield event(kind, response=_response(model, ask, generation, ended=False))
    (choice,), shown = generation.choices, 0
    begun = Piece("")

    def opened(place: int, piece: Piece) -> list[dict[str, Any]]:
        item = _item(ask, place, piece, ended=False)
        events = [event("output_item.added", output_index=place, item=item)]
        if piece.kind != CALL:
            empty = _part(Piece(piece.kind))
            events.append(event("content_part.added", item_id=item["id"], output_index=place, content_index=0, part=empty))
        return events

    def grown(place: int, piece: Piece) -> dict[str, Any]:
        at = {"item_id": _item(ask, place, piece)["id"], "output_index": place}
        if piece.kind == CALL:
            return event("function_call_arguments.delta", **at, delta=piece.arguments)
        name, more = ("output_text.delta", {"logprobs": []}) if piece.kind == CONTENT else ("reasoning_text.delta", {})
        return event(name, **at, content_index=0, delta=piece.text, **more)

    def closed(place: int, piece: Piece) -> list[dict[str, Any]]:
        item = _item(ask, place, piece)
        at = {"item_id": item["id"], "output_index": place}
        if piece.kind == CALL:
            events = [event("function_call_arguments.done", **at, arguments=piece.arguments, name=piece.name)]
        else:
            name, more = ("output_text.done", {"logprobs": []}) if piece.kind == CONTENT else ("reasoning_text.done", {})
            events = [event(name, **at, content_index=0, text=piece.text, **more)]
            events.append(event("content_part.done", **at, content_index=0, part=_part(piece)))
        return [*events, event("output_item.done", output_index=place, item=item)]

    async for step in generation.steps():
        for piece in step.pieces:
            if piece.kind != begun.kind or piece.kind == CALL:
                for one in closed(shown - 1, begun) if begun.kind else ():
                    yield one
                begun, shown = Piece(piece.kind, "", piece.name, piece.arguments, piece.id), shown + 1
                for one in opened(shown - 1, begun):
                    yield one
            begun = Piece(begun.kind, begun.text + piece.text, begun.name, begun.arguments, begun.id)
            yield grown(shown - 1, piece)
    for one in closed(shown - 1, begun) if begun.kind else ():
        yield one
    kind = "incomplete" if choice.finish_reason == "length" else "completed"
    yield event(kind, response=_response(model, ask, generation, ended=True))
