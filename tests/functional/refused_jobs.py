"""Runs `aligner` commands that are to be refused, one after another in one process (importing Megatron-Core takes seconds).

Arguments: a JSON file with a list of argument lists; where to write a list of {"code": exit code, "stderr": text}.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import torch.distributed as dist

from aligner import cli
from aligner.parallel.mcore import parallel_state


def run(arguments: list[str]) -> dict[str, object]:
    stderr = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(stderr):
        try:
            code = cli.main(arguments)
        except SystemExit as end:
            code = end.code
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return {"code": code, "stderr": stderr.getvalue()}


if __name__ == "__main__":
    jobs, results = (Path(argument) for argument in sys.argv[1:])
    results.write_text(json.dumps([run(arguments) for arguments in json.loads(jobs.read_text())]))
