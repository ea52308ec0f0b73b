"""The moving average of the weights in other layouts: the single process's, from its checkpoint too."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from layout_models import Spec, assert_close, exported, make_batch, make_losses, make_model, train_step
from ranks import joined, laid_out

from aligner.models.checkpoint import checkpoint
from aligner.models.training.optimizer import OptimizerConfig

SETTINGS = {"lr": 1e-3, "min_lr": 1e-3, "warmup_steps": 0, "clip_grad": 0.5, "eps": 1e-4, "ema_decay": 0.6}
LAYOUTS = {"dp2": {}, "tp2": {"tp": 2}}


def averaged(topology, parallel: dict, folder: Path, *, resumes: bool = False) -> dict:
    """Three steps, of which the first two are saved or, if it resumes, read; then the weights' average and the weights."""
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
    return {"average": average, "weights": exported(model.model.chunks)}


def in_every_layout(folder: Path) -> list[dict]:
    """From the start and from the single process's checkpoint; on the first rank."""
    found = []
    with joined():
        for name, parallel in LAYOUTS.items():
            with laid_out(parallel, seed=1) as topology:  # the single process's
                found.append(averaged(topology, parallel, folder / name))
                found.append(averaged(topology, parallel, folder / "one", resumes=True))
        return found if dist.get_rank() == 0 else []


def test_layouts_have_the_single_process_average(on_ranks, topology, tmp_path):
    one = averaged(topology, {}, tmp_path / "one")
    assert max(float((one["average"][name] - own).abs().max()) for name, own in one["weights"].items()) > 1e-4
    found = on_ranks(in_every_layout, 2, tmp_path)[0]
    found += [averaged(topology, {}, tmp_path / name, resumes=True) for name in LAYOUTS]
    assert len(found) == 6
    for each in found:
        for kind in ("average", "weights"):
            assert_close(each[kind], one[kind], atol=2e-6)
