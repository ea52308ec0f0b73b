"""The processes of the TensorRT-LLM engine: how they start and end, what passes between them and the training ranks."""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_tensorrt_llm import CONTEXT, engine_of, installed
from fake_tensorrt_llm_binding import OnGpu, handle_of

from aligner.errors import EngineError
from aligner.rollout.engine import GenRequest, ListedWork
from aligner.rollout.engine.manifest import Manifest
from aligner.rollout.tensorrt_llm import link as tensorrt_llm_link
from aligner.rollout.tensorrt_llm.link import Door, knock
from aligner.types import LogprobKind, SamplingConfig


def test_no_launcher_is_in_sight_of_the_engines_process():
    of_launchers = {"OMPI_COMM_WORLD_SIZE": "8", "PMIX_RANK": "3", "PMI_RANK": "3", "SLURM_NTASKS": "8", "RANK": "3", "MASTER_ADDR": "x"}
    kept = {"HOME": "/home/a", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    given = tensorrt_llm_link.engine_environment(of_launchers | kept | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ["2", "3"])
    assert kept.items() <= given.items() and given["CUDA_VISIBLE_DEVICES"] == "2,3" and not set(of_launchers) & set(given)
    assert given["PYTHONPATH"].split(os.pathsep) == [path for path in sys.path if path]


def test_a_bucket_is_one_buffer(tmp_path):
    torch.manual_seed(0)
    bucket = [("a", torch.randn(3, 5)), ("b", torch.randn(7).bfloat16()), ("empty", torch.empty(0, 4)), ("d", torch.randn(4, 6).t())]
    specs, buffer = tensorrt_llm_link.packed(bucket)
    assert buffer.dtype == torch.uint8 and [start for *_, start in specs] == [0, 64, 80, 80]  # each begins at a multiple of 16
    found = tensorrt_llm_link.unpacked(specs, tensorrt_llm_link.opened(tensorrt_llm_link.handle(buffer), device=0))
    assert all(torch.equal(found[name], tensor) for name, tensor in bucket) and len(found) == len(bucket)


def test_a_buffer_on_a_gpu_travels_as_a_handle_that_another_process_opens(monkeypatch, tmp_path):
    monkeypatch.setattr(tensorrt_llm_link.reductions, "reduce_tensor", handle_of)
    handle = tensorrt_llm_link.handle(OnGpu())
    with pytest.raises(RuntimeError, match="the handle is of this process"):
        tensorrt_llm_link.opened(handle, device=5)
    (tmp_path / "handle").write_bytes(pickle.dumps(handle))
    code = (
        "import pickle, sys\nfrom aligner.rollout.tensorrt_llm.link import opened\n"
        "found = opened(pickle.load(open(sys.argv[1], 'rb')), device=5)\nassert found == {'shape': (2, 3), 'device': 5}, found"
    )
    environment = tensorrt_llm_link.engine_environment(os.environ, [])
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "handle"], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_connections_end_with_errors_that_say_what_happened(tmp_path):
    with pytest.raises(EngineError, match="cannot make a socket.*a short path"):
        Door(tmp_path / ("long" * 40))
    with pytest.raises(EngineError, match="the worker did not connect to .*worker0 within 0 s"):
        Door(tmp_path / "worker0").answer("the worker", 0.05)

    def refuse() -> None:
        raise EngineError("its process ended")

    with pytest.raises(EngineError, match="its process ended"):
        Door(tmp_path / "worker0").answer("the worker", 60.0, refuse)
    door = Door(tmp_path / "worker0")
    there = knock(tmp_path / "worker0", "the rank")
    here = door.answer("the worker", 60.0)
    there.send("hello", 1)
    assert here.receive(60.0) == ("hello", 1) and not (tmp_path / "worker0").exists()
    there.send("error", "out of memory")
    with pytest.raises(EngineError, match="out of memory"):
        here.call("load", seconds=60.0)
    assert there.receive(60.0) == ("load",)
    there.close()
    with pytest.raises(EngineError, match="the worker ended; see its own messages"):
        here.receive(60.0)
    for again in (here.receive, lambda: here.send("x"), lambda: here.has_message(0)):
        with pytest.raises(EngineError, match="the worker ended"):
            again()


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


STRANGER = """
import os, socket, struct, sys, time
from pathlib import Path
door, uid, first = Path(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
if uid:
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
    try:
        door.with_name(door.name + ".key").read_bytes()
    except PermissionError:
        pass
    else:
        raise SystemExit("could read the key")
connection = socket.socket(socket.AF_UNIX)
try:
    connection.connect(str(door))
except PermissionError:
    raise SystemExit(0)
connection.sendall(first)
connection.settimeout(60)
try:
    heard = connection.recv(100)  # until it is sent away
except ConnectionResetError:
    heard = b""
raise SystemExit(f"heard {heard}" if heard else 0)
"""


def strange(door: Path, first: bytes, uid: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", STRANGER, str(door), str(uid), first.hex()])


def test_only_the_process_with_the_key_is_unpickled(tmp_path, capsys, monkeypatch):
    """Another process of this user gets in without it: what it sends first, a message that would do something, is not even read as one."""
    monkeypatch.setattr(tensorrt_llm_link, "KEY_SECONDS", 0.5)
    message = pickle.dumps(("hello", Bomb(tmp_path / "exploded")))
    framed = struct.pack("!i", len(message)) + message
    path = tmp_path / "worker0"
    door = Door(path)
    key = path.with_name("worker0.key")
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_bytes()) == 32
    firsts = (framed, b"", b"x" * 32 + framed, key.read_bytes()[:31])  # at once, nothing for ever, another key, a part of it
    heard: list[Any] = []
    thread = threading.Thread(target=lambda: heard.append(door.answer("the worker", 120.0)))
    thread.start()
    for first in firsts:
        assert strange(path, first).wait(60) == 0
    there = knock(path, "the rank")
    thread.join(60)
    there.send("hello", 1)
    assert heard[0].receive(60.0) == ("hello", 1) and not key.exists() and not path.exists()
    assert not (tmp_path / "exploded").exists()
    assert capsys.readouterr().out.count("worker0: a process without the key connected, which is not the worker: it was sent away") == 4
    pickle.loads(message)
    assert (tmp_path / "exploded").exists()  # it would have


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize("is_open", [False, True])
def test_another_user_gets_in_nowhere(is_open, tmp_path):
    """Not into the engine's directory; and if that were open to all, not to the key."""
    with TemporaryDirectory(prefix="aligner-engine-", dir="/tmp") as home:
        assert Path(home).stat().st_mode & 0o777 == 0o700
        if is_open:
            Path(home).chmod(0o777)
        door = Door(Path(home) / "requests")
        stranger = strange(Path(home) / "requests", b"x" * 32, uid=65534)
        with pytest.raises(EngineError, match="did not connect"):
            door.answer("the process", 3.0)
        assert stranger.wait(60) == 0


def test_a_process_that_ends_at_once_is_not_waited_for(tmp_path, monkeypatch):
    from aligner.rollout.tensorrt_llm import engine as tensorrt_llm

    def dies(home: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], start_new_session=True)

    with installed("1.2.1", tmp_path):
        monkeypatch.setattr(tensorrt_llm, "start_process", dies)
        with pytest.raises(EngineError, match="process ended with status 3 before it was ready"):
            engine_of(tmp_path).start()


def test_the_gpus_of_a_replica(monkeypatch):
    from aligner.rollout.tensorrt_llm import engine as tensorrt_llm

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert tensorrt_llm._devices(2) == ["2", "3"] and tensorrt_llm._devices(1) == ["2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert tensorrt_llm._devices(2) == ["6", "7"]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(EngineError, match="rollout.tp=2: the first rank of a replica must see the GPUs of all its ranks.*gpus-per-task"):
        tensorrt_llm._devices(2)


class Far:
    """A process that ends every request at once, and reads no more before its answers were read: sockets hold little."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def generate_async(self, tokens: list[int], sampling: Any, streaming: bool) -> Any:
        async def aresult() -> None:
            return None

        self.lengths.append(len(tokens))
        output = SimpleNamespace(token_ids=tokens, logprobs=[-1.0] * len(tokens), finish_reason="length")
        return SimpleNamespace(aresult=aresult, outputs=[output])


def test_both_sides_may_send_more_than_a_socket_holds(tmp_path):
    from aligner.rollout.tensorrt_llm.requests import Requests, Take
    from aligner.rollout.tensorrt_llm.worker import Desk

    with installed("1.2.1", tmp_path):
        door = Door(tmp_path / "requests")
        far, there = Far(), knock(tmp_path / "requests", "the rank")
        here = door.answer("the process", 60.0)
        thread = threading.Thread(target=lambda: asyncio.run(Desk(far, there).run()), daemon=True)
        thread.start()
        wanted = [GenRequest(index=index, tokens=(5,) * 100_000, seed=0) for index in range(40)]
        limits = {"eos_id": 2, "context": 100_001, "kind": LogprobKind.sampled, "version": 1, "timeout_seconds": 60.0}
        parts = Requests(here, SamplingConfig(), **limits).run(Take(ListedWork(wanted), None), limit=20)
        found = sorted(result.index for results in parts for result in results)
        assert found == list(range(40)) and far.lengths == [100_000] * 40
        here.send("shutdown")
        thread.join(60)
        assert not thread.is_alive()


def test_a_model_that_cannot_be_built_is_an_error_at_the_start(package, hf_directory, monkeypatch):
    import tensorrt_llm

    def refuses(**_: Any) -> None:
        raise ValueError("no kernel image is available for this GPU")

    monkeypatch.setattr(tensorrt_llm, "LLM", refuses)
    engine = engine_of(hf_directory("llama"))
    with pytest.raises(EngineError, match="process could not build its model: ValueError: no kernel image is available"):
        engine.start()
    with pytest.raises(EngineError, match="not running"):
        engine.finish_refit(1)


@pytest.mark.cpu
def test_a_worker_must_be_on_its_ranks_gpu(package, hf_directory, monkeypatch):
    from aligner.rollout.tensorrt_llm import worker as tensorrt_llm_worker

    monkeypatch.setattr(tensorrt_llm_worker, "gpu_name", lambda: "GPU-of-another-rank")
    with pytest.raises(EngineError, match="worker 0 computes on the GPU GPU-of-another-rank, its training rank on cpu"):
        engine_of(hf_directory("llama")).start()


def test_an_executor_that_does_not_pause_is_taken_for_hung(package, hf_directory, monkeypatch):
    engine = engine_of(hf_directory("llama"), pause_seconds=0.2)
    engine.start()
    goes_on = threading.Event()
    monkeypatch.setattr(package.engine, "control_action", lambda: goes_on.wait(60))
    with pytest.raises(EngineError, match="worker did not answer within 0 s"):
        engine.begin_refit(Manifest(tensors={}))
    goes_on.set()
    with pytest.raises(EngineError, match="did not answer"):  # an answer that comes now would be taken for another one's
        engine.finish_refit(1)
    engine.shutdown()


def test_what_the_model_is_built_with(package, hf_directory):
    """The lengths are the run's; the cache has room for its batch."""
    engine = engine_of(hf_directory("llama"), max_batch_size=4)
    assert "tensorrt_llm" in sys.modules and not package.llms
    engine.start()
    assert engine._process.given["PATH"]
    given = package.llms[-1].given
    assert {name: given[name] for name in ("max_seq_len", "max_input_len", "max_batch_size", "max_num_tokens", "load_format", "dtype")} == {
        "max_seq_len": CONTEXT,
        "max_input_len": CONTEXT,
        "max_batch_size": 4,
        "max_num_tokens": 2048 + 4,
        "load_format": "dummy",
        "dtype": "float32",
    }
    cache = given["kv_cache_config"].given
    assert cache["max_tokens"] == 4 * CONTEXT and cache["enable_block_reuse"]
    assert given["cuda_graph_config"].given == {"enable_padding": True, "max_batch_size": 4}
    assert given["sampler_type"] == "TRTLLMSampler" and "enable_sleep" not in given
    engine.shutdown()


def test_ranks_that_follow_take_part_when_the_first_takes(monkeypatch):
    """Taking may be collective over the replica, and only the first rank knows when it has room."""
    from aligner.rollout.tensorrt_llm import requests as tensorrt_llm_requests
    from aligner.rollout.tensorrt_llm.requests import Take

    class Counted:
        is_open = False

        def __init__(self) -> None:
            self.rooms: list[int] = []

        def take(self, room: int) -> list[GenRequest]:
            self.rooms.append(room)
            return []

    told: list[int] = []
    first, follower = Counted(), Counted()
    monkeypatch.setattr(tensorrt_llm_requests, "leaders_integers", lambda numbers, *, group, device: told.extend(numbers) or numbers)
    take = Take(first, "the ranks of a replica")
    take.requests(4)
    take.tell(tensorrt_llm_requests.WAIT)
    take.requests(1)
    take.tell(tensorrt_llm_requests.END)
    monkeypatch.setattr(tensorrt_llm_requests, "leaders_integers", lambda numbers, *, group, device: [told.pop(0)])
    Take(follower, "the ranks of a replica").follow()
    assert first.rooms == follower.rooms == [4, 1] and not told
