"""Constitution files, and what a model is asked: in the paper's words and through the chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.data.config import ConstitutionDataConfig
from aligner.data.constitution import (
    Comparison,
    Constitution,
    Example,
    Framing,
    Principle,
    Question,
    Turns,
    draw,
    load_cases,
    load_constitution,
)
from aligner.errors import ConfigError, DataError

EXAMPLE = Example(prompt="p", response="r", critique_request="cr", critique="c", revision_request="rr", revision="v")
COMPARISON = Comparison(prompt="p", first="f", second="s", question="q?", answer="B")
SHOWN = "\n\nHuman: p\n\nAssistant: r\n\nCritiqueRequest: cr\n\nCritique: c\n\nRevisionRequest: rr\n\nRevision: v"
TURNS = Turns(response="bad", critique_request="why?", critique="rude", revision_request="again")


def cases(path: str, chars, *, given: bool = False, **settings):
    return load_cases(path, ConstitutionDataConfig(train=path, **settings), chars, given=given)


def texts(framing: Framing, chars, case, turns: Turns) -> str:
    return chars.decode(framing.turns(case, turns), skip_special=False)


def test_the_built_in_principles_ask_for_everything(tmp_path: Path) -> None:
    found = load_constitution("")
    assert len(found.revising) == len(found.comparing) == len(found.principles) >= 10
    assert len({one.name for one in found.principles}) == len(found.principles)
    file = tmp_path / "c.json"
    file.write_text(found.to_json())  # what a run writes can be given to another one
    assert load_constitution(str(file)) == found and load_constitution(str(file)).digest == found.digest


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "principles:\n  - {critique_request: a, revision_request: b}\n  - name: kind\n    question: |\n      Which?\n"
        "examples:\n- {prompt: p, response: r, critique_request: cr, critique: c, revision_request: rr, revision: v}\n"
        "comparisons:\n- {prompt: p, first: f, second: s, question: 'q?', answer: B}\n"
    )
    found = load_constitution(str(file))
    assert found.principles == (
        Principle(name="principle 1", critique_request="a", revision_request="b"),
        Principle(name="kind", question="Which?"),
    )
    assert (found.examples, found.comparisons) == ((EXAMPLE,), (COMPARISON,))
    assert (found.revising, found.comparing) == ([found.principles[0]], [found.principles[1]])


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("principles: []\n", ["c.yaml:1: principles is empty, expected at least one"]),
        ("- a\n", ["c.yaml: is ['a'], expected the field 'principles', a list of them"]),
        ("a: 1\nprinciple: 2\n", ["c.yaml:1: has no field 'principles'", "c.yaml:2: principle is an unknown field, allowed: comp"]),
        ("principles:\n- question: 3\n", ["c.yaml:2: principles[0].question is 3, expected a string"]),
        (
            "principles:\n- question: a\n- question: ' '\n- b\n",
            ["c.yaml:3: principles[1].question is ' ', expe", "c.yaml:4: principles[2] is"],
        ),
        ("principles:\n- name: a\n", ["c.yaml:2: principles[0] requests nothing"]),
        ("principles:\n- critique_request: a\n", ["c.yaml:2: principles[0] has 'critique_request' alone"]),
        ("principles:\n- question: a\n  question: b\n", ["c.yaml:3: 'question' appears twice"]),
        (
            "principles:\n- {name: a, question: b}\n- {name: a, question: c}\n",
            ["c.yaml:3: principles[1].name is 'a', like principles[0]"],
        ),
        ("principles:\n- question: a\nexamples:\n- prompt: a\n", ["c.yaml:4: examples[0] has no field 'critique'", "'revision_request'"]),
        (
            "principles:\n- question: a\ncomparisons:\n- {prompt: p, first: f, second: s, question: q, answer: C}\n",
            ["c.yaml:4: comparisons[0].answer is 'C', allowed: A, B"],
        ),
        ("principles: [\n", ["c.yaml: is not YAML in UTF-8"]),
    ],
)
def test_faults_of_a_file(text: str, faults: list[str], tmp_path: Path) -> None:
    """With the line in YAML; every one of them is named."""
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(DataError) as caught:
        load_constitution(str(file))
    assert [fault for fault in faults if fault not in str(caught.value)] == []


def test_faults_of_a_json_file_and_of_its_name(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"principles": [{"question": "a"}, {"question": 1}]}))
    with pytest.raises(DataError, match=r"c.json: principles\[1\].question is 1"):
        load_constitution(str(file))
    file.write_text("{")
    with pytest.raises(DataError, match="c.json: is not JSON in UTF-8: Expecting property name"):
        load_constitution(str(file))
    with pytest.raises(ConfigError, match="data.constitution=nowhere.yaml: no such file"):
        load_constitution("nowhere.yaml")
    with pytest.raises(ConfigError, match="ends in '.py', allowed: .yaml, .yml, .json"):
        load_constitution(__file__)
    with pytest.raises(ConfigError, match="data.validation=v: nothing is trained, "):
        ConstitutionDataConfig(validation="v")


def test_principles_are_drawn_by_key() -> None:
    """None comes again before all have been drawn; another key gives another order."""
    among = [Principle(name=str(number)) for number in range(4)]
    drawn = draw(among, 8, "1/0/0/revise")
    assert drawn == draw(among, 8, "1/0/0/revise") and drawn[:3] == draw(among, 3, "1/0/0/revise")
    assert sorted(one.name for one in drawn[:4]) == sorted(one.name for one in drawn[4:]) == list("0123")
    assert len({tuple(one.name for one in draw(among, 4, f"1/{row}/0/revise")) for row in range(20)}) > 5


def test_text_is_framed_as_the_papers(jsonl, chars) -> None:
    path = jsonl({"prompt": "hi"}, {"prompt": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"})
    (plain, dialogue), _ = cases(path, chars)
    assert plain.as_json == "\n\nHuman: hi\n\nAssistant:" and plain.response("ok") == " ok"
    assert dialogue.as_json.startswith("\n\nHuman: a") and dialogue.dialogue == "Human: a\n\nAssistant: b\n\nHuman: c"
    framing = Framing(chars, Constitution(principles=(), examples=(EXAMPLE,)), add_bos=True)
    asked = f"<bos>{SHOWN}\n\nHuman: hi\n\nAssistant: bad\n\nCritiqueRequest: why?\n\nCritique:"
    assert texts(framing, chars, plain, Turns(response="bad", critique_request="why?")) == asked
    assert texts(framing, chars, plain, TURNS) == f"{asked} rude\n\nRevisionRequest: again\n\nRevision:"


def test_messages_go_through_the_chat_template(jsonl, chars) -> None:
    """The examples are turns before the conversation."""
    path = jsonl({"prompt": "hi"})
    ((case,), _) = cases(path, chars, apply_chat_template=True)
    assert case.as_json == "hi" and case.response("ok") == "ok"
    framing = Framing(chars, Constitution(principles=(), examples=(EXAMPLE,), comparisons=(COMPARISON,)), add_bos=True)
    shown = "<bos><u>p<a>r<eos>\n<u>cr<a>c<eos>\n<u>rr<a>v<eos>\n"
    assert texts(framing, chars, case, TURNS) == f"{shown}<u>hi<a>bad<eos>\n<u>why?<a>rude<eos>\n<u>again<a>"
    tokens, start = framing.options(Question(dialogue=case.dialogue, question="Which?", first="x", second="y"), chat=True)[1]
    head = "Consider the following conversation between a human and an assistant:"
    asked = head + "\n\nHuman: {}\n\n{}\nOptions:\n(A) {}\n\n(B) {}<a>The answer is:"
    turns = f"<bos><u>{asked.format('p', 'q?', 'f', 's')} (B)<eos>\n<u>{asked.format('hi', 'Which?', 'x', 'y')}"
    assert chars.decode(tokens[:start], skip_special=False) == turns and chars.decode(tokens[start:]) == " (B)"


@pytest.mark.parametrize(
    ("text", "ended", "chat", "expected"),
    [
        (" fine <eos>", True, False, ("fine", "")),
        ("fine\n\nHuman:", True, False, ("fine", "")),
        ("fine\n\nHuman: mo", False, False, ("fine", "")),  # the text had ended before it was cut
        ("fin", False, False, ("fin", "truncated")),
        (" \n<eos>", True, False, ("", "empty")),
        ("\n\nCritique:", True, False, ("", "empty")),
        ("a\n\nHuman:", False, True, ("a\n\nHuman:", "truncated")),  # of a chat these marks are text
        ("a<a>b<eos>", True, True, ("a<a>b", "unreadable")),
        ("a<eos>", True, True, ("a", "")),
    ],
)
def test_what_a_model_wrote(text: str, ended: bool, chat: bool, expected: tuple[str, str], chars) -> None:
    assert Framing(chars, Constitution(principles=()), add_bos=True).read(chars.encode(text), ended=ended, chat=chat) == expected


def test_given_pairs_and_bad_records(jsonl, chars) -> None:
    path = jsonl(
        {"prompt": "hi", "responses": ["a ", " b"]},
        {"prompt": "x" * 50, "responses": ["a", "b"]},
        {"prompt": "p", "chosen": "c", "rejected": "d"},
    )
    found, report = cases(path, chars, given=True, max_prompt_length=40)
    assert [case.pair for case in found] == [("a", "b"), ("c", "d")] and report.num_too_long == 1
    bad = jsonl({"prompt": "hi", "responses": ["a"]}, {"prompt": "hi", "responses": ["a", " "]}, {"prompt": "hi"}, name="bad.jsonl")
    with pytest.raises(DataError) as caught:
        cases(bad, chars, given=True)
    for line, fault in enumerate(
        ("field 'responses' is ['a'], expected a list of two", "field 'responses[1]' is ' '", "has the fields"), start=1
    ):
        assert f"bad.jsonl:{line}: {fault}" in str(caught.value)
