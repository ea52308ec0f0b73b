"""The table of the largest models of `transformers`' own modules in docs/models.md, and what such a model's engine holds."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import largest_own_modules as table
import plan_parts
import pytest

from aligner.models.config import HFArchitecture, LoraConfig


@pytest.mark.cpu  # the simulated GPU cannot hold a plan's fake tensors
@pytest.mark.parametrize(("gpus", "way"), [(8, "all weights"), (64, "`model.lora.rank=16`")])
def test_a_cell_is_what_the_planner_finds(gpus: int, way: str, tmp_path: Path) -> None:
    rows = [line.split("|") for line in table.PAGE.read_text().partition(table.BEGIN)[2].splitlines() if line.startswith(f"| {gpus} ")]
    written = rows[0][2 + list(table.WAYS).index(way)].strip()
    layers = int(written.partition("(")[2].split()[0])
    assert table.cell(layers, tmp_path) == written
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:  # a plan needs a process that has joined no world
        fits = [alone.submit(table.fits, number, gpus, way, tmp_path).result(timeout=300) for number in (layers, layers + 1)]
    assert fits == [True, False]


def test_their_engine_holds_weights_only_if_it_samples_ahead() -> None:
    """Adapters are not merged into weights of the engine's own, as in the layers here."""
    lora, own = {"lora": LoraConfig(rank=4)}, HFArchitecture(num_layers=2, hidden_size=64, num_attention_heads=8)
    for architecture, expected in ((plan_parts.architecture(), True), (own, False)):
        component = plan_parts.component(architecture=architecture, model=lora, engine=plan_parts.engine())
        assert component.engine_holds_weights is expected
    assert plan_parts.component(architecture=own, engine=plan_parts.engine(asynchronous=True)).engine_holds_weights
