"""Whatever the training layout and the rollout layout, the engine samples what a single process does, before and after training."""

from __future__ import annotations

import gc
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_foreign import FakeForeign
from ranks import world
from sampled_models import make_engine, make_inputs, make_policy, sample, write_model

from aligner.errors import EngineError
from aligner.losses.sft import sft_loss
from aligner.models.config import Activation, Family, Normalization, PositionEmbedding
from aligner.parallel import transfer
from aligner.parallel.collectives import gather_objects
from aligner.parallel.topology import ParallelConfig
from aligner.protocols import Replica
from aligner.rollout.builtin import refit
from aligner.rollout.config import RoutingReplay, VerifyRefit
from aligner.rollout.engine.foreign import StreamedEngine
from aligner.rollout.engine.lifecycle import PhasedEngine
from aligner.rollout.engine.manifest import hf_manifest
from aligner.rollout.engine.work import WorkSharing
from aligner.types import Prompt, SamplingConfig

BUCKET_BYTES = 3000  # many buckets, and matrices that are cut over several
SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS = {  # name: (processes, training layout, rollout tensor-parallel sizes, of which reads the parameters in place, models)
    "pp2": (2, {"pp": 2}, [0, 2], None, ["qwen2", "gpt2", "mixtral"]),
    "pp2_interleaved": (2, {"pp": 2, "vpp": 2}, [1], None, ["qwen2"]),
    "tp2": (2, SP, [0, 1], 0, ["qwen2", "gpt2"]),
    "dp2": (2, {}, [2], None, ["qwen2"]),
    "cp2": (2, {"cp": 2}, [0, 2], 0, ["qwen2"]),
    "ep2": (2, {"ep": 2}, [0, 2], None, ["mixtral"]),
    "tp2_experts": (2, SP | {"etp": 2}, [0, 1], 0, ["mixtral"]),
    "tp2_pp2": (4, SP | {"pp": 2}, [0, 1, 4], None, ["qwen2", "gpt2"]),
    "tp4": (4, {"tp": 4, "sequence_parallel": True}, [0, 2], None, ["qwen2"]),  # 2 key-value groups on 4 ranks: not readable in place
    "ep2_pp2": (4, {"ep": 2, "pp": 2}, [0, 4], None, ["mixtral"]),
    "tp2_ep2": (4, SP | {"ep": 2}, [2, 4], None, ["mixtral"]),
}


def policy_of(directory: Path, topology, parallel: ParallelConfig):
    return make_policy(directory, topology, parallel, rows=1)


def engine_of(policy, tp: int, **settings):
    refit.MIB = BUCKET_BYTES
    routes = RoutingReplay.measure if policy.chunks[0].architecture.num_experts else RoutingReplay.none
    settings |= {"tp": tp, "refit_bucket_mib": 1, "verify_refit": VerifyRefit.checksum, "routing_replay": routes}
    return make_engine(policy, length=16, stops=tuple(range(5, 12)), **settings)


def generate(engine, inputs: dict) -> dict[int, tuple]:
    """(tokens, log-probs, finish reason, version, experts of each token and layer) by seed, of what this replica took of the prompts."""
    rollouts = sample(engine, inputs)
    experts = {r.seed: r.extras["routes"].sort().values.tolist() if r.extras else None for r in rollouts}
    return {r.seed: (r.response, r.logprobs, r.finish_reason.value, r.policy_version, experts[r.seed]) for r in rollouts}


def describe(engine) -> dict:
    replica = engine.replica
    return {
        "replica": (replica.index, replica.count, replica.is_leader),
        "in_place": isinstance(engine.engine.weights, refit.TrainingWeights),
        "layers": len(engine.engine.decoder.weights.layers),
    }


def is_away(tensors) -> bool:
    return all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)


def check_sleep(engine, policy, inputs: dict, rollouts: dict) -> None:
    """A sleeping engine holds no weights of its own, refuses to generate, and wakes with the policy's weights, which are away then."""
    own = [layer.qkv.weight for layer in engine.engine.decoder.weights.layers]
    training = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
    assert is_away(own) and not is_away(training)
    with pytest.raises(EngineError, match="while it sleeps"):
        generate(engine, inputs | {"prompts": inputs["prompts"] * 8, "seeds": inputs["seeds"] * 8})
    logprobs = policy.logprobs(inputs["batch"])
    for _ in range(2):
        assert is_away(own)
        engine.wake()
        engine.wake()
        assert is_away(training) and not is_away(own)
        assert generate(engine, inputs) == rollouts
        engine.sleep()
        assert torch.equal(policy.logprobs(inputs["batch"]), logprobs)


def error_of(action) -> str:
    """The message of the EngineError that an action raises, which must be the same on all ranks."""
    with pytest.raises(EngineError) as error:
        action()
    assert len(set(gather_objects(str(error.value)))) == 1
    return str(error.value)


def check_faults(policy, inputs: dict) -> None:
    """What is wrong on rank 1 alone is raised on both ranks, neither generates, and the next refit mends it. Two ranks, rollout.tp=2."""
    engine, rank = engine_of(policy, 2), dist.get_rank()
    engine.refit(1)
    before = generate(engine, inputs)
    weight = policy.module.decoder.layers[1].mlp.linear_fc2.weight.data
    kept = weight.clone()
    if rank == 1:
        weight[0, -1] = float("nan")  # in the half that rank 1 keeps
    message = error_of(lambda: engine.refit(2))
    assert "failed on rank 1: the weights are not finite: decoder.layers.1.mlp.linear_fc2.weight (1 of" in message
    assert "its last refit failed" in error_of(lambda: generate(engine, inputs))
    weight.copy_(kept)
    engine.refit(1)
    assert generate(engine, inputs) == before

    named = refit.named_parameters
    if rank == 1:
        refit.named_parameters = lambda chunks: dict(list(named(chunks).items())[1:])
    message = error_of(lambda: engine.refit(2))
    assert "failed on rank 1: refit: embedding.word_embeddings.weight of" in message and "missing" in message
    assert "its last refit failed" in error_of(lambda: generate(engine, inputs))
    refit.named_parameters = named
    engine.refit(1)
    assert generate(engine, inputs) == before


def check_stream(policy) -> None:
    """An engine of another package that fails on rank 1 alone: the others do not wait for it, and nothing is generated."""
    rank, foreign, prompts = dist.get_rank(), FakeForeign(), [Prompt(id=i, tokens=(3,), source="") for i in range(6)]
    replica = Replica(index=rank, count=dist.get_world_size())
    manifest = hf_manifest(policy.module.architecture, torch.float32)
    streamed = StreamedEngine(foreign, policy.export_weights, manifest, replica, bucket_bytes=4000, verified=True)
    engine = PhasedEngine(streamed, SamplingConfig(), WorkSharing(replica, None), offload=False)
    assert all(torch.equal(foreign.weights[name], tensor) for name, tensor in policy.export_weights())
    for method in ("begin", "load", "finish"):
        foreign.fails_at = method if rank == 1 else ""
        message = error_of(lambda: engine.refit(1))
        assert "failed on rank 1: RuntimeError: the package says no" in message and foreign.log[-1] == "abort"
        assert "its last refit failed" in error_of(lambda: engine.generate(prompts, range(6)))
    foreign.fails_at = ""
    engine.refit(7)
    parts = gather_objects([one for part in engine.generate(prompts, range(6)) for one in part])
    assert sorted(one.seed for part in parts for one in part) == list(range(6))
    assert {one.response for part in parts for one in part} == {(7,)}


def check_memory(engine) -> None:
    """At the first buckets of a refit: what there is beside the weights of both sides is two buckets at most."""
    copy, seen, there_before = transfer._copy, [], storages()

    def counting(copies) -> None:
        if len(seen) < 6:
            seen.append(sum(size for place, size in storages().items() if place not in there_before))
        copy(copies)

    with mock.patch.object(transfer, "_copy", counting):
        engine.refit(engine.version)
    assert 0 < max(seen) <= 2 * BUCKET_BYTES, seen


def storages() -> dict[int, int]:
    """Bytes of every storage that a tensor of this process has, by address."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def in_layouts(folder: Path, parallel: dict, models: list[str], rollout_tps: list[int], inputs: dict) -> dict[tuple[str, int], dict]:
    """What an engine of each rollout layout samples before and after a training step, by model and rollout layout."""
    with world(parallel) as topology:
        done = {name: in_rollout_layouts(folder / name, topology, parallel, rollout_tps, inputs) for name in models}
        return {(name, tp): result for name, results in done.items() for tp, result in results.items()}


def in_rollout_layouts(directory: Path, topology, parallel: dict, rollout_tps: list[int], inputs: dict) -> dict[int, dict]:
    policy = policy_of(directory, topology, ParallelConfig(**parallel))
    engines = {tp: engine_of(policy, tp) for tp in rollout_tps}
    results = {tp: describe(engine) | {"rollouts": generate(engine, inputs)} for tp, engine in engines.items()}
    policy.train_step(inputs["batch"], sft_loss)
    for tp, engine in engines.items():
        engine.refit(policy.version)
        results[tp]["trained_rollouts"] = generate(engine, inputs)
    for tp in [tp for tp, result in results.items() if not result["in_place"]][:1]:
        engine = engine_of(policy, tp, offload=True)
        engine.refit(policy.version)
        check_sleep(engine, policy, inputs, results[tp]["trained_rollouts"])
    if not parallel:
        check_faults(policy, inputs)
        check_stream(policy)
    elif "pp" in parallel and directory.name == "qwen2":
        check_memory(engines[0 if 0 in engines else 1])
    return results


def models() -> dict:
    """Tied with biases on query, key and value; tied with learned positions and biases everywhere; untied experts."""
    gpt2 = {"position_embedding": PositionEmbedding.learned, "normalization": Normalization.layer_norm, "linear_bias": True}
    gpt2 |= {"gated_mlp": False, "activation": Activation.gelu_tanh, "num_key_value_heads": 4}
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24, "tied_embeddings": False}
    return {
        "qwen2": {"family": Family.qwen2, "qkv_bias": True},
        "gpt2": {"family": Family.gpt2, **gpt2},
        "mixtral": {"family": Family.mixtral, **experts},
    }


@pytest.fixture(scope="module")
def inputs() -> dict:
    return make_inputs()


@pytest.fixture(scope="module")
def folder(topology, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name, fields in models().items():
        write_model(path / name, num_layers=4, **fields)
    return path


@pytest.fixture(scope="module")
def expected(folder, topology, inputs) -> dict[str, dict]:
    """By model: what one process samples before and after the training step."""
    results = {}
    for name in models():
        policy = policy_of(folder / name, topology, ParallelConfig())
        engine = engine_of(policy, 0)
        results[name] = {"rollouts": generate(engine, inputs)}
        policy.train_step(inputs["batch"], sft_loss)
        engine.refit(policy.version)
        results[name]["trained_rollouts"] = generate(engine, inputs)
        before, after = ([r[0] for r in results[name][key].values()] for key in ("rollouts", "trained_rollouts"))
        assert len(set(map(len, before))) > 1 and before != after, name  # the comparison is of something
    return results


def same(got: dict[int, tuple], expected: dict[int, tuple]) -> None:
    for seed, (response, logprobs, *rest) in got.items():
        assert (response, *rest) == (expected[seed][0], *expected[seed][2:]), seed
        assert logprobs == pytest.approx(expected[seed][1], abs=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rollout_layout_samples_the_single_processs_tokens(layout, folder, expected, inputs, on_ranks):
    nproc, parallel, rollout_tps, in_place, models = LAYOUTS[layout]
    ranks = on_ranks(in_layouts, nproc, folder, parallel, models, rollout_tps, inputs)
    for name in models:
        wanted = expected[name]
        for chosen in rollout_tps:
            tp = chosen or parallel.get("tp", 1)
            results = [rank[name, chosen] for rank in ranks]
            assert [r["replica"] for r in results] == [(rank // tp, nproc // tp, rank % tp == 0) for rank in range(nproc)]
            assert all(r["in_place"] == (chosen == in_place) and r["layers"] == 4 for r in results)
            for key in ("rollouts", "trained_rollouts"):
                assert sorted(seed for r in results[::tp] for seed in r[key]) == inputs["seeds"]  # each sampled by one replica
                for result in results:
                    same(result[key], wanted[key])
