"""Optimizers other than Adam over several ranks: a run continues from its checkpoint to the bit, and at another layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from layout_models import train_step
from model_steps import make_batch
from ranks import world
from tiers import cases
from torch import Tensor

from aligner.losses.sft import sft_loss
from aligner.models import create
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Architecture, Dtype, Family, ModelConfig
from aligner.models.training import muon
from aligner.models.training.optimizer import OptimizerConfig, OptimizerKind
from aligner.models.training.trainable import Training
from aligner.parallel.topology import ParallelConfig

SIZES = {"num_layers": 2, "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 136}
SIZES |= {"vocab_size": 61, "max_position_embeddings": 32, "initializer_range": 0.2, "tied_embeddings": False}
TP2_SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS = {  # name: (ranks, fields of `go`, ranks and layout that continue)
    "adam8bit_dp2": (2, {"kind": "adam8bit"}, (1, {})),
    "adam8bit_dp2_bfloat16": (2, {"kind": "adam8bit", "dtype": "bfloat16"}, (2, TP2_SP)),
    "adam8bit_tp2_pp2": (4, {"kind": "adam8bit", "parallel": {"tp": 2, "pp": 2}}, (2, {})),
    "muon_tp2": (2, {"kind": "muon", "parallel": TP2_SP}, (1, {})),
    "muon_tp2_dp2_bfloat16": (4, {"kind": "muon", "parallel": TP2_SP, "dtype": "bfloat16"}, (2, {})),
    "muon_pp2_dp2": (4, {"kind": "muon", "parallel": {"pp": 2}}, (2, {"tp": 2})),
    "muon_tp2_etp2": (2, {"kind": "muon", "parallel": {**TP2_SP, "etp": 2}, "experts": True}, (1, {})),
    "muon_ep2": (2, {"kind": "muon", "parallel": {"ep": 2}, "experts": True}, (2, {"ep": 2})),
}


def make(fields: dict, parallel: dict, topology):
    kind = OptimizerKind(fields["kind"])
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-4, warmup_steps=0, kind=kind, distributed=kind is not OptimizerKind.muon)
    config = ModelConfig(make_vocab_divisible_by=2, dtype=Dtype(fields.get("dtype", "float32")))
    mixture = {"family": Family.mixtral, "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 40}
    architecture = Architecture(**SIZES, **(mixture if fields.get("experts") else {"family": Family.llama}))
    training = Training(optimizer=optimizer, total_steps=6, micro_batch_size=2)
    return create.create_policy(config, architecture, ParallelConfig(**parallel), topology, training)


def go(fields: dict, output: Path, source: str = "") -> dict:
    """The losses and gradient norms of steps 4 to 6 after saving step 3, and after loading it; or after loading `source`."""
    parallel = fields.get("parallel", {})
    with world(parallel, seed=5) as topology:

        def steps(model, numbers: range) -> list[dict[str, float]]:
            return [train_step(model, make_batch(number=number), sft_loss) for number in numbers]

        model = make(fields, parallel, topology)
        if source:
            checkpoint.load(model.model, Path(source))
            return {"after": steps(model, range(4, 7))}
        steps(model, range(1, 4))
        saved = checkpoint.save(output, model.model, checkpoint.SaveRequest(step=3, state={}))
        after = steps(model, range(4, 7))
        again = make(fields, parallel, topology)
        checkpoint.load(again.model, saved)
        return {"saved": str(saved), "after": after, "after_loading": steps(again, range(4, 7))}


def exact_direction(update: Tensor) -> Tensor:
    """As torch's, in float64 instead of bfloat16, which rounds by 4 % of the result."""
    x = update.double() / update.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (-0.2 * max(x.shape) ** 0.5 * x).float()


def updates(fields: dict, parallel: dict, topology) -> list[dict[str, Tensor]]:
    """What two steps changed of each of Hugging Face's tensors, by exact directions and by torch's."""
    found = []
    for direction in (exact_direction, muon._direction):
        with mock.patch.object(muon, "_direction", direction):
            model = make(fields, parallel, topology)
            before = {name: tensor.clone() for name, tensor in model.export_weights()}
            for number in (1, 2):
                train_step(model, make_batch(number=number), sft_loss)
            found.append({name: tensor - before[name] for name, tensor in model.export_weights()})
    return found


def on_all(fields: dict) -> list[dict[str, Tensor]]:
    with world(fields["parallel"], seed=5) as topology:
        return updates(fields, fields["parallel"], topology)


@pytest.mark.parametrize("name", cases(["muon_tp2", "muon_pp2_dp2", "muon_tp2_etp2", "muon_ep2"], fast=["muon_tp2", "muon_tp2_etp2"]))
def test_muon_makes_the_same_matrices_orthogonal_at_every_layout(name, on_ranks, topology):
    """A part of a matrix by itself would have another direction."""
    ranks, fields, _ = LAYOUTS[name]
    results = zip(updates(fields, {}, replace(topology, seed=5)), on_ranks(on_all, ranks, fields)[0], (1e-3, 0.1), strict=True)
    for alone, together, tolerance in results:
        assert alone.keys() == together.keys()
        for key, update in alone.items():
            assert (together[key] - update).norm() < tolerance * update.norm(), key


@pytest.mark.parametrize("name", cases(LAYOUTS, fast=("adam8bit_dp2", "muon_tp2", "muon_tp2_etp2")))
def test_a_run_continues_to_the_bit_and_at_another_layout(name, on_ranks, tmp_path):
    ranks, fields, (others, parallel) = LAYOUTS[name]
    result = on_ranks(go, ranks, fields, tmp_path)[0]
    assert result["after_loading"] == result["after"]
    found = on_ranks(go, others, fields | {"parallel": parallel}, tmp_path, result["saved"])[0]
    for got, wanted in zip(found["after"], result["after"], strict=True):
        assert got["sft/loss"] == pytest.approx(wanted["sft/loss"], rel=3e-2)
