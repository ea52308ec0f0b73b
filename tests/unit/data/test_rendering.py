"""Chat templates as programs from outside: what `transformers` makes of them, in bounded time and memory, on any day, with any error."""

# ruff: noqa: E501  (templates are lines)

from __future__ import annotations

from datetime import date

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from aligner.data import rendering
from aligner.data.config import SFTDataConfig
from aligner.data.rendering import PROBES, render
from aligner.data.supervised import load_supervised
from aligner.data.templates import TEMPLATES
from aligner.data.tokenizer import load_tokenizer
from aligner.errors import ConfigError, DataError

DAY = date(2024, 7, 26)
MARKS = {"bos_token": "<s>", "eos_token": "</s>"}
LOOPS = "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m | tojson }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
SCOPES = (
    "{%- macro say(m) %}{% generation %}{{ m.content }}{% set x = 1 %}{% endgeneration %}{% endmacro -%}\n"
    "  {%- for m in messages %}\n    {%- if m.role == 'assistant' %}\n {{ say(m) }}!{{ x is defined }}\n    {%- endif %}\n  {%- endfor %}\n"
    "{{ tools is none }}{{ documents is none }}{{ messages[0].nothing }}"
)


@pytest.mark.parametrize("template", [*TEMPLATES.values(), LOOPS, SCOPES, "{{ strftime_now('%d %b %Y') | length }}"])
@pytest.mark.parametrize("messages", PROBES[:3])
def test_the_text_is_that_of_transformers(template, messages):
    asks = messages[-1]["role"] == "user"
    try:
        texts, spans = render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=asks, return_assistant_tokens_mask=True, **MARKS
        )
    except Exception:
        with pytest.raises(DataError):
            render(template, messages, day=DAY, tools=None, documents=None, add_generation_prompt=asks, **MARKS)
        return
    found = render(template, messages, day=DAY, tools=None, documents=None, add_generation_prompt=asks, **MARKS)
    assert [found.text] == texts
    if "macro" not in template:  # where `transformers` loses its place
        assert list(found.written) == spans[0]


def test_the_day_is_the_one_that_is_given():
    template = "{{ strftime_now('%d %b %Y') }}"
    assert render(template, PROBES[0], day=DAY).text == "26 Jul 2024" and rendering.writes_dates(template)
    assert not rendering.writes_dates(TEMPLATES["llama3"])


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('no system role') }}", "refuses the messages: no system role"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[0].content + messages }}", "TypeError"),
        ("{{ messages[0].content.index('zz') }}", "ValueError: substring not found"),
        ("{% include 'x' %}", "TypeError: no loader"),
        ("{% for i in range(100000000) %}{% endfor %}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ messages | tojson }}{{ raise_exception | tojson }}", "TypeError"),
        ("{{ ().__class__.__mro__ }}", "unsafe"),
    ],
)
def test_any_exception_is_a_refusal_with_its_message(template, told):
    with pytest.raises(DataError, match=f"the chat template refuses the messages: .*{told.partition(': ')[2] or told}"):
        render(template, PROBES[0], day=DAY)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10**10 }}",
        "{{ ['x'] * 10**9 }}",
        "{{ 'x' | center(10**10) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    ],
)
def test_memory_is_bounded(template):
    with pytest.raises(ConfigError, match="takes more than 1024 MiB or .* seconds for a conversation of a few words"):
        render(template, PROBES[0], day=DAY)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set l = [0] %}" + "{% set l = [l, l] %}" * 60 + "{{ l }}",
    ],
)
def test_time_is_bounded(template, monkeypatch):
    monkeypatch.setattr(rendering, "MOST_SECONDS", 0.5)  # here, for the program's wait; the limit of its own is longer
    with pytest.raises(ConfigError, match="takes more than .* seconds"):
        render(template, PROBES[0], day=DAY)


@pytest.mark.parametrize("template", ["{% if %}", "{% for m in messages %}", "{{ [1] | random }}", "{% nothing %}"])
def test_what_is_no_jinja_names_its_line(template):
    with pytest.raises(ConfigError, match="the chat template is not valid Jinja: line 1: "):
        render(template, PROBES[0], day=DAY)


def test_a_template_that_fails_is_a_bad_record_with_file_and_line(make_tokenizer_dir, jsonl):
    """As DeepSeek-V3's does for calls whose arguments are objects."""
    template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
    tokenizer = load_tokenizer(make_tokenizer_dir(pad_token="<pad>", eos_token="<eos>", chat_template=template))
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    path = jsonl({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]})
    with pytest.raises(DataError, match=r"d.jsonl:1: the chat template of .* refuses the messages: TypeError: can only concatenate str"):
        load_supervised(path, SFTDataConfig(train=path), tokenizer)
