"""Directories as people bring them: what is data in them, and of which split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.data.config import PromptDataConfig, SFTDataConfig
from aligner.data.prompts import load_prompts, read_questions
from aligner.data.sources import left_out, located, read_records
from aligner.data.supervised import load_supervised
from aligner.errors import DataError


def write(folder: Path, *names: str) -> str:
    """Files of one record each, which holds the file's name; what is no data has text that would not read."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        record = {"prompt": name, "response": "b"}
        if name.endswith(".parquet"):
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist([record]), folder / name)
        else:
            (folder / name).write_text(f"{json.dumps([record] if name.lower().endswith('.json') else record)}\n")
    return str(folder)


def files_read(location: str) -> list[str]:
    return [raw.value["prompt"] for raw in read_records(location)]


def test_what_systems_editors_and_caches_leave_is_no_data(tmp_path):
    folder = write(tmp_path, "a.jsonl", "b.NDJSON", "c.JSON", "README.md", "notes.txt")
    left = [".a.jsonl", "._a.jsonl", ".~lock.a.jsonl", "~$a.json", "__MACOSX/a.jsonl", ".cache/a.jsonl", ".ipynb_checkpoints/a.jsonl"]
    left += ["cache-0123456789abcdef.arrow", "cache-01_00000_of_00002.arrow", "tmpab12.arrow", "a.jsonl~", "a.jsonl.lock"]
    left += ["dataset_info.json", "dataset_infos.json", "state.json"]
    for name in left:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{")
    (tmp_path / "dataset_info.json").rename(tmp_path / "manifest.json")  # beside it, state.json is `save_to_disk`'s
    assert files_read(folder) == ["a.jsonl", "b.NDJSON", "c.JSON"]
    assert left_out(folder) == ""


SPLITS = [
    (["train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "test-00000-of-00001.parquet"], "train", 2),
    (["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet", "README.md"], "train", 1),
    (["train.jsonl", "test.jsonl"], "train", 1),
    (["gsm8k_train.jsonl", "gsm8k_test.jsonl"], "train", 1),
    (["train/a.jsonl", "train/b.jsonl", "test/a.jsonl"], "train", 2),
    (["train/test_cases.jsonl", "test/train_cases.jsonl"], "train", 1),
    (["json-train.jsonl", "json-validation.jsonl"], "train", 1),
    (["TRAIN.jsonl", "DEV.jsonl"], "TRAIN", 1),
    (["training.jsonl", "eval.jsonl"], "training", 1),
]


@pytest.mark.parametrize(("names", "split", "count"), SPLITS, ids=[names[0] for names, *_ in SPLITS])
def test_the_train_split_is_read_of_several(names, split, count, tmp_path, chars):
    folder = write(tmp_path / "d", *names)
    assert located(folder) == f"{folder}:{split}" and files_read(folder) == names[:count] == files_read(f"{folder}:{split}")
    others = {name for name in names if not name.endswith("md")} - set(names[:count])
    assert all(others == set(files_read(f"{folder}:{one}")) for one in ("test", "validation") if _has(folder, one))
    assert load_supervised(folder, SFTDataConfig(train=folder), chars)[1].summary().startswith(f"{folder}:{split}: {count} of {count}")


def _has(folder: str, split: str) -> bool:
    try:
        return bool(files_read(f"{folder}:{split}"))
    except DataError:
        return False


REFUSED = [
    (["validation.jsonl"], "files of the split validation; name the split: .*d:validation"),
    (["train_sft-00000-of-00001.jsonl", "test_sft-00000-of-00001.jsonl"], "files of the splits test_sft, train_sft; name"),
    (["train.jsonl", "extra.jsonl"], r"files of the split train, and of no split \(extra.jsonl\)"),
    (["dev.jsonl", "test.jsonl"], "files of the splits dev, test"),
    (["main/train.jsonl", "main/test.jsonl", "socratic/train.jsonl"], "the split 'train' lies in main, socratic; name one of"),
]


@pytest.mark.parametrize(("names", "message"), REFUSED, ids=[names[0] for names, _ in REFUSED])
def test_what_is_trained_on_is_never_guessed(names, message, tmp_path):
    with pytest.raises(DataError, match=message):
        files_read(write(tmp_path / "d", *names))


def test_a_split_that_is_not_there_is_named(tmp_path):
    folder = write(tmp_path / "d", "train.jsonl", "dev.jsonl")
    assert files_read(f"{folder}:validation") == ["dev.jsonl"]  # another word for it
    with pytest.raises(DataError, match="no split 'tset', there are dev, train"):
        files_read(f"{folder}:tset")
    plain = write(tmp_path / "plain", "a.jsonl")
    with pytest.raises(DataError, match="no split 'train', there are none"):
        files_read(f"{plain}:train")


def test_each_setting_has_its_own_split(tmp_path, chars):
    folder = write(tmp_path / "d", "train.jsonl", "validation.jsonl", "test.jsonl")
    only = write(tmp_path / "held_out", "train-00000-of-00001.jsonl")
    config = PromptDataConfig(train=only, validation=folder)
    (prompt,), report = load_prompts(folder, config, chars)
    assert prompt.text == "validation.jsonl" and report.location == f"{folder}:validation"
    assert read_questions(folder, config, [prompt]).texts == {prompt.source: "validation.jsonl"}
    assert load_prompts(only, PromptDataConfig(train=folder, validation=only), chars)[0][0].text == "train-00000-of-00001.jsonl"
    own = PromptDataConfig(
        train=only, validation=[{"path": folder, "name": "held_out", "add_bos": False}]
    )  # a source with settings of its own
    assert [one.text for one in load_prompts(own.validation, own, chars)[0]] == ["validation.jsonl"]
    with pytest.raises(DataError, match=f"data.validation={folder}: the directory has files of the splits test, train, validation; name"):
        load_prompts(folder, PromptDataConfig(train=folder, validation=folder), chars)
    sources = PromptDataConfig(train=[folder, {"path": f"{folder}:test", "name": "other"}])
    assert [one.text for one in load_prompts(sources.train, sources, chars)[0]] == ["train.jsonl", "test.jsonl"]


def test_directories_below_are_read_if_there_is_nothing_above(tmp_path, chars):
    folder = write(tmp_path / "d", "2024/a.jsonl", "2025/b/c.jsonl")
    assert files_read(folder) == ["2024/a.jsonl", "2025/b/c.jsonl"]
    write(tmp_path / "d", "top.jsonl")
    assert load_supervised(folder, SFTDataConfig(train=folder), chars)[1].summary().splitlines() == [
        f"{folder}: 1 of 1 records used",
        f"{folder}: not read: 2024",
    ]
    (tmp_path / "d" / "more.zip").write_text("")
    assert left_out(folder) == "not read: 2024, more.zip"


def test_links_are_followed_and_broken_ones_named(tmp_path):
    write(tmp_path / "blobs", "x.jsonl", "y/z.jsonl")
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "train").symlink_to(tmp_path / "blobs" / "y")
    (tmp_path / "blobs" / "y" / "up").symlink_to(folder)  # round in a circle
    assert files_read(str(folder)) == ["y/z.jsonl"]
    (folder / "a.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="a.jsonl' does not exist"):
        files_read(str(folder))


def test_save_to_disk_is_read_with_and_without_the_prefix(tmp_path, monkeypatch):
    import datasets

    rows = datasets.Dataset.from_dict({"prompt": ["a", "b"]})
    saved, several = str(tmp_path / "saved"), str(tmp_path / "several")
    rows.save_to_disk(saved)
    datasets.load_from_disk(saved).map(lambda row: {"prompt": "mapped"})  # writes its cache beside the data
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(several)
    assert files_read(saved) == files_read(f"datasets:{saved}") == files_read(several) == ["a", "b"]
    assert files_read(f"{several}:test") == files_read(f"{several}/test") == files_read(f"datasets:{several}:test") == ["b"]
    assert [raw.source for raw in read_records(saved)] == [f"{saved}:1", f"{saved}:2"]
    assert [raw.source for raw in read_records(f"datasets:{several}:test")] == [f"datasets:{several}:test:1"]
    with pytest.raises(DataError, match="no split 'dev', there are train, test"):
        files_read(f"{several}:dev")
    for place in (saved, f"datasets:{saved}"):
        with pytest.raises(DataError, match="no split 'test': it was saved as one data set"):
            files_read(f"{place}:test")
    datasets.DatasetDict({"a": rows, "b": rows}).save_to_disk(str(tmp_path / "others"))
    with pytest.raises(DataError, match="files of the splits a, b; name the split"):
        files_read(str(tmp_path / "others"))
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / "saved" / name).unlink()
    assert files_read(saved) == ["a", "b"]  # its Arrow files alone
