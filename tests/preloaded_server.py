"""The warm process behind preloaded.py: reads one JSON request per line and answers each with a line.

It ends when its input does; the kernel then sends SIGTERM to what it started (a launcher hands that on), and it kills what is left of that.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import inspect
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_ROOT = Path(__file__).resolve().parents[1]
_PROGRAMS = (_ROOT / "examples", _ROOT / "tests")
# Python options that stand before a script and say nothing that a fork could not have.
_OPTIONS = ("-u", "-I", "-S")
_SECONDS_TO_END = 3.0


def _serve() -> None:
    import aligner.commands.convert  # noqa: F401
    import aligner.commands.programs  # noqa: F401
    import aligner.data.supervised  # noqa: F401
    import aligner.environments.exchange  # noqa: F401
    import aligner.jobs.agents  # noqa: F401
    import aligner.jobs.samples  # noqa: F401
    import aligner.jobs.serves  # noqa: F401
    import aligner.jobs.trains  # noqa: F401
    import aligner.jobs.writes  # noqa: F401
    import aligner.models.create  # noqa: F401  torch and Megatron-Core with it
    import aligner.rewards.compose  # noqa: F401

    # What jobs import when they come to it: PyTriton, hydra's composition, tokenizers.
    jobs = ("pytriton.triton", "pytriton.decorators", "pytriton.model_config", "hydra._internal.config_loader_impl", "jinja2.sandbox")
    for name in (*jobs, "pytest"):  # which modules of tests import
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast  # noqa: F401

    _compose()
    if threading.active_count() > 1:
        raise RuntimeError(f"threads would be missing in a fork: {threading.enumerate()}")
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that it marks
    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            running.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                _become_requested(request)
            running.add(answer)
        print(json.dumps(answer), flush=True)
    _end(running)


def _compose() -> None:
    """Settings of the recipes that most jobs are of: each process reads a schema, its comments and Hydra's grammar once."""
    from aligner.algorithms.registry import built_in
    from aligner.settings.compose import compose_node

    for name in ("sft", "dpo", "grpo", "ppo"):
        recipe = built_in(name)
        compose_node(recipe.config, name, ["run.directory=runs/x"], recipe.folders())


def _end(running: set[int]) -> None:
    """SIGTERM, then SIGKILL."""
    for number, seconds in ((signal.SIGTERM, _SECONDS_TO_END), (signal.SIGKILL, _SECONDS_TO_END)):
        for pid in running:
            os.killpg(pid, number)
        deadline = time.monotonic() + seconds
        while running and time.monotonic() < deadline:
            running -= {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.02)


def _become_requested(request: dict) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a process of a terminal, also under nohup and `make test &`
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _die_with_parent(signal.SIGTERM)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.chdir(request["cwd"])
    _become(request["arguments"], request["environment"])


def _die_with_parent(number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _become(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Turn this fork into `python ARGUMENTS`; does not return."""
    code = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        _show(arguments, environment)
        _forget_the_origin()
        subprocess.Popen = _ForkingPopen
        if arguments[0] == "-m":
            sys.argv = ["-m", *arguments[2:]]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        _flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _leave(code: int) -> None:
    """End as an interpreter does: wait for the threads, run what is registered for the end."""
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        _flush()
    finally:
        os._exit(code & 0xFF)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _forget_the_origin() -> None:
    """What an interpreter of its own would not share with the one that it was forked from."""
    import numpy
    from huggingface_hub import constants, hf_api
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()

    if any(name.startswith("HF_") for name in os.environ):  # read when they were imported
        importlib.reload(constants)
        hf_api.api.endpoint = constants.ENDPOINT

    random.seed()
    numpy.random.seed()
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).resolve().parent)]
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # line by line also into a file, as with python -u
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr


def _show(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Write command line and environment where /proc/PID reads them. Python keeps its own copies elsewhere by now."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = (int(field) for field in fields[45:49])
    _write(arg_start, arg_end, [sys.executable, *arguments])
    _write(env_start, env_end, [f"{name}={value}" for name, value in environment.items()])


def _write(start: int, end: int, strings: Sequence[str]) -> None:
    data = b"".join(text.encode() + b"\0" for text in strings)
    if len(data) >= end - start:
        raise ValueError(f"{len(data)} bytes do not fit into the {end - start} that /proc shows of this process")
    ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


def _program(command: object) -> tuple[list[str], int | None] | None:
    """(arguments of Python, signal at the parent's death) of a command that starts a Python program of this project; None for others."""
    if not isinstance(command, (list, tuple)) or command[0] != sys.executable:
        return None
    rest, number = [str(part) for part in command[1:]], None
    while rest and rest[0] in _OPTIONS:
        rest = rest[1:]
    if len(rest) > 4 and rest[0].endswith("aligner/cluster/processes.py") and rest[1] == "exec" and rest[3] == sys.executable:
        # What this wrapper does: the parent-death signal, then exec.
        rest, number = rest[4:], signal.SIGTERM
        while rest[0] in _OPTIONS:
            rest = rest[1:]
    script = rest and rest[0].endswith(".py") and any(folder in Path(rest[0]).parents for folder in _PROGRAMS)
    return (rest, number) if script or rest[:2] == ["-m", "aligner.cli"] else None


class _ForkingPopen(subprocess.Popen):
    """Popen that forks for Python programs of this project, where this process has joined no world that a fork would share."""

    def _execute_child(self, *given: object) -> None:
        import torch.distributed

        options = inspect.signature(super()._execute_child).bind(*given).arguments
        program = _program(options["args"])
        if program is None or options["preexec_fn"] or options["pass_fds"] or torch.distributed.is_initialized():
            super()._execute_child(*given)
            return
        _flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._be_child(program, options)
        self._child_created = True
        self._close_pipe_fds(*(options[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))

    def _be_child(self, program: tuple[list[str], int | None], options: Mapping) -> None:
        arguments, number = program
        if options["start_new_session"]:
            os.setsid()
        if number is not None:
            _die_with_parent(number)
        # First out of the way of 0, 1 and 2, which the ends themselves may be.
        ends = [(os.dup(options[name]), target) for target, name in enumerate(("p2cread", "c2pwrite", "errwrite")) if options[name] != -1]
        for source, target in ends:
            os.dup2(source, target)
        os.closerange(3, 4096)
        if options["cwd"] is not None:
            os.chdir(options["cwd"])
        signal.set_wakeup_fd(-1)
        for caught in signal.valid_signals():
            if callable(signal.getsignal(caught)) and caught != signal.SIGINT:
                signal.signal(caught, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        environment = os.environ if options["env"] is None else options["env"]
        _become(arguments, {os.fsdecode(name): os.fsdecode(value) for name, value in dict(environment).items()})


if __name__ == "__main__":
    _serve()
