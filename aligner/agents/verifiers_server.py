"""Runs in an interpreter that has verifiers, which need not have this package: `python verifiers_server.py tasks|serve CONFIG [...]`.

    tasks CONFIG COUNT FIRST     the tasks of the task set as JSON lines
    serve CONFIG ADDRESS WORKERS serves episodes (verifiers' `serve_env`, unchanged); the first line of its output is its address

CONFIG is JSON of what vf-eval takes as [env]. Each client asks with a key of its own, which verifiers reads from a variable of its process;
the variable's name brings the key along: `ALIGNER_SESSION_KEY_<key>`.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import islice
from typing import Any

KEY_PREFIX = "ALIGNER_SESSION_KEY_"


class _Environ(os._Environ):  # type: ignore[type-arg]
    def __getitem__(self, name: str) -> str:
        return name[len(KEY_PREFIX) :] if name.startswith(KEY_PREFIX) else str(super().__getitem__(name))


def prepare() -> None:
    """In every process that plays episodes."""
    os.environ.__class__ = _Environ


class _Address:
    """In place of a queue for the address."""

    def put(self, address: str) -> None:
        print(json.dumps({"address": address}), flush=True)


def main(mode: str, config: str, *rest: str) -> None:
    prepare()
    from verifiers.v1.serve import serve_env
    from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

    resolved = resolve_env_config(json.loads(config))
    if mode == "serve":
        workers: dict[str, Any] = {"max_workers": int(rest[1]), "elastic": False}
        serve_env(config=resolved, address=rest[0], address_queue=_Address(), log_setup=prepare, **workers)
        return
    count, first = map(int, rest)
    for task in islice(load_taskset(resolved.taskset), first, first + count):
        print(json.dumps(task.data.model_dump(mode="json")), flush=True)


if __name__ == "__main__":
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # this folder's verifiers.py is not the one to import
    main(*sys.argv[1:])
