"""Runs entry scripts that are to be refused, one after another in one process (importing Megatron-Core takes seconds).

Arguments: a JSON file with a list of [script, [settings]]; where to write a list of {"code": exit code, "stderr": text, "stdout": text}.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

import torch.distributed as dist

from aligner.parallel.mcore import parallel_state

SCRIPTS = Path(__file__).parents[2] / "examples" / "nlp"


def run(script: str, settings: list[str]) -> dict[str, object]:
    sys.argv = [script, *settings]
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        except SystemExit as end:
            code = end.code
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return {"code": code, "stderr": stderr.getvalue(), "stdout": stdout.getvalue()}


if __name__ == "__main__":
    jobs, results = (Path(argument) for argument in sys.argv[1:])
    results.write_text(json.dumps([run(name, arguments) for name, arguments in json.loads(jobs.read_text())]))
