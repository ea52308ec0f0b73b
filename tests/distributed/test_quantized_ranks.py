"""Two ranks of a replica in 8 bits have the codes of one process, and sample what it samples."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import joined, laid_out
from sampled_models import make_engine, make_inputs, make_policy, sample, write_model

from aligner.models.config import Family
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.builtin.refit import OwnWeights, TrainingWeights
from aligner.rollout.config import Precision, VerifyRefit

CASES = {  # of one process, and of two ranks in training's layout, in another one, and where training has pipeline stages
    "int8": {"precision": Precision.int8},
    "fp8": {"precision": Precision.fp8, "cache_precision": Precision.fp8},
}
TOLERANCE = {"int8": 1e-4, "fp8": 2e-2}  # a last bit may decide how an input, key or value is rounded
MODELS = {
    "dense": {"family": Family.qwen2, "qkv_bias": True},
    "mixture": {"family": Family.mixtral, "num_experts": 3, "experts_per_token": 2, "expert_ffn_hidden_size": 24},
}


def found_in(names: Iterable[str], directory: Path, topology, parallel: ParallelConfig, inputs: dict, **settings: Any) -> dict:
    """For each model and case the samples by seed, and the codes and scales that this rank has."""
    result = {}
    for name in names:
        policy = make_policy(directory / name, topology, parallel)
        for case, fields in CASES.items():
            engine = make_engine(policy, length=10, verify_refit=VerifyRefit.checksum, **fields, **settings)
            rollouts = {one.seed: (one.response, one.logprobs) for one in sample(engine, inputs)}
            weights = engine.engine.weights
            held = {key: (one.codes.float(), one.scales) for key, one in weights._rounded.items()}
            result[name, case] = {"rollouts": rollouts, "held": held, "is_in_place": isinstance(weights, TrainingWeights)}
            assert isinstance(weights, TrainingWeights | OwnWeights)
    return result


def two_ranks(layout: dict, directory: Path, inputs: dict, settings: dict) -> dict:
    found: dict = {}
    with joined():
        for name in MODELS:
            own = layout | ({"etp": 2, "sequence_parallel": True} if name == "mixture" and "tp" in layout else {})
            with laid_out(own) as topology:
                found |= found_in([name], directory, topology, ParallelConfig(**own), inputs, **settings)
    return found


@pytest.fixture(scope="module")
def inputs() -> dict:
    return make_inputs()


@pytest.fixture(scope="module")
def directory(topology, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name, fields in MODELS.items():
        write_model(path / name, **fields)
    return path


@pytest.fixture(scope="module")
def expected(directory, topology, inputs) -> dict:
    return found_in(MODELS, directory, topology, ParallelConfig(), inputs)


@pytest.mark.parametrize(("layout", "settings"), [({"tp": 2}, {}), ({"pp": 2}, {"tp": 2})], ids=["in_place", "own_weights"])
def test_two_ranks_are_one_process(layout, settings, on_ranks, directory, expected, inputs):
    ranks = on_ranks(two_ranks, 2, layout, directory, inputs, settings)
    for (model, case), one in expected.items():
        for got in (rank[model, case] for rank in ranks):
            assert got["is_in_place"] == (not settings) and one["is_in_place"]
            for seed, (response, logprobs) in one["rollouts"].items():
                assert got["rollouts"][seed][0] == response
                assert got["rollouts"][seed][1] == pytest.approx(logprobs, abs=TOLERANCE[case])
        for key, (codes, scales) in one["held"].items():
            own = [rank[model, case]["held"][key] for rank in ranks]
            if key.split(".")[-2] in ("linear_proj", "linear_fc2"):  # inputs are split: one scale for each row
                assert torch.equal(torch.cat([part for part, _ in own], dim=1), codes)
                assert all(torch.equal(part, scales) for _, part in own)
            else:  # rows are: in the order of the parts that a layer fuses
                assert sorted(torch.cat([part for part, _ in own]).sum(dim=1).tolist()) == sorted(codes.sum(dim=1).tolist())
                assert sorted(torch.cat([part for _, part in own])[:, 0].tolist()) == sorted(scales[:, 0].tolist())
