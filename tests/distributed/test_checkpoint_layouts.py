"""A checkpoint of one process continues over two ranks, tensor- or data-parallel, and theirs in one process again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aligner.losses.sft import sft_loss
from aligner.models.optimizer import OptimizerConfig
from aligner.types import LabeledBatch

JOB = Path(__file__).parent / "checkpoint_job.py"
VOCAB, ROWS, WIDTH = 61, 4, 16
# eps is large, so that gradients which are zero but for rounding move nothing.
OPTIMIZER = OptimizerConfig(lr=1e-2, min_lr=1e-3, warmup_steps=1, eps=1e-3)


def make_batch(number: int) -> LabeledBatch:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(1, VOCAB, (ROWS, WIDTH), generator=generator)
    mask = torch.arange(WIDTH).expand(ROWS, WIDTH) > 3
    return LabeledBatch(tokens=tokens, lengths=torch.full((ROWS,), WIDTH), loss_mask=mask)


def make_policy(topology):
    from aligner.models.build import LanguageModel
    from aligner.models.config import Architecture, ModelConfig
    from aligner.models.policy import MegatronPolicy
    from aligner.models.trainable import TrainableModel, Training
    from aligner.parallel.topology import ParallelConfig

    architecture = Architecture(
        vocab_size=VOCAB,
        num_layers=2,
        hidden_size=32,
        num_key_value_heads=2,
        ffn_hidden_size=48,
        max_position_embeddings=64,
        initializer_range=0.2,
        tied_embeddings=False,
    )
    module = LanguageModel(architecture, ModelConfig(), ParallelConfig(), load=False)
    return MegatronPolicy(TrainableModel(module, topology, Training(optimizer=OPTIMIZER, total_steps=6, micro_batch_size=2)))


def weights_of(policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export_weights()}


@pytest.fixture(scope="module")
def saved(topology, tmp_path_factory) -> dict:
    """Two steps, a checkpoint, and two more by the uninterrupted run."""
    from aligner.models import checkpoint

    policy, directory = make_policy(topology), tmp_path_factory.mktemp("checkpoints")
    for number in range(2):
        policy.train_step(make_batch(number), sft_loss)
    checkpoint.save(directory, policy.model, checkpoint.SaveRequest(step=2, state={"position": 8}))
    steps = [{"weights": weights_of(policy), "metrics": {}}]
    for number in (2, 3):
        metrics = policy.train_step(make_batch(number), sft_loss)
        steps.append({"weights": weights_of(policy), "metrics": {name: metric.value() for name, metric in metrics.items()}})
    return {"directory": directory, "steps": steps}


def assert_near(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("tp", [2, 1], ids=["tp2", "dp2"])
def test_a_checkpoint_continues_at_another_layout_and_back(tp, saved, run_distributed, topology, tmp_path):
    from aligner.models import checkpoint

    at_save, third, fourth = saved["steps"]
    torch.save({"optimizer": OPTIMIZER, "batch": make_batch(2)}, tmp_path / "inputs.pt")
    run_distributed(JOB, 2, tp, saved["directory"], tmp_path, timeout=240)
    for rank in range(2):
        got = torch.load(tmp_path / f"rank{rank}.pt")
        assert got["state"] == {"position": 8} and got["version"] == 2
        assert all(torch.equal(got["loaded"][name], tensor) for name, tensor in at_save["weights"].items())
        assert got["metrics"] == pytest.approx(third["metrics"], rel=1e-5)
        assert_near(got["trained"], third["weights"])
    assert max((third["weights"][n] - w).abs().max() for n, w in at_save["weights"].items()) > 1e-3  # the step was one
    policy = make_policy(topology)
    assert checkpoint.load(policy.model, tmp_path / "checkpoints") == {"position": 8}
    metrics = policy.train_step(make_batch(3), sft_loss)
    assert {name: metric.value() for name, metric in metrics.items()} == pytest.approx(fourth["metrics"], rel=1e-5)
    assert_near(weights_of(policy), fourth["weights"])
