"""A run of many small ranks, to see what the conductor does with them: `many_ranks.py job SPEC SCRIPT` is the body of a batch
script, `many_ranks.py actor|server RUN MAX_STEPS` a rank. They import nothing but the modules that a launcher's processes share."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

from aligner.cluster import outcomes
from aligner.cluster.lease import watch_lease
from aligner.cluster.run_directory import RunDirectory

STEP_SECONDS = 0.2


def job(spec: Path, script: Path) -> int:
    from unittest import mock

    from aligner.cluster.slurm import __main__ as body
    from aligner.cluster.slurm.spec import read_spec

    def composed(here, *_: object) -> Path:
        folder = RunDirectory(Path(read_spec(spec).run_directory)).create().jobs / here.job
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(spec, folder / "spec.json"))

    with mock.patch.object(body, "_compose", composed):
        return body.main(["--script", str(script), "--config", "many", str(spec), str(script)])


def rank(kind: str, run: RunDirectory, max_steps: int) -> None:
    watch_lease(os.environ)
    is_first = os.environ["SLURM_PROCID"] == "0"
    print(f"rank {os.environ['SLURM_PROCID']} on {os.environ['SLURMD_NODENAME']}", flush=True)
    if kind == "server":
        if is_first:
            run.service(os.environ["ALIGNER_COMPONENT"]).write_text("{}")
        while True:
            time.sleep(STEP_SECONDS)
    steps = run.checkpoints / "policy"
    step = max((int(path.name.removeprefix("step_")) for path in steps.glob("step_*")), default=0)
    while not run.done.exists():
        time.sleep(STEP_SECONDS)
        step += 1
        if is_first:
            saved = steps / f"step_{step:06d}"
            saved.mkdir(parents=True)
            (saved / "aligner.json").touch()
            if (run.path / "finish").exists():
                run.done.write_text(json.dumps({"step": max_steps}))
    outcomes.record(os.environ, 0)


if __name__ == "__main__":
    what, *others = sys.argv[1:]
    if what == "job":
        sys.exit(job(Path(others[0]), Path(others[1])))
    rank(what, RunDirectory(Path(others[0])), int(others[1]))
