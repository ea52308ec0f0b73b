"""Tokenized data in files: the same examples as in memory, found again by content, never half-written or damaged."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import filelock
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aligner.data import cache, stored
from aligner.data.config import BadLines, PreferenceDataConfig, PromptDataConfig, ProposalDataConfig, RegressionDataConfig, SFTDataConfig
from aligner.data.judged import load_regression
from aligner.data.prompts import load_prompts
from aligner.data.stored import StoredExamples, row_counts
from aligner.data.supervised import load_preferences, load_supervised
from aligner.errors import ConfigError, DataError

ODD = [{"prompt": "a", "when": datetime(2024, 1, 1), "raw": {"b": b"\xff"}, "price": Decimal("1.5"), "n": float("nan"), "kept": {"x": [1]}}]


def test_fields_that_json_has_no_values_of(kept, chars, tmp_path):
    """What a reward function reads is kept, or named with its line; the rest is not looked at."""
    pq.write_table(pa.Table.from_pylist([{**ODD[0], "when": None}, *ODD]), tmp_path / "d.parquet")
    path = str(tmp_path / "d.parquet")
    config = PromptDataConfig(train=path, **kept)
    refused = {
        "when": r"d.parquet:2: field 'when' is datetime.datetime\(2024",
        "raw": "d.parquet:1: field 'raw.b' is b'",
        "price": "'price'",
    }
    for name, said in refused.items():
        with pytest.raises(DataError, match=f"{said}.*which data.cache cannot keep: .*allowed: values of JSON, or data.cache=''"):
            load_prompts(path, config, chars, columns=frozenset([name]))
    with pytest.raises(DataError, match="data.cache cannot keep"):
        load_prompts(path, config, chars)
    for columns in (frozenset(), frozenset(["kept", "n"])):
        for settings in (config, PromptDataConfig(train=path)):
            prompts, _ = load_prompts(path, settings, chars, columns=columns)
            assert repr(prompts[1].columns) == repr({name: ODD[0][name] for name in ("n", "kept") if name in columns})
    assert len(made(kept)) == 2
    assert (
        load_prompts(path, PromptDataConfig(train=path), chars, columns=frozenset(["kept", "lost"]))[0][1].columns.keys() == ODD[0].keys()
    )


SFT = [{"prompt": "abc"[: 1 + number % 3], "response": "xyz"[number % 3 :], "note": number} for number in range(10)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(cache, "BLOCK_SIZE", 2)


@pytest.fixture
def kept(tmp_path):
    """Settings of a cache of its own, with two processes."""
    return {"cache": str(tmp_path / "cache"), "num_workers": 2}


def made(settings) -> list[Path]:
    return sorted(path.parent for path in Path(settings["cache"]).glob("*/manifest.json"))


def read(path, chars, **settings):
    return load_supervised(path, SFTDataConfig(train=path, **settings), chars)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_examples_and_report_are_those_of_memory(workers, jsonl, chars, tmp_path):
    """Bad, long and cut records among them, in every order of the processes."""
    path = jsonl(*SFT[:4], {"prompt": "a"}, *SFT[4:7], {"prompt": "a" * 9, "response": "b"}, *SFT[7:], {"prompt": 3, "response": "a"}, {})
    settings = dict(bad_lines=BadLines.skip, max_length=8)
    plain, plain_report = read(path, chars, **settings)
    for _ in range(2):  # written, and found
        examples, report = read(path, chars, cache=str(tmp_path / "cache"), num_workers=workers, **settings)
        assert isinstance(examples, StoredExamples) and list(examples) == plain and report == plain_report
        assert [examples[-1], *examples[3:5]] == [plain[-1], *plain[3:5]] and len(examples) == len(plain) == 10
        assert row_counts(examples).tolist() == row_counts(plain).tolist()
    assert report.num_bad == 3 and report.num_too_long == 1 and report.unused == {"note": 10}


@pytest.mark.parametrize(
    ("load", "schema", "records"),
    [
        (load_prompts, PromptDataConfig, [{"prompt": "a", "answer": "b"}, {"prompt": "bc"}] * 3),
        (load_prompts, PromptDataConfig, [{"messages": [{"role": "user", "content": "a"}], "level": n, "tags": ["é"]} for n in range(5)]),
        (load_supervised, SFTDataConfig, [{"instruction": "a", "input": "bc"[: n % 3], "output": "c"} for n in range(5)]),
        (load_preferences, PreferenceDataConfig, [{"text": text} for text in ("ab", "c", "b", "cb", "a", "b")]),
        (
            load_regression,
            RegressionDataConfig,
            [{"prompt": "a", "response": "b", "label": [1, 2, 3, 4, 5, 6, 7, 8, number]} for number in range(5)],
        ),
    ],
)
def test_every_kind_of_examples_is_kept(load, schema, records, jsonl, chars, kept):
    path = jsonl(*records)
    plain, plain_report = load(path, schema(train=path), chars)
    examples, report = load(path, schema(train=path, **kept), chars)
    assert list(examples) == list(plain) and report == plain_report and len(made(kept)) == 1


def test_examples_that_cannot_be_kept_are_refused(tmp_path):
    @dataclass(frozen=True)
    class Odd:
        tokens: dict[int, str]

    with pytest.raises(stored.NotStorable, match="dict"):
        stored.schema_of(Odd)
    row = SimpleNamespace(tokens=(1, 2), loss_mask=(False, True))
    with pytest.raises(DataError, match="records have different numbers of responses"):
        stored.write_index(tmp_path, [], [row_counts([SimpleNamespace(rows=(row,) * count)]) for count in (2, 3)])
    assert ProposalDataConfig(train="a").cache == ""


def test_a_key_is_of_content_settings_and_tokenizer(jsonl, chars, kept, make_tokenizer_dir):
    from aligner.data.tokenizer import load_tokenizer

    path = jsonl(*SFT)
    read(path, chars, **kept)
    os.utime(path)  # the same bytes at another time
    read(path, chars, **kept, validation="other.jsonl")  # which no example depends on
    assert len(made(kept)) == 1
    read(path, chars, **kept, add_bos=False)
    assert len(made(kept)) == 2
    read(path, load_tokenizer(make_tokenizer_dir(chat_template="{{ messages }}", eos_token="<eos>")), **kept)
    assert len(made(kept)) == 3
    before = Path(path).stat()
    Path(path).write_text(Path(path).read_text().replace("xyz", "xyy"))  # as many bytes
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    examples, _ = read(path, chars, **kept)
    assert len(made(kept)) == 4 and chars.decode(examples[0].tokens).endswith("xyy")


def test_a_digest_is_not_computed_twice_of_a_file_that_stands_still(jsonl, chars, kept, monkeypatch):
    path = jsonl(*SFT)
    monkeypatch.setattr(cache.time, "time", lambda: Path(path).stat().st_mtime + 10)
    read(path, chars, **kept)
    digests, digest = [], cache._digest
    monkeypatch.setattr(cache, "_digest", lambda path, *rest: digests.append(str(path)) or digest(path, *rest))
    read(path, chars, **kept)
    assert digests and path not in digests


def test_what_is_damaged_is_made_again_or_not_used(jsonl, chars, kept):
    path = jsonl(*SFT)
    plain = list(read(path, chars)[0])
    read(path, chars, **kept)
    (directory,) = made(kept)
    for name, damage in (
        ("manifest.json", lambda content: content[: len(content) // 2]),
        ("blocks.npy", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        ("counts.npy", lambda content: content[:-4]),
        ("shard_001.arrow", lambda content: content[:-8]),
    ):
        file = directory / name
        file.write_bytes(damage(file.read_bytes()))
        assert list(read(path, chars, **kept)[0]) == plain, name
        assert made(kept) == [directory]
    (directory / "shard_000.arrow").unlink()
    assert list(read(path, chars, **kept)[0]) == plain
    shard = directory / "shard_000.arrow"
    content = bytearray(shard.read_bytes())
    content[-200] ^= 1  # as many bytes: found when the block is read, which no start waits for
    shard.write_bytes(content)
    examples, _ = read(path, chars, **kept)
    with pytest.raises(DataError, match=f"^{shard} is damaged; remove {directory}, and it will be made again"):
        list(examples)


def test_nothing_is_kept_of_a_data_set_that_is_refused(jsonl, chars, kept):
    path = jsonl(*SFT, {"prompt": "a"}, *SFT[:3], {"response": "b"})
    with pytest.raises(DataError) as here:
        read(path, chars)
    with pytest.raises(DataError) as refused:
        read(path, chars, **kept)
    assert str(refused.value) == str(here.value) and "d.jsonl:11: " in str(here.value)
    assert not made(kept) and not [one for one in Path(kept["cache"]).iterdir() if one.is_dir() and one.name != "digests"]
    with pytest.raises(DataError, match="data file 'missing.jsonl' does not exist"):
        read("missing.jsonl", chars, **kept)
    with pytest.raises(ConfigError, match="data.cache: 'datasets:some/name' names no local files"):
        read("datasets:some/name", chars, **kept)
    Path(path).with_name("file").write_text("")
    with pytest.raises(ConfigError, match="data.cache=.*file"):
        read(path, chars, cache=str(Path(path).with_name("file")))


def test_a_process_that_is_killed_ends_the_reading(jsonl, chars, kept, monkeypatch):
    path, parent = jsonl(*SFT), os.getpid()
    encode = type(chars).encode

    def killed(*arguments, **options):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(*arguments, **options)

    monkeypatch.setattr(type(chars), "encode", killed)
    with pytest.raises(DataError, match="^data.cache: a process that tokenized ended with exit code -9"):
        read(path, chars, **kept)
    monkeypatch.undo()
    assert len(read(path, chars, **kept)[0]) == 10


def _rank(path, chars, settings, start, end):
    start.wait()
    written, write = [], stored.ShardWriter.write
    stored.ShardWriter.write = lambda self, examples: written.append(1) or write(self, examples)
    examples, _ = read(path, chars, **settings)
    end.send((bool(written), [example.tokens for example in examples]))


def test_processes_that_start_together_share_one(jsonl, chars, kept):
    path, settings = jsonl(*SFT * 20), kept | {"num_workers": 1}
    context = multiprocessing.get_context("fork")
    start, pipes = context.Barrier(3), [context.Pipe() for _ in range(3)]
    ranks = [context.Process(target=_rank, args=(path, chars, settings, start, end)) for _, end in pipes]
    for rank in ranks:
        rank.start()
    found = [end.recv() for end, _ in pipes]
    for rank in ranks:
        rank.join()
    assert [wrote for wrote, _ in found].count(True) == 1 and len(made(settings)) == 1
    assert all(tokens == [example.tokens for example in read(path, chars)[0]] for _, tokens in found)


def test_two_machines_that_make_the_same_do_no_harm(jsonl, chars, kept, monkeypatch):
    """Without locks both write; the directory of the first is the one that is used."""
    path = jsonl(*SFT)

    def no_locks(self, **options):
        raise NotImplementedError

    monkeypatch.setattr(filelock.FileLock, "acquire", no_locks)
    convert = cache._Storing.convert

    def slow(self, *arguments):
        monkeypatch.setattr(cache._Storing, "convert", convert)
        other = read(path, chars, **kept)[0]  # another machine is faster
        found = convert(self, *arguments)
        assert list(other) == list(found)
        return found

    monkeypatch.setattr(cache._Storing, "convert", slow)
    assert list(read(path, chars, **kept)[0]) == list(read(path, chars)[0])
    assert len(made(kept)) == 1 and not list(Path(kept["cache"]).glob(".*"))


def test_the_heart_beats_while_others_tokenize(jsonl, chars, kept):
    beats = []
    path = jsonl(*SFT)
    load_supervised(path, SFTDataConfig(train=path, **kept), chars, heartbeat=lambda: beats.append(1))
    assert beats


def test_a_mixture_is_kept_source_by_source(jsonl, chars, kept):
    train = [{"path": jsonl(*SFT, name="a.jsonl"), "max_records": 3, "weight": 1}, {"path": jsonl(*SFT[:4], name="b.jsonl"), "weight": 2}]
    plain, _ = load_supervised(train, SFTDataConfig(train=train), chars)
    examples, _ = load_supervised(train, SFTDataConfig(train=train, **kept), chars)
    assert list(examples) == list(plain) and len(made(kept)) == 2 and row_counts(examples).tolist() == row_counts(list(plain)).tolist()
    examples, _ = load_supervised([one | {"weight": 5} for one in train], SFTDataConfig(train=train, **kept), chars)
    assert len(made(kept)) == 2 and len(examples) == 7  # weights are no part of the key


def test_a_pyarrow_that_does_not_import_ends_in_one_sentence(tmp_path: Path) -> None:
    """pyarrow 26 beside NumPy 1: pip installs them together, and the import is what fails."""
    (tmp_path / "pyarrow.py").write_text("raise ImportError('pyarrow requires NumPy 2.0 or newer, found 1.26.4')\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[3]}"}
    command = [sys.executable, "-m", "aligner.cli", "data", "validate", "sft", "data.train=x.jsonl"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: the package pyarrow does not import: pyarrow requires NumPy 2.0 or newer, found 1.26.4; "
        "beside NumPy 1: pip install 'pyarrow<26'"
    )
