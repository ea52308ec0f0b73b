"""Optimizers other than Adam over several ranks: a run continues from its checkpoint to the bit, and at another layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from layout_models import train_step
from model_steps import make_batch
from ranks import world
from tiers import cases

from aligner.losses.sft import sft_loss
from aligner.models import create
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Architecture, Dtype, Family, ModelConfig
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
}


def make(fields: dict, parallel: dict, topology):
    kind = OptimizerKind(fields["kind"])
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-4, warmup_steps=1, kind=kind)
    config = ModelConfig(make_vocab_divisible_by=2, dtype=Dtype(fields.get("dtype", "float32")))
    architecture = Architecture(**SIZES, family=Family.llama)
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


@pytest.mark.parametrize("name", cases(LAYOUTS, fast=("adam8bit_dp2",)))
def test_a_run_continues_to_the_bit_and_at_another_layout(name, on_ranks, tmp_path):
    ranks, fields, (others, parallel) = LAYOUTS[name]
    result = on_ranks(go, ranks, fields, tmp_path)[0]
    assert result["after_loading"] == result["after"]
    found = on_ranks(go, others, fields | {"parallel": parallel}, tmp_path, result["saved"])[0]
    for got, wanted in zip(found["after"], result["after"], strict=True):
        assert got["sft/loss"] == pytest.approx(wanted["sft/loss"], rel=3e-2)
