"""What a job's settings name on the Hub is downloaded where the job is submitted; the job itself still gets the names."""

from __future__ import annotations

from pathlib import Path

from aligner.commands import slurm
from aligner.commands.parts import LaunchOptions
from aligner.commands.slurm import launch_slurm

SETTINGS = ("model.path=org/name", "data.train=prompts.jsonl", "cluster.device=cpu", "cluster.gpus_per_node=1")


def test_a_submission_downloads_and_a_script_does_not(hub, tmp_path: Path, monkeypatch, capsys) -> None:
    hub.add("org/name", {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"})
    submitted: list[str] = []
    monkeypatch.setattr(slurm, "_submit", lambda name, text, *, test_only: submitted.append(text) or 0)
    settings = [*SETTINGS, f"run.directory={tmp_path / 'run'}"]
    assert launch_slurm("sft", settings, LaunchOptions(dry_run=True)) == 0 == launch_slurm("sft", settings, LaunchOptions(test_only=True))
    assert not hub.requests
    assert launch_slurm("sft", settings, LaunchOptions()) == 0
    assert hub.downloads("model.safetensors") == 1 and "model.path=org/name" in submitted[-1] and "snapshots" not in submitted[-1]
    assert not (tmp_path / "run").exists()
