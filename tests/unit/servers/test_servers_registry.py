"""Discovery: who is found, who counts as dead, and what the errors say. Processes and clocks are set by hand; nothing sleeps for long."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from training_jobs import eventually

from aligner.errors import ServerError, ServerUnreachable
from aligner.servers.health import Purpose
from aligner.servers.processes import parent, zombie_children
from aligner.servers.registry import (
    Liveness,
    Publication,
    ServiceState,
    gone_path,
    make_registration,
    process_is_dead,
    read_registration,
    registration_path,
    wait_for_service,
)


def registration(name: str = "critic", incarnation: str = "aaaaaaaa11", **fields):
    made = make_registration(name=name, role="critic", num_ranks=2, layout="tp2")
    known = {"state": ServiceState.ready, "url": "http://127.0.0.1:5556", "port": 5556, "checkpoint": "step-3"}
    return replace(made, **({"incarnation": incarnation} | known | fields))


def test_a_published_service_is_found_and_withdrawn(tmp_path: Path) -> None:
    mine = registration()
    publication = Publication(tmp_path, mine, heartbeat_seconds=0.05)
    found = wait_for_service(tmp_path, "critic", timeout_seconds=5)
    assert found == mine
    assert (found.url, found.pid, found.checkpoint, found.num_ranks) == ("http://127.0.0.1:5556", os.getpid(), "step-3", 2)
    assert (found.role, found.layout, found.attempt, found.state) == ("critic", "tp2", "", ServiceState.ready)
    assert publication.failure() is None
    assert [path.name for path in tmp_path.iterdir()] == ["critic.json"]  # no temporary file is left
    publication.withdraw()
    publication.withdraw()
    assert list(tmp_path.iterdir()) == []


def test_a_registration_that_cannot_be_removed_hides_no_error(tmp_path: Path, monkeypatch, capsys) -> None:
    """A disk that is full or read-only at the end of a run whose own error says why it ends."""

    def refuse(path: Path, **_: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    with pytest.raises(RuntimeError, match="the first error"), monkeypatch.context() as patch:
        with Publication(tmp_path, registration(), heartbeat_seconds=0.05):
            patch.setattr(Path, "unlink", refuse)
            raise RuntimeError("the first error")
    assert "warning: critic leaves its registration behind: the file system is mounted read-only" in capsys.readouterr().out
    damaged = Publication(tmp_path / "other", registration(), heartbeat_seconds=60.0)
    registration_path(tmp_path / "other", "critic").write_text("")
    damaged.withdraw()
    assert "is not a registration of this version" in capsys.readouterr().out


def test_the_heartbeat_touches_the_file_and_notices_a_removal(tmp_path: Path) -> None:
    publication = Publication(tmp_path, registration(), heartbeat_seconds=0.02)
    path = registration_path(tmp_path, "critic")
    os.utime(path, (1, 1))
    assert eventually(lambda: read_registration(path)[1] > 10**9)
    path.unlink()
    assert eventually(lambda: publication.failure() is not None)
    assert publication.failure() == f"registration {path} was removed or taken by another server"
    publication.withdraw()


def test_nobody_registers(tmp_path: Path) -> None:
    with pytest.raises(
        ServerUnreachable, match=rf"critic: waited 0 s \(since .*{tmp_path}/critic.json; last seen: no server has registered"
    ):
        wait_for_service(tmp_path, "critic", timeout_seconds=0.05)


def test_an_abandoned_wait_ends(tmp_path: Path) -> None:
    abandoned = threading.Event()
    abandoned.set()
    with pytest.raises(ServerUnreachable, match="waited 0 s"):
        wait_for_service(tmp_path, "critic", timeout_seconds=1000, abandoned=abandoned)


def test_a_dead_process_is_not_waited_for_as_if_it_lived(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = replace(registration(), pid=ended.pid)
    Publication(tmp_path, dead, heartbeat_seconds=60)
    assert process_is_dead(dead)
    with pytest.raises(ServerUnreachable, match=rf"last seen: stale: critic at .*its process {ended.pid} no longer exists"):
        wait_for_service(tmp_path, "critic", timeout_seconds=0.05)


def test_a_reused_pid_is_another_process() -> None:
    mine = registration()
    assert not process_is_dead(mine)
    assert process_is_dead(replace(mine, process_start_ticks=mine.process_start_ticks - 1))
    assert not process_is_dead(replace(mine, node="elsewhere", pid=2**22 + 1))  # another machine's processes cannot be seen


def test_a_stale_heartbeat_of_another_machine(tmp_path: Path) -> None:
    Publication(tmp_path, replace(registration(), node="elsewhere"), heartbeat_seconds=60)
    os.utime(registration_path(tmp_path, "critic"), (1000, 1000))
    with pytest.raises(ServerUnreachable, match="stale: .*its last heartbeat was .* s ago"):
        wait_for_service(tmp_path, "critic", timeout_seconds=0.05)


def test_a_heartbeat_that_changes_is_alive_whatever_the_clocks_say(tmp_path: Path) -> None:
    Publication(tmp_path, replace(registration(), node="elsewhere"), heartbeat_seconds=60)
    path = registration_path(tmp_path, "critic")
    os.utime(path, (1000, 1000))
    timer = threading.Timer(0.2, os.utime, args=(path, (1001, 1001)))  # a server whose clock is decades behind
    timer.start()
    assert wait_for_service(tmp_path, "critic", timeout_seconds=30).incarnation == "aaaaaaaa11"
    timer.join()


def test_liveness_tells_what_is_wrong(tmp_path: Path) -> None:
    mine = replace(registration(), node="elsewhere")
    publication = Publication(tmp_path, mine, heartbeat_seconds=60)
    path = registration_path(tmp_path, "critic")
    assert Liveness(path, mine, heartbeat_timeout_seconds=60).problem() is None

    impatient = Liveness(path, mine, heartbeat_timeout_seconds=0.0)
    impatient.problem()
    assert "has not been touched for 0 s (allowed: 0 s)" in impatient.problem(pause_seconds=0.0)
    os.utime(path, (5, 5))
    assert impatient.problem(pause_seconds=0.0) is None

    path.write_text(path.read_text().replace("aaaaaaaa11", "bbbbbbbb22"))
    assert "it was replaced by critic at" in Liveness(path, mine, 60).problem()
    path.unlink()
    assert Liveness(path, mine, 60).problem() == f"it withdrew its registration {path}"
    publication.withdraw()


def test_a_component_says_early_that_it_loads(tmp_path: Path) -> None:
    with Publication(tmp_path, make_registration(name="critic", role="critic", num_ranks=2), heartbeat_seconds=60) as publication:
        with pytest.raises(ServerUnreachable, match=rf"last seen: critic is loading on .* since \d\d:\d\d:\d\d \(pid {os.getpid()}\)"):
            wait_for_service(tmp_path, "critic", timeout_seconds=0.05)
        told: list[str] = []
        timer = threading.Timer(0.3, publication.ready, args=("https://node:6999",))
        timer.start()
        assert wait_for_service(tmp_path, "critic", timeout_seconds=30, tell=told.append).port == 6999
        assert len(told) == 1 and told[0].startswith("waiting for critic: critic is loading on ")
        timer.join()
        ready = publication.ready("https://node:7000")
        assert (ready.port, ready.incarnation) == (7000, publication.registration.incarnation)
        assert wait_for_service(tmp_path, "critic", timeout_seconds=5) == ready
    assert list(tmp_path.iterdir()) == []


def test_what_nobody_will_start_again_is_not_waited_for(tmp_path: Path) -> None:
    gone_path(tmp_path, "critic").write_text("critic was killed by SIGKILL, and the launcher does not restart it\n")
    with pytest.raises(ServerUnreachable, match="critic: nobody will start it again: critic was killed by SIGKILL, and"):
        wait_for_service(tmp_path, "critic", timeout_seconds=1000)
    publication = Publication(tmp_path, registration(), heartbeat_seconds=60)  # somebody did
    assert wait_for_service(tmp_path, "critic", timeout_seconds=5).incarnation == "aaaaaaaa11"
    publication.withdraw()


def test_an_earlier_attempt_is_no_server_of_this_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Alive or not: a client passes it over, and a server takes its place; the old one notices."""
    old = Publication(tmp_path, registration(attempt="41.0"), heartbeat_seconds=0.02)
    with pytest.raises(ServerUnreachable, match=r"stale: critic at .* it belongs to attempt 41.0, this is attempt 42.1"):
        wait_for_service(tmp_path, "critic", timeout_seconds=0.05, attempt="42.1")
    assert wait_for_service(tmp_path, "critic", timeout_seconds=5).attempt == "41.0"  # where nobody counts attempts
    new = Publication(tmp_path, registration(incarnation="bbbbbbbb22", attempt="42.1"), heartbeat_seconds=60)
    assert (
        "registry: critic at" in (told := capsys.readouterr().out)
        and "belongs to attempt 41.0 and is replaced: this is attempt 42.1" in told
    )
    assert wait_for_service(tmp_path, "critic", timeout_seconds=5, attempt="42.1").incarnation == "bbbbbbbb22"
    assert eventually(lambda: old.failure() is not None)
    with pytest.raises(ServerError, match="was removed or taken by another server"):
        old.ready("http://late:1")
    old.withdraw()
    assert registration_path(tmp_path, "critic").exists()
    new.withdraw()


def test_a_successor_on_another_machine_watches_the_heartbeat(tmp_path: Path) -> None:
    """Its predecessor's process cannot be seen: a heart that beats is respected, one that has stopped just now is watched and replaced."""
    first = Publication(tmp_path, registration(node="elsewhere"), heartbeat_seconds=0.02)
    with pytest.raises(ServerError, match="already serves under that name"):
        Publication(tmp_path, registration(incarnation="bbbbbbbb22"), heartbeat_seconds=0.1)
    first._stop.set()  # it dies
    first._thread.join()
    second = Publication(tmp_path, registration(incarnation="bbbbbbbb22"), heartbeat_seconds=0.1)
    assert read_registration(registration_path(tmp_path, "critic"))[0].incarnation == "bbbbbbbb22"
    second.withdraw()


def test_a_dead_child_is_a_zombie_until_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert parent(child.pid) == os.getpid() and child.pid not in zombie_children(os.getpid())
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert child.pid in zombie_children(os.getpid()) and zombie_children(child.pid) == []

    def of_others_is_hidden(path: Path) -> str:
        if str(path) == "/proc/1/stat":
            raise PermissionError(path)
        return read_text(path)

    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", of_others_is_hidden)  # /proc with hidepid=1
    assert child.pid in zombie_children(os.getpid())
    child.wait()
    assert parent(child.pid) is None and child.pid not in zombie_children(os.getpid())


def test_a_service_that_waits_for_its_turn_is_waited_for(tmp_path: Path) -> None:
    """However long others have the GPUs; then its time begins."""
    told: list[str] = []
    with Publication(tmp_path, registration(state=ServiceState.loading, url="", port=0), heartbeat_seconds=0.02) as publication:
        publication.waits(True)
        timer = threading.Timer(0.5, lambda: publication.ready("http://127.0.0.1:5556"))
        timer.start()
        assert wait_for_service(tmp_path, "critic", timeout_seconds=0.2, tell=told.append).url == "http://127.0.0.1:5556"
        timer.join()
        assert "critic waits for its turn on the GPUs on" in told[0]
        publication.waits(True)
        publication.waits(False)
        with pytest.raises(ServerUnreachable, match="critic is loading on"):
            wait_for_service(tmp_path, "critic", timeout_seconds=0.05)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "actor.json", tmp_path / "done.json"


def beat(actor: Path, number: int) -> None:
    actor.touch()
    os.utime(actor, ns=(number, number))


def test_it_waits_for_an_actor_and_stays_while_one_lives(files: tuple[Path, Path]) -> None:
    actor, done = files
    now = [0.0]
    purpose = Purpose(actor, done, 100.0, clock=lambda: now[0])
    for now[0], heartbeat in ((99.0, 1), (198.0, 2), (297.0, 2)):  # no request all the time
        beat(actor, heartbeat)
        assert purpose.over(now[0]) == ""
    now[0] = 299.0  # the last heartbeat was seen at 198
    reason = "for 100 s there was no request and no actor in the run (server.idle_timeout_seconds)"
    assert purpose.over(idle_seconds=299.0) == reason
    assert purpose.over(idle_seconds=3.0) == ""  # somebody without a registration asks


def test_it_ends_with_the_run(files: tuple[Path, Path]) -> None:
    actor, done = files
    done.write_text("{}")
    purpose = Purpose(actor, done, 100.0)
    assert purpose.over(1.0) == ""  # done long ago: somebody wants the server nevertheless
    os.utime(done, ns=(5, 5))
    assert purpose.over(1.0) == "the run is done (done.json)"
