from __future__ import annotations

import json
import lzma

import pytest

from aligner.data.sources import read_records
from aligner.errors import DataError


def test_jsonl_counts_lines_and_indexes_records(jsonl):
    path = jsonl({"a": 1}, "", {"a": 2}, "{oops", {"a": "line\u2028separator"})
    records = list(read_records(path))
    assert [(r.line, r.index) for r in records] == [(1, 0), (3, 1), (4, 2), (5, 3)]
    assert records[0].source == f"{path}:1" and records[1].value == {"a": 2}
    assert "is not a JSON value" in records[2].error and records[3].value == {"a": "line\u2028separator"}


def test_only_so_many_records_are_read(jsonl):
    file = jsonl({"a": 1}, {"a": 2}, {"a": 3})
    assert [len(list(read_records(file, first))) for first in (0, 1, 2, 3, 4, None)] == [0, 1, 2, 3, 3, 3]


def test_bytes_that_are_not_utf8_and_absurd_nesting_are_bad_lines(jsonl):
    records = list(read_records(jsonl({"a": 1}, b'{"a": "\xff"}', "[" * 100_000)))
    assert records[0].error == "" and all("is not a JSON value" in r.error for r in records[1:]) and len(records) == 3


def test_byte_order_mark_is_not_a_bad_line(jsonl):
    assert [r.value for r in read_records(jsonl(b'\xef\xbb\xbf{"a": 1}'))] == [{"a": 1}]


def test_json_list_parquet_and_directory(tmp_path, jsonl):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.json").write_text(json.dumps([{"x": 1}, {"x": 2}]))
    pq.write_table(pa.table({"x": [3, 4]}), tmp_path / "b.parquet")
    jsonl({"x": 5}, name="c.jsonl")
    (tmp_path / "notes.txt").write_text("not data")
    records = list(read_records(str(tmp_path)))
    assert [r.value for r in records] == [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 4}, {"x": 5}]
    assert [r.index for r in records] == [0, 1, 2, 3, 4]
    assert records[3].source == f"{tmp_path / 'b.parquet'}:2" and records[4].source == f"{tmp_path / 'c.jsonl'}:1"


def test_datasets_from_a_local_folder_of_files(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "named"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "p"}\n')
    assert [r.value for r in read_records(f"datasets:{folder}:train")] == [{"text": "p"}]


@pytest.mark.parametrize("packed", ["", ".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_packed_files(tmp_path, suffix, packed):
    """A line break in a cell, a byte order mark and a text longer than csv's own limit are data like other data."""
    import pyarrow as pa

    rows = [{"prompt": "a,\nb" + "x" * 200_000, "label": True, "chosen": [{"role": "user", "content": "é"}]}, {"prompt": "7", "label": 2}]
    cells = [[row["prompt"], str(row["label"]), json.dumps(row["chosen"]) if "chosen" in row else ""] for row in rows]
    lines = ["prompt,label,chosen\n", *(",".join('"' + cell.replace('"', '""') + '"' for cell in row) + "\r\n" for row in cells)]
    text = {".jsonl": "".join(json.dumps(row) + "\n" for row in rows), ".json": json.dumps(rows), ".csv": "\ufeff" + "".join(lines)}[suffix]
    path = tmp_path / f"d{suffix}{packed}"
    if packed == ".xz":
        path.write_bytes(lzma.compress(text.encode()))
    else:
        with pa.output_stream(str(path), compression={".zst": "zstd", ".gz": "gzip", ".bz2": "bz2", "": None}[packed]) as stream:
            stream.write(text.encode())
    for place in (path, tmp_path):
        found = [record.value for record in read_records(str(place))]
        assert found[0] == rows[0] and {name: found[1][name] for name in rows[1]} == rows[1]


@pytest.mark.parametrize("as_file", [True, False])
def test_arrow_files_and_streams(tmp_path, as_file):
    import pyarrow as pa

    table = pa.Table.from_pylist([{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}])
    with (pa.ipc.new_file if as_file else pa.ipc.new_stream)(str(tmp_path / "d.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    records = list(read_records(str(tmp_path)))
    assert [(r.value["prompt"], r.source) for r in records] == [("a", f"{tmp_path}/d.arrow:1"), ("b", f"{tmp_path}/d.arrow:2")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "does not exist"),
        (
            "a.txt",
            "x",
            "ends in '.txt', allowed: .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow, and .jsonl, .ndjson, .json, .csv, .tsv with",
        ),
        ("a.csv", "x,y\n1\n", "a.csv:1: has 1 cells, expected 2 like the header"),
        ("a.csv", "x,x\n", "expected names of columns, each once"),
        ("a.csv", 'x\n"a', "is not CSV in UTF-8"),
        ("a.arrow", "not arrow", "not a readable arrow file"),
        ("a.jsonl.zst", "not zstd", "not a readable zstd file"),
        ("a.json.xz", "not xz", "not a readable xz file"),
        ("a.json", '{"version": 1, "data": [{"x": 1}]}', "contains one object, of 'version', 'data', expected a list of objects"),
        ("a.json", '[{"x": 1},', "is not JSON in UTF-8"),
        ("a.jsonl.GZ", "not gzip", "not a readable gzip file"),
        ("a.parquet", "not parquet", "not a readable parquet file"),
    ],
)
def test_unreadable_files(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        list(read_records(str(tmp_path / name)))


def test_empty_directory_and_malformed_name(tmp_path):
    with pytest.raises(DataError, match="holds no file ending in"):
        list(read_records(str(tmp_path)))
    with pytest.raises(DataError, match="allowed: datasets:NAME"):
        list(read_records("datasets:a:b:c:d"))
