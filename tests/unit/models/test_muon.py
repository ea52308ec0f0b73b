"""`optimizer.kind=muon`: torch's own Muon on Hugging Face's matrices, AdamW on the rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from model_steps import train
from torch import Tensor

from aligner.errors import CheckpointError, ConfigError
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype, LoraConfig
from aligner.models.families.mapping import to_hf
from aligner.models.training.muon import Muon
from aligner.models.training.optimizer import Decay, OptimizerConfig, OptimizerKind
from aligner.models.weights import named_shards

pytestmark = pytest.mark.usefixtures("topology")
LR, DECAY, MOMENTUM = 1e-2, 0.1, 0.9
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "tied_embeddings": False}


def muon(**changes) -> OptimizerConfig:
    constant = {"lr": LR, "min_lr": LR, "decay": Decay.constant, "warmup_steps": 0, "clip_grad": 0.0, "weight_decay": DECAY}
    return OptimizerConfig(kind=OptimizerKind.muon, muon_momentum=MOMENTUM, distributed=False, **constant | changes)


def model_with(make_model, kind: str = "policy", dtype: str = "float32", optimizer: OptimizerConfig | None = None, **config):
    return make_model(kind, optimizer=optimizer or muon(), config={"dtype": Dtype(dtype)} | config, architecture=WIDE)


def hf_tensors(model, attribute: str) -> Iterator[tuple[str, Tensor]]:
    """Weights ("data") or gradients ("main_grad") by Hugging Face's names; a head by ours."""
    (chunk,) = model.model.chunks
    for part in named_shards(model.model.chunks):
        tensor = getattr(part.parameter, attribute)
        if part.rule is None:
            yield part.place.name, tensor
        else:
            yield from zip(part.rule.hf_names, to_hf(part.rule, tensor, chunk.architecture), strict=True)


@pytest.mark.parametrize("kind", ["policy", "reward"])
def test_the_numbers_are_those_of_torch(make_model, kind):
    model = model_with(make_model, kind)
    weights = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in hf_tensors(model, "data")}
    matrices = [name for name, p in weights.items() if name.startswith("model.layers.") and p.dim() == 2]
    assert {name.split(".")[-2] for name in matrices} == {f"{one}_proj" for one in ("q", "k", "v", "o", "gate", "up", "down")}
    others = {decays: [p for name, p in weights.items() if name not in matrices and (p.dim() == 2) is decays] for decays in (True, False)}
    by_muon = torch.optim.Muon(
        [weights[name] for name in matrices], lr=LR, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    groups = [{"params": others[True], "weight_decay": DECAY}, {"params": others[False], "weight_decay": 0.0}]
    by_adam = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.98))
    for step in range(4):
        train(model, range(step, step + 1), kind)
        for name, gradient in hf_tensors(model, "main_grad"):
            weights[name].grad = gradient.clone()
        by_muon.step()
        by_adam.step()
        for name, tensor in hf_tensors(model, "data"):
            torch.testing.assert_close(tensor, weights[name].detach(), rtol=1e-5, atol=1e-6, msg=name)


def test_a_matrix_has_one_moment(make_model):
    model = model_with(make_model, "reward", "bfloat16")
    train(model, range(1), "reward")
    (part,) = model.model.optimizer.chained_optimizers
    assert isinstance(part.optimizer, Muon)
    states = {frozenset(state): p.dim() for p, state in part.optimizer.state.items()}
    assert set(states) == {frozenset({"step", "momentum_buffer"}), frozenset({"step", "exp_avg", "exp_avg_sq"})}
    assert all(p.dtype == torch.float32 for p in part.optimizer.state)


def test_what_does_not_go_with_it_is_said(make_model, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^optimizer\.kind=muon: not with optimizer\.distributed=true; allowed beside it: false$"):
        OptimizerConfig(kind=OptimizerKind.muon)
    for name, value in (("precision_aware", True), ("cpu_offload", True), ("loraplus_ratio", 16.0)):
        with pytest.raises(ConfigError, match=rf"^optimizer\.kind=muon: not with optimizer\.{name}={str(value).lower()}; allowed"):
            muon(**{name: value})
    with pytest.raises(ConfigError, match=r"^optimizer\.muon_momentum=1\.0: must be at least 0 and below 1$"):
        OptimizerConfig(muon_momentum=1.0)
    with pytest.raises(ConfigError, match=r"^optimizer\.kind=muon: not with model\.lora\.rank=3, .*; allowed: 0$"):
        model_with(make_model, lora=LoraConfig(rank=3))
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigError, match=r"^optimizer\.kind=muon: needs torch 2\.9 or newer, here is .*; allowed: adam, adam8bit$"):
        model_with(make_model)


@pytest.mark.parametrize(("saved", "then"), [("adam", "muon"), ("muon", "adam")])
def test_another_kind_of_checkpoint_is_refused(make_model, tmp_path, saved, then):
    kinds = {"muon": muon(), "adam": OptimizerConfig(distributed=False, warmup_steps=0)}
    model = model_with(make_model, optimizer=kinds[saved])
    train(model, range(1))
    path = checkpoint.save(tmp_path, model.model, checkpoint.SaveRequest(step=1, state={}))
    with pytest.raises(CheckpointError, match="optimizer"):
        checkpoint.load(model_with(make_model, optimizer=kinds[then]).model, path)
