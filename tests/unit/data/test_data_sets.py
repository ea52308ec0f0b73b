"""Prompt, supervised and preference sets: tokens and masks by hand, policies for bad and long records."""

from __future__ import annotations

import pytest

from aligner.data.config import BadLines, Overlong, PreferenceDataConfig, PromptDataConfig, SFTDataConfig
from aligner.data.prompts import load_prompts
from aligner.data.supervised import load_preferences, load_supervised
from aligner.data.tokenizer import load_tokenizer
from aligner.errors import DataError

A, B, C = (5 + ord(c) - 32 for c in "abc")  # ids in the character tokenizer
PAD, BOS, EOS, USER, ASSISTANT, NEWLINE = 0, 1, 2, 3, 4, 100


def prompts(path, tokenizer, **settings):
    return load_prompts(path, PromptDataConfig(train=path, **settings), tokenizer)


def supervised(path, tokenizer, **settings):
    return load_supervised(path, SFTDataConfig(train=path, **settings), tokenizer)


def preferences(path, tokenizer, **settings):
    return load_preferences(path, PreferenceDataConfig(train=path, **settings), tokenizer)


def test_prompts_have_one_begin_token_and_ids_that_survive_drops(jsonl, chars):
    path = jsonl({"text": "aaaaa"}, {"prompt": "ab", "answer": "c"}, {"text": "<bos>ab"}, {"messages": [{"role": "user", "content": "a"}]})
    loaded, report = prompts(path, chars, max_prompt_length=4)
    assert [p.tokens for p in loaded] == [(BOS, A, B), (BOS, A, B), (BOS, USER, A, ASSISTANT)]
    assert [p.id for p in loaded] == [1, 2, 3] and [p.source for p in loaded] == [f"{path}:{line}" for line in (2, 3, 4)]
    assert [p.text for p in loaded] == ["ab", "<bos>ab", "<bos><u>a<a>"] and loaded[0].answer == "c"
    assert (report.num_records, report.num_kept, report.num_too_long) == (4, 3, 1)
    assert report.summary() == f"{path}: 3 of 4 records used, 1 left out: longer than 4 tokens (data.max_prompt_length), it has 6"


def test_prompts_that_are_too_long_lose_their_beginning_or_are_refused(jsonl, chars):
    """What is asked stands at the end; the begin token stays."""
    path = jsonl({"text": "aabc"}, {"text": "a"}, {"messages": [{"role": "user", "content": "ab"}]})
    found, report = prompts(path, chars, max_prompt_length=3, overlong=Overlong.truncate)
    assert [one.tokens for one in found] == [(BOS, B, C), (BOS, A), (BOS, B, ASSISTANT)] and report.num_truncated == 2
    assert [one.text for one in found] == ["<bos>bc", "a", "<bos>b<a>"]
    assert prompts(path, chars, max_prompt_length=3)[1].num_too_long == 2
    with pytest.raises(DataError, match="d.jsonl:1: has 5 tokens, allowed: at most data.max_prompt_length=3"):
        prompts(path, chars, max_prompt_length=3, overlong=Overlong.refuse)


def test_prompt_options(jsonl, chars):
    path = jsonl({"question": "a", "label": "b"})
    loaded, _ = prompts(path, chars, prompt_field="question", answer_field="label", apply_chat_template=True)
    assert loaded[0].tokens == (BOS, USER, A, ASSISTANT) and loaded[0].answer == "b"
    assert prompts(path, chars, prompt_field="question", add_bos=False)[0][0].tokens == (A,)


def test_all_bad_lines_in_one_error_then_skipped_and_counted(jsonl, chars):
    path = jsonl({"text": "a"}, "{oops", {"text": 7}, {"text": "b"})
    with pytest.raises(DataError) as caught:
        prompts(path, chars)
    assert "2 of 4 records" in str(caught.value)
    assert f"{path}:2: is not a JSON value" in str(caught.value)
    assert f"{path}:3: field 'text' is 7, expected a non-empty string" in str(caught.value)
    loaded, report = prompts(path, chars, bad_lines=BadLines.skip)
    assert [p.id for p in loaded] == [0, 3]
    assert report.num_bad == 2 and len(report.problems) == 2 and "2 bad and skipped" in report.summary()


def test_listing_is_capped_at_twenty_and_counts_the_rest(jsonl, chars):
    path = jsonl(*({"messages": number} for number in range(25)))
    with pytest.raises(DataError) as caught:
        prompts(path, chars)
    lines = str(caught.value).splitlines()
    assert "25 of 25 records" in lines[0] and len(lines) == 22 and lines[-1] == "  ... and 5 more"


def test_an_empty_set_is_an_error_whatever_emptied_it(jsonl, chars):
    with pytest.raises(DataError, match="no usable record: .*0 of 0"):
        prompts(jsonl(), chars)
    with pytest.raises(DataError, match="no usable record: .* 0 of 2 records used, 2 left out: longer than 2 tokens .*they have 4 to 5"):
        prompts(jsonl({"text": "aaa"}, {"text": "aaaa"}), chars, max_prompt_length=2)
    with pytest.raises(DataError, match="no usable record: .*1 bad"):
        prompts(jsonl({"text": ""}), chars, bad_lines=BadLines.skip)


def test_supervised_mask_covers_response_and_end_token(jsonl, chars):
    path = jsonl({"input": "a", "output": "bc"}, {"prompt": "<bos>a", "response": "b<eos>"})
    (first, second), _ = supervised(path, chars)
    assert first.tokens == (BOS, A, B, C, EOS) and first.loss_mask == (False, False, True, True, True)
    assert second.tokens == (BOS, A, B, EOS) and second.loss_mask == (False, False, True, True)  # neither token doubled
    assert second.source == f"{path}:2"


def test_conversation_mask_covers_every_assistant_turn(jsonl, chars):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "ab")]
    (row,), _ = supervised(jsonl({"messages": [{"role": r, "content": c} for r, c in turns]}), chars)
    assert row.tokens == (BOS, USER, A, ASSISTANT, B, EOS, NEWLINE, USER, C, ASSISTANT, A, B, EOS)
    learnt = [i for i, m in enumerate(row.loss_mask) if m]
    assert learnt == [4, 5, 10, 11, 12]  # b <eos>, a b <eos>; not the line break, not what the template's last one adds


def test_chat_wrapped_prompt_with_response(jsonl, chars):
    (row,), _ = supervised(jsonl({"prompt": "a", "response": "b"}), chars, apply_chat_template=True)
    assert row.tokens == (BOS, USER, A, ASSISTANT, B, EOS) and row.loss_mask == (False,) * 4 + (True, True)


def test_end_token_is_added_where_the_template_writes_none(jsonl, make_tokenizer_dir):
    template = "{% for m in messages %}{% if m.role == 'user' %}<u>{% else %}<a>{% endif %}{{ m.content }}{% endfor %}"
    tokenizer = load_tokenizer(
        make_tokenizer_dir(eos_token="<eos>", chat_template=template + "{% if add_generation_prompt %}<a>{% endif %}")
    )
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "a")]
    (row,), _ = supervised(jsonl({"messages": [{"role": r, "content": c} for r, c in turns]}), tokenizer)
    assert row.tokens == (USER, A, ASSISTANT, B, USER, C, ASSISTANT, A, EOS)
    assert [i for i, m in enumerate(row.loss_mask) if m] == [3, 7, 8]


def test_template_that_ignores_its_generation_prompt_is_a_bad_line(jsonl, make_tokenizer_dir):
    template = "{% for m in messages %}<u>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    tokenizer = load_tokenizer(make_tokenizer_dir(eos_token="<eos>", chat_template=template))
    with pytest.raises(DataError, match=r"d.jsonl:1: message 1: the chat template .* generation prompt"):
        supervised(jsonl({"prompt": [{"role": "user", "content": "a"}], "response": "b"}), tokenizer)


def test_template_refusal_is_a_bad_line(jsonl, chars):
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    with pytest.raises(DataError, match="d.jsonl:1: the chat template .* refuses the messages: no system role"):
        prompts(jsonl({"messages": turns}), chars)


def test_overlong_examples_by_option(jsonl, chars):
    path = jsonl({"input": "a", "output": "b"}, {"input": "a", "output": "bbbb"}, {"input": "aaaaa", "output": "b"})
    assert len(supervised(path, chars)[0]) == 3  # any length
    with pytest.raises(DataError, match=r"d.jsonl:2: has 7 tokens, allowed: at most data.max_length=5"):
        supervised(path, chars, max_length=5, overlong=Overlong.refuse)
    kept, report = supervised(path, chars, max_length=5)
    assert len(kept) == 1 and report.num_too_long == 2 and report.num_bad == 0
    assert report.summary() == f"{path}: 1 of 3 records used, 2 left out: longer than 5 tokens (data.max_length), they have 7 to 8"
    assert [(one.source, one.length) for one in report.too_long] == [(f"{path}:2", 7), (f"{path}:3", 8)]
    kept, report = supervised(path, chars, max_length=5, overlong=Overlong.truncate, bad_lines=BadLines.skip)
    assert kept[1].tokens == (BOS, A, B, B, B) and kept[1].loss_mask == (False, False, True, True, True)
    assert (report.num_truncated, report.num_bad) == (1, 1)  # the third has no response token within 5
    assert "no response token within max_length=5" in report.problems[0]


def test_preference_pairs(jsonl, chars):
    path = jsonl({"prompt": "a", "chosen": "b", "rejected": "cc", "chosen_reward": 2, "rejected_reward": -1})
    (pair,), _ = preferences(path, chars)
    assert pair.chosen.tokens == (BOS, A, B, EOS) and pair.chosen.loss_mask == (False, False, True, True)
    assert pair.rejected.tokens == (BOS, A, C, C, EOS) and pair.rejected.loss_mask == (False, False, True, True, True)
    assert pair.margin == 3.0 and pair.source == f"{path}:1"


def test_alternating_text_lines(jsonl, chars):
    path = jsonl({"text": "ab"}, {"text": "ac"}, {"text": "<bos>b"}, {"text": "c"})
    (first, second), report = preferences(path, chars)
    assert first.chosen.tokens == (BOS, A, B, EOS) and first.rejected.tokens == (BOS, A, C, EOS)
    assert first.chosen.loss_mask == (False, True, True, True)
    assert second.chosen.tokens == (BOS, B, EOS) and second.source == f"{path}:3" and report.num_records == 2
    (plain, _), _ = preferences(path, chars, add_bos=False)
    assert plain.chosen.tokens == (A, B, EOS) and plain.chosen.loss_mask == (False, True, True)  # nothing predicts position 0


def test_a_bad_line_does_not_shift_the_pairs_after_it(jsonl, chars):
    path = jsonl({"text": "a"}, "{oops", {"text": "b"}, {"text": "c"}, {"text": "a"})
    (pair,), report = preferences(path, chars, bad_lines=BadLines.skip)
    assert pair.chosen.tokens == (BOS, B, EOS) and report.num_bad == 2
    assert "next line 2 is not a JSON value" in report.problems[0] and "odd number" in report.problems[1]


def test_pairs_made_equal_by_truncation_are_bad(jsonl, chars):
    with pytest.raises(DataError, match=r"d.jsonl:1: chosen and rejected have the same 3 tokens"):
        preferences(jsonl({"prompt": "a", "chosen": "bb", "rejected": "bc"}), chars, max_length=3, overlong=Overlong.truncate)


def test_real_comparisons_split_at_the_last_assistant_turn(shared_data):
    tokenizer = load_tokenizer(shared_data / "stories260k")
    path = str(shared_data / "hh_harmless" / "comparisons.jsonl")
    pairs, report = preferences(path, tokenizer, max_length=4096, bad_lines=BadLines.skip)
    assert (report.num_kept, report.num_bad) == (1496, 4)  # whose chosen response is a space
    assert report.problems[0] == f"{path}:87: the chosen response is ' ', expected text"
    for pair in pairs:
        for row in (pair.chosen, pair.rejected):
            start = row.loss_mask.index(True)
            assert all(row.loss_mask[start:]) and row.tokens[-1] == tokenizer.eos_id and row.tokens.count(tokenizer.bos_id) == 1
            assert tokenizer.decode(row.tokens[start - 20 : start]).endswith("\n\nAssistant:")
        shared_prompt = pair.chosen.loss_mask.index(True)
        assert pair.chosen.tokens[:shared_prompt] == pair.rejected.tokens[: pair.rejected.loss_mask.index(True)]


def test_real_gsm8k_by_field_names(shared_data):
    tokenizer = load_tokenizer(shared_data / "stories260k")
    path = str(shared_data / "gsm8k" / "test.jsonl")
    loaded, report = prompts(path, tokenizer, prompt_field="question", max_prompt_length=1024)
    assert report.num_kept == 700 and loaded[0].text.startswith("Janet") and loaded[0].answer.endswith("#### 18")
    rows, _ = supervised(path, tokenizer, prompt_field="question", response_field="answer", max_length=2048)
    start = rows[0].loss_mask.index(True)
    assert rows[0].tokens[:start] == loaded[0].tokens
    assert tokenizer.decode(rows[0].tokens) == loaded[0].text + loaded[0].answer
