"""Adapters in every layout: the single process's log-probs, losses, gradients, gradient norms and merged weights, from an adapter in PEFT's
format. That they continue at other layouts is in test_optimizer_state.py."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from layout_models import (
    Spec,
    assert_close,
    assert_metrics,
    exported,
    gradients,
    make_added,
    make_batch,
    make_losses,
    make_model,
    train_step,
    write_adapter,
)
from ranks import joined, laid_out

from aligner.models.checkpoint import checkpoint
from aligner.models.config import LoraInit
from aligner.models.modules.lora import Adapter
from aligner.models.modules.peft import export_adapters
from aligner.models.training.optimizer import OptimizerConfig

SP = {"tp": 2, "sequence_parallel": True}
MODELS = {"dense": ["qkv", "proj", "fc1", "fc2"], "experts": ["qkv", "proj", "experts"], "dora": ["q", "v", "proj", "fc1", "fc2"]}
MODELS["pissa"] = MODELS["dora"]
LAYOUTS = {  # name: (model, kinds, fields of ParallelConfig, fields of ModelConfig)
    "tp2_shared_prompts": ("dense", ["dpo"], {"tp": 2}, {"micro_batch_tokens": 48, "packing": True, "share_prompts": True}),
    "pp2_recompute": ("dense", ["dpo", "value", "head"], {"pp": 2}, {"recompute": "full"}),
    "tp2_etp2": ("experts", ["dpo"], SP | {"etp": 2}, {}),
    "tp2_ep2": ("experts", ["dpo"], SP | {"ep": 2}, {}),
    "tp2_dora": ("dora", ["dpo"], {"tp": 2}, {}),
    "tp2_sp_dora": ("dora", ["dpo", "value", "head"], SP, {"recompute": "full"}),
    "tp2_sp_pissa": ("pissa", ["dpo"], SP, {}),
    "pp2_pissa": ("pissa", ["dpo"], {"pp": 2}, {"recompute": "full"}),
}
DROPPING = ("tp2_shared_prompts", "tp2_etp2")  # that show which inputs of adapters are dropped
RESUMED = "tp2_shared_prompts"  # that of them which goes on from its own checkpoint, too


def spec_of(name: str, adapters: Path, **lora) -> Spec:
    """The settings of a layout; of a name of `MODELS`: of one process."""
    model, _, parallel, settings = LAYOUTS.get(name, (name, [], {}, {}))
    own = {"init": LoraInit.pissa} if model == "pissa" else {"path": str(adapters / model), "dora": model == "dora"}
    lora = {"rank": 3, "alpha": 6.0, "targets": MODELS[model]} | own | lora
    return Spec(parallel=parallel, model=settings, experts=model == "experts", lora=lora, distributed_optimizer=True)


def start(kind: str, spec: Spec, topology):
    """A model of which every update counts: of a gradient that is only rounding Adam would make another step in every layout."""
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-3, warmup_steps=0, clip_grad=0.5, eps=1e-4)
    return make_model(kind, spec, topology, optimizer)


def outputs_of(kind: str, model) -> torch.Tensor:
    if kind == "head":
        return torch.stack([*model.per_token(make_batch(kind), "logprobs", "values").values()])
    return (model.values if kind == "value" else model.logprobs)(make_batch(kind))


def step(kind: str, model) -> dict[str, float]:
    return train_step(model, make_batch(kind), make_losses(kind)[0], make_added(kind))


def end(kind: str, model) -> dict:
    """The second step, and what it leaves."""
    return {"metrics": step(kind, model), "merged": exported(model.model.chunks), "outputs": outputs_of(kind, model)}


def train(kind: str, spec: Spec, topology) -> dict:
    model = start(kind, spec, topology)
    found = {"outputs": outputs_of(kind, model), "metrics": step(kind, model), "gradients": gradients(model.model.chunks)}
    return found | {"end": end(kind, model)}


def new(spec: Spec, topology) -> dict[str, torch.Tensor]:
    """The adapters that training starts from where none are given, whole."""
    return {name: tensor.clone() for name, tensor in export_adapters(start("dpo", spec, topology).model.chunks)}


@contextmanager
def noting_drops(found: list):
    """Note of each adapter's inputs whether the tensor-parallel ranks drop the same numbers, and whether they are to."""
    real = Adapter._dropped

    def noting(self, x: torch.Tensor) -> torch.Tensor:
        dropped = real(self, x)
        zeros = (dropped == 0).contiguous()
        both = [torch.empty_like(zeros) for _ in range(self.group.size())]
        dist.all_gather(both, zeros, group=self.group)
        whole = self.pairs.splits_output and not self.splits_sequence
        found.append((whole, torch.equal(*both), float(zeros.float().mean())))
        return dropped

    with mock.patch.object(Adapter, "_dropped", noting):
        yield


def drop(spec: Spec, topology, saved: Path | None) -> tuple[list[tuple[bool, bool, float]], bool | None]:
    """(of every adapter's input in one step: whether the ranks have the same one, whether they drop the same of it, which part; whether
    a run that is resumed behind that step from `saved` drops what one does that was not interrupted)."""
    found: list = []
    model = start("dpo", spec, topology)
    with noting_drops(found):
        step("dpo", model)
    if saved is None:
        return found, None
    checkpoint.save(saved, model.model, checkpoint.SaveRequest(step=1, state={}))
    again, expected = start("dpo", spec, topology), step("dpo", model)
    checkpoint.load(again.model, checkpoint.resolve(saved))
    return found, step("dpo", again) == expected


def in_every_layout(adapters: Path) -> dict[str, dict]:
    results = {}
    with joined():
        for name, (_, kinds, parallel, _) in LAYOUTS.items():
            spec = spec_of(name, adapters)
            with laid_out(parallel, seed=1) as topology:  # the single process's
                results[name] = {kind: train(kind, spec, topology) for kind in kinds}
                results[name]["new"] = new(spec_of(name, adapters, path=""), topology)
                if name in DROPPING:
                    saved = adapters / "drops" if name == RESUMED else None
                    results[name]["drops"] = drop(spec_of(name, adapters, dropout=0.5), topology, saved)
        return results if dist.get_rank() == 0 else {}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> Path:
    """An adapter for each model, whose B's are not zero."""
    folder = tmp_path_factory.mktemp("adapters")
    for model in MODELS.keys() - {"pissa"}:  # which starts from the weights
        write_adapter(spec_of(model, folder))
    return folder


@pytest.fixture(scope="module")
def one(adapters, topology) -> dict[tuple[str, str], dict]:
    wanted = {(model, kind) for model, kinds, *_ in LAYOUTS.values() for kind in kinds}
    return {(model, kind): train(kind, spec_of(model, adapters), topology) for model, kind in sorted(wanted)}


@pytest.fixture(scope="module")
def many(adapters, on_ranks) -> dict[str, dict]:
    return on_ranks(in_every_layout, 2, adapters)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_equal_the_single_process(layout, one, many):
    model, kinds, *_ = LAYOUTS[layout]
    for kind in kinds:
        expected, got = one[model, kind], many[layout][kind]
        assert expected["metrics"]["optim/grad_norm"] > 0.5  # it was clipped
        assert_metrics(got["metrics"], expected["metrics"])
        torch.testing.assert_close(got["outputs"], expected["outputs"], rtol=1e-4, atol=5e-5)
        assert sum("lora_" in name for name in expected["gradients"]) >= len(expected["gradients"]) - 2  # a value model has a head
        assert all(gradient.abs().max() > 0 for gradient in expected["gradients"].values())
        assert_close(got["gradients"], expected["gradients"], atol=1e-6)
        assert_end(expected["end"], got["end"])


@pytest.mark.parametrize("layout", DROPPING)
def test_ranks_drop_the_same_of_what_they_all_have(layout, many):
    """And different numbers of what each has its part of; a resumed run goes on with the same ones."""
    found, is_resumed = many[layout]["drops"]
    assert is_resumed or layout != RESUMED
    assert {whole for whole, _, _ in found} == {True, False}
    assert all(whole == same and 0.4 < part < 0.6 for whole, same, part in found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_adapters_are_those_of_a_single_process(layout, adapters, many, topology):
    """Whatever ranks have which part of them: drawn for the whole width of a layer, and B's of 0; with PiSSA
    both of the whole weight."""
    expected = new(spec_of(LAYOUTS[layout][0], adapters, path=""), topology)
    assert expected.keys() == many[layout]["new"].keys()
    for name, tensor in expected.items():
        if name.endswith("lora_magnitude_vector"):  # norms of rows that may be split are sums of two
            torch.testing.assert_close(many[layout]["new"][name], tensor, rtol=1e-6, atol=0)
            continue
        assert torch.equal(many[layout]["new"][name], tensor) and tensor.any() == ("lora_A" in name or LAYOUTS[layout][0] == "pissa")


def assert_end(expected: dict, got: dict) -> None:
    assert_metrics(got["metrics"], expected["metrics"])
    torch.testing.assert_close(got["outputs"], expected["outputs"], rtol=1e-4, atol=5e-5)
    assert_close(got["merged"], expected["merged"], atol=2e-6)
