"""Tensor and data parallelism give the single process's losses, gradients, weights and outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

JOB = Path(__file__).parent / "layout_job.py"
LAYOUTS = {  # name: (processes, tp, sequence parallel, distributed optimizer)
    "tp2": (2, 2, 0, 0),
    "tp2_sp": (2, 2, 1, 1),
    "dp2": (2, 1, 0, 0),
    "dp2_distributed_optimizer": (2, 1, 0, 1),
    "tp2_dp2": (4, 2, 0, 1),
}


SINGLE = (1, 1, 0, 0)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[tuple[int, ...], dict]:
    return {}


def _result(results, run_distributed, tmp_path: Path, layout: tuple[int, ...], kind: str) -> dict:
    """What the job gave for a layout; it runs once per layout, for all kinds."""
    if layout not in results:
        output = tmp_path / "result.pt"
        run_distributed(JOB, layout[0], *layout[1:], output, timeout=240)
        results[layout] = torch.load(output)
    return results[layout][kind]


@pytest.mark.parametrize("kind", ["policy", "value", "reward", "sft"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_single_process(kind, layout, results, run_distributed, tmp_path):
    one = _result(results, run_distributed, tmp_path, SINGLE, kind)
    many = _result(results, run_distributed, tmp_path, LAYOUTS[layout], kind)
    assert one["metrics"][0]["optim/grad_norm"] > 1e-3  # the comparison is of something
    for expected, got in zip(one["metrics"], many["metrics"], strict=True):
        assert got == pytest.approx(expected, rel=2e-5, abs=2e-6)
    for expected, got in zip(one["gradients"], many["gradients"], strict=bool(many["gradients"])):
        assert expected.keys() == got.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"gradient of {name}: {m}")
    for name, weight in one["weights"].items():
        torch.testing.assert_close(many["weights"][name], weight, rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"weight {name}: {m}")
    torch.testing.assert_close(many["outputs"], one["outputs"], rtol=1e-3, atol=2e-4)
