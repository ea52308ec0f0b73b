"""`aligner gap` sees the same under tensor, sequence, pipeline, context and expert parallelism, and an engine split otherwise."""

from __future__ import annotations

from pathlib import Path

from training_jobs import write_task

JOB = Path(__file__).parent / "gap_job.py"
# In each of two layers: norms, qkv, queries, keys, attention, projection, two residuals, MLP and its inner activations (or its router).
PLACES = 2 * 11 + 3


def test_every_layout(run_distributed, tmp_path) -> None:
    write_task(tmp_path)
    output = run_distributed(JOB, 2, tmp_path, timeout=240)[0]
    layouts = ["sequence", "tensor, engine whole", "pipeline", "context", "replicas, engine split", "experts"]
    for name in layouts:
        assert f"{name}: nothing; {PLACES} places; gap True" in output, output
    for name in ("sequence", "pipeline", "context"):
        assert f"{name}: layer 1, mlp norm (prefill); {PLACES} places; gap False" in output, output
