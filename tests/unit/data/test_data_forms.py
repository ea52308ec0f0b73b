"""Records as other projects publish them: each form is recognised by its fields and read as what it says."""

from __future__ import annotations

import json
from datetime import datetime
from functools import partial

import pytest

from aligner.data.config import (
    BadLines,
    Learn,
    PreferenceDataConfig,
    PromptDataConfig,
    RecordForm,
    RegressionDataConfig,
    SFTDataConfig,
    UnpairedDataConfig,
)
from aligner.data.forms import Purpose, advice, recast
from aligner.data.judged import load_regression, load_unpaired
from aligner.data.messages import Message
from aligner.data.prompts import load_prompts
from aligner.data.records import parse_judged, parse_preference, parse_prompt, parse_supervised, split_dialogue
from aligner.data.sources import RawRecord, read_records
from aligner.data.supervised import load_preferences, load_supervised
from aligner.errors import ConfigError, DataError

USER, ASSISTANT, OTHER = ({"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b")))
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
ALPACA = {"instruction": "Translate", "input": "dog", "output": "Hund"}
RATED = {"helpfulness": 4, "correctness": 3, "coherence": 4, "complexity": 1, "verbosity": 0}
HELPSTEER_PROMPT = "q<extra_id_1>Assistant\na\n<extra_id_1>User\nr"
COMPLETIONS = [
    {"response": "fair", "overall_score": 5.0},
    {"response": "best", "overall_score": 8.5},
    {"response": "worst", "annotations": {"honesty": {"Rating": "1"}, "helpfulness": {"Rating": "N/A"}}},
]


def read(record: object, purpose: Purpose, named: RecordForm = RecordForm.auto) -> RawRecord:
    """One record as a file has it, recast."""
    from aligner.data.sources import _JSON

    return recast(RawRecord(file="f", line=1, index=0, value=_JSON.decode(json.dumps(record))), purpose, named)


def chat(*turns: str) -> tuple[Message, ...]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return tuple(Message(role=roles[turn[0]], content=turn[2:]) for turn in turns)


SUPERVISED = [
    ("prompt_completion", {"prompt": "q", "completion": "a"}, "q", "a"),
    ("prompt_completion", {"prompt": [USER], "completion": [ASSISTANT]}, chat("u q"), "a"),
    ("messages", {"messages": [USER, ASSISTANT], "source": "x"}, chat("u q", "a a"), None),
    ("messages", {"messages": [{"role": "developer", "content": "s"}, USER, ASSISTANT]}, chat("s s", "u q", "a a"), None),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ASSISTANT]}, chat("u q", "a a"), None),
    ("alpaca", ALPACA | {"text": "Below is an instruction"}, "Translate\n\ndog", "Hund"),
    ("alpaca", ALPACA | {"input": ""}, "Translate", "Hund"),
    ("alpaca", ALPACA | {"input": None}, "Translate", "Hund"),
    (
        "alpaca",
        ALPACA | {"system": "Be brief", "history": [["q", "a"]]},
        chat("s Be brief", "u q", "a a", "u Translate\n\ndog", "a Hund"),
        None,
    ),
    ("alpaca", ALPACA | {"system": "", "history": []}, chat("u Translate\n\ndog", "a Hund"), None),
    ("sharegpt", {"conversations": [HUMAN, GPT], "system": "s", "id": 1}, chat("s s", "u q", "a a"), None),
    ("sharegpt", {"conversations": [USER, ASSISTANT]}, chat("u q", "a a"), None),
    ("helpsteer", {"prompt": HELPSTEER_PROMPT, "response": "b"} | RATED, chat("u q", "a a", "u r"), "b"),
    ("text", {"text": "q"}, "q", None),
]


@pytest.mark.parametrize(("form", "record", "prompt", "response"), SUPERVISED)
def test_supervised(form, record, prompt, response):
    raw = read(record, Purpose.supervised)
    found = parse_supervised(raw)
    assert raw.value.form.value == form
    if response is not None:
        assert (found.prompt, found.response) == (prompt, response)
    else:
        assert (found.text if form == "text" else found.messages) == prompt


PAIRS = [
    ("pair", {"prompt": "q", "chosen": "a", "rejected": "b"}, "q", "a", "b", 0),
    ("pair", {"chosen": "The sky is blue.", "rejected": "The sky is green."}, "The sky is", " blue.", " green.", 0),
    ("pair", {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [OTHER]}, chat("u q"), "a", "b", 0),
    ("pair", {"chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]}, chat("u q"), "a", "b", 0),
    ("pair", {"prompt": [USER], "chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]}, chat("u q"), "a", "b", 0),
    ("pair", {"prompt": "q", "chosen": [ASSISTANT], "rejected": [OTHER]}, chat("u q"), "a", "b", 0),
    (  # HuggingFaceH4/ultrafeedback_binarized
        "pair",
        {"prompt": "q", "prompt_id": "0", "chosen": [USER, ASSISTANT], "rejected": [USER, OTHER], "messages": [USER, ASSISTANT]}
        | {"score_chosen": 7.5, "score_rejected": 4.0},
        chat("u q"),
        "a",
        "b",
        3.5,
    ),
    (  # argilla/ultrafeedback-binarized-preferences-cleaned
        "pair",
        {"prompt": "q", "chosen": [USER, ASSISTANT], "chosen-rating": 5.0, "rejected": [USER, OTHER], "rejected-rating": 2.0},
        chat("u q"),
        "a",
        "b",
        3,
    ),
    ("alpaca", {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"}, "q", "a", "b", 0),
    ("alpaca", {"instruction": "q", "system": "s", "chosen": "a", "rejected": "b"}, chat("s s", "u q"), "a", "b", 0),
    ("sharegpt", {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "b"}}, chat("u q"), "a", "b", 0),
    ("nemo_pair", {"prompt": "q", "chosen_response": "a", "rejected_response": "b"}, "q", "a", "b", 0),
    ("ultrafeedback", {"source": "x", "instruction": "q", "completions": COMPLETIONS}, chat("u q"), "best", "worst", 7.5),
    (
        "helpsteer2_preference",
        {"split": "train", "prompt": HELPSTEER_PROMPT, "response_1": "b", "response_2": "a", "preference_strength": 2},
        chat("u q", "a a", "u r"),
        "a",
        "b",
        2,
    ),
    (
        "helpsteer3",
        {"domain": "code", "context": [USER], "response1": "a", "response2": "b", "overall_preference": -3},
        chat("u q"),
        "a",
        "b",
        3,
    ),
]


@pytest.mark.parametrize(("form", "record", "prompt", "chosen", "rejected", "margin"), PAIRS)
def test_pairs(form, record, prompt, chosen, rejected, margin):
    raw = read(record, Purpose.preference)
    found = parse_preference(raw)
    assert raw.value.form.value == form
    assert (found.prompt, found.chosen, found.rejected, found.margin) == (prompt, chosen, rejected, margin)


def test_split_dialogue_takes_the_last_common_turn():
    """Turn 1 is shared, turn 2 differs; what follows the first difference belongs to the responses, whole."""
    shared = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    assert split_dialogue(shared + " d", shared + " e\n\nAssistant: f") == (shared, " d", " e\n\nAssistant: f")
    with pytest.raises(DataError, match="expected a common beginning that contains"):
        split_dialogue("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: z\n\nAssistant: b")


JUDGED = [
    ("prompt_completion", {"prompt": "q", "completion": "a", "label": True}, "q", True),
    ("prompt_completion", {"prompt": [USER], "completion": [ASSISTANT], "label": False}, chat("u q"), False),
    ("prompt_response", {"prompt": "q", "response": "a", "preference": "rejected"}, "q", False),
    ("alpaca", {"instruction": "q", "output": "a", "kto_tag": True}, "q", True),
    ("sharegpt", {"conversations": [HUMAN, GPT], "kto_tag": False}, chat("u q"), False),
]


@pytest.mark.parametrize(("form", "record", "prompt", "desirable"), JUDGED)
def test_judged(form, record, prompt, desirable):
    raw = read(record, Purpose.judged)
    found = parse_judged(raw)
    assert raw.value.form.value == form
    assert (found.prompt, found.response, found.desirable) == (prompt, "a", desirable)


PROMPTS = [
    ("prompt_response", {"prompt": [USER], "answer": "1"}, chat("u q")),
    ("alpaca", {"instruction": "q", "input": "i", "output": "a"}, "q\n\ni"),
    ("alpaca", {"instruction": "q", "system": "s"}, chat("s s", "u q")),
    ("sharegpt", {"conversations": [HUMAN]}, chat("u q")),
    ("helpsteer", {"prompt": "q", "response": "a"} | RATED, chat("u q")),
    ("helpsteer3", {"context": [USER], "response1": "a", "response2": "b", "overall_preference": 0}, chat("u q")),
    ("ultrafeedback", {"instruction": "q", "completions": COMPLETIONS}, chat("u q")),
]


@pytest.mark.parametrize(("form", "record", "prompt"), PROMPTS)
def test_prompts(form, record, prompt):
    raw = read(record, Purpose.prompts)
    assert parse_prompt(raw).prompt == prompt and raw.value.form.value == form


CALL = {"name": "add", "arguments": {"x": 1}}
TOOLS = [{"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}}]


def test_calls_of_tools_in_both_notations_are_the_same_conversation():
    """OpenAI's have arguments as JSON text and an id; ShareGPT's the whole call; columns of Arrow nulls for what a turn lacks."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    turns = [
        USER | {"tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "c1"},
        ASSISTANT | {"reasoning_content": "so"},
    ]
    openai = parse_supervised(read({"messages": turns, "tools": [{"type": "function", "function": TOOLS[0]}]}, Purpose.supervised))
    spoken = [HUMAN, {"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "2"}, GPT]
    sharegpt = parse_supervised(read({"conversations": spoken, "tools": json.dumps(TOOLS)}, Purpose.supervised))
    assert openai.tools == sharegpt.tools == ({"type": "function", "function": TOOLS[0]},)
    assert [turn.as_json() for turn in openai.messages] == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL, "id": "c1"}]},
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "c1"},
        ASSISTANT | {"reasoning_content": "so"},
    ]
    assert [turn.content for turn in sharegpt.messages] == ["q", "", "2", "a"]
    assert sharegpt.messages[1].tool_calls == ({"type": "function", "function": CALL},)


def test_a_call_is_trained_on_and_the_template_gets_the_tools(make_tokenizer_dir, jsonl):
    from aligner.data.tokenizer import load_tokenizer

    template = (
        "{% if tools %}T{{ tools[0].function.name }};{% endif %}{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}"
        "{% elif m.role == 'tool' %}<u>{{ m.content }}{% else %}<a>{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
        "{% endfor %}{{ m.content }}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    tokenizer = load_tokenizer(make_tokenizer_dir(eos_token="<eos>", pad_token="<pad>", chat_template=template))
    turns = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}, ASSISTANT]
    path = jsonl({"messages": turns, "tools": TOOLS})
    (row,), report = load_supervised(path, SFTDataConfig(train=path), tokenizer)
    assert tokenizer.decode(row.tokens, skip_special=False) == 'Tadd;<u>q<a>{"x": 1}<eos><u>2<a>a<eos>'
    learnt = [token for token, learnt in zip(row.tokens, row.loss_mask, strict=True) if learnt]
    assert tokenizer.decode(learnt, skip_special=False) == '{"x": 1}<eos>a<eos>' and report.unused == {}
    path = jsonl({"prompt": [USER], "chosen": turns[1:], "rejected": [OTHER], "tools": TOOLS})
    (pair,), _ = load_preferences(path, PreferenceDataConfig(train=path), tokenizer)
    assert tokenizer.decode(pair.chosen.tokens, skip_special=False) == 'Tadd;<u>q<a>{"x": 1}<eos><u>2<a>a<eos>'
    assert sum(pair.chosen.loss_mask) == len(learnt)


def test_texts_are_learnt_whole_with_an_end(jsonl, chars):
    path = jsonl({"text": "ab"})
    (row,), _ = load_supervised(path, SFTDataConfig(train=path), chars)
    assert chars.decode(row.tokens, skip_special=False) == "<bos>ab<eos>" and row.loss_mask == (False, True, True, True)
    with pytest.raises(DataError, match="is a text, of which no part is a response"):
        load_supervised(path, SFTDataConfig(train=path, learn=Learn.last_response), chars)


def test_attributes_of_helpsteer_are_labels_and_pairs_are_two_judged_responses(jsonl, chars):
    path = jsonl({"prompt": "q", "response": "a"} | RATED)
    config = RegressionDataConfig(train=path, attributes=["verbosity", *list(RATED)[:4]])
    (example,), report = load_regression(path, config, chars)
    assert example.labels == (0, 4, 3, 4, 1) and report.unused == {}
    path = jsonl({"context": [USER], "response1": "a", "response2": "b", "overall_preference": 1})
    examples, _ = load_unpaired(path, UnpairedDataConfig(train=path), chars)
    assert [(chars.decode(one.response), one.desirable) for one in examples] == [("b", True), ("a", False)]


def test_what_a_form_does_not_use_is_listed(jsonl, chars):
    path = jsonl({"conversations": [HUMAN | {"weight": 1}, GPT], "id": 3}, {"conversations": [HUMAN, GPT], "lang": "en"})
    assert load_supervised(path, SFTDataConfig(train=path), chars)[1].unused == {"conversations[].weight": 1, "id": 1, "lang": 1}
    path = jsonl({"instruction": "q", "completions": COMPLETIONS, "models": ["x"]})
    assert load_prompts(path, PromptDataConfig(train=path), chars)[1].unused == {"completions": 1, "models": 1}


BAD = [
    (load_supervised, SFTDataConfig, {"question": "q", "reply": "a"}, "has the fields ['question', 'reply'], expected those of a form: "),
    (load_supervised, SFTDataConfig, ALPACA | {"conversations": [HUMAN, GPT]}, "has 'instruction' and 'conversations', which is ambiguous"),
    (
        load_supervised,
        SFTDataConfig,
        {"conversations": [HUMAN, {"from": "bot", "value": "x"}]},
        "field 'conversations[1]': from is 'bot', ",
    ),
    (load_supervised, SFTDataConfig, {"conversations": [HUMAN, {"from": "gpt"}]}, "field 'conversations[1]' is {'from': 'gpt'}, expected"),
    (load_supervised, SFTDataConfig, {"conversations": [HUMAN, {"from": "function_call", "value": "add"}]}, "expected the call as JSON"),
    (load_supervised, SFTDataConfig, ALPACA | {"history": [["q"]]}, "field 'history[0]' is ['q'], expected [question, answer]"),
    (load_supervised, SFTDataConfig, {"messages": [USER, ASSISTANT], "tools": "add"}, "field 'tools' is 'add', expected a list"),
    (load_supervised, SFTDataConfig, {"messages": [USER, {"role": "assistant", "tool_calls": [1]}]}, "tool_calls[0] is 1, expected"),
    (
        load_supervised,
        SFTDataConfig,
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, ASSISTANT]},
        "has the type 'image', expected text: this model, as it is loaded, does not see",
    ),
    (load_preferences, PreferenceDataConfig, {"chosen": [USER, ASSISTANT], "rejected": [ASSISTANT]}, "begin with different messages"),
    (load_preferences, PreferenceDataConfig, {"chosen": "a", "rejected": "b"}, "share ''"),
    (load_preferences, PreferenceDataConfig, {"instruction": "q", "completions": COMPLETIONS[:1]}, "expected two that differ"),
    (load_preferences, PreferenceDataConfig, {"instruction": "q", "completions": [1]}, "is not a record of the form ultrafeedback"),
    (
        load_preferences,
        PreferenceDataConfig,
        {"context": [USER], "response1": "a", "response2": "b", "overall_preference": 0},
        "'overall_preference' is 0, expected a number from -3 to 3 that is not 0",
    ),
    (load_preferences, partial(PreferenceDataConfig, form=RecordForm.alpaca), {"chosen": "a"}, "expected {instruction, input?, output, "),
]


@pytest.mark.parametrize(("load", "config", "record", "text"), BAD, ids=[text for *_, text in BAD])
def test_refused_with_file_and_line(load, config, record, text, jsonl, chars):
    path = jsonl({"prompt": "q", "response": "a", "chosen": "a", "rejected": "b"}, record)
    with pytest.raises(DataError) as caught:
        load(path, config(train=path), chars)
    assert f"{path}:2: " in str(caught.value) and text in str(caught.value)


def test_a_setting_names_the_form(jsonl, chars):
    both = ALPACA | {"conversations": [HUMAN, GPT]}
    path = jsonl(both)
    named = SFTDataConfig(train=path, form=RecordForm.sharegpt)
    (row,), report = load_supervised(path, named, chars)
    assert chars.decode(row.tokens) == "<u>q<a>a" and report.unused == {"input": 1, "instruction": 1, "output": 1}
    path = jsonl({"messages": [USER, ASSISTANT], "prompt": "x", "response": "y"})
    (row,), _ = load_supervised(path, SFTDataConfig(train=path, form=RecordForm.prompt_response), chars)
    assert chars.decode(row.tokens) == "xy"
    path = jsonl({"prompt": "q", "chosen": "a", "rejected": "b", "response": "c", "label": True})
    config = UnpairedDataConfig(train=path, form=RecordForm.prompt_response, bad_lines=BadLines.skip)
    (example,), _ = load_unpaired(path, config, chars)
    assert chars.decode(example.response) == "c"
    assert read(both, Purpose.steps, RecordForm.sharegpt).error.startswith("data.form=sharegpt: such records have no steps data")
    with pytest.raises(ConfigError, match="data.form=alpaca and data.prompt_field=x"):
        PromptDataConfig(train=path, form=RecordForm.alpaca, prompt_field="x")


SCHEMA = {"name": "f", "parameters": {"type": "object", "properties": {"unit": {"default": None, "enum": ["C", None]}}}}
ARGUMENTS = [{"city": "Paris", "unit": None}, {"where": {"a": None, "b": [{"x": None}]}}]


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ".arrow"])
def test_nulls_that_an_author_wrote_stay(suffix, as_text, tmp_path):
    """Those that Arrow added to an object, for the fields of others, go; JSON text in a column is its author's, whatever the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = [json.dumps(one) if as_text else one for one in ARGUMENTS]
    turns = [[USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": one}}]}] for one in made]
    rows = [{"messages": one, "tools": json.dumps([SCHEMA]) if as_text else [SCHEMA]} for one in turns]
    path = tmp_path / f"d{suffix}"
    if suffix in (".parquet", ".arrow"):
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, path) if suffix == ".parquet" else pa.ipc.new_stream(str(path), table.schema).write_table(table)
    elif suffix == ".csv":
        cells = [[json.dumps(row["messages"]), row["tools"] if as_text else json.dumps(row["tools"])] for row in rows]
        path.write_text("messages,tools\n" + "".join(",".join('"' + one.replace('"', '""') + '"' for one in row) + "\n" for row in cells))
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if suffix == ".jsonl" else json.dumps(rows))
    records = [parse_supervised(recast(raw, Purpose.supervised)) for raw in read_records(str(path))]
    found = [record.messages[1].tool_calls[0]["function"]["arguments"] for record in records]
    added = suffix in (".parquet", ".arrow") and not as_text
    assert found == ([{"city": "Paris"}, {"where": {"b": [{}]}}] if added else ARGUMENTS)
    unit = records[0].tools[0]["function"]["parameters"]["properties"]["unit"]
    assert unit == ({"enum": ["C", None]} if added else {"default": None, "enum": ["C", None]})


def test_rows_of_datasets_that_aligner_train_is_given_stay_arrows(tmp_path):
    """Written as JSON, the nulls that Arrow added would look like the author's; dates would have no place."""
    import datasets

    from aligner.api import _write

    turns = [
        [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {one: 1}}}]}] for one in "ab"
    ]
    rows = datasets.Dataset.from_list([{"messages": one, "when": datetime(2024, 1, 1)} for one in turns]).select([1])
    (raw,) = read_records(_write(tmp_path, "data.train", rows))
    record = parse_supervised(recast(raw, Purpose.supervised))
    assert record.messages[1].tool_calls[0]["function"]["arguments"] == {"b": 1} and raw.value["when"] == datetime(2024, 1, 1)


def test_columns_of_arrow_hold_nulls(tmp_path, chars):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"messages": [USER, ASSISTANT], "prompt": None}, {"messages": [USER, ASSISTANT | {"reasoning_content": "so"}], "prompt": "q"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    path = str(tmp_path / "d.parquet")
    assert [recast(raw, Purpose.supervised).value.form.value for raw in read_records(path)] == ["messages", "messages"]
    assert load_supervised(path, SFTDataConfig(train=path), chars)[1].unused == {"prompt": 1}


@pytest.mark.parametrize(
    ("config", "record", "said"),
    [
        (SFTDataConfig(), {"prompt": "p", "reply": "r"}, "did you mean data.prompt_field=prompt data.response_field=reply?"),
        (SFTDataConfig(), {"question": "p", "answer": "r"}, "did you mean data.prompt_field=question data.response_field=answer?"),
        (SFTDataConfig(), {"prompt": "p", "chosen": "c", "rejected": "r"}, "these are pairs: `aligner train dpo` accepts them"),
        (PreferenceDataConfig(), {"prompt": "p", "response": "r"}, "these are prompts with responses: `aligner train sft` accepts them"),
        (
            PreferenceDataConfig(),
            {"prompt": "p", "preferred": "a", "dispreferred": "b"},
            "rename preferred to chosen and dispreferred to rejected",
        ),
        (PromptDataConfig(), {"question": "p"}, "did you mean data.prompt_field=question?"),
        (SFTDataConfig(), {"x": "p"}, ""),
    ],
)
def test_what_records_with_other_fields_may_be(config, record, said, jsonl, chars):
    assert said in advice(record, config)
    load = {SFTDataConfig: load_supervised, PreferenceDataConfig: load_preferences, PromptDataConfig: load_prompts}[type(config)]
    path = jsonl(*[record] * 5)
    with pytest.raises(DataError) as caught:
        load(path, config, chars)
    lines = str(caught.value).splitlines()
    assert len(lines) == (3 if said else 2) and lines[1].endswith("(5 such records)") and said in lines[-1]
