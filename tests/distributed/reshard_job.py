"""One training layout, several rollout layouts: what the engine samples before and after a training step, from every rank.

usage: reshard_job.py FOLDER OUTPUT      FOLDER/inputs.pt: `parallel` (fields of ParallelConfig), `models` (directories in FOLDER),
`rollout_tps`, prompts, seeds and a batch to train on. OUTPUT/rankN.pt: by (model, rollout tp), see `check_engine`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from aligner.parallel import launch

BUCKET_BYTES = 3000  # many buckets, and matrices that are cut over several


def make_policy(directory: Path, topology, parallel):
    from aligner.models.config import ModelConfig
    from aligner.models.create import create_policy, read_architecture
    from aligner.models.optimizer import OptimizerConfig
    from aligner.models.trainable import Training

    config = ModelConfig(path=str(directory), make_vocab_divisible_by=8)
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0, eps=1e-3)
    training = Training(optimizer=optimizer, total_steps=4, micro_batch_size=1, temperature=0.9)
    return create_policy(config, read_architecture(config, vocab_size=0), parallel, topology, training)


def make_engine(policy, tp: int, *, offload: bool = False):
    from aligner.rollout import megatron
    from aligner.rollout.config import RolloutConfig
    from aligner.types import SamplingConfig

    megatron.MIB = BUCKET_BYTES
    sampling = SamplingConfig(temperature=0.9, top_k=40, top_p=0.98, max_response_length=16, stop_token_ids=list(range(5, 12)))
    return megatron.MegatronEngine(
        policy.chunks, RolloutConfig(sampling=sampling, max_batch_size=4, tp=tp, refit_bucket_mib=1, offload=offload), eos_id=2
    )


def generate(engine, inputs: dict) -> dict[int, tuple]:
    """(tokens, log-probs, finish reason, version) by seed, of this replica's share of the prompts."""
    from aligner.parallel.collectives import shard_bounds
    from aligner.types import Prompt

    prompts = [Prompt(id=i, tokens=tuple(tokens), source=f"p:{i}") for i, tokens in enumerate(inputs["prompts"])]
    start, stop = shard_bounds(len(prompts), shard=engine.replica.index, num_shards=engine.replica.count)
    rollouts = [rollout for part in engine.generate(prompts[start:stop], inputs["seeds"][start:stop]) for rollout in part]
    return {r.seed: (r.response, r.logprobs, r.finish_reason.value, r.policy_version) for r in rollouts}


def describe(engine) -> dict:
    from aligner.rollout.refit import TrainingWeights

    replica = engine.replica
    return {
        "replica": (replica.index, replica.count, replica.is_leader),
        "in_place": isinstance(engine._weights, TrainingWeights),
        "layers": len(engine.decoder.weights.layers),
    }


def is_away(tensors) -> bool:
    return all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)


def check_sleep(engine, policy, inputs: dict, rollouts: dict) -> None:
    """A sleeping engine holds no weights of its own, refuses to generate, and wakes with the policy's weights, which are away then."""
    from aligner.errors import EngineError

    own = [layer.qkv.weight for layer in engine.decoder.weights.layers]
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
        assert engine.is_asleep and is_away(own)
        engine.wake()
        engine.wake()
        assert is_away(training) and not is_away(own)
        assert generate(engine, inputs) == rollouts
        engine.sleep()
        assert torch.equal(policy.logprobs(inputs["batch"]), logprobs)


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
