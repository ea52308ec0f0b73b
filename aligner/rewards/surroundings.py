"""What a sandboxed program needs around it: its text and input, a directory, readable paths, bubblewrap's command, a control group."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import secrets
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aligner.errors import ConfigError
from aligner.rewards.jail import DEVICES, NOBODY, WORK

SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
JAIL = str(Path(__file__).resolve().with_name("jail.py"))
ANSWER_SECONDS = 30.0  # for an interpreter to report its location
_LINKS = {"tmp": WORK, "dev/shm": WORK, "dev/fd": "/proc/self/fd"}
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@contextlib.contextmanager
def file_with(text: str) -> Iterator[int]:
    """The descriptor of a nameless, read-only file in memory, at its beginning."""
    with open(os.memfd_create("text", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b", buffering=0) as file:
        file.write(text.encode(errors="surrogatepass"))
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        file.seek(0)
        yield file.fileno()


@contextlib.contextmanager
def own_directory(uid: int | None) -> Iterator[str]:
    """A new directory of user `uid` (None: this user); at the end it is removed with its content, or a warning is printed."""
    directory = tempfile.mkdtemp(prefix="aligner-sandbox-")
    try:
        if uid is not None:
            os.chown(directory, uid, uid)
        yield directory
    finally:
        try:
            remove_tree(directory)
        except OSError as error:  # must not affect a reward
            print(f"warning: a program's files in {directory} cannot be removed: {error}", flush=True)


def remove_tree(directory: str) -> None:
    """Remove a directory of any depth, whatever the modes inside, without following links: links themselves are removed.

    Directories are moved to the top one by one, so that no path gets long and no call is nested. Raises OSError.
    """
    top, free, moved = _opened(directory), secrets.token_hex(8), 0
    try:
        while names := os.listdir(top):
            for name in names:
                if not _is_directory(name, top):
                    os.unlink(name, dir_fd=top)
                    continue
                below = _opened(name, top)
                try:
                    for inner in os.listdir(below):
                        if _is_directory(inner, below):
                            os.close(_opened(inner, below))  # moving it requires the right to write in it
                            os.rename(inner, f"{free}-{moved}", src_dir_fd=below, dst_dir_fd=top)
                            moved += 1
                        else:
                            os.unlink(inner, dir_fd=below)
                finally:
                    os.close(below)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(directory)


def _is_directory(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def _opened(name: str, parent: int | None = None) -> int:
    """A descriptor of a directory (not a link), made readable and writable for its owner."""
    place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        if os.fstat(place).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{place}", 0o700)
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(place)


def readable_paths(interpreter: str) -> list[str]:
    """The paths that an interpreter needs: the system's libraries, and its own installation. Raises ConfigError if it does not run."""
    question = "import os, sys; print(sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), sep='\\n')"
    try:
        answer = subprocess.run(
            [interpreter, "-I", "-c", question],
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"sandbox interpreter={interpreter}: cannot be run: {error}") from error
    return outermost([path for path in (*SYSTEM_PATHS, *answer.stdout.split("\n")) if path and os.path.lexists(path)])


def outermost(paths: list[str]) -> list[str]:
    """The paths that are not inside another one, each once."""
    unique = list(dict.fromkeys(paths))
    return [path for path in unique if not any(path.startswith(other.rstrip("/") + "/") for other in unique)]


def has_nobody() -> bool:
    """Whether this root may become NOBODY: in a user namespace (rootless containers) root is mapped to another, perhaps the only, user."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= NOBODY < first + count:
            return True
    return False


def bubblewrap_command(bubblewrap: str, readable: list[str], size_bytes: int, *, then_nobody: bool) -> list[str]:
    """bubblewrap's command without the program: `readable` paths read-only, some devices, WORK of `size_bytes`, its own namespaces.

    `then_nobody`: root gives up its rights only inside, since nobody may not be able to reach the interpreter's files.
    """
    own = [JAIL, importlib.util.cache_from_source(JAIL)]  # compiled, it starts faster
    paths = outermost([*readable, *filter(os.path.exists, own)])
    parents = {str(parent) for path in paths for parent in Path(path).parents} - {"/"}
    # bubblewrap's default mode 0700 would shut out the user that root becomes
    passable = [argument for path in sorted({*parents, "/dev"}) for argument in ("--perms", "0755", "--dir", path)]
    shown = [argument for path in paths for argument in ("--ro-bind", path, path)]
    devices = [
        argument for name in DEVICES for argument in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")
    ]  # its own --dev can be written to
    links = [argument for name, goal in _LINKS.items() if f"/{name}" not in parents for argument in ("--symlink", goal, f"/{name}")]
    if then_nobody:
        rights = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        rights = ["--unshare-user", *(("--uid", str(NOBODY), "--gid", str(NOBODY)) if os.geteuid() == 0 else ())]
    return [
        *(bubblewrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"),
        *rights,
        *passable,
        *shown,
        *devices,
        *("--proc", "/proc"),
        *links,
        *("--perms", "0777", "--size", str(size_bytes), "--tmpfs", WORK, "--remount-ro", "/", "--chdir", WORK, "--"),
    ]


CONTROLLERS = {"memory", "pids"}
NAME = "aligner-sandbox-"
EMPTYING_SECONDS = 5.0  # for killed processes to disappear


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """One program's control group (cgroup v2): its path, and `procs`, a descriptor through which a process joins by writing 0.

    The kernel counts the pages of all its processes together, the directory in memory, pipes and page tables: nothing gets past it.
    """

    path: Path
    procs: int

    def out_of_memory(self) -> bool:
        """Whether the kernel killed one of its processes for lack of memory."""
        counts = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
        return counts.get("oom_kill", "0") != "0"


def delegated_place(process: Path = Path("/proc/self")) -> Path | None:
    """Where this process may make groups with limits: below its own group, or beside it if the group above is delegated too; else None.

    Not farther up, so that a job's or service's limits for the run apply to its programs too.
    """
    own = _own_group(process)
    if own is None:
        return None
    return next((place for place in (own, own.parent) if _may_divide(place, is_own=place == own)), None)


def _own_group(process: Path) -> Path | None:
    path = next((line[3:] for line in (process / "cgroup").read_text().splitlines() if line.startswith("0::")), "")
    for line in (process / "mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        root, mounted = fields.split()[3:5]
        if kind.startswith("cgroup2 ") and (path + "/").startswith(root.rstrip("/") + "/"):
            return Path(mounted) / path[len(root) :].lstrip("/")
    return None


def _may_divide(place: Path, *, is_own: bool) -> bool:
    """Whether this user may make groups with limits there; turns on the controllers if necessary."""
    try:
        if not all(os.access(place / name, os.W_OK) for name in ("", "cgroup.procs", "cgroup.subtree_control")):
            return False
        marks = ("user.delegate", "trusted.delegate")  # systemd's, for delegated groups; root can write everywhere
        if os.geteuid() == 0 and not is_own and not any(name in marks for name in os.listxattr(place)):
            return False
        switches = place / "cgroup.subtree_control"
        if not set(switches.read_text().split()) >= CONTROLLERS:
            switches.write_text(" ".join(f"+{name}" for name in sorted(CONTROLLERS)))
        return True
    except OSError:  # the group has processes itself, or controllers are missing
        return False


@contextlib.contextmanager
def control_group(place: Path, *, memory_bytes: int, processes: int) -> Iterator[ControlGroup]:
    """A new group at `place` with these limits, no swap; at the end its processes are killed and it is removed. Raises OSError."""
    path = place / f"{NAME}{os.getpid()}-{secrets.token_hex(4)}"
    path.mkdir()
    try:
        limits = {"memory.max": memory_bytes, "memory.swap.max": 0, "memory.oom.group": 1, "pids.max": processes}
        for name, value in limits.items():
            if name != "memory.swap.max" or (path / name).exists():  # missing in kernels without swap
                (path / name).write_text(str(value))
        procs = os.open(path / "cgroup.procs", os.O_WRONLY)
        try:
            yield ControlGroup(path, procs)
        finally:
            os.close(procs)
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    kill = path / "cgroup.kill"  # Linux 5.14; the program's processes have ended before in any case
    if kill.exists():
        kill.write_text("1")
    deadline = time.monotonic() + EMPTYING_SECONDS
    while True:
        try:
            return path.rmdir()
        except OSError:  # busy until the last process is gone
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
