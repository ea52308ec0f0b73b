"""The critic's and the reward servers' operations, the queue of requests and the settings, without any server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from training_jobs import eventually

from aligner.algorithms.ppo import TrainPPO
from aligner.data.vision import ImageStore
from aligner.errors import ConfigError
from aligner.jobs import serves as serving
from aligner.servers import config as server_config, processes, wire
from aligner.servers.config import ClientConfig, RequestLimits, ServerConfig, Transport
from aligner.servers.frontend import TRITON, Frontend
from aligner.servers.health import Supervisor
from aligner.servers.intake import Intake, Operation
from aligner.servers.kserve import AnswerError
from aligner.servers.ledger import Ledger
from aligner.servers.payloads import TrainIdentity, digest_of
from aligner.servers.processes import processes_with_variable, start_ticks
from aligner.servers.server import Command, Report, _take_part
from aligner.servers.services import CriticService, FunctionRewardService, RewardService
from aligner.settings.compose import compose
from aligner.telemetry.metrics import Mean, Metric, Sum
from aligner.types import Images, TokenBatch, ValueBatch

LIMITS = RequestLimits(vocab_size=100, max_sequence_length=8)


@pytest.mark.parametrize(("signalled", "others_stop"), [(True, False), (False, True), (False, False)])
def test_a_signal_that_comes_while_ranks_report_is_not_lost(signalled: bool, others_stop: bool) -> None:
    stop: list[int] = []

    class Control:
        rank = 1

        def gather(self, report: Report) -> list[Report]:
            stop.extend([signal.SIGTERM] * signalled)  # the handler runs after this rank has reported
            return [Report(stop_requested=others_stop), report]

    service = SimpleNamespace(
        progress=SimpleNamespace(phase=lambda name: contextlib.nullcontext()), residence=SimpleNamespace(move=lambda here: None)
    )
    _take_part(service, Control(), Command(), stop)
    assert bool(stop) == (signalled or others_stop)


class RecordingCritic:
    """Remembers the rows of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def train_step(self, batch: ValueBatch, loss: object) -> dict[str, Metric]:
        rows = batch.tokens[:, 0].tolist()
        self.steps.append(rows)
        return {"value/loss": Mean(total=float(sum(rows)), count=len(rows)), "optim/steps": Sum(total=1)}


def test_training_takes_mini_batches_in_order_each_epoch() -> None:
    model, zeros = RecordingCritic(), torch.zeros(5, 2)
    tokens, mask = torch.arange(5)[:, None].repeat(1, 2), torch.tensor([[False, True]]).repeat(5, 1)
    batch = ValueBatch(tokens=tokens, lengths=torch.full((5,), 2), loss_mask=mask, old_values=zeros, returns=zeros)
    identity = TrainIdentity(run="r1", step=1, part=0, digest=digest_of(wire.encode_value_batch(batch)), previous="start")
    service = CriticService(model, lambda outputs, batch: None, Ledger("r1"), mini_batch_size=2, num_epochs=2, save=str)
    reply = service.train(wire.TrainRequest(batch=batch, identity=identity))
    assert model.steps == [[0, 1], [2, 3], [4]] * 2
    # The mean over rows, not over mini-batches: twice (0 + 1 + 2 + 3 + 4) / 10 rows = 2; a mean of means would be (0.5 + 2.5 + 4) / 3.
    assert reply.loss_mean == 2.0
    assert reply.metrics == {"value/loss": 2.0, "optim/steps": 6.0}


class LengthScores:
    """Scores every row with its length."""

    def scores(self, batch: TokenBatch) -> torch.Tensor:
        return batch.lengths[:, None].to(torch.float32)


TEXTS = wire.RewardTexts(prompts=["a", "bb"], responses=["c", "dd"], answers=["c", None])
TOKENS = TokenBatch(tokens=torch.tensor([[65, 66, 0]]), lengths=torch.tensor([2]))


def test_a_reward_model_scores_tokens_or_encoded_texts() -> None:
    assert RewardService(LengthScores()).score(wire.RewardRequest(batch=TOKENS, texts=None)).tolist() == [[2.0]]
    encoding = RewardService(LengthScores(), encode=lambda text: [ord(letter) for letter in text])
    encoding.check(wire.RewardRequest(texts=TEXTS))
    assert encoding.score(wire.RewardRequest(texts=TEXTS)).tolist() == [[2.0], [4.0]]
    with pytest.raises(ValueError, match="tokens: missing"):
        RewardService(LengthScores()).check(wire.RewardRequest(texts=TEXTS))


def test_a_reward_function_gets_prompts_responses_and_answers() -> None:
    seen = []

    def function(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float]:
        seen.append((prompts, responses, answers))
        return [0.5] * len(responses)

    service = FunctionRewardService(function, decode=lambda ids: "".join(map(chr, ids)))
    assert service.score(wire.RewardRequest(texts=TEXTS, batch=TOKENS)).tolist() == [[0.5], [0.5]]
    assert service.score(wire.RewardRequest(batch=TOKENS)).tolist() == [[0.5]]
    assert seen == [(["a", "bb"], ["c", "dd"], ["c", None]), ([""], ["AB"], [None])]
    with pytest.raises(ValueError, match="responses: missing"):
        FunctionRewardService(function).check(wire.RewardRequest(batch=TOKENS))
    with pytest.raises(ValueError, match="returned 1 rewards for 2 responses"):
        FunctionRewardService(lambda prompts, responses, answers: [1.0]).score(wire.RewardRequest(texts=TEXTS))


def test_closing_answers_what_waits_runs_and_comes_later() -> None:
    queue = Intake({"critic_save": Operation(endpoint=wire.CRITIC_SAVE, handler=lambda request: "path")}, LIMITS)
    arrays = {"step": np.array([1])}
    running, waiting = queue.submit(wire.CRITIC_SAVE, arrays), queue.submit(wire.CRITIC_SAVE, arrays)
    ticket = queue.take(1)
    queue.close(AnswerError("the first reason"))
    queue.close(AnswerError("a later reason"))
    late = queue.submit(wire.CRITIC_SAVE, arrays)
    queue.answer(ticket, {"path": np.array(["too late"])})
    for answer in (running, waiting, late):
        assert "the first reason" in str(answer.exception(0))


def test_the_watchdog_ends_marked_processes_when_its_parent_dies(tmp_path: Path) -> None:
    """A parent that starts a watchdog and a marked child, and is killed."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    mark = f"ALIGNER_TEST_WATCHDOG={os.getpid()}"
    code = (
        "import os, subprocess, sys, time; name, value = sys.argv[2].split('=');"
        "dog = [sys.executable, '-S', '-E', sys.argv[1], str(os.getpid()), *sys.argv[2:]];"
        "w = subprocess.Popen(dog, stdin=subprocess.PIPE);"
        "c = subprocess.Popen(['sleep', '100'], env={**os.environ, name: value}, start_new_session=True);"
        "print(w.pid, flush=True); time.sleep(100)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, processes.__file__, mark, str(workspace)], stdout=subprocess.PIPE, text=True)
    dog = int(parent.stdout.readline())
    # Between fork and exec the child still has its parent's environment, and no mark.
    assert eventually(lambda: list(processes_with_variable(mark).values()) == ["sleep 100 "])
    parent.kill()
    parent.wait()
    poll = Path(f"/proc/{dog}/stat")
    assert eventually(lambda: not poll.exists() or ") Z" in poll.read_text())
    assert processes_with_variable(mark) == {}
    assert not workspace.exists()


def test_the_process_is_named_that_started_those_that_ended_with_it(tmp_path: Path) -> None:
    frontend = Frontend(ServerConfig(), "incarnation", tmp_path / "log", [], lambda *_: None)
    started = []
    for _ in range(3):
        started.append(subprocess.Popen(["sleep", "100"]))
        time.sleep(0.02)  # two ticks of the clock of /proc
    triton, stub, child = started
    try:
        for process, command in ((child, "python"), (stub, "python stub"), (triton, f"{TRITON} 5")):  # in no order of time
            frontend._processes[process.pid] = (start_ticks(process.pid), command)
        assert frontend.failure() is None
        for process in (child, stub):
            process.kill()
            process.wait()
        dying = threading.Timer(0.1, triton.kill)
        dying.start()
        assert f"process {triton.pid} of Triton died ({TRITON} 5)" in frontend.failure()
        triton.wait()
        del frontend._processes[triton.pid]
        assert f"process {stub.pid} of Triton died (python stub)" in frontend.failure()
    finally:
        for process in started:
            process.kill()
            process.wait()
        frontend.stop()


def test_the_supervisor_remembers_the_first_failure() -> None:
    words: list[str] = []
    problems = iter([None, "first", "second"])
    supervisor = Supervisor([lambda: next(problems)], grace_seconds=60, last_words=words.append)
    assert eventually(supervisor.failure)
    supervisor.report("from the main thread")
    assert supervisor.failure() == "first"
    supervisor.close()  # in time: no last words, and this process is still here
    assert words == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ServerConfig(port=70000), "^port=70000: must be from 1 to 65535, or 0"),
        (lambda: ServerConfig(host=""), "^host='': give an address"),
        (lambda: ServerConfig(idle_seconds=0), "^idle_seconds=0: must be above 0"),
        (lambda: ServerConfig(control_timeout_seconds=2), "^idle_seconds=1.0: must be at most a quarter of control_timeout_seconds=2"),
        (lambda: ClientConfig(num_threads=0), "^num_threads=0: must be above 0"),
    ],
)
def test_impossible_settings_are_named(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("asked", "is_installed", "chosen"),
    [("auto", True, "pytriton"), ("auto", False, "http"), ("pytriton", True, "pytriton"), ("http", True, "http"), ("http", False, "http")],
)
def test_the_transport_is_what_the_environment_has(asked: str, is_installed: bool, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_config, "find_spec", lambda name: object() if is_installed else None)
    assert ServerConfig(transport=Transport(asked)).chosen_transport() is Transport(chosen)


@pytest.mark.parametrize(("serve", "component"), [(serving.serve_critic, "critic"), (serving.serve_reward_model, "reward")])
def test_pytriton_that_is_missing_is_refused_before_anything_is_loaded(
    serve: Callable, component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_config, "find_spec", lambda name: None)
    monkeypatch.setattr(serving, "open_session", lambda *_, **__: pytest.fail("it was begun"))
    config = compose(
        TrainPPO, "ppo", ["data.train=x", "reward.serve=true", "reward.model.path=/x", f"{component}.server.transport=pytriton"]
    )
    key = f"{component}.server.transport"
    with pytest.raises(ConfigError, match=f"^{key}=pytriton: nvidia-pytriton is not installed .*: pip install .*, or set {key}=http$"):
        serve(config)


def test_what_killed_servers_have_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    living, dead, young, other = (tmp_path / f"{processes.PREFIX}{name}" for name in ("living", "dead", "young", "other"))
    for folder in (living, dead, young, other):
        (folder / "workspace").mkdir(parents=True)
    code = "import pathlib, sys; sys.path.insert(0, sys.argv[1]); import processes; "
    code += "processes.own(pathlib.Path(sys.argv[2])); print(flush=True); input()"
    folder = str(Path(processes.__file__).parent)
    owners = [
        subprocess.Popen([sys.executable, "-c", code, folder, str(one)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for one in (living, dead)
    ]
    for owner in owners:
        owner.stdout.readline()
    segments = [Path(f"/dev/shm/pytrtion{owner.pid}-0") for owner in owners]
    for segment in segments:
        segment.touch()
    owners[1].kill()
    owners[1].wait()
    (other / processes.OWNER).symlink_to(dead / processes.OWNER)  # no server of ours makes one
    os.mkfifo(young / processes.OWNER)  # to open it waits for a writer; anybody may put one into the common directory
    try:
        assert processes.sweep(tmp_path) == [dead]
        assert sorted(tmp_path.iterdir()) == [living, other, young]
        assert [segment.exists() for segment in segments] == [True, False]
    finally:
        owners[0].communicate(b"\n", timeout=30)
        segments[0].unlink()
    assert processes.sweep(tmp_path) == [living]


def test_empty_folders_of_tritons_python_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this user that are older than every Triton that lives; one with something in it is somebody's."""
    monkeypatch.setattr(processes, "BACKEND", (tmp_path, "python_env_*"))
    old, full, theirs, young = (tmp_path / f"python_env_{name}" for name in ("oldold", "full00", "theirs", "young0"))
    link, other = tmp_path / "python_env_linked", tmp_path / "other"
    for folder in (old, full, theirs, other):
        folder.mkdir()
    (full / "script").touch()
    link.symlink_to(other)
    os.chown(theirs, *((65534, 65534) if os.geteuid() == 0 else (-1, -1)))
    triton = subprocess.Popen(["tritonserver", "600"], executable="/bin/sleep")  # one that lives, and made the young folder
    while not Path(f"/proc/{triton.pid}/cmdline").read_bytes():  # a process has none while it is made
        time.sleep(0.01)
    hour_ago = time.time() - 3600
    # Of all that run here, the machine's other Tritons are none of this test's.
    monkeypatch.setattr(
        processes, "processes_with_variable", lambda _: {k: v for k, v in processes_with_variable("").items() if k == triton.pid}
    )
    try:
        for folder in (old, full, theirs):
            os.utime(folder, (hour_ago, hour_ago))
        young.mkdir()
        processes.remove(tmp_path / "workspace", 0, 1)
        assert not old.exists() and full.exists() and young.exists() and link.is_symlink() and other.exists()
        assert theirs.exists() or os.geteuid() != 0
    finally:
        triton.kill()
        triton.wait()
    workspace = tmp_path / f"{processes.PREFIX}left"
    workspace.mkdir()
    (workspace / processes.OWNER).write_text("1 1")
    assert processes.sweep(tmp_path) == [workspace] and not young.exists() and full.exists() and link.is_symlink()


def test_a_clock_that_lags_takes_nothing_from_a_triton_that_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems stamp by a clock that stands still for milliseconds: what was made after a start may be dated before it."""
    monkeypatch.setattr(processes, "BACKEND", (tmp_path, "python_env_*"))
    folder = tmp_path / "python_env_young0"
    folder.mkdir()
    monkeypatch.setattr(processes, "processes_with_variable", lambda _: {os.getpid(): "tritonserver"})
    for lag, stays in ((0.5, True), (5, False)):
        up = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
        time_of_start = time.time() - up
        os.utime(folder, (time_of_start - lag, time_of_start - lag))
        processes.remove(tmp_path / "workspace", 0, 1)
        assert folder.exists() is stays


def test_shared_memory_of_a_number_that_is_in_use_again(tmp_path: Path) -> None:
    """The dead server's goes, which is older than the process that has the number now; that process's own stays."""
    workspace = tmp_path / f"{processes.PREFIX}left"
    old, new = (Path(f"/dev/shm/pytrtion{os.getpid()}-{number}") for number in range(2))
    workspace.mkdir()
    (workspace / processes.OWNER).write_text(f"{os.getpid()} 1")  # of a server that had this number and is gone: nobody holds the lock
    for segment in (old, new):
        segment.touch()
    began = Path(f"/proc/{os.getpid()}").stat().st_ctime
    os.utime(old, (began - 60, began - 60))
    try:
        assert processes.sweep(tmp_path) == [workspace]
        assert not workspace.exists() and not old.exists() and new.exists()
    finally:
        old.unlink(missing_ok=True)
        new.unlink()


def test_shared_memory_of_a_server_that_is_about_to_end(tmp_path: Path) -> None:
    """A server that lost a part of itself lives while its watchdog removes what Triton has not."""
    workspace, segment = tmp_path / f"{processes.PREFIX}lost", Path(f"/dev/shm/pytrtion{os.getpid()}-2")
    workspace.mkdir()
    segment.touch()
    command = [sys.executable, processes.__file__, str(os.getpid()), "NAME=of nobody", str(workspace)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        process.communicate(timeout=30)
        assert process.returncode == 0 and not workspace.exists() and not segment.exists()
    finally:
        segment.unlink(missing_ok=True)


def test_what_another_user_has_put_there_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / f"{processes.PREFIX}theirs"
    theirs.mkdir()
    (theirs / processes.OWNER).write_text("1 1")
    (tmp_path / f"{processes.PREFIX}link").symlink_to(theirs)
    monkeypatch.setattr(processes.os, "getuid", lambda: theirs.stat().st_uid + 1)
    assert processes.sweep(tmp_path) == [] and (theirs / processes.OWNER).exists()


def test_a_request_whose_image_is_gone_is_rejected(tmp_path: Path) -> None:
    """The model never gets it: an error there would end the server for everybody."""
    store = ImageStore(tmp_path)
    digest = store.put(b"an image")
    batch = TokenBatch(tokens=torch.tensor([[1, 2]]), lengths=torch.tensor([2]), extras={Images.name: Images(Images.of([digest])[None])})
    operation = serving.with_images(Operation(endpoint=wire.CRITIC_INFER, handler=lambda _: "", check=None), store)
    operation.check(wire.ValuesRequest(batch=batch))
    (tmp_path / digest).write_bytes(b"another")
    with pytest.raises(ValueError, match=f"image {digest}: .*has changed"):
        operation.check(wire.ValuesRequest(batch=batch))
    (tmp_path / digest).unlink()
    with pytest.raises(ValueError, match=f"image {digest}: .*No such file"):
        operation.check(wire.RewardRequest(batch=batch))
    operation.check(wire.StatusRequest(run="run"))
    refusing = Operation(endpoint=wire.CRITIC_INFER, handler=lambda _: "", check=lambda _: pytest.fail("asked"))
    with pytest.raises(pytest.fail.Exception, match="asked"):
        serving.with_images(refusing, store).check(wire.StatusRequest(run="run"))
