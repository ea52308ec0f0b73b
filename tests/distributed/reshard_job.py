"""One training layout, several rollout layouts: what the engine samples before and after a training step, from every rank.

usage: reshard_job.py FOLDER OUTPUT      FOLDER/inputs.pt: `parallel` (fields of ParallelConfig), `models` (directories in FOLDER),
`rollout_tps`, prompts, seeds and a batch to train on. OUTPUT/rankN.pt: by (model, rollout tp), see `check_engine`.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from aligner.parallel import launch

BUCKET_BYTES = 3000  # many buckets, and matrices that are cut over several


def make_policy(directory: Path, topology, parallel):
    from aligner.models.config import ModelConfig
    from aligner.models.create import create_policy, read_architecture
    from aligner.models.training.optimizer import OptimizerConfig
    from aligner.models.training.trainable import Training

    config = ModelConfig(path=str(directory), make_vocab_divisible_by=8)
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0, eps=1e-3)
    training = Training(optimizer=optimizer, total_steps=4, micro_batch_size=1, temperature=0.9)
    return create_policy(config, read_architecture(config, vocab_size=0), parallel, topology, training)


def make_engine(policy, tp: int, *, offload: bool = False):
    from aligner.rollout.builtin import megatron
    from aligner.rollout.config import RolloutConfig, RoutingReplay, VerifyRefit
    from aligner.rollout.create import create_engine
    from aligner.types import SamplingConfig

    megatron.MIB = BUCKET_BYTES
    routes = RoutingReplay.measure if policy.chunks[0].architecture.num_experts else RoutingReplay.none
    sampling = SamplingConfig(temperature=0.9, top_k=40, top_p=0.98, max_response_length=16, stop_token_ids=list(range(5, 12)))
    verify = VerifyRefit.checksum
    sizes = {"max_batch_size": 4, "tp": tp, "refit_bucket_mib": 1, "offload": offload}
    config = RolloutConfig(sampling=sampling, verify_refit=verify, routing_replay=routes, **sizes)
    return create_engine(policy, config, eos_id=2)


def generate(engine, inputs: dict) -> dict[int, tuple]:
    """(tokens, log-probs, finish reason, version, experts of each token and layer) by seed, of what this replica took of the prompts."""
    from aligner.types import Prompt

    prompts = [Prompt(id=i, tokens=tuple(tokens), source=f"p:{i}") for i, tokens in enumerate(inputs["prompts"])]
    rollouts = [rollout for part in engine.generate(prompts, inputs["seeds"]) for rollout in part]
    experts = {r.seed: r.extras["routes"].sort().values.tolist() if r.extras else None for r in rollouts}
    return {r.seed: (r.response, r.logprobs, r.finish_reason.value, r.policy_version, experts[r.seed]) for r in rollouts}


def describe(engine) -> dict:
    from aligner.rollout.builtin.refit import TrainingWeights

    replica = engine.replica
    return {
        "replica": (replica.index, replica.count, replica.is_leader),
        "in_place": isinstance(engine.engine.weights, TrainingWeights),
        "layers": len(engine.engine.decoder.weights.layers),
    }


def is_away(tensors) -> bool:
    return all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)


def check_sleep(engine, policy, inputs: dict, rollouts: dict) -> None:
    """A sleeping engine holds no weights of its own, refuses to generate, and wakes with the policy's weights, which are away then."""
    from aligner.errors import EngineError

    own = [layer.qkv.weight for layer in engine.engine.decoder.weights.layers]
    training = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
    assert is_away(own) and not is_away(training)
    try:
        generate(engine, inputs | {"prompts": inputs["prompts"] * 8, "seeds": inputs["seeds"] * 8})
    except EngineError as error:
        assert "while it sleeps" in str(error)
    else:
        raise AssertionError("a sleeping engine generated")
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
    from aligner.errors import EngineError
    from aligner.parallel.collectives import gather_objects

    try:
        action()
    except EngineError as error:
        message = str(error)
    else:
        raise AssertionError("nothing was raised")
    assert len(set(gather_objects(message))) == 1
    return message


def check_faults(policy, inputs: dict) -> None:
    """What is wrong on rank 1 alone is raised on both ranks, neither generates, and the next refit mends it. Two ranks, rollout.tp=2."""
    from aligner.rollout.builtin import refit

    engine, rank = make_engine(policy, 2), dist.get_rank()
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
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes"))
    from fake_foreign import FakeForeign

    from aligner.parallel.collectives import gather_objects
    from aligner.protocols import Replica
    from aligner.rollout.engine.foreign import StreamedEngine
    from aligner.rollout.engine.lifecycle import PhasedEngine
    from aligner.rollout.engine.manifest import hf_manifest
    from aligner.rollout.engine.work import WorkSharing
    from aligner.types import Prompt, SamplingConfig

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
    from aligner.parallel import transfer

    copy, seen, there_before = transfer._copy, [], storages()

    def counting(copies) -> None:
        if len(seen) < 6:
            seen.append(sum(size for place, size in storages().items() if place not in there_before))
        copy(copies)

    transfer._copy = counting
    try:
        engine.refit(engine.version)
    finally:
        transfer._copy = copy
    assert 0 < max(seen) <= 2 * BUCKET_BYTES, seen


def storages() -> dict[int, int]:
    """Bytes of every storage that a tensor of this process has, by address."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def run(directory: Path, topology, parallel, inputs: dict) -> dict[int, dict]:
    from aligner.losses.sft import sft_loss

    policy = make_policy(directory, topology, parallel)
    engines = {tp: make_engine(policy, tp) for tp in inputs["rollout_tps"]}
    results = {tp: describe(engine) | {"rollouts": generate(engine, inputs)} for tp, engine in engines.items()}
    policy.train_step(inputs["batch"], sft_loss)
    for tp, engine in engines.items():
        engine.refit(policy.version)
        results[tp]["trained_rollouts"] = generate(engine, inputs)
    for tp in [tp for tp, result in results.items() if not result["in_place"]][:1]:
        engine = make_engine(policy, tp, offload=True)
        engine.refit(policy.version)
        check_sleep(engine, policy, inputs, results[tp]["trained_rollouts"])
    if not inputs["parallel"]:
        check_faults(policy, inputs)
        check_stream(policy)
    elif parallel.pp > 1 and directory.name == "qwen2":
        check_memory(engines[0 if 0 in engines else 1])
    return results


def main() -> None:
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    launch.initialize("gloo", timeout_seconds=90, fingerprint="reshard", collective_timeout_seconds=90)
    from aligner.parallel.topology import ParallelConfig, initialize

    inputs = torch.load(output / "inputs.pt", weights_only=False)
    parallel = ParallelConfig(**inputs["parallel"])
    topology = initialize(parallel, seed=11)
    results = {(name, tp): result for name in inputs["models"] for tp, result in run(folder / name, topology, parallel, inputs).items()}
    torch.save(results, output / f"rank{dist.get_rank()}.pt")
    launch.shutdown()


if __name__ == "__main__":
    main()
