"""The parent of everything in a test cluster: munged, slurmctld, and a slurmd per node. All of it ends when this program ends.

    slurm_keeper.py DIRECTORY

reads one JSON request per line, `{"do": "start", "node": "n1"}`, and answers each with a line, `{"error": null}`. It is process 1 of a set
of namespaces, so the kernel kills whatever is left of the cluster when it ends. It ends when its input does, and on SIGTERM.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from slurm_settings import DATABASE_PORT, HEAD, ClusterSettings, load_settings  # noqa: E402

_BRIDGE = "bridge"
_NODE = """
set -eu
node=$1; directory=$2; address=$3; gateway=$4
read go  # the network interface is there
hostname "$node"
ip link set lo up; ip link set eth0 up
ip addr add "$address/24" dev eth0
ip route add default via "$gateway"
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
# Not exec: process 1 of the node has to reap what the steps leave behind, and lives on when slurmd is killed.
slurmd -D -N "$node" -f "$directory/slurm.conf" &
while :; do wait || :; sleep 3600 & wait $! || :; done
"""


def run(*command: str) -> None:
    """Raise RuntimeError with what a failing command said."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stdout.strip()}")


def _until_it_runs(*command: str) -> None:
    """Run a command until the daemon that it talks to answers. Raises RuntimeError with what it said after 30 s."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return run(*command)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


class Keeper:
    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._nodes: dict[str, int] = {}

    def open(self) -> None:
        settings, directory = self._settings, self._settings.directory
        socket.sethostname(HEAD)
        run("mount", "--bind", str(settings.hosts), "/etc/hosts")
        if Path("/etc/nsswitch.conf").exists():
            run("mount", "--bind", str(settings.name_services), "/etc/nsswitch.conf")
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", _BRIDGE, "type", "bridge")
        run("ip", "addr", "add", f"{settings.address(HEAD)}/24", "dev", _BRIDGE)
        run("ip", "link", "set", _BRIDGE, "up")
        for number, device in enumerate(settings.devices):
            try:
                os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))  # /dev/null
            except PermissionError:
                device.write_text(str(number))
        files = {name: directory / f"munge.{name}" for name in ("key", "pid", "log", "seed")}
        options = [f"--{name}-file={path}" for name, path in files.items()] + [f"--socket={directory / 'munge.sock'}"]
        self._daemon("munged", ["munged", "--foreground", "--force", "--num-threads=2", *options])
        if settings.accounting:
            self._open_database()
        self._daemon("slurmctld", ["slurmctld", "-D", "-c", "-f", str(settings.conf)])

    def _open_database(self) -> None:
        """MariaDB with a directory of its own, and slurmdbd, which makes its tables and learns of this cluster."""
        data = self._settings.directory / "database"
        run("mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root", "--auth-root-authentication-method=normal")
        socket_file, port = data / "socket", f"--port={DATABASE_PORT}"
        small = ("--innodb-buffer-pool-size=32M", "--innodb-flush-log-at-trx-commit=0", "--skip-log-bin")
        options = (f"--datadir={data}", "--user=root", f"--socket={socket_file}", port, "--bind-address=127.0.0.1", *small)
        self._daemon("mariadbd", ["mariadbd", "--no-defaults", *options])
        grant = "GRANT ALL ON slurm.* TO slurm@localhost IDENTIFIED BY 'slurm'"
        _until_it_runs("mariadb", "--no-defaults", f"--socket={socket_file}", "-e", grant)
        self._daemon("slurmdbd", ["slurmdbd", "-D"])
        _until_it_runs("sacctmgr", "--immediate", "add", "cluster", "test")

    def _daemon(self, name: str, command: list[str], **options) -> subprocess.Popen:
        with (self._settings.directory / f"{name}.out").open("ab") as out:
            return subprocess.Popen(command, stdin=options.pop("stdin", subprocess.DEVNULL), stdout=out, stderr=out, **options)

    def start(self, node: str) -> None:
        settings = self._settings
        spaces = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private")
        arguments = (node, str(settings.directory), settings.address(node), settings.address(HEAD))
        command = ["unshare", *spaces, "bash", "-c", _NODE, "slurm-node", *arguments]
        process = self._daemon(node, command, stdin=subprocess.PIPE, start_new_session=True)
        deadline = time.monotonic() + 10
        while os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"node {node}: no network namespace after 10 s")
            time.sleep(0.005)
        run("ip", "link", "add", f"to-{node}", "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
        run("ip", "link", "set", f"to-{node}", "master", _BRIDGE, "up")
        process.stdin.write(b"go\n")
        process.stdin.close()
        self._nodes[node] = process.pid

    def kill(self, node: str) -> None:
        """The node loses its power: all its processes end at once."""
        pid = self._nodes.pop(node)
        _kill([pid])
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            pass  # it had ended by itself
        # The interface is destroyed with the namespace, some time later: its name must be free for a restart.
        subprocess.run(["ip", "link", "del", f"to-{node}"], stderr=subprocess.DEVNULL, timeout=30)


def _descendants(ancestor: int) -> list[int]:
    """Pids of all processes below one."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, front = [], [ancestor]
    while front:
        front = [child for parent in front for child in children.get(parent, [])]
        found += front
    return found


def _kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended meanwhile


def _reap() -> None:
    """Collect what has ended: also what was adopted."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass  # no children


def _answer(keeper: Keeper, request: dict[str, str]) -> str | None:
    actions = {"start": keeper.start, "kill": keeper.kill}
    try:
        keeper.open() if request["do"] == "open" else actions[request["do"]](request["node"])
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    keeper = Keeper(load_settings(Path(sys.argv[1])))
    try:
        while True:
            if not select.select([sys.stdin], [], [], 1.0)[0]:
                _reap()
                continue
            line = sys.stdin.readline()
            if not line:
                return 0
            print(json.dumps({"error": _answer(keeper, json.loads(line))}), flush=True)
    finally:
        while left := _descendants(os.getpid()):
            _kill(left)
            time.sleep(0.01)
            _reap()


if __name__ == "__main__":
    sys.exit(main())
