"""The local launcher with real processes: small Python scripts that end, crash, hang, ignore signals and leave grandchildren behind."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training_jobs import eventually

from aligner.cluster.component import Component, LocalLauncherConfig
from aligner.cluster.local import launch
from aligner.cluster.run_directory import RunDirectory
from aligner.errors import LaunchError

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the local launcher is for Linux"),
    pytest.mark.timeout(120),
]
_ROOT = Path(__file__).parents[2]
_SLEEP = "import time; time.sleep(600)"
_IGNORES_TERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
_QUICK = LocalLauncherConfig(grace_seconds=1.0, shutdown_timeout_seconds=1.0, ready_timeout_seconds=30.0)


# As the jobs do it: a new file, before any rank of the main component leaves.
_DONE = """
import os
done = os.path.join(os.path.dirname(os.environ['ALIGNER_LEASE']), 'done.json')
open(own := f'{done}.{os.getpid()}', 'w').close()  # of two components both have a rank 0
os.replace(own, done)
"""


def _python(name: str, code: str, **settings) -> Component:
    return Component(name=name, command=(sys.executable, "-S", "-c", code), **settings)


def _main(name: str, code: str, **settings) -> Component:
    return _python(name, f"{code}\n{_DONE}", main=True, **settings)


def _run(tmp_path: Path, *components: Component, config: LocalLauncherConfig = _QUICK, **settings) -> tuple[int, str, RunDirectory]:
    run_directory = RunDirectory(tmp_path / "run").create()
    stream = io.StringIO()
    code = launch(components, run_directory=run_directory, config=config, stream=stream, **settings)
    return code, stream.getvalue(), run_directory


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def _pid(path: Path) -> int:
    assert eventually(lambda: path.exists() and path.read_text().endswith("\n"), 60), path
    return int(path.read_text())


def _waits_for(path: Path) -> str:
    return f"import os, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.05)\n"


def _daemon(path: Path) -> str:
    """Leaves a process that has left the group behind."""
    return f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    {_writes_pid(path).strip()}\n    time.sleep(600)\n"


def _writes_pid(path: Path) -> str:
    return f"import os; open({str(path)!r}, 'w').write(f'{{os.getpid()}}\\n')\n"


def test_the_run_ends_with_the_main_component(tmp_path: Path) -> None:
    """Its ranks share a port that other components do not have."""
    critic = "import os; print(os.environ['MASTER_PORT'], flush=True)\n" + _writes_pid(tmp_path / "critic") + _SLEEP
    show = "e = os.environ; print(e['RANK'], e['WORLD_SIZE'], e['MASTER_ADDR'], e['OMP_NUM_THREADS'], e['LOCAL_RANK'], e['MASTER_PORT'])"
    actor = _main("actor", _waits_for(tmp_path / "critic") + show, num_processes=2, env={"OMP_NUM_THREADS": "1"})
    code, output, run = _run(tmp_path, _python("critic", critic), actor)
    assert code == 0 and "FAILED" not in output
    logs = [run.log("actor", rank).read_text() for rank in (0, 1)]
    (first, port), (second, same) = (log.rsplit(maxsplit=1) for log in logs)
    assert (first, second) == ("0 2 127.0.0.1 1 0", "1 2 127.0.0.1 1 1")
    assert port == same != run.log("critic", 0).read_text().strip()
    assert all(f"[actor.{rank}] {log}" in output for rank, log in enumerate(logs))
    assert not _alive(_pid(tmp_path / "critic"))


def test_a_crash_gives_the_main_component_time_to_save_and_is_reported(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    actor = _waits_for(tmp_path / "crashed") + f"time.sleep(0.5); open({str(saved)!r}, 'w').close(); print('saved a checkpoint')"
    critic = f"for i in range(30): print('line', i)\nopen({str(tmp_path / 'crashed')!r}, 'w').close(); raise SystemExit(7)"
    config = LocalLauncherConfig(grace_seconds=60.0, shutdown_timeout_seconds=1.0)
    code, output, _ = _run(tmp_path, _python("critic", critic), _python("actor", actor, main=True), config=config)
    assert code == 7
    assert saved.exists()
    report = output[output.index("FAILED") :]
    assert report.startswith("FAILED: component critic, rank 0, ended with exit code 7\n")
    assert "| line 29\n" in report and "| line 10\n" in report and "| line 9\n" not in report  # the last 20 of 30


_FAILURES: dict[str, tuple[dict[str, Any], str, dict[str, Any], int, list[str]]] = {  # critic, actor, exit code, what is said
    "one of two ranks is killed": (
        {
            "code": "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)",
            "num_processes": 2,
        },
        *(_SLEEP, {}, 128 + 9, ["FAILED: component critic, rank 1, was killed by SIGKILL (exit code 137)"]),
    ),
    "a crash of the main component": (
        *({"code": _SLEEP}, "raise SystemExit('no such model')", {}, 1),
        ["FAILED: component actor, rank 0, ended with exit code 1", "| no such model"],
    ),
    "a server that leaves with zero": ({"code": "pass"}, _SLEEP, {}, 1, ["FAILED: component critic, rank 0, ended with exit code 0"]),
    "a rank that leaves with zero has not stopped in order": (
        *({"code": _SLEEP}, "import os; raise SystemExit(75 * int(os.environ['RANK']))", {"num_processes": 2}, 1),
        ["FAILED: component actor, rank 0, ended with exit code 0 by itself"],
    ),
    "a rank that leaves before the last step": (
        {"code": _SLEEP},
        *("import os, time\nif os.environ['RANK'] == '1': os._exit(0)\ntime.sleep(600)", {"num_processes": 2}, 1),
        [
            "FAILED: component actor, rank 1, ended with exit code 0 by itself before the last step, without done.json: user code, such as "
            "a reward function, most likely called exit"
        ],
    ),
}


@pytest.mark.parametrize("case", _FAILURES)
def test_a_failure_is_named_and_ends_the_run(case: str, tmp_path: Path) -> None:
    critic, actor, settings, expected, said = _FAILURES[case]
    RunDirectory(tmp_path / "run").create().done.touch()  # of an earlier start
    code, output, _ = _run(tmp_path, _python("critic", **critic), _python("actor", actor, main=True, **settings))
    assert code == expected and all(text in output for text in said), output
    assert "actor finished" not in output and "the same command continues" not in output


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    code, output, _ = _run(tmp_path, Component(name="actor", command=("/no/such/program",), main=True))
    assert code == 127
    assert "| cannot run /no/such/program: No such file or directory" in output


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    deaf = _IGNORES_TERM.replace("print(", _writes_pid(pid).strip() + "; print(")
    code, output, _ = _run(tmp_path, _python("critic", deaf), _main("actor", _waits_for(pid)))
    assert code == 0
    assert "critic did not end 1 s after SIGTERM: killing" in output
    assert not _alive(_pid(pid))


def test_a_grandchild_that_left_the_group_and_lost_its_parent_is_ended(tmp_path: Path) -> None:
    pid = tmp_path / "grandchild"
    code, _, _ = _run(tmp_path, _main("actor", _daemon(pid) + _waits_for(pid)))
    assert code == 0
    assert not _alive(_pid(pid))


def test_registered_services_are_announced_and_missing_ones_end_the_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    register = f"import time; open({str(run.service('critic'))!r}, 'w').write('{{\"url\": \"http://127.0.0.1:1\"}}'); time.sleep(600)"
    pid = tmp_path / "pid"
    stream = io.StringIO()
    config = LocalLauncherConfig(ready_timeout_seconds=3.0, shutdown_timeout_seconds=1.0)
    with pytest.raises(LaunchError, match=r"reward not ready: waited \d+ s for .*services/reward.json"):
        launch(
            [_python("critic", register), _python("reward", _writes_pid(pid) + _SLEEP), _python("actor", _SLEEP, main=True)],
            run_directory=run,
            config=config,
            expect_services=("critic", "reward"),
            stream=stream,
        )
    assert "critic: ready after" in stream.getvalue()
    assert "at http://127.0.0.1:1\n" in stream.getvalue()
    assert not _alive(_pid(pid))


_LAUNCHER = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup and `make test &` start this with signals ignored, which the launcher
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # leaves so
from pathlib import Path
from aligner.cluster.component import Component
from aligner.cluster.component import LocalLauncherConfig
from aligner.cluster.local import launch
from aligner.cluster.run_directory import RunDirectory
run, *codes = sys.argv[1:]
draws = [{"main": True, "terminal": "DRAWS" in os.environ}] + [{}] * len(codes)
components = [Component(name=f"c{i}", command=(sys.executable, "-S", "-c", code), **draws[i]) for i, code in enumerate(codes)]
config = LocalLauncherConfig(grace_seconds=5.0, shutdown_timeout_seconds=2.0)
raise SystemExit(launch(components, run_directory=RunDirectory(Path(run)).create(), config=config))
"""


def _launcher(tmp_path: Path, *codes: str, output: int = subprocess.PIPE, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _LAUNCHER, str(tmp_path / "run"), *codes]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), **variables}
    return subprocess.Popen(
        command, env=environment, stdout=output, stderr=output if output != subprocess.PIPE else subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_reach_the_main_component_first_and_end_all(tmp_path: Path, number: int, code: int) -> None:
    main, server = tmp_path / "main", tmp_path / "server"
    saves = f"""
import signal, sys, time
def save(number, frame):
    print("saved on signal", number, flush=True)
    sys.exit(0)
signal.signal({int(number)}, save)
{_writes_pid(main)}
time.sleep(600)
"""
    launcher = _launcher(tmp_path, saves, _writes_pid(server) + _SLEEP)
    pids = [_pid(main), _pid(server)]
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    assert f"[c0]  saved on signal {int(number)}" in output
    assert not any(_alive(pid) for pid in pids)


def test_a_second_ctrl_c_ends_all_at_once(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    deaf = "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\n" + _writes_pid(pid) + _SLEEP
    launcher = _launcher(tmp_path, deaf)
    process = _pid(pid)
    assert launcher.stdout is not None
    launcher.send_signal(signal.SIGINT)
    while "Ctrl-C" not in launcher.stdout.readline():  # the first one was seen: two at once would arrive as one
        pass
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert not _alive(process)


def test_a_killed_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    obedient, deaf, orphan = tmp_path / "obedient", tmp_path / "deaf", tmp_path / "orphan"
    deaf_code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _writes_pid(deaf) + _SLEEP
    launcher = _launcher(tmp_path, _writes_pid(obedient) + _SLEEP, deaf_code, _daemon(orphan) + "time.sleep(600)")
    pids = [_pid(obedient), _pid(deaf), _pid(orphan)]
    launcher.kill()
    launcher.communicate(timeout=60)
    assert eventually(lambda: not any(_alive(pid) for pid in pids), 60), pids
    log = tmp_path / "run" / "logs" / "launcher.log"
    assert eventually(lambda: "[guard] the launcher ended without stopping" in log.read_text(), 60)


def test_two_launchers_cannot_share_a_run_directory(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    launcher = _launcher(tmp_path, _writes_pid(pid) + _SLEEP)
    _pid(pid)
    with pytest.raises(LaunchError, match="another launcher is running"):
        _run(tmp_path, _python("actor", "pass", main=True))
    launcher.terminate()
    launcher.communicate(timeout=60)


def test_a_drawing_component_sees_a_terminal_and_others_go_to_their_logs(tmp_path: Path) -> None:
    """The launcher runs on a pseudo-terminal, as under a user's shell."""
    flag = tmp_path / "flag"
    main = _waits_for(flag) + "import sys; print('terminal', sys.stdout.isatty())\n" + _DONE
    other = f"import time\nprint('noise', flush=True); open({str(flag)!r}, 'w').close(); time.sleep(600)"
    reader, writer = pty.openpty()
    process = _launcher(tmp_path, main, other, output=writer, DRAWS="1")
    os.close(writer)
    seen = b""
    try:
        while data := os.read(reader, 4096):
            seen += data
    except OSError:  # EIO: the launcher closed its end
        pass
    os.close(reader)
    assert process.wait(timeout=60) == 0
    assert b"terminal True" in seen
    assert b"noise" not in seen
    assert (tmp_path / "run" / "logs" / "c1.0.log").read_text() == "noise\n"


def test_a_server_that_dies_is_started_again_where_that_is_wanted(tmp_path: Path) -> None:
    """Its first start leaves a grandchild and dies; the actor sees the second one, with another port and the same attempt."""
    first, second = tmp_path / "first", tmp_path / "second"
    show = "print(os.environ['ALIGNER_ATTEMPT'], os.environ['MASTER_PORT'], flush=True)"
    critic = (
        f"import os, subprocess, sys, time\n{show}\n"
        f"if os.path.exists({str(first)!r}): open({str(second)!r}, 'w').close(); time.sleep(600)\n"
        f"child = subprocess.Popen([sys.executable, '-S', '-c', {_SLEEP!r}])\n"
        f"open({str(first)!r}, 'w').write(f'{{child.pid}}\\n'); raise SystemExit(7)"
    )
    config = LocalLauncherConfig(grace_seconds=1.0, shutdown_timeout_seconds=1.0, max_server_restarts=1)
    code, output, run = _run(tmp_path, _python("critic", critic), _main("actor", _waits_for(second)), config=config)
    assert code == 0
    assert "critic ended with exit code 7; starting it again (1 of 1)" in output
    assert "FAILED" not in output
    starts = [line.split() for line in run.log("critic", 0).read_text().splitlines()]
    assert [attempt for attempt, _ in starts] == [f"local-{os.getpid()}.0"] * 2 and starts[0][1] != starts[1][1]
    assert not _alive(_pid(first))


def test_a_server_that_was_refused_is_not_started_again(tmp_path: Path) -> None:
    config = LocalLauncherConfig(grace_seconds=0.1, shutdown_timeout_seconds=1.0, max_server_restarts=3)
    code, output, _ = _run(tmp_path, _python("critic", "raise SystemExit(2)"), _python("actor", _SLEEP, main=True), config=config)
    assert code == 2
    assert "starting it again" not in output


def test_a_main_component_that_stops_in_order_is_no_failure(tmp_path: Path) -> None:
    leases = "import json, os; print(json.load(open(os.environ['ALIGNER_LEASE']))['attempt'])\n"
    code, output, run = _run(
        tmp_path, _python("critic", _SLEEP), _python("actor", leases + "raise SystemExit(75)", num_processes=2, main=True)
    )
    assert code == 75
    assert "actor stopped before the last step, with a checkpoint; the same command continues from there" in output
    assert "FAILED" not in output
    assert run.log("actor", 1).read_text() == f"local-{os.getpid()}.0\n"
    assert not run.lease.exists()


def test_user_code_that_a_process_died_in_is_named(tmp_path: Path) -> None:
    dies = f"""
import os, pathlib, signal, sys
sys.path.insert(0, {str(_ROOT)!r})
from aligner.settings import user_code
health = pathlib.Path(os.environ["ALIGNER_LEASE"]).parent / "health"
user_code.record_in(health / "actor.0.calls")
with user_code.calling("reward function rewards.py:crashes"):
    os.kill(os.getpid(), signal.SIGSEGV)
"""
    code, output, _ = _run(tmp_path, _main("actor", dies))
    assert code == 128 + signal.SIGSEGV
    said = "component actor, rank 0, was killed by SIGSEGV (exit code 139) while it called reward function rewards.py:crashes"
    assert f"FAILED: {said}" in output
