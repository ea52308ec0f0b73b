"""The planner's memory of models that see against that of real ones: activations, the vision tower's with them, within 10 %."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_parts import activations
from ranks import joined, laid_out
from transformers import AutoTokenizer
from vision_models import write_seeing
from vision_rows import Rows

from aligner.losses.sft import sft_loss
from aligner.models import create
from aligner.models.config import Dtype, Implementation, ModelConfig, Part, Recompute
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel.topology import ParallelConfig
from aligner.planner import dry_run
from aligner.planner.config import ClusterConfig
from aligner.planner.estimate import plan_component
from aligner.planner.workload import Component, Head, Phase, Work
from aligner.types import Images, LabeledBatch

LENGTH, ROWS, IMAGES = 160, 4, 6
SEEN = {"freeze": []}
OWN = SEEN | {"implementation": Implementation.transformers}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # (model, fields of ModelConfig, of ParallelConfig)
    "qwen2_5_vl": ("qwen2_5_vl", SEEN, {}),
    "qwen3_vl": ("qwen3_vl", SEEN, {}),
    "qwen3_vl_frozen": ("qwen3_vl", {"freeze": [Part.vision, Part.projector]}, {}),
    "qwen3_vl_projector": ("qwen3_vl", {"freeze": [Part.vision]}, {}),
    "qwen3_vl_recompute": ("qwen3_vl", SEEN | {"recompute": Recompute.full}, {}),
    "qwen2_5_vl_pp2": ("qwen2_5_vl", SEEN, {"pp": 2}),
    "qwen2_5_vl_tp2": ("qwen2_5_vl", SEEN, {"tp": 2}),
    "gemma3": ("gemma3", OWN, {}),
    "llava": ("llava", OWN, {}),
    "mistral3": ("mistral3", OWN, {}),
    "smolvlm": ("smolvlm", OWN, {}),
}
SPLIT = [name for name, (_, _, parallel) in CASES.items() if parallel]
OWN_MODULES = [name for name, (_, fields, _) in CASES.items() if "implementation" in fields]


def component(folder: Path, name: str, *, image_tokens: int) -> Component:
    kind, fields, parallel = CASES[name]
    sizes = {"micro_batch_size": 2, "make_vocab_divisible_by": 8, "logits_chunk_size": 64}
    model = ModelConfig(path=str(folder / kind), dtype=Dtype.float32, images=True, **sizes, **fields)
    rows = {"rows": ROWS, "length": LENGTH, "response_length": LENGTH - 1, "update_rows": ROWS, "num_updates": 1}
    return Component(
        name="trainer",
        head=Head.language,
        num_ranks=2 if parallel else 1,
        architecture=create.read_architecture(model, vocab_size=0),
        model=model,
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(lr=1e-3, min_lr=1e-3, warmup_steps=0),
        work=Work(phases=(Phase.train,), **rows),
        image_tokens=image_tokens,
    )


def images_of(rows: Rows) -> int:
    """As many as a row has room for."""
    return min(IMAGES, LENGTH // (len(rows.tokens[3]) + 1))  # the last of its rows is one image


def batch(rows: Rows, folder: Path) -> LabeledBatch:
    """Rows of equal length with as many images each."""
    digest, slots = rows.digests["b"], rows.vision.expansion(rows.digests["b"])
    pattern = AutoTokenizer.from_pretrained(folder)(slots, add_special_tokens=False)["input_ids"]
    images = images_of(rows)
    tokens = torch.tensor([((pattern + [40]) * images + [40] * LENGTH)[:LENGTH]] * ROWS)
    mask = (torch.arange(LENGTH) > 0).expand_as(tokens)
    return LabeledBatch(
        tokens=tokens,
        lengths=torch.full((ROWS,), LENGTH),
        loss_mask=mask,
        extras={"images": Images.padded([Images.of([digest] * images)] * ROWS, LENGTH)},
    )


def peak(folder: Path, name: str, topology: Any, *, images: bool = True) -> int:
    """Bytes at the fullest moment of a step, with images or on text."""
    own = component(folder, name, image_tokens=1)
    rows = Rows(CASES[name][0], folder / CASES[name][0])
    training = create.training(own.model, own.optimizer, vision=rows.vision)
    policy = create.create_policy(own.model, own.architecture, own.parallel, topology, training)
    given = batch(rows, folder / CASES[name][0])
    given = given if images else replace(given, tokens=torch.full_like(given.tokens, 40), extras={})
    policy.train_step(given, sft_loss)
    with dry_run.LiveStorage() as tracker:
        policy.train_step(given, sft_loss)
    return tracker.peak


def measure(folder: Path, names: list[str]) -> dict[str, tuple[int, int, int]]:
    """(stage, peak bytes of a step, of one on text if the model is `transformers`' own) of each of these cases."""
    found = {}
    with joined():
        for name in names:
            with laid_out(CASES[name][2], seed=1) as topology:
                unseen = peak(folder, name, topology, images=False) if name in OWN_MODULES else 0
                found[name] = topology.pp_rank, peak(folder, name, topology), unseen
    return found


def predict(folder: Path) -> dict[str, list[tuple[int, int]]]:
    """Of every case, by stage: activations with and without images."""
    found, cluster = {}, ClusterConfig()
    for name, (kind, *_) in CASES.items():
        rows = Rows(kind, folder / kind)
        slots = images_of(rows) * rows.vision.num_slots(rows.digests["b"])
        own = component(folder, name, image_tokens=slots)
        blind = replace(own, model=replace(own.model, images=False))
        plans = [plan_component(one, cluster) for one in (own, blind)]
        found[name] = [tuple(activations(plan, Phase.train, stage) for plan in plans) for stage in range(own.parallel.pp)]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("towers")
    for name in {kind for kind, *_ in CASES.values()}:
        write_seeing(name, made / name, num_hidden_layers=4)
    return made


@pytest.fixture(scope="module")
def plans(folder: Path, on_ranks) -> dict[str, list[tuple[int, int]]]:
    return on_ranks(predict, 1, folder)[0]


@pytest.fixture(scope="module")
def alone(folder: Path, on_ranks) -> dict[str, tuple[int, int, int]]:
    return on_ranks(measure, 1, folder, [name for name in CASES if name not in SPLIT])[0]


@pytest.fixture(scope="module")
def split(folder: Path, on_ranks) -> list[dict[str, tuple[int, int, int]]]:
    return on_ranks(measure, 2, folder, SPLIT)


def test_activations_with_images_are_the_real_ones(plans, alone, split) -> None:
    for name in CASES.keys() - OWN_MODULES:
        for stage, peak, _ in [ranks[name] for ranks in (split if name in SPLIT else [alone])]:
            planned, blind = plans[name][stage]
            assert planned == pytest.approx(peak, rel=0.1), name
            assert (planned > blind) == (stage == 0), name


@pytest.mark.parametrize("name", OWN_MODULES)
def test_what_images_add_to_transformers_own_modules_is_the_real_part(name: str, plans, alone) -> None:
    """Their text part is planned as a dense model of its sizes."""
    (planned, blind), (_, seen, unseen) = plans[name][0], alone[name]
    assert planned - blind == pytest.approx(seen - unseen, rel=0.1)
