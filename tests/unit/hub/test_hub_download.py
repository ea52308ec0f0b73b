"""Names of the Hub become directories: from the cache, or from a Hub on this machine that speaks its protocol."""

from __future__ import annotations

import errno
import json
import shutil
import threading

import filelock
import pytest
from huggingface_hub import constants

from aligner.errors import AlignerError, ConfigError
from aligner.hub import download
from aligner.hub.download import Wanted, fetch
from aligner.hub.names import Files, HubName, Kind, name_of, parse, parse_data

MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}).encode(),
    "m-1.safetensors": b"1" * 3000,
    "m-2.safetensors": b"2" * 5000,
    "consolidated.safetensors": b"twice",
    "pytorch_model.bin": b"a pickle",
    "modeling_own.py": b"raise SystemExit",
    "onnx/model.onnx": b"another format",
}
TAKEN = {name for name in MODEL if name not in ("consolidated.safetensors", "pytorch_model.bin", "modeling_own.py", "onnx/model.onnx")}


def wanted(text: str = "org/name", **options: object) -> Wanted:
    name = parse(text, options.pop("kind", Kind.model))
    return Wanted(key="model.path", name=name, **options)


def names_in(directory) -> set[str]:
    return {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse("Qwen/Qwen2.5-0.5B-Instruct") == HubName("Qwen/Qwen2.5-0.5B-Instruct")
    assert parse("org/name@refs/pr/1") == HubName("org/name", "refs/pr/1")
    for text in ("", "name", "/org/name", "./org/name", "org/name/more", "~/name", "org/..", "org/na--me", "x:org/name", "org/name@"):
        assert parse(text) is None, text
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert parse("org/name") is None  # a directory that is there is what is meant
    assert parse_data("org/data") == (HubName("org/data", kind=Kind.dataset), "")
    assert parse_data("datasets:org/data@v1:main:test") == (HubName("org/data", "v1", Kind.dataset), ":main:test")
    assert parse_data("data/train.jsonl") is None and parse_data("datasets:squad:train") is None and parse_data("datasets:/a/b") is None
    commit = "0123456789" * 4
    assert name_of(f"/c/models--org--a-b.c/snapshots/{commit}") == HubName("org/a-b.c", commit)
    assert name_of(f"/c/datasets--org--d/snapshots/{commit}") == HubName("org/d", commit, Kind.dataset)
    assert name_of("/c/models--org--name/snapshots/main") is None and name_of("runs/export") is None


def test_only_what_is_needed_is_downloaded_and_once(hub):
    commit, said = hub.add("org/name", MODEL), []
    found = fetch(wanted(), said.append)
    assert found.commit == commit and names_in(found.directory) == TAKEN
    assert all((found.directory / name).read_bytes() == MODEL[name] for name in TAKEN)
    assert name_of(found.directory) == HubName("org/name", commit)
    assert any(commit in line for line in said) and said[-1].endswith("(100 %)")
    count = len(hub.requests)
    assert fetch(wanted(), said.append) == found and fetch(wanted(f"org/name@{commit}"), said.append) == found
    assert len(hub.requests) == count  # offline first: nothing is asked


def test_the_cached_commit_stays_when_the_branch_moves(hub):
    first = hub.add("org/name", MODEL)
    fetch(wanted(), print)
    second = hub.add("org/name", {**MODEL, "m-1.safetensors": b"new"})
    assert fetch(wanted(), print).commit == first
    assert fetch(wanted(f"org/name@{second}"), print).commit == second
    assert fetch(wanted(commit=second), print).commit == second  # the run's own commit


def test_settings_alone_and_then_the_weights(hub):
    hub.add("org/name", MODEL)
    directory = fetch(wanted(files=Files.settings), print).directory
    assert hub.downloads("m-1.safetensors") == 0 and (directory / "config.json").is_file() and (directory / "chat_template.jinja").is_file()
    count = len(hub.requests)
    fetch(wanted(files=Files.settings), print)
    assert len(hub.requests) == count
    assert names_in(fetch(wanted(), print).directory) == TAKEN and hub.downloads("config.json") == 1


def test_a_tag_is_resolved_to_its_commit(hub):
    first = hub.add("org/name", MODEL, ref="v1.0")
    hub.add("org/name", {**MODEL, "config.json": b"{}"})
    assert fetch(wanted("org/name@v1.0"), print).commit == first


def test_a_cut_connection_resumes_where_it_was(hub, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what is received is written to the disk in such parts
    hub.add("org/name", MODEL)
    hub.cuts["m-2.safetensors"] = 2000
    directory = fetch(wanted(), print).directory
    assert (directory / "m-2.safetensors").read_bytes() == MODEL["m-2.safetensors"]
    assert hub.ranges == ["bytes=2000-"]


def test_a_download_that_was_broken_off_is_not_taken_for_complete(hub, monkeypatch):
    hub.add("org/name", MODEL)
    get, broken_off = download.snapshot_download, []

    def broken(repo, *, allow_patterns, **options):
        if not broken_off:
            broken_off.append(get(repo, allow_patterns=[one for one in allow_patterns if one != "chat_template.jinja"], **options))
            raise KeyboardInterrupt
        return get(repo, allow_patterns=allow_patterns, **options)

    monkeypatch.setattr(download, "snapshot_download", broken)
    with pytest.raises(KeyboardInterrupt):
        fetch(wanted(files=Files.settings), print)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="is not complete, and HF_HUB_OFFLINE forbids a download"):
        fetch(wanted(files=Files.settings), print)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert (fetch(wanted(files=Files.settings), print).directory / "chat_template.jinja").is_file()


def test_a_snapshot_of_another_tool_is_taken_if_its_weights_are_there(hub):
    commit = hub.add("org/name", MODEL)
    folder = fetch(wanted(), print).directory.parents[1]
    shutil.rmtree(folder / "aligner")
    count = len(hub.requests)
    assert fetch(wanted(), print).commit == commit and len(hub.requests) == count
    (folder / "snapshots" / commit / "m-2.safetensors").unlink()
    assert (fetch(wanted(), print).directory / "m-2.safetensors").is_file() and len(hub.requests) > count


def test_processes_wait_for_the_one_that_downloads(hub):
    hub.add("org/name", MODEL)
    hub.delays["m-1.safetensors"] = 1.0
    said: list[str] = []
    ranks = [threading.Thread(target=fetch, args=(wanted(), said.append)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert hub.downloads("m-1.safetensors") == hub.downloads("config.json") == 1
    assert sum("waiting for another process, which downloads it" in line for line in said) == 3


def test_the_wait_ends_and_says_for_what(hub, tmp_path):
    hub.add("org/name", MODEL)
    (folder := tmp_path / "cache" / "models--org--name" / "aligner").mkdir(parents=True)
    with filelock.FileLock(folder / "lock"):
        with pytest.raises(AlignerError, match=r"model.path=org/name: waited 0 s for another process, .*--name and holds .*lock"):
            fetch(wanted(wait_seconds=0.2), print)


def test_what_the_hub_refuses_is_said_in_one_line(hub, monkeypatch):
    hub.add("org/gated", MODEL, gated=True)
    hub.add("org/private", MODEL, private=True)
    hub.add("org/name", MODEL)
    hub.add("org/pickle", {"config.json": b"{}", "pytorch_model.bin": b""})
    cases = {
        "org/unknown": rf"no such directory here, and {hub.url} has no model org/unknown, or it is private: set HF_TOKEN",
        "org/private": "or it is private: set HF_TOKEN, or run `hf auth login`",
        "org/gated": rf"is gated, and no token is set: accept its terms at {hub.url}/org/gated and set HF_TOKEN",
        "org/name@v9": "org/name has no branch, tag or commit v9",
        "org/pickle": "has no safetensors weights .*; its .bin files are not supported",
    }
    for text, message in cases.items():
        with pytest.raises(ConfigError, match=f"^model.path={text}: .*{message}") as caught:
            fetch(wanted(text), print)
        assert "\n" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(ConfigError, match="this token may not read it: ask for access"):
        fetch(wanted("org/gated"), print)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert names_in(fetch(wanted("org/gated"), print).directory) == TAKEN == names_in(fetch(wanted("org/private"), print).directory)


def test_no_network(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(AlignerError, match=r"^model.path=org/name: no such directory here, .*127.0.0.1:9 cannot be reached") as caught:
        fetch(wanted(), print)
    assert not isinstance(caught.value, ConfigError) and "\n" not in str(caught.value)  # a later attempt may reach it
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="does not have it, and HF_HUB_OFFLINE forbids a download: run `hf download org/name`"):
        fetch(wanted(), print)


def test_a_disk_that_is_full(hub, monkeypatch):
    hub.add("org/name", MODEL)
    usage = shutil.disk_usage
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage(path)._replace(free=100))
    with pytest.raises(AlignerError, match="GiB are free there: make space, or name another cache with HF_HOME"):
        fetch(wanted(), print)
    monkeypatch.setattr(download.shutil, "disk_usage", usage)

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "snapshot_download", full)
    with pytest.raises(AlignerError, match="the file system is full: .*: make space"):
        fetch(wanted(), print)


def test_a_data_set_needs_all_of_its_files(hub, monkeypatch):
    data = {"README.md": b"---\n---\n", "data/train-0.jsonl": b'{"prompt": "a"}\n', "data/train-1.jsonl": b""}
    files = {**data, "load.py": b"", ".x.json": b""}
    commit = hub.add("org/data", files, kind="datasets")
    asked = wanted("org/data", kind=Kind.dataset, files=Files.data)
    found = fetch(asked, print)
    assert names_in(found.directory) == set(data)
    assert name_of(found.directory) == HubName("org/data", commit, Kind.dataset)
    shutil.rmtree(found.directory.parents[1] / "aligner")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said: list[str] = []
    assert fetch(asked, said.append) == found and "cannot check whether" in said[0]


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "..", "a/../../b.safetensors", "a\\0b"])
def test_names_that_lead_out_of_the_folder(hub, file, monkeypatch):
    hub.add("org/name", {**MODEL, "model.safetensors.index.json": json.dumps({"weight_map": {"a": file}}).encode()})
    with pytest.raises(ConfigError, match="model.safetensors.index.json: names the file .*; allowed: files inside the folder"):
        fetch(wanted(), print)
    hub.add("org/data", {"data.jsonl": b"{}", f"{file}/x.jsonl": b"{}"}, kind="datasets")
    with pytest.raises(ConfigError, match="model.path=org/data: names the file .*; allowed: files inside the folder"):
        fetch(wanted("org/data", kind=Kind.dataset, files=Files.data), print)
