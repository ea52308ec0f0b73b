"""A checkpoint of one layout is continued at another, weights and optimizer: loading changes nothing, and training goes on the same."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import checkpoint_job as job
import pytest
import torch

JOB = Path(__file__).parent / "checkpoint_job.py"


STEPS = 5


def make_model(kind: str, topology, *, experts: bool = False):
    """The reference: one process, and weights large enough that every parameter gets a gradient that is not rounding."""
    from aligner.models.config import Architecture, Family, ModelConfig
    from aligner.models.create import create_policy, create_value_model
    from aligner.parallel.topology import ParallelConfig

    sizes = {"num_layers": 4, "hidden_size": 32, "num_key_value_heads": 2, "ffn_hidden_size": 48, "initializer_range": 0.2}
    sizes |= {"vocab_size": job.VOCAB, "max_position_embeddings": 64, "tied_embeddings": kind == "value"}
    if experts:
        sizes |= {"family": Family.mixtral, "num_layers": 2, "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24}
    build = create_policy if kind == "policy" else create_value_model
    config = ModelConfig(make_vocab_divisible_by=8)
    return build(config, Architecture(**sizes), ParallelConfig(), topology, job.make_training())


def reference(kind: str, topology, folder: Path, **options) -> tuple[Path, list[dict[str, float]]]:
    """An uninterrupted run of five steps that saves each: (its checkpoints, the metrics of each step)."""
    model, metrics = make_model(kind, topology, **options), []
    for step in range(1, STEPS + 1):
        metrics.append(job.train_step(model, kind, step))
        job.save(folder, model, step)
    return folder, metrics


@pytest.fixture(scope="module")
def policy(topology, tmp_path_factory) -> tuple[Path, list[dict[str, float]]]:
    return reference("policy", topology, tmp_path_factory.mktemp("policy"))


@pytest.fixture
def go_on(run_distributed, tmp_path) -> Callable:
    """`go_on(num_ranks, source, step, **spec)`: the folder with what the job saved, and its result."""

    def run(num_ranks: int, source: Path, step: int, **spec) -> tuple[Path, dict]:
        output = tmp_path / f"{step}-{num_ranks}-{'-'.join(f'{k}{v}' for k, v in spec.get('parallel', {}).items())}"
        output.mkdir()
        settings = job.Spec(source=str(source), step=step, **spec)
        run_distributed(JOB, num_ranks, json.dumps(asdict(settings)), output, timeout=300)
        return output, json.loads((output / "result.json").read_text())

    return run


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds, whole, by its name in the whole model."""
    from aligner.parallel.mcore import dist_checkpointing

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [dist_checkpointing.load_plain_tensors(str(directory / part)) for part in ("weights", "optimizer")]
    named = (
        (f"{part}: {name}", value) for part, content in zip(("weights", "optimizer"), parts, strict=True) for name, value in content.items()
    )
    return {name: value for name, value in named if isinstance(value, torch.Tensor)}


def assert_same(got: Path, expected: Path, *, atol: float) -> None:
    """Bit for bit with atol 0. Rows of the padded vocabulary are nobody's."""
    found, wanted = tensors(got), tensors(expected)
    assert found.keys() == wanted.keys()
    assert any(name.startswith("optimizer: optimizer.state.exp_avg_sq.") for name in wanted)
    for name, tensor in wanted.items():
        rows = slice(job.VOCAB if "embedding" in name or "output_layer" in name else None)
        torch.testing.assert_close(found[name][rows], tensor[rows], rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def assert_continues(output: Path, result: dict, source: Path, step: int, uninterrupted: tuple[Path, list[dict[str, float]]]) -> None:
    """Loading changed nothing, and the next step is that of the uninterrupted run."""
    from aligner.models.checkpoint.checkpoint import step_directory

    folder, metrics = uninterrupted
    assert result["state"] == {"position": 4 * step} and result["version"] == step
    assert_same(step_directory(output / "loaded", step), source, atol=0.0)
    assert result["metrics"] == pytest.approx(metrics[step], rel=1e-4)
    assert_same(step_directory(output / "trained", step + 1), step_directory(folder, step + 1), atol=1e-5)


def continue_in_one_process(
    kind: str, topology, source: Path, step: int, uninterrupted: tuple[Path, list[dict[str, float]]], tmp_path: Path
):
    spec = job.Spec(source=str(source), step=step, kind=kind)
    output = tmp_path / f"one-{step}"
    assert_continues(output, job.run(spec, topology, output), source, step, uninterrupted)


def test_tensor_and_pipeline_parallel_to_one_process_to_data_parallel_and_back(policy, go_on, topology, tmp_path):
    """One process -> TP2 x PP2 -> one process, and PP2 x DP2 -> TP2 x PP2 -> one process; the second save is one in the background."""
    source, step = policy[0] / "step_000001", 1
    for number, parallel in enumerate(({"tp": 2, "pp": 2}, {"pp": 2}, {"tp": 2, "pp": 2, "sequence_parallel": True})):
        output, result = go_on(4, source, step, parallel=parallel, in_background=number == 0)
        assert_continues(output, result, source, step, policy)
        source, step = output / "trained" / f"step_{step + 1:06d}", step + 1
        continue_in_one_process("policy", topology, source, step, policy, tmp_path)


def test_interleaved_pipeline_and_another_padding(policy, go_on, topology, tmp_path):
    """Two chunks a rank. The vocabulary is padded to 64 rows by the reference, to 128 here."""
    source = policy[0] / "step_000002"
    output, result = go_on(2, source, 2, parallel={"pp": 2, "vpp": 2}, vocab_divisor=128)
    assert_continues(output, result, source, 2, policy)
    continue_in_one_process("policy", topology, output / "trained" / "step_000003", 3, policy, tmp_path)


def test_a_value_model_and_its_head(go_on, topology, tmp_path):
    """And every rank hears of what one rank could not write, or found damaged."""
    uninterrupted = reference("value", topology, tmp_path / "value")
    source = tmp_path / "value" / "step_000001"
    output, result = go_on(2, source, 1, kind="value", parallel={"pp": 2}, breaks=True)
    failed, damaged = result["errors"]
    assert failed.startswith("writing a checkpoint failed: rank 1: ") and "No space left on device" in failed
    assert "config.yaml is damaged" in damaged and "(and 1 more); no older checkpoint beside it is intact" in damaged
    assert sorted(p.name for p in (output / "trained").iterdir()) == ["latest", "spoilt", "step_000002"]
    assert_continues(output, result, source, 1, uninterrupted)
    continue_in_one_process("value", topology, output / "trained" / "step_000002", 2, uninterrupted, tmp_path)


def test_experts_over_two_ranks(go_on, topology, tmp_path):
    """One process -> EP2 (and DP2) -> one process."""
    uninterrupted = reference("policy", topology, tmp_path / "experts", experts=True)
    source = tmp_path / "experts" / "step_000001"
    output, result = go_on(2, source, 1, parallel={"ep": 2})
    assert_continues(output, result, source, 1, uninterrupted)
    continue_in_one_process("policy", topology, output / "trained" / "step_000002", 2, uninterrupted, tmp_path)
