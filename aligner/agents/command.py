"""Any program as an agent: started once for each session, it asks the policy's endpoint and prints, or posts, its reward.

It gets where and as whom to ask in the variables that the clients of OpenAI and Anthropic read, and its task as JSON on standard input and
in the file that ALIGNER_TASK_FILE names. Its reward is the last line of its standard output, if that is JSON: {"reward": 1.0}, and
"counts" by name if it likes. Another exit code than 0 is a failure. Whatever it has started ends with it.
"""

from __future__ import annotations

import json
import math
import os
import re
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.agents import AgentOutcome, SessionAccess
from aligner.cluster import processes
from aligner.types import Prompt

KEPT_BYTES = 64 * 2**10  # of either output: its end
SAID_CHARACTERS = 1000  # of an error's text, in messages
_READ_BYTES = 64 * 2**10
_DRAIN_SECONDS = 1.0  # for output that is still in the pipes when the program has ended
_SECRET = re.compile(r"TOKEN(?!IZ)|SECRET|PASSW|CREDENTIAL|COOKIE|API_?KEY|(^|_)KEY$", re.IGNORECASE)
_OURS = re.compile(r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK)$|(MASTER_|TORCHELASTIC_|PMI_|PMIX_|OMPI_|NCCL_|ALIGNER_)")


def passed_on(variables: Mapping[str, str], allowed: Sequence[str] = ()) -> dict[str, str]:
    """The variables of this process that an agent gets: without those whose names look like secrets, unless they are `allowed`, and without
    those by which a rank knows its place."""
    kept = {processes.MARKER_VARIABLE, *allowed}  # by the first one the launcher finds, and ends, whatever is left of a run
    return {name: value for name, value in variables.items() if name in kept or not (_SECRET.search(name) or _OURS.match(name))}


def task_of(prompt: Prompt) -> dict[str, Any]:
    """A task as an agent reads it: its record's fields are in `record`."""
    return {
        "id": prompt.id,
        "source": prompt.source,
        "prompt": prompt.text,
        "messages": list(prompt.messages),
        "answer": prompt.answer,
        "record": dict(prompt.columns),
    }


class CommandAgents:
    """`aligner.agents.Agents`."""

    def __init__(self, command: Sequence[str], *, pass_environment: Sequence[str] = ()) -> None:
        self._command = list(command)
        self._pass = list(pass_environment)
        self._lock = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped: set[str] = set()
        self._has_ended = False

    def play(self, prompt: Prompt, access: SessionAccess) -> AgentOutcome:
        with tempfile.TemporaryDirectory(prefix="aligner-agent-", ignore_cleanup_errors=True) as folder:
            task = Path(folder) / "task.json"
            task.write_text(json.dumps(task_of(prompt), default=str))
            environment = passed_on(os.environ, self._pass) | self._variables(access, task)
            with task.open("rb") as stdin, self._lock:
                if self._has_ended:
                    return AgentOutcome(failed="it was not started: the run ends")
                process = subprocess.Popen(
                    processes.exec_command(self._command),  # it ends with this process, and this thread waits for it
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment,
                    start_new_session=True,
                )
                self._running[access.session] = process
            try:
                with process:
                    try:
                        out, err = _outputs(process)
                    finally:
                        _end_group(process)
            finally:
                with self._lock:
                    del self._running[access.session]
                    was_stopped = access.session in self._stopped
                    self._stopped.discard(access.session)
        return self._outcome(process.returncode, out, err, was_stopped=was_stopped)

    def stop(self, session: str) -> None:
        with self._lock:
            process = self._running.get(session)
            if process is None:
                return
            self._stopped.add(session)
        strays = processes.find(_mark(session))  # of other process groups too
        _end_group(process)
        processes.send(strays, signal.SIGKILL)

    def close(self) -> None:
        with self._lock:
            self._has_ended, running = True, list(self._running)
        for session in running:
            self.stop(session)

    def _variables(self, access: SessionAccess, task: Path) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": access.base_url,
            "OPENAI_API_BASE": access.base_url,
            "OPENAI_API_KEY": access.key,
            "OPENAI_MODEL": access.model,
            "ANTHROPIC_BASE_URL": access.root_url,
            "ANTHROPIC_API_KEY": access.key,
            "ANTHROPIC_MODEL": access.model,
            "ALIGNER_BASE_URL": access.root_url,
            "ALIGNER_MODEL": access.model,
            "ALIGNER_SESSION": access.session,
            "ALIGNER_SEED": str(access.seed),
            "ALIGNER_TASK_FILE": str(task),
            "PYTHONUNBUFFERED": "1",  # what a program has printed before it was killed is its error message
        }

    def _outcome(self, code: int, out: bytes, err: bytes, *, was_stopped: bool) -> AgentOutcome:
        said = err.decode(errors="replace").strip()[-SAID_CHARACTERS:]
        said = f"; it wrote to standard error: {said}" if said else ""
        if was_stopped:
            return AgentOutcome(failed=f"it was stopped{said}")
        if code:
            how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return AgentOutcome(failed=f"it {how}{said}")
        last = out.decode(errors="replace").strip().rpartition("\n")[2]
        try:
            found = json.loads(last)
        except ValueError:
            found = None
        if not isinstance(found, dict) or "reward" not in found:
            shown = f'is {last!r:.100}, not {{"reward": NUMBER}}' if last else "is missing"
            return AgentOutcome(said=f"the last line of its standard output {shown}")
        reward, counts = found["reward"], found.get("counts") or {}
        if not (reward is None or _is_number(reward)):
            return AgentOutcome(failed=f"it printed reward={reward!r:.100}: must be a finite number, or null for none")
        if not isinstance(counts, dict) or not all(map(_is_number, counts.values())):
            return AgentOutcome(failed=f"it printed counts={counts!r:.100}: must be numbers by name")
        return AgentOutcome(reward=reward, counts=counts)


def _is_number(x: object) -> bool:
    """Whether a value of JSON is a finite number."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def _mark(session: str) -> str:
    return f"ALIGNER_SESSION={session}\0"


def _outputs(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """The ends of what the program writes, until it has ended; not of what it leaves behind, which may hold its pipes open."""
    assert process.stdout is not None and process.stderr is not None  # they are pipes
    streams = (process.stdout.fileno(), process.stderr.fileno())
    kept = {stream: bytearray() for stream in streams}
    deadline = float("inf")
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < deadline:
            ready = selector.select(0.1)
            for key, _ in ready:
                data = os.read(key.fd, _READ_BYTES)
                kept[key.fd] += data
                del kept[key.fd][:-KEPT_BYTES]
                if not data:
                    selector.unregister(key.fd)
            if process.poll() is not None:
                if not ready:
                    break
                deadline = min(deadline, time.monotonic() + _DRAIN_SECONDS)
    process.wait()
    return bytes(kept[streams[0]]), bytes(kept[streams[1]])


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of its process group: the program itself, or what it has left running."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # nothing is left
        pass
