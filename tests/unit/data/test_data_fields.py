"""No field of a record is dropped without a word: what nothing reads is listed, what could be read in two ways is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

from aligner.data.config import (
    AnnotateDataConfig,
    BadLines,
    ConstitutionDataConfig,
    DemonstrationDataConfig,
    DistillationDataConfig,
    PreferenceDataConfig,
    PromptDataConfig,
    ProposalDataConfig,
    RegressionDataConfig,
    RequestDataConfig,
    SampledDataConfig,
    SFTDataConfig,
    StepDataConfig,
    UnpairedDataConfig,
)
from aligner.data.constitution import load_cases
from aligner.data.distillation import load_distillation
from aligner.data.judged import load_regression, load_steps, load_unpaired
from aligner.data.labelled import load_requests, load_unlabelled
from aligner.data.prompts import load_prompts
from aligner.data.proposals import LabelQuery, Quantity, load_proposals, load_sampled
from aligner.data.sources import read_records
from aligner.data.supervised import load_demonstrations, load_preferences, load_supervised
from aligner.errors import DataError

QUERY = LabelQuery(quantity=Quantity.proposal, attributes=("quality",), lowest=0, highest=4)
RATED = partial(RegressionDataConfig, attributes=["good", "long"])
USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SPOKEN = [{"from": "User", "value": "a"}, {"from": "Assistant", "value": "b", "label": "quality:4"}]
LOGS = {"log(P(a|x,y))": -1.0, "log(P(y|x))": -2.0}
GROUP = {"prompt_turns": SPOKEN[:1], "label": "quality:4", "responses": [{"from": "Assistant", "value": text} | LOGS for text in "bc"]}
DISTILLED = {"tokens": [1, 5], "labels": [5, 6], "loss_mask": [0, 1], "topk_logits": [[0], [-1]], "topk_token_ids": [[5], [6]]}
ALPACA = {"instruction": "Translate", "input": "dog", "output": "Hund"}
# Every reader of records with a record of each of its forms.
READ = [
    (load_supervised, SFTDataConfig, {"prompt": "a", "response": "b"}),
    (load_supervised, SFTDataConfig, {"messages": [USER, ASSISTANT]}),
    (load_supervised, SFTDataConfig, {"conversations": SPOKEN, "system": "s", "mask": "User", "type": "VALUE_TO_TEXT"}),
    (load_supervised, SFTDataConfig, ALPACA),
    (load_demonstrations, DemonstrationDataConfig, ALPACA),
    (load_preferences, PreferenceDataConfig, {"prompt": "a", "chosen": "b", "rejected": "c", "chosen_reward": 1, "rejected_reward": 0}),
    (load_preferences, PreferenceDataConfig, {"text": "a"}),
    (load_unpaired, UnpairedDataConfig, {"prompt": "a", "response": "b", "preference": "chosen"}),
    (load_unpaired, UnpairedDataConfig, {"prompt": "a", "chosen": "b", "rejected": "c"}),
    (load_prompts, PromptDataConfig, {"prompt": "a", "answer": "b"}),
    (load_prompts, PromptDataConfig, {"messages": [USER]}),
    (load_regression, RATED, {"prompt": "a", "response": "b", "label": {"good": 1, "long": 2}}),
    (load_regression, RATED, {"text": "a", "label": [1, 2]}),
    (load_regression, RATED, {"conversations": [SPOKEN[0], SPOKEN[1] | {"label": "good:1,long:2"}], "type": "TEXT_TO_VALUE"}),
    (load_steps, StepDataConfig, {"prompt": "a", "steps": ["b", "c"], "labels": [1, 0]}),
    (load_proposals, ProposalDataConfig, GROUP),
    (load_requests, RequestDataConfig, {"prompt": "a"}),
    (load_requests, RequestDataConfig, {"conversations": SPOKEN, "type": "VALUE_TO_TEXT"}),
    (load_unlabelled, AnnotateDataConfig, ALPACA),
    (partial(load_cases, given=False), ConstitutionDataConfig, {"prompt": "a"}),
    (partial(load_cases, given=True), ConstitutionDataConfig, {"prompt": "a", "responses": ["b", "c"]}),
    (load_distillation, DistillationDataConfig, DISTILLED),
]


@pytest.mark.parametrize(("load", "config", "record"), READ, ids=lambda value: "+".join(value) if isinstance(value, dict) else "")
def test_what_is_not_read_is_listed_once_with_a_count(load, config, record, jsonl, chars):
    """Beside the fields of a format, which are all read; what is empty holds nothing."""
    more = {"source": "wiki", "meta": {"id": 1}, "note": "", "none": None}
    second = {"text": "b"} if record == {"text": "a"} else record
    path = jsonl(record | more, second | {"source": "x"})
    report = load(path, config(train=path), chars)[1]
    assert report.unused == {"source": 2, "meta": 1} and report.num_bad == 0
    assert report.said_of_unused == ("that only reward functions may use" if load is load_prompts else report.said_of_unused)
    assert report.summary().endswith(f"\n{path}: fields {report.said_of_unused}: source (2 records), meta (1 records)")


def test_fields_of_turns_are_listed_too(jsonl, chars):
    path = jsonl({"messages": [USER | {"name": "x"}, ASSISTANT | {"id": 1}, USER | {"name": "y"}, ASSISTANT], "id": 0})
    assert load_supervised(path, SFTDataConfig(train=path), chars)[1].unused == {"id": 1, "messages[].id": 1, "messages[].name": 1}
    path = jsonl({"conversations": SPOKEN})  # without a type labels are not shown to the model
    assert load_supervised(path, SFTDataConfig(train=path), chars)[1].unused == {"conversations[].label": 1}
    path = jsonl({"prompt": "a", "answer": "b"})
    assert load_cases(path, ConstitutionDataConfig(train=path), chars, given=False)[1].unused == {"answer": 1}
    path = jsonl(GROUP | {"responses": [GROUP["responses"][0] | {"num_tokens": 3}, GROUP["responses"][1]]})
    assert load_proposals(path, ProposalDataConfig(train=path), chars)[1].unused == {"responses[].num_tokens": 1}


def test_records_that_are_passed_on_whole_have_no_unused_fields(jsonl, chars):
    path = jsonl(GROUP | {"source": "x"})
    ((group,), report) = load_sampled(path, SampledDataConfig(train=path), chars, QUERY)
    assert report.unused == {} and group.with_log_probs(Quantity.proposal, [0.0, 0.0])["source"] == "x"


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
TWO_READINGS = [
    (load_supervised, SFTDataConfig, {"messages": [USER, ASSISTANT], "prompt": "a", "response": "b"}, "'messages' and 'prompt'"),
    (load_supervised, SFTDataConfig, {"prompt": "a", "response": "b", "instruction": "c"}, "'prompt' and 'instruction'"),
    (load_supervised, SFTDataConfig, {"prompt": "a", "response": "b", "input": "c", "output": "d"}, "'prompt' and 'input'"),
    (load_supervised, SFTDataConfig, ALPACA | {"prompt": "c"}, "'instruction' and 'prompt'"),
    (load_supervised, SFTDataConfig, {"conversations": SPOKEN, "messages": [USER, ASSISTANT]}, "'conversations' and 'messages'"),
    (load_demonstrations, DemonstrationDataConfig, {"messages": [USER, ASSISTANT]} | ALPACA, "'messages' and 'instruction'"),
    (load_preferences, PreferenceDataConfig, PAIR | {"chosen_response": "d", "rejected_response": "e"}, "'chosen' and 'chosen_response'"),
    (load_preferences, PreferenceDataConfig, PAIR | {"instruction": "d"}, "'prompt' and 'instruction'"),
    (load_unpaired, UnpairedDataConfig, PAIR | {"response": "b", "label": True}, "'response' and 'chosen'"),
    (load_unpaired, UnpairedDataConfig, {"prompt": "a", "response": "b", "completion": "c", "label": True}, "'response' and 'completion'"),
    (load_unpaired, UnpairedDataConfig, {"prompt": "a", "response": "b", "label": True, "preference": True}, "'preference' and 'label'"),
    (load_prompts, PromptDataConfig, {"prompt": "a", "messages": [USER]}, "'prompt' and 'messages'"),
    (load_prompts, PromptDataConfig, {"prompt": "a", "instruction": "b"}, "'prompt' and 'instruction'"),
    (load_prompts, PromptDataConfig, {"prompt": "a", "input": "b"}, "'prompt' and 'input'"),
    (load_regression, RATED, {"text": "a", "prompt": "a", "response": "b", "label": [1, 2]}, "'text' and 'prompt'"),
    (load_steps, StepDataConfig, {"prompt": "a", "steps": ["b"], "completions": ["c"], "labels": [1]}, "'steps' and 'completions'"),
    (load_unlabelled, AnnotateDataConfig, {"messages": [USER, ASSISTANT], "prompt": "a", "response": "b"}, "'messages' and 'prompt'"),
    (partial(load_cases, given=True), ConstitutionDataConfig, PAIR | {"responses": ["b", "c"]}, "'responses' and 'chosen'"),
]


@pytest.mark.parametrize(("load", "config", "record", "both"), TWO_READINGS, ids=[both for *_, both in TWO_READINGS])
def test_two_readings_of_one_record_are_refused(load, config, record, both, jsonl, chars):
    path = jsonl(record)
    with pytest.raises(DataError, match=f"{path}:1: has {both}, which is ambiguous, expected one of them"):
        load(path, config(train=path), chars)


def test_naming_the_fields_chooses(jsonl, chars):
    path = jsonl({"messages": [USER, ASSISTANT], "prompt": "ab", "response": "b", "instruction": "c"})
    (row,), report = load_supervised(path, SFTDataConfig(train=path, prompt_field="prompt", response_field="response"), chars)
    assert chars.decode(row.tokens) == "abb" and report.unused == {"instruction": 1, "messages": 1}
    (prompt,), _ = load_prompts(path, PromptDataConfig(train=path, prompt_field="instruction"), chars)
    assert prompt.text == "c"


@pytest.mark.parametrize("cached", [False, True])
def test_a_named_field_that_no_record_has_is_refused(cached, jsonl, chars, tmp_path):
    """Of each setting that names one; with the fields that there are."""
    settings = {"cache": str(tmp_path / "cache"), "num_workers": 2} if cached else {}
    path = jsonl(*[{"prompt": "a", "response": "b", "answer": "c", "extra": {"answer": 1}}] * 3, {"prompt": "a"})
    typo = PromptDataConfig(train=path, answer_field="anwser", **settings)
    said = f"data.answer_field='anwser': none of the 4 records of {path} has anything in this field; they have prompt, response, "
    for bad_lines in BadLines:
        with pytest.raises(DataError) as caught:
            load_prompts(path, replace(typo, bad_lines=bad_lines), chars)
        assert str(caught.value) == said + "answer, extra, extra.answer; did you mean 'answer'?"
    with pytest.raises(DataError, match="data.prompt_field='promt': none of .* did you mean 'prompt'"):
        load_prompts(path, PromptDataConfig(train=path, prompt_field="promt", **settings), chars)
    for load, config in ((load_supervised, SFTDataConfig), (load_demonstrations, DemonstrationDataConfig)):
        with pytest.raises(DataError, match="data.response_field='reply': none of the 4 records"):
            load(path, config(train=path, prompt_field="prompt", response_field="reply", **settings), chars)
    other = jsonl({"prompt": "a", "final": "7"}, name="other.jsonl")
    mixed = PromptDataConfig(train=[{"path": path, "answer_field": "fnal"}, other], validation=other, answer_field="final", **settings)
    with pytest.raises(DataError, match=f"data.answer_field='fnal': none of the 4 records of {path} has"):
        load_prompts(mixed.train, mixed, chars)
    assert load_prompts(other, mixed, chars)[0][0].answer == "7"


def test_a_named_field_may_be_absent_from_some_records(jsonl, chars):
    path = jsonl({"prompt": "a"}, {"prompt": "b", "final": None}, {"prompt": "c", "final": 7})
    assert [one.answer for one in load_prompts(path, PromptDataConfig(train=path, answer_field="final"), chars)[0]] == [None, None, "7"]
    with pytest.raises(DataError, match="data.answer_field='final': none of the 2 records"):
        load_prompts(path, PromptDataConfig(train=path, answer_field="final"), chars, first=2)
    assert [one.answer for one in load_prompts(path, PromptDataConfig(train=path), chars)[0]] == [None] * 3  # none was named


VERL = {"data_source": "gsm8k", "prompt": [USER], "reward_model": {"ground_truth": "2", "style": "rule"}, "extra_info": {"answer": "x"}}
ANSWERED = [
    ("", VERL, "2"),
    ("", {"prompt": "a", "ground_truth": 2.5}, "2.5"),
    ("", {"prompt": "a", "solution": "$2$"}, "$2$"),
    ("", {"prompt": "a", "solution": "long", "answer": "2"}, "2"),
    ("", {"prompt": "a", "solution": ["no", "text"]}, None),
    ("", VERL | {"reward_model": {"ground_truth": {"target": ["x"]}}}, None),
    ("", VERL | {"reward_model": json.dumps(VERL["reward_model"])}, "2"),
    ("reward_model.ground_truth", VERL, "2"),
    ("extra_info.answer", VERL, "x"),
    ("extra_info.answer", VERL | {"extra_info.answer": "exact"}, "exact"),
    ("extra_info.answer", VERL | {"extra_info": '{"answer": "of text"}'}, "of text"),
    ("a.b.c", {"prompt": "a", "a.b": {"c": 1}, "a": {"b": "text"}}, "1"),
]


@pytest.mark.parametrize(("name", "record", "answer"), ANSWERED)
def test_answers_are_found_inside_of_other_fields(name, record, answer, jsonl, chars):
    path = jsonl(record)
    (prompt,), report = load_prompts(path, PromptDataConfig(train=path, answer_field=name), chars)
    assert prompt.answer == answer and prompt.columns == record
    assert not any(one.endswith("ground_truth") for one in report.unused)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "reward_model",
            "'reward_model' is .*expected a string or a number .data.answer_field=reward_model.ground_truth is one of its fields",
        ),
        ("prompt.content", "data.answer_field='prompt.content': none of the 1 records"),
        ("reward_model.truth", "none of .* they have data_source, .*reward_model.ground_truth"),
        ("ground_truht", "did you mean 'reward_model.ground_truth'"),
    ],
)
def test_a_name_that_leads_to_no_answer(name, message, jsonl, chars):
    path = jsonl(VERL)
    with pytest.raises(DataError, match=message):
        load_prompts(path, PromptDataConfig(train=path, answer_field=name), chars)


def test_prompts_and_responses_may_be_inside_too(jsonl, chars):
    path = jsonl({"turn": {"asked": "a", "said": "b"}, "id": 1})
    named = SFTDataConfig(train=path, prompt_field="turn.asked", response_field="turn.said", add_bos=False)
    (row,), report = load_supervised(path, named, chars)
    assert chars.decode(row.tokens) == "ab" and report.unused == {"id": 1}


def test_a_field_that_is_there_twice_is_bad(jsonl, chars, tmp_path):
    """JSON takes the last one, whatever was meant."""
    good = '{"prompt": "a", "response": "b"}'
    path = jsonl(good, '{"prompt": "a", "response": "b", "prompt": "c"}', '{"prompt": [{"role": "user", "content": "a", "role": "user"}]}')
    with pytest.raises(DataError) as caught:
        load_supervised(path, SFTDataConfig(train=path), chars)
    assert f"{path}:2: has the field 'prompt' twice in one object" in str(caught.value)
    assert f"{path}:3: has the field 'role' twice in one object" in str(caught.value)
    whole = tmp_path / "d.json"
    whole.write_text(f'[{good}, {{"prompt": "a", "prompt": "a"}}]')
    assert [raw.error[:26] for raw in read_records(str(whole))] == ["", "has the field 'prompt' twi"]


def test_columns_of_other_files_are_tracked_as_well(tmp_path, chars):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"messages": [USER | {"name": None}, ASSISTANT | {"name": "x"}], "id": 1, "prompt": None, "response": None}] * 2
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    path = str(tmp_path / "d.parquet")
    assert load_supervised(path, SFTDataConfig(train=path), chars)[1].unused == {"id": 2, "messages[].name": 2}
    assert json.dumps(next(read_records(path)).value["messages"][0]["role"]) == '"user"'
