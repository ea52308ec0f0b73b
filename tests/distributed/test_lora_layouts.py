"""Adapters in every layout: the single process's log-probs, losses, gradients, gradient norms and merged weights, from an adapter in PEFT's
format and from another layout's checkpoint."""

from __future__ import annotations

from pathlib import Path

import layout_job
import lora_job as job
import pytest
import torch

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> Path:
    """An adapter for each model, whose B's are not zero."""
    folder = tmp_path_factory.mktemp("adapters")
    for model in job.MODELS:
        layout_job.write_adapter(job.spec_of(model, folder))
    return folder


@pytest.fixture(scope="module")
def one(adapters, topology) -> dict[tuple[str, str], dict]:
    """What a single process makes of each kind of each model."""
    wanted = {(model, kind) for model, kinds, *_ in job.LAYOUTS.values() for kind in kinds}
    return {(model, kind): job.train(kind, job.spec_of(model, adapters), topology) for model, kind in sorted(wanted)}


@pytest.fixture
def many(adapters, run_distributed) -> dict[str, dict]:
    """What two processes make of it, layout by layout; the job runs once."""
    output = adapters / "results" / "found.pt"
    if not output.exists():
        output.parent.mkdir()
        run_distributed(FOLDER / "lora_job.py", 2, adapters, output, timeout=300)
    return torch.load(output)


@pytest.mark.parametrize("layout", job.LAYOUTS)
def test_adapters_equal_the_single_process(layout, one, many):
    model, kinds, *_ = job.LAYOUTS[layout]
    for kind in kinds:
        expected, got = one[model, kind], many[layout][kind]
        assert expected["metrics"]["optim/grad_norm"] > 0.5  # it was clipped
        assert got["metrics"] == pytest.approx(expected["metrics"], rel=2e-5, abs=2e-6)
        torch.testing.assert_close(got["outputs"], expected["outputs"], rtol=1e-4, atol=5e-5)
        assert sum("lora_" in name for name in expected["gradients"]) >= len(expected["gradients"]) - 2  # a value model has a head
        assert all(gradient.abs().max() > 0 for gradient in expected["gradients"].values())
        assert_close(expected["gradients"], got["gradients"], atol=1e-6)
        assert_end(expected["end"], got["end"])


@pytest.mark.parametrize("layout", job.MOVES)
def test_adapters_of_another_layout_go_on(layout, one, many):
    """With the optimizer's moments: the second step is that of the run that was not interrupted."""
    assert_end(one[job.LAYOUTS[layout][0], "dpo"]["end"], many[layout]["moved"])


@pytest.mark.parametrize("layout", job.DROPPING)
def test_ranks_drop_the_same_of_what_they_all_have(layout, many):
    """And different numbers of what each has its part of; a resumed run goes on with the same ones."""
    found, is_resumed = many[layout]["drops"]
    assert is_resumed or layout != job.RESUMED
    assert {whole for whole, _, _ in found} == {True, False}
    assert all(whole == same and 0.4 < part < 0.6 for whole, same, part in found)


@pytest.mark.parametrize("layout", job.LAYOUTS)
def test_new_adapters_are_those_of_a_single_process(layout, adapters, many, topology):
    """Whatever ranks have which part of them: drawn for the whole width of a layer, and B's of 0."""
    expected = job.new(job.spec_of(job.LAYOUTS[layout][0], adapters, path=""), topology)
    assert expected.keys() == many[layout]["new"].keys()
    assert all(torch.equal(many[layout]["new"][name], tensor) for name, tensor in expected.items())
    assert all(tensor.any() == ("lora_A" in name) for name, tensor in expected.items())


def assert_end(expected: dict, got: dict) -> None:
    assert got["metrics"] == pytest.approx(expected["metrics"], rel=2e-5, abs=2e-6)
    torch.testing.assert_close(got["outputs"], expected["outputs"], rtol=1e-4, atol=5e-5)
    assert_close(expected["merged"], got["merged"], atol=2e-6)


def assert_close(expected: dict, got: dict, *, atol: float) -> None:
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
