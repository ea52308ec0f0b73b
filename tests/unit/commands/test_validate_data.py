"""`aligner data`: what it prints, its exit code, and that it reads the data of every recipe as its job reads them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from aligner import cli
from aligner.algorithms.registry import recipes
from aligner.commands.validate_data import KINDS, inspect, kinds_of
from aligner.data.forms import HELPSTEER_ATTRIBUTES
from aligner.data.inspection import Row, View, duplicates, histogram, render, spread
from aligner.data.tokenizer import Tokenizer, load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from conftest import TEMPLATE, write_tokenizer  # noqa: E402

SFT = {"prompt": "a", "response": "b"}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
TURNS = [{"from": "User", "value": "a"}, {"from": "Assistant", "value": "b", "label": "quality:4"}]
LABELLED = {"system": "", "conversations": TURNS, "mask": "User", "type": "VALUE_TO_TEXT"}
LOGS = {"log(P(a|x,y))": -1, "log(P(y|x))": -2, "log(Q(y|a,x))": -3.5}
GROUP = {"system": "", "prompt_turns": TURNS[:1], "label": "quality:4", "responses": [{"from": "Assistant", "value": t} for t in "bc"]}
PROPOSED = GROUP | {"responses": [one | LOGS for one in GROUP["responses"]]}
DISTILLED = {"tokens": [1, 5], "labels": [5, 6], "loss_mask": [0, 1], "topk_logits": [[0], [-1]], "topk_token_ids": [[5], [6]]}
ASKED = "<bos><extra_id_0>System\n\n<extra_id_1>User\na\n<extra_id_1>Assistant\n"
ENDED = "\n<extra_id_1><eos>]]"

# A record of every recipe, and its rows as they are shown; of all others the record is a prompt.
RECORDS: dict[str, tuple[dict, list[str]]] = {
    **dict.fromkeys(("sft", "teacher_logprobs", "spin"), (SFT, ["<bos>a[[b<eos>]]"])),
    **dict.fromkeys(("reward_model", "dpo"), (PAIR, ["<bos>a[[b<eos>]]", "<bos>a[[c<eos>]]"])),
    "kto": ({"prompt": "a", "response": "b", "preference": True}, ["<bos>a[[b<eos>]]"]),
    "regression_reward_model": (LABELLED, [f"<bos>[[{ASKED[5:]}b\n<extra_id_2>]]"]),
    "process_reward_model": ({"prompt": "a", "steps": ["b"], "labels": [1]}, ["<bos>ab[[\n]]"]),
    "steerlm": (LABELLED, [f"{ASKED}<extra_id_2>quality:4\n[[b{ENDED}"]),
    "steerlm2": (PROPOSED, [f"{ASKED}<extra_id_2>quality:4\n[[{text}{ENDED}" for text in "bc"]),
    "proposals": (GROUP, [f"{ASKED}<extra_id_2>quality:4\n[[{text}{ENDED}" for text in "bc"]),
    "generate": (LABELLED, [f"{ASKED}<extra_id_2>quality:4\n"]),
    "annotate": (LABELLED, [f"{ASKED}b\n<extra_id_2>"]),
    "constitution": ({"prompt": "a"}, ["<bos>\n\nHuman: a\n\nAssistant:"]),
    "distill": (DISTILLED, ["<bos> [[!]]"]),
}
PROMPT = ({"prompt": "a", "answer": "b"}, ["<bos>a"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "t"
    return write_tokenizer(folder, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def chat(tokenizer: Path) -> Tokenizer:
    return load_tokenizer(tokenizer)


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
    lengths = spread([len(row.tokens) for view in views for row in view.rows])
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


def config_of(recipe: str, path: str, **data: object):
    config = recipes()[recipe].config()
    return replace(config, data=replace(config.data, train=path, **data))


@pytest.mark.parametrize("recipe", recipes())
def test_every_recipe(recipe: str, tmp_path: Path, chat: Tokenizer) -> None:
    record, rows = RECORDS.get(recipe, PROMPT)
    path = write(tmp_path / "d.jsonl", record, "{oops", record)
    finding, views = inspect(config_of(recipe, path), path, chat)
    assert [render(row, chat) for row in views[0].rows] == rows
    assert finding.report.num_bad == 1 and finding.report.problems[0].startswith(f"{path}:2: ")
    assert finding.repeated == [(f"{path}:3", f"{path}:1")]


def test_every_kind_is_of_a_recipe() -> None:
    assert set(KINDS.values()) <= set(recipes()) and set(RECORDS) <= set(recipes())


def test_spin_reads_what_its_job_reads(tmp_path: Path, chat: Tokenizer) -> None:
    """The last response alone; a prompt that is too long for the rollouts is left out and counted, a last turn of the user is bad."""
    chats = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))]
    asked = LABELLED | {"conversations": [*TURNS, TURNS[0]]}
    path = write(tmp_path / "d.jsonl", {"messages": chats}, {"prompt": "a" * 30, "response": "b"}, asked)
    finding, (view,) = inspect(config_of("spin", path, max_prompt_length=20), path, chat)
    assert [render(row, chat) for row in view.rows] == ["<bos><u>a<a>b<eos>\n<u>c<a>[[d<eos>]]"]
    assert finding.report.num_too_long == 1
    assert finding.report.problems == (f"{path}:3: ends with a turn that is not learnt, expected a response at the end",)


def test_log_probs_are_shown(tmp_path: Path, chat: Tokenizer) -> None:
    path = write(tmp_path / "d.jsonl", PROPOSED)
    _, (view,) = inspect(config_of("steerlm2", path), path, chat)
    assert [row.note for row in view.rows] == [f"response {n}: log P(a|x,y) + log P(y|x) -3, log Q(y|a,x) -3.5" for n in (1, 2)]


# aligner data inspect: the form, how fields are used, and samples

CONVERSATION = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


@pytest.fixture
def inspected(tmp_path, capsys):
    def run(*records: object, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        path = tmp_path / "d.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        code = cli.main(["data", "inspect", str(path), *options])
        said = capsys.readouterr()
        return code, said.out.replace(str(path), "d.jsonl"), said.err.replace(str(path), "d.jsonl")

    return run


def test_form_fields_and_samples(inspected):
    record = {"instruction": "Translate", "input": "dog", "output": "Hund ü", "system": "Be brief", "id": 1}
    code, out, _ = inspected(*[record] * 5)
    assert code == 0 and "d.jsonl: read as sft (also good for prompts: --kind)\n  form alpaca {instruction, input?, output" in out
    assert "    system, instruction, input, output: the conversation\n  fields that are not used: id (5 records)\n" in out
    asked = "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nTranslate\n\ndog<|im_end|>\n<|im_start|>assistant\n"
    sample = f"{asked}[[Hund ü<|im_end|>]]\n"
    assert out.count(sample) == 3


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"conversations": CONVERSATION[:1], "chosen": CONVERSATION[1], "rejected": CONVERSATION[1] | {"value": "b"}}, "preference"),
        ({"prompt": "q", "completion": "a", "label": False}, "kto"),
        ({"prompt": "q", "completions": ["a", "b"], "labels": [True, False]}, "steps"),
        ({"text": "q"}, "sft"),
        ({"prompt": "q", "answer": "a"}, "prompts"),
        ({"prompt": "q", "response": "a"} | dict.fromkeys(HELPSTEER_ATTRIBUTES, 1), "regression"),
    ],
)
def test_what_a_form_is_good_for(tmp_path, record, kind):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(record))
    assert kinds_of(str(path))[0] == kind


def test_a_kind_may_be_named_and_bad_records_are_shown(inspected):
    code, out, _ = inspected({"prompt": "q", "answer": "1"}, {"prompt": ""}, options=("--kind", "prompts"))
    assert code == 1 and "    answer: the answer, for reward functions\n" in out
    assert "bad: d.jsonl:2: field 'prompt' is ''" in out and "1 of the first 2 records can be used, 1 bad" in out


def test_an_unknown_form_is_refused_with_its_fields(inspected):
    code, _, err = inspected({"question": "q"})
    assert code == 2 and err.startswith(
        "error: d.jsonl:1: has the fields ['question'], expected those of a form: prompt_response {prompt, "
    )
