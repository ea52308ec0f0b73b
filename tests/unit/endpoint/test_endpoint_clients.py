"""The real clients of OpenAI and Anthropic against the endpoint over a scripted engine: whole and streamed, with tools and thinking."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_live_engine import END, KEY, ScriptedEngine, scripted, tokenizer_of

openai = pytest.importorskip("openai", reason="the package openai is not installed")

from aligner.endpoint.app import Endpoint  # noqa: E402
from aligner.endpoint.generation import choice_seed  # noqa: E402

CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Ulm"}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a place.", "parameters": PARAMETERS}}]
SAID = "It is <b>22\u00b0</b> \U0001f642 there."


def answer(request: Any) -> str:
    """Thinks and calls a tool when asked for the weather; else says the same, or what it was told to say."""
    asked = bytes(token for token in request.tokens if token < 256) and TOKENIZER.decode(request.tokens, skip_special=False)
    if "say:" in asked:
        return asked.rpartition("say:")[2].partition("\n")[0]
    return f"<think>It wants weather.</think>{CALL}" if asked.endswith("weather?\n<|assistant|>") else SAID


TOKENIZER: Any = None


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Endpoint, ScriptedEngine]]:
    global TOKENIZER
    TOKENIZER = tokenizer_of(tmp_path_factory.mktemp("bytes"))
    with scripted(TOKENIZER, answer) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: tuple[Endpoint, ScriptedEngine]) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served[0].url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(served: tuple[Endpoint, ScriptedEngine], anthropic: Any) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=served[0].url, api_key=KEY, max_retries=0) as client:
        yield client


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_the_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len, model.weight_version) == ("tiny", 4096, 7)


def test_a_chat(client: Any, served: tuple[Endpoint, ScriptedEngine]) -> None:
    said = client.chat.completions.create(
        model="any", messages=user("Hello"), seed=5, temperature=0.5, top_p=0.9, logprobs=True, n=3, extra_body={"return_token_ids": True}
    )
    assert [choice.message.content for choice in said.choices] == [SAID] * 3 and said.weight_version == 7
    assert {choice.finish_reason for choice in said.choices} == {"stop"}
    ids = [*TOKENIZER.encode(SAID), END]
    assert said.choices[2].token_ids == ids and [one.logprob for one in said.choices[2].logprobs.content[:2]] == [-0.5, -0.75]
    assert bytes(byte for one in said.choices[0].logprobs.content[:5] for byte in one.bytes) == b"It is"
    requests = served[1].requests[-3:]
    assert sorted(one.seed for one in requests) == sorted(choice_seed(5, place) for place in range(3)) and choice_seed(5, 0) == 5
    assert {(one.sampling.temperature, one.sampling.top_p) for one in requests} == {(0.5, 0.9)}
    assert TOKENIZER.decode(said.prompt_token_ids, skip_special=False) == "<|user|>Hello\n<|assistant|>"
    assert said.usage.completion_tokens == 3 * len(ids) and said.usage.prompt_tokens == len(said.prompt_token_ids)
    raw = client.chat.completions.with_raw_response.create(model="", messages=user("Hello"))
    assert raw.headers["X-Weight-Version"] == "7"


def test_a_chat_that_streams(client: Any) -> None:
    options = {"stream_options": {"include_usage": True}, "extra_body": {"return_token_ids": True}, "logprobs": True}
    chunks = list(client.chat.completions.create(model="tiny", messages=user("Hello"), stream=True, n=2, **options))
    for index in range(2):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in own) == SAID
        assert [token for choice in own for token in getattr(choice, "token_ids", [])] == [*TOKENIZER.encode(SAID), END]
        assert len([one for choice in own if choice.logprobs for one in choice.logprobs.content]) == len(TOKENIZER.encode(SAID)) + 1
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["stop"]
    assert chunks[-1].usage.completion_tokens == 2 * (len(TOKENIZER.encode(SAID)) + 1)
    assert len(chunks) > 4  # tokens that wait go out together
    with client.chat.completions.stream(model="tiny", messages=user("Hello")) as stream:
        assert stream.get_final_completion().choices[0].message.content == SAID


def test_stop_strings_are_left_out_of_the_text_alone(client: Any) -> None:
    how = {"model": "tiny", "messages": user("Hello"), "stop": [" \U0001f642", "never"], "extra_body": {"return_token_ids": True}}
    choice = client.chat.completions.create(**how).choices[0]
    assert choice.message.content == "It is <b>22\u00b0</b>" and choice.finish_reason == "stop" and choice.stop_reason == " \U0001f642"
    assert choice.token_ids == list(TOKENIZER.encode("It is <b>22\u00b0</b> \U0001f642"))
    shown = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**how, stream=True)]
    assert "".join(shown) == choice.message.content


def test_tools_of_a_chat(client: Any) -> None:
    """The call, its result and the answer; the same from a stream."""
    messages: list[Any] = user("Ulm weather?")
    message = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments, message.content) == ("weather", '{"place": "Ulm"}', None)
    assert message.reasoning_content == "It wants weather."
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "22"}]}]
    after = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, extra_body={"return_token_ids": True})
    prompt = TOKENIZER.decode(after.prompt_token_ids, skip_special=False)
    assert after.choices[0].message.content == SAID and prompt.startswith("<|system|>[{")
    assert '<|assistant|><think>It wants weather.</think><tool_call>{"name": "weather", "arguments": {"place": "Ulm"}}' in prompt
    assert prompt.endswith("<|tool|>22\n<|assistant|>")
    with client.chat.completions.stream(model="tiny", messages=user("Ulm weather?"), tools=TOOLS) as stream:
        choice = stream.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments, choice.finish_reason) == ("weather", '{"place": "Ulm"}', "tool_calls")
    told = client.chat.completions.create(model="tiny", messages=user("Ulm weather?"), tools=TOOLS, tool_choice="none")
    assert told.choices[0].message.content == CALL and told.choices[0].message.tool_calls is None


def test_completions(client: Any) -> None:
    said = client.completions.create(model="tiny", prompt=["say:one\n", "say:two\n"], n=2, logprobs=0, max_tokens=20)
    assert [(one.index, one.text) for one in said.choices] == [(0, "one"), (1, "one"), (2, "two"), (3, "two")]
    assert said.choices[0].logprobs.tokens == ["o", "n", "e", "<|end|>"] and said.choices[0].logprobs.text_offset == [0, 1, 2, 3]
    ids = client.completions.create(model="tiny", prompt=list(TOKENIZER.encode("say:one\n")), max_tokens=2)
    assert (ids.choices[0].text, ids.choices[0].finish_reason) == ("on", "length")
    assert client.completions.create(model="tiny", prompt="say:" + "x" * 30 + "\n").usage.completion_tokens == 16  # as OpenAI's
    chunks = list(client.completions.create(model="tiny", prompt="say:one\n", stream=True, max_tokens=9))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "one"
    echoed = client.completions.create(model="tiny", prompt="say:one\n", echo=True, max_tokens=0)
    assert echoed.choices[0].text == "say:one\n" and echoed.usage.completion_tokens == 0


def test_responses(client: Any) -> None:
    said = client.responses.create(model="tiny", input="Hello", instructions="Be brief.", extra_body={"return_token_ids": True})
    assert (said.output_text, said.status, said.weight_version) == (SAID, "completed", 7)
    assert TOKENIZER.decode(said.prompt_token_ids, skip_special=False) == "<|system|>Be brief.\n<|user|>Hello\n<|assistant|>"
    tools = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
    asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Ulm weather?"}]}]
    found = client.responses.create(model="tiny", input=asked, tools=tools)
    assert [item.type for item in found.output] == ["reasoning", "function_call"]
    call = found.output[1]
    asked += [*found.output, {"type": "function_call_output", "call_id": call.call_id, "output": "22"}]
    after = client.responses.create(model="tiny", input=asked, tools=tools, extra_body={"return_token_ids": True})
    prompt = TOKENIZER.decode(after.prompt_token_ids, skip_special=False)
    assert '<|assistant|><think>It wants weather.</think><tool_call>{"name": "weather"' in prompt and after.output_text == SAID
    cut = client.responses.create(model="tiny", input="Hello", max_output_tokens=4)
    assert (cut.status, cut.incomplete_details.reason, cut.output_text) == ("incomplete", "max_output_tokens", "It i")


def test_responses_that_stream(client: Any) -> None:
    events = list(client.responses.create(model="tiny", input="Hello", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == SAID
    assert [event.type for event in events if "delta" not in event.type] == [
        f"response.{kind}"
        for kind in (
            *("created", "in_progress", "output_item.added", "content_part.added"),
            *("output_text.done", "content_part.done", "output_item.done", "completed"),
        )
    ]
    tools = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
    with client.responses.stream(model="tiny", input="Ulm weather?", tools=tools) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "function_call"] and final.output[1].arguments == '{"place": "Ulm"}'


def test_log_probs_of_responses(client: Any) -> None:
    """Each token's is in one delta, those of thoughts and calls too."""

    def read(logprobs: Any) -> list[Any]:
        return [(one.token, one.logprob, [(top.token, top.logprob) for top in one.top_logprobs]) for one in logprobs]

    how: dict[str, Any] = {"model": "tiny", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    for asked, text in (("Hello", SAID), (f"say:<think>hm</think>So: {CALL}\n", "So:")):
        more = {"tools": [{"type": "function", "name": "weather", "parameters": PARAMETERS}]} if "say:" in asked else {}
        whole = client.responses.create(input=asked, extra_body={"return_token_ids": True}, **how, **more)
        (expected,) = (item.content[0].logprobs for item in whole.output if item.type == "message")
        drawn = TOKENIZER.decode(whole.token_ids, skip_special=False)
        assert whole.output_text == text and text in drawn and len(expected) == len(whole.token_ids)
        assert all([top.logprob for top in one.top_logprobs] == [-0.25, -2.0] for one in expected)
        events = list(client.responses.create(input=asked, stream=True, **how, **more))
        told = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
        (done,) = (event.logprobs for event in events if event.type == "response.output_text.done")
        parts = [event.part for event in events if event.type == "response.content_part.done"]
        (part,) = (part.logprobs for part in parts if part.type == "output_text")
        (item,) = (item.content[0].logprobs for item in events[-1].response.output if item.type == "message")
        assert read(told) == read(done) == read(part) == read(item) == read(expected)
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    plain = list(client.responses.create(model="tiny", input="Hello", stream=True))
    assert not any(event.logprobs for event in plain if event.type.startswith("response.output_text"))


def test_messages(claude: Any) -> None:
    said = claude.messages.create(
        model="tiny",
        max_tokens=100,
        system=[{"type": "text", "text": "Be brief."}],
        messages=user("Hello"),
        extra_body={"return_token_ids": True},
    )
    assert (said.content[0].text, said.stop_reason, said.weight_version) == (SAID, "end_turn", 7)
    assert TOKENIZER.decode(said.prompt_token_ids, skip_special=False) == "<|system|>Be brief.\n<|user|>Hello\n<|assistant|>"
    assert said.usage.output_tokens == len(said.token_ids)
    stopped = claude.messages.create(model="tiny", max_tokens=100, messages=user("Hello"), stop_sequences=["22"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("It is <b>", "stop_sequence", "22")
    assert claude.messages.create(model="tiny", max_tokens=3, messages=user("Hello")).stop_reason == "max_tokens"
    counted = claude.messages.count_tokens(model="tiny", messages=user("Hello"), system="Be brief.")
    assert counted.input_tokens == len(said.prompt_token_ids)


def test_tools_of_messages(claude: Any) -> None:
    tools = [{"name": "weather", "description": "Of a place.", "input_schema": PARAMETERS}]
    messages: list[Any] = user("Ulm weather?")
    said = claude.messages.create(model="tiny", max_tokens=200, messages=messages, tools=tools)
    assert [block.type for block in said.content] == ["thinking", "tool_use"] and said.stop_reason == "tool_use"
    assert said.content[1].input == {"place": "Ulm"}
    result = {"type": "tool_result", "tool_use_id": said.content[1].id, "content": [{"type": "text", "text": "22"}]}
    messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]}]
    after = claude.messages.create(model="tiny", max_tokens=200, messages=messages, tools=tools, extra_body={"return_token_ids": True})
    prompt = TOKENIZER.decode(after.prompt_token_ids, skip_special=False)
    assert (
        prompt.endswith("</tool_call>\n<|tool|>22\n<|user|>Well?\n<|assistant|>")
        and "<think>It wants weather.</think><tool_call>" in prompt
    )
    with claude.messages.stream(model="tiny", max_tokens=200, messages=user("Ulm weather?"), tools=tools) as stream:
        final = stream.get_final_message()
    assert final.content[0].thinking == "It wants weather." and final.content[1].input == {"place": "Ulm"}
    with claude.messages.stream(model="tiny", max_tokens=100, messages=user("Hello")) as stream:
        assert "".join(stream.text_stream) == SAID and stream.get_final_message().stop_reason == "end_turn"


def test_errors_are_of_the_clients_own_kind(client: Any, claude: Any, anthropic: Any, served: tuple[Endpoint, ScriptedEngine]) -> None:
    with pytest.raises(openai.BadRequestError, match="unknown parameter colour") as found:
        client.chat.completions.create(model="tiny", messages=user("Hello"), extra_body={"colour": 1})
    assert found.value.param == "colour" and found.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="unknown parameter colour"):
        claude.messages.create(model="tiny", max_tokens=1, messages=user("Hello"), extra_body={"colour": 1})
    with pytest.raises(anthropic.NotFoundError):
        claude.post("/v1/messages/batches", cast_to=object, body={})
    with pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(anthropic.AuthenticationError, match="the key is missing or wrong"):
        claude.with_options(api_key="wrong").messages.create(model="tiny", max_tokens=1, messages=user("Hello"))
    image = io.BytesIO()
    pytest.importorskip("PIL.Image").new("RGB", (2, 2)).save(image, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}"
    with pytest.raises(
        openai.BadRequestError, match=r"messages\[0\].content\[0\] is an image, and this model, as it is loaded, does not see"
    ):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        )
    served[1].has_ended = True
    try:
        with pytest.raises(openai.InternalServerError, match="the engine has ended"):
            client.chat.completions.create(model="tiny", messages=user("Hello"))
    finally:
        served[1].has_ended = False


def test_a_failure_in_the_middle_of_a_stream_is_an_error(tmp_path: Path, anthropic: Any) -> None:
    from aligner.errors import EngineError

    with scripted(tokenizer_of(tmp_path), lambda _: EngineError("the device is gone")) as (endpoint, _):
        with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0) as client:
            with pytest.raises(openai.APIError, match="the device is gone"):
                list(client.chat.completions.create(model="tiny", messages=user("Hello"), stream=True))
            with pytest.raises(openai.InternalServerError, match="the device is gone"):
                client.chat.completions.create(model="tiny", messages=user("Hello"))
        with anthropic.Anthropic(base_url=endpoint.url, api_key=KEY, max_retries=0) as claude:
            with pytest.raises(anthropic.APIStatusError, match="the device is gone"):
                with claude.messages.stream(model="tiny", max_tokens=9, messages=user("Hello")) as stream:
                    list(stream)
