"""The moving average of the weights in other layouts: the single process's, from its checkpoint too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from layout_models import Spec, assert_close, exported, make_batch, make_losses, make_model, train_step
from ranks import world

from aligner.models.checkpoint import checkpoint
from aligner.models.training.optimizer import OptimizerConfig

SETTINGS = {"lr": 1e-3, "min_lr": 1e-3, "warmup_steps": 0, "clip_grad": 0.5, "eps": 1e-4, "ema_decay": 0.6}


def averaged(parallel: dict, folder: Path, resumes: bool) -> dict:
    """Three steps, of which the first two are saved or, if it resumes, read; then the weights' average and the weights."""
    with world(parallel) as topology:
        model = make_model("sft", Spec(parallel=parallel), topology, OptimizerConfig(**SETTINGS))
        batch, loss = make_batch("sft"), make_losses("sft")[0]
        if resumes:
            checkpoint.load(model.model, folder)
        else:
            for _ in range(2):
                train_step(model, batch, loss)
            checkpoint.save(folder, model.model, checkpoint.SaveRequest(step=2, state={}))
        train_step(model, batch, loss)
        with model.averaged():
            average = exported(model.model.chunks)
        weights = exported(model.model.chunks)
        return {"average": average, "weights": weights} if dist.get_rank() == 0 else {}


LAYOUTS = {"dp2": (2, {}), "tp2": (2, {"tp": 2})}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_have_the_single_process_average(layout, on_ranks, tmp_path):
    ranks, parallel = LAYOUTS[layout]
    one = on_ranks(averaged, 1, {}, tmp_path / "one", False)[0]
    many = on_ranks(averaged, ranks, parallel, tmp_path / "many", False)[0]
    others = [on_ranks(averaged, 1, {}, tmp_path / "many", True)[0], on_ranks(averaged, ranks, parallel, tmp_path / "one", True)[0]]
    assert max(float((one["average"][name] - own).abs().max()) for name, own in one["weights"].items()) > 1e-4
    for found in (many, *others):
        for kind in ("average", "weights"):
            assert_close(found[kind], one[kind], atol=2e-6)
