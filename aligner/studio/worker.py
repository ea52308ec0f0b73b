"""A process that composes, plans and reads data for pages: it has imported torch once, and what hangs in it hangs no page.

python -m aligner.studio.worker    # requests as lines of JSON on stdin, answers on stdout
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO, Any

from aligner.cluster.processes import exec_command
from aligner.errors import AlignerError, ServerError

SECONDS = 300.0  # for one answer, the first one's imports included, on a busy machine too
PREVIEWED = 200  # records of each source
_LINE = 1 << 26  # bytes of the longest answer


class Worker:
    """The studio's end. One request at a time; the process starts with the first one, and ends with the studio."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds, self._asked = seconds, 0
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def ask(self, action: str, config: str, overrides: Sequence[str]) -> dict[str, Any]:
        """The answer to one of `ACTIONS`. Raises ServerError with the reason if there is none, or none in time."""
        async with self._turn:
            try:
                found = await asyncio.wait_for(self._answer(action, config, overrides), self._seconds)
            except (asyncio.TimeoutError, ConnectionError) as error:
                if self._process is not None and self._process.returncode is None:
                    self._process.kill()
                self._process = None
                raise ServerError(f"{action}: {str(error) or f'took longer than {self._seconds:g} s and was ended'}") from error
        if "error" in found:
            raise ServerError(found["error"])
        return found

    async def _answer(self, action: str, config: str, overrides: Sequence[str]) -> dict[str, Any]:
        if self._process is None:
            command, pipe = exec_command([sys.executable, "-m", "aligner.studio.worker"]), asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=_LINE)
        process, self._asked = self._process, self._asked + 1
        assert process.stdin is not None and process.stdout is not None
        request = {"id": self._asked, "action": action, "config": config, "overrides": list(overrides)}
        process.stdin.write(json.dumps(request).encode() + b"\n")
        await process.stdin.drain()
        while line := await process.stdout.readline():
            found: dict[str, Any] = json.loads(line)
            if found.pop("id") == self._asked:  # not the answer to one whose page has gone
                return found
        raise ConnectionError(f"its process ended with exit code {await process.wait()}")


def _describe(config: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of a config with these presets: as `aligner.settings.explain.shipped`, for any recipe."""
    from aligner.algorithms.registry import recipe_of
    from aligner.settings.compose import compose_node, shown_values
    from aligner.settings.explain import groups_of
    from aligner.settings.schema import schema_keys

    recipe: Any = recipe_of(config, overrides)
    keys, folders = schema_keys(recipe.config, described=True), recipe.folders()
    values = dict(shown_values(compose_node(recipe.config, config, overrides, folders), keys))
    return {"groups": groups_of(keys, folders), "keys": [asdict(key) for key in keys], "values": values}


def _check(config: str, overrides: Sequence[str]) -> dict[str, Any]:
    """What `aligner launch` would refuse, the plan or why there is none, and the config as a file."""
    from aligner.algorithms.registry import composed, recipe_of
    from aligner.settings.compose import as_file

    found: dict[str, Any] = {"refusal": "", "plan": None, "no_plan": "", "yaml": ""}
    try:
        composed(config, overrides).check_complete()
    except AlignerError as error:
        found["refusal"] = str(error)
    try:
        found["plan"] = _planned(config, overrides)
    except AlignerError as error:
        found["no_plan"] = str(error)
    with contextlib.suppress(AlignerError):  # its reason is the refusal
        comment = "as NAME.yaml in FOLDER: aligner launch local NAME --config-dir FOLDER"
        found["yaml"] = as_file(config, overrides, {}, recipe_of(config, overrides).folders(), comment=comment)
    return found


def _planned(config: str, overrides: Sequence[str]) -> dict[str, Any]:
    from aligner.commands.plan.command import load, plan_config
    from aligner.commands.plan.outputs import memory_chart
    from aligner.planner.report import fullest, listed, ranks, seconds

    settings: Any = load(config, overrides)
    job = plan_config(config, settings)
    nodes, whole = math.ceil(job.num_ranks / job.cluster.gpus_per_node), job.run.run_seconds
    lines = [f"A step takes {seconds(job.step_seconds)} ({listed(job.run.phases, seconds)}), with {ranks(job.num_ranks)}."]
    if math.isfinite(whole):
        hours = f"{nodes * whole / 3600:,.2f} node hours on {nodes} of its nodes"
        lines.append(f"All {settings.loop.max_steps} steps take {seconds(whole)}: {hours}.")
    charts = [memory_chart(plan, [fullest(plan, phase) for phase in plan.component.work.phases]) for plan in job.components]
    return {"problems": list(job.problems), "lines": lines, "panels": list(map(asdict, charts))}


def _preview(config: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The findings and first samples of `aligner data validate`, of the first records of every source."""
    from aligner.commands.parts import ValidateOptions
    from aligner.commands.validate_data import examine, samples, show

    options, sets = ValidateOptions(), []
    for finding, views, tokenizer in examine(config, overrides, options, PREVIEWED):
        show(finding, text := io.StringIO())
        sets.append({"findings": text.getvalue(), "samples": samples(views[: options.num_samples], tokenizer)})
    return {"sets": sets}


def _against(config: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The chart of the run in the directory `config` beside its plan."""
    from pathlib import Path

    from aligner.commands.plan.command import against

    return asdict(against(Path(config)).chart())


def _changed(config: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of the run in the directory `config` that differ from the defaults of its recipe, which is the one override."""
    from aligner.commands.model_card import changed_settings
    from aligner.reporting.run_view import RunView

    return {"changed": changed_settings(overrides[0], RunView(config).config())}


def _script(config: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The batch script that `aligner launch slurm` would submit."""
    from aligner.commands.parts import LaunchOptions
    from aligner.commands.slurm import launch_slurm

    with contextlib.redirect_stdout(io.StringIO()) as text:
        launch_slurm(config, overrides, LaunchOptions(dry_run=True))
    return {"script": text.getvalue()}


ACTIONS = {"describe": _describe, "check": _check, "preview": _preview, "script": _script, "against": _against, "changed": _changed}


def main(requests: IO[str], answers: IO[str]) -> None:
    """Answer until stdin ends."""
    for line in requests:
        asked = json.loads(line)
        try:
            found = ACTIONS[asked["action"]](asked["config"], asked["overrides"])
        except AlignerError as error:
            found = {"error": str(error)}
        except Exception as error:  # of a file that a library cannot read: the page shows it
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": asked["id"], **found}, default=str), file=answers, flush=True)


if __name__ == "__main__":
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    main(sys.stdin, own)
