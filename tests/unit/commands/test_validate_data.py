"""`aligner data validate`: what it prints, and its exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from aligner import cli
from aligner.data.inspection import Row, View, duplicates, histogram, lengths_of, render

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from conftest import TEMPLATE, write_tokenizer  # noqa: E402


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer", pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=TEMPLATE)


def write(path: Path, *records: object) -> str:
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return str(path)


def test_bad_lines_duplicates_lengths_and_masks(tmp_path, tokenizer, capsys):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]}
    file = write(tmp_path / "d.jsonl", good, {"prompt": "a", "response": ""}, good, {"prompt": "aaaaaa", "response": "b"}, "{oops")
    report = tmp_path / "report.json"
    code = cli.main(["data", "validate", "--kind", "sft", file, "--tokenizer", str(tokenizer), "--samples", "1", "--json", str(report)])
    out = capsys.readouterr().out
    assert code == 1
    assert f"bad: {file}:2: field 'response' is ''" in out and f"bad: {file}:5: is not a JSON value" in out
    assert f"warning: {file}:3: the same tokens as {file}:1" in out
    assert "3 of 5 records can be used, 2 bad" in out
    assert "min 7, median 7, p95 9, max 9" in out and "23, of which 8 in the loss mask" in out
    assert f"--- {file}:1: 7 tokens, 3 in the loss mask\n<bos><u>a<a>[[bc<eos>]]\n" in out and out.count("---") == 1
    (found,) = json.loads(report.read_text())
    assert found["report"]["num_bad"] == 2 and found["lengths"]["p95"] == 9 and len(found["repeated"]) == 1


def test_settings_of_the_data_and_good_data(tmp_path, tokenizer, capsys):
    file = write(tmp_path / "d.jsonl", {"prompt": "a", "chosen": "bbbb", "rejected": "c", "chosen_reward": 2, "rejected_reward": 1})
    options = ["--kind", "preference", "--tokenizer", str(tokenizer)]
    code = cli.main(["data", "validate", file, "data.max_length=4", "data.overlong=truncate", *options])
    out = capsys.readouterr().out
    assert code == 0 and "truncated: 1" in out
    assert f"{file}:1 (chosen, better by 1): 4 tokens, 2 in the loss mask\n<bos>a[[bb]]\n" in out
    assert f"{file}:1 (rejected): 4 tokens, 2 in the loss mask\n<bos>a[[c<eos>]]\n" in out


def test_the_data_of_a_config(tmp_path, tokenizer, capsys):
    file = write(tmp_path / "d.jsonl", {"text": "ab", "label": [1, None]}, {"text": "ab", "label": [float("nan"), 1]})
    settings = [f"data.train={file}", f"model.tokenizer={tokenizer}", "data.attributes=[good,long]"]
    assert cli.main(["data", "validate", "regression_reward_model", *settings]) == 1
    out = capsys.readouterr().out
    assert "label': good is nan" in out and "(labels: 1, -)" in out
    assert (
        cli.main(["data", "validate", "grpo", f"data.train={write(tmp_path / 'p.jsonl', {'prompt': 'a', 'answer': 'b'})}", *settings[1:2]])
        == 0
    )
    assert "(answer: b): 2 tokens, 0 in the loss mask\n<bos>a\n" in capsys.readouterr().out
    steps = write(tmp_path / "s.jsonl", {"prompt": "a", "steps": ["b", "c"], "labels": [1, 0]})
    assert cli.main(["data", "validate", "process_reward_model", f"data.train={steps}", *settings[1:2], 'data.step_separator="+"']) == 0
    assert "(steps: 1, 0): 6 tokens, 2 in the loss mask\n<bos>ab[[+]]c[[+]]\n" in capsys.readouterr().out


def test_the_first_few_of_each_kind_a_histogram_and_what_is_left_out(tmp_path, tokenizer, capsys):
    lines = (
        [{"prompt": "a", "response": ""}] * 5
        + [{"prompt": "a"}]
        + [{"prompt": f"{n:02}", "response": "b" * n, "id": n} for n in range(1, 31)]
    )
    file = write(tmp_path / "d.jsonl", *lines)
    arguments = ["data", "validate", "--kind", "sft", file, "data.max_length=24", "--tokenizer", str(tokenizer), "--samples", "0"]
    assert cli.main(arguments) == 1
    out = capsys.readouterr().out.splitlines()
    assert (
        sum(line.startswith(f"bad: {file}:") for line in out) == 4
        and f"bad: {file}:6: field 'response' is missing (the record has ['prompt'])" in out
    )
    assert "bad: ... and 2 more: field 'response' is ..., expected a non-empty string (--all lists them)" in out
    assert (
        "  bad: 5 records: field 'response' is ..., expected a non-empty string" in out
        and "  bad: 1 records: field 'response' is missing" in out
    )
    assert (
        f"too long: {file}:27: 25 tokens, more than 24 tokens (data.max_length)" in out
        and "too long: ... and 7 more (--all lists them)" in out
    )
    assert "  10 left out: longer than 24 tokens (data.max_length), they have 25 to 34" in out
    assert "  fields that are not used: id (20 records)" in out
    rows = [line.split() for line in out if " rows " in line]
    assert [(row[0], int(row[2])) for row in rows] == [("1-5", 1), *((f"{n}-{n + 4}", 5) for n in range(6, 31, 5)), ("31-35", 4)]
    assert [row[-1] for row in rows] == ["#" * 8, *["#" * 40] * 5, "#" * 32]
    assert cli.main([*arguments, "--all"]) == 1
    out = capsys.readouterr().out
    assert out.count("bad: /") == 6 and out.count("too long: /") == 10 and "--all" not in out
    long = write(tmp_path / "long.jsonl", lines[-1], lines[-2])
    assert cli.main([*arguments[:4], long, *arguments[5:]]) == 0  # nothing is left, and nothing is bad
    out = capsys.readouterr().out
    assert "0 of 2 records can be used, 0 bad" in out and "          33-33 tokens         1 rows #" in out


def test_nothing_usable_and_mistakes(tmp_path, tokenizer, capsys):
    file = write(tmp_path / "d.jsonl", {"prompt": "a"})
    assert cli.main(["data", "validate", "--kind", "sft", file, "--tokenizer", str(tokenizer)]) == 1
    assert "0 of 1 records can be used, 1 bad" in capsys.readouterr().out
    for arguments, text in (
        (["--kind", "sfd", file, "--tokenizer", str(tokenizer)], "--kind sfd: allowed: sft, preference"),
        (["--kind", "sft", file], "needs --tokenizer DIR"),
        (["sft", "--tokenizer", "x"], "--tokenizer: is for --kind"),
        (["--kind", "sft", "nothing.jsonl", "--tokenizer", str(tokenizer)], "'nothing.jsonl' does not exist"),
    ):
        assert cli.main(["data", "validate", *arguments]) == 2
        assert text in capsys.readouterr().err


def test_figures_by_hand():
    views = [View(source=f"f:{n}", rows=(Row(tokens=tuple(range(n)), loss_mask=(False,) * n),)) for n in (*range(1, 21), 3)]
    lengths = lengths_of(views)
    assert (lengths.least, lengths.middle, lengths.p95, lengths.most) == (1, 10, 19, 20)
    assert histogram([]) == [] and histogram([7]) == [(7, 7, 1)]
    assert histogram([1, 20, 20, 100, 101]) == [
        (low, low + 19, count) for low, count in zip(range(1, 122, 20), (3, 0, 0, 0, 1, 1), strict=False)
    ]
    assert duplicates(views) == []  # of one source: the same record
    again = View(source="g:1", rows=views[2].rows)
    assert duplicates([*views, again]) == [("g:1", "f:3")]


def test_spaces_at_borders_are_kept():
    class Spaces:
        """A tokenizer that leaves out the space before the first word."""

        def decode(self, ids, *, skip_special):
            return " ".join(f"w{i}" for i in ids)

    row = Row(tokens=(1, 2, 3, 4), loss_mask=(False, True, True, False))
    assert render(row, Spaces()) == "w1[[ w2 w3]] w4"
