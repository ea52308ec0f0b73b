"""Killing a run with SIGKILL, and comparing what two runs left to the last bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from training_jobs import Job, eventually, kill, run_job, steps_of, train, without_times


def kill_after(job: Job, step: int) -> None:
    """SIGKILL to every process of the job once metrics.jsonl has this step."""
    job.reached(step)
    kill_all(job)


def kill_when(job: Job, condition: Callable[[], object]) -> None:
    """The same once the condition is true. Raises AssertionError where the job ends first."""
    assert eventually(lambda: condition() or job.process.poll() is not None, 120) and job.process.poll() is None, job.output()
    kill_all(job)


def kill_all(job: Job) -> None:
    while processes := job.processes():  # again for what was being started meanwhile
        for pid in processes:
            kill(pid)
        job.process.poll()


def killed_and_resumed(
    recipe: str,
    folder: Path,
    settings: list[str],
    *kills: int | Callable[[Path], object],
    last: int,
    components: Sequence[str] = ("policy",),
) -> tuple[Path, Path, str]:
    """The directories of a run that nothing disturbed and of one that was killed (after a step, or once a condition of its directory is
    true) and started again each time, found equal to the last bit; and what the last start said."""
    whole, killed, program = folder / f"{recipe}_whole", folder / f"{recipe}_killed", train(recipe)
    run_job(program, whole, settings)
    for when in kills:
        with Job(program, killed, settings) as job:
            kill_after(job, when) if isinstance(when, int) else kill_when(job, lambda when=when: when(killed))
    output = run_job(program, killed, settings)
    assert "resumed after step" in output and steps_of(killed) == steps_of(whole)
    same_runs(killed, whole, last, components=components)
    return whole, killed, output


def in_two_parts(recipe: str, folder: Path, settings: list[str], *, first: int, last: int) -> tuple[Path, Path, str]:
    """The directories of a run in one and of one that ended after step `first` and went on, found equal; and what the run in one said."""
    whole, parts, program = folder / f"{recipe}_whole", folder / f"{recipe}_parts", train(recipe)
    said = run_job(program, whole, [*settings, f"loop.max_steps={last}"])
    run_job(program, parts, [*settings, f"loop.max_steps={first}"])
    assert f"resumed after step {first}" in run_job(program, parts, [*settings, f"loop.max_steps={last}"])
    assert steps_of(parts) == steps_of(whole)
    same_runs(parts, whole, last)
    return whole, parts, said


def ready_server(directory: Path, component: str, *, after: int = 0) -> int:
    """The pid of a run's server, once it answers; `after`: of the one that follows this process."""
    registration = directory / "services" / f"{component}.json"

    def ready() -> bool:
        said = json.loads(registration.read_text()) if registration.exists() else {"state": "", "pid": 0}
        return said["state"] == "ready" and said["pid"] != after

    assert eventually(ready, 120)
    return json.loads(registration.read_text())["pid"]


def weights(directory: Path) -> bytes:
    return (directory / "export" / "model.safetensors").read_bytes()


def kept(run: Path, folder: str) -> dict[str, bytes]:
    """What a run that trains in iterations has kept of them, by file."""
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted((run / folder).rglob("*.json"))}


def same_runs(one: Path, other: Path, last_step: int, *, components: Sequence[str] = ("policy",)) -> None:
    """Raise AssertionError where two runs have not exported, saved and reported the same."""
    assert without_times(one) == without_times(other)
    assert weights(one) == weights(other)
    for component in components:
        last = f"checkpoints/{component}/step_{last_step:06d}"
        same_tensors(optimizer_and_weights(one / last), optimizer_and_weights(other / last))


def optimizer_and_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint's weights and optimizer, by part and name, read with torch alone."""
    found: dict[str, torch.Tensor] = {}
    for part in ("weights", "optimizer"):
        state: dict[str, Any] = {}
        reader = FileSystemReader(checkpoint / part)
        _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        leaves, _ = flatten_state_dict(state)
        found |= {f"{part}/{name}": leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor) and leaf.numel()}
    return found


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert any(name.startswith("optimizer/") for name in one) and any(name.startswith("weights/") for name in one)
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []
