"""Two ranks: collectives; tensor-parallel generation, or what data-parallel replicas must do together when something is wrong.

usage: engine_job.py TP MODEL_DIRECTORY OUTPUT_DIRECTORY    (TP is 2, or 1 for two replicas)
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist

from aligner.parallel import launch


def check_collectives() -> None:
    from aligner.parallel import collectives, micro_batches
    from aligner.telemetry.metrics import Distribution, Max, Mean, Min, Sum, values

    rank, world, cpu = dist.get_rank(), dist.group.WORLD, torch.device("cpu")
    rows = torch.arange(10).reshape(5, 2)
    for shares in ([[0, 3], [1, 2, 4]], [[4, 1, 0, 2, 3], []], [[], [3, 0, 2, 1, 4]]):  # any assignment, empty shares too
        assert torch.equal(collectives.gather_assigned_rows(rows[shares[rank]], shares, group=world), rows)
    start, stop = micro_batches.shard_bounds(6, shard=rank, num_shards=2, unit=2)
    assert (stop - start) == (2, 4)[rank]
    assert collectives.gather_objects({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert collectives.broadcast_object(rank, src=1) == 1
    assert collectives.all_ranks(True, cpu) and not collectives.all_ranks(rank == 0, cpu)
    # Means by the global count: (1 + 2 + 3) / 3 and 10 / 1 are 4, not 6.
    mean = Mean(total=6.0, count=3) if rank == 0 else Mean(total=10.0, count=1)
    metrics = {"a/mean": mean, "a/max": Max(maximum=-1.0 - rank), "a/sum": Sum(total=rank + 1)}
    reduced = collectives.reduce_metrics(metrics, world, cpu)
    assert {name: metric.value() for name, metric in reduced.items()} == {"a/mean": 4.0, "a/max": -1.0, "a/sum": 3.0}
    # 1 to 100 on one rank and 101 to 400 on the other: quantiles are of all 400, within their resolution.
    numbers = torch.arange(1.0, 101.0) if rank == 0 else torch.arange(101.0, 401.0)
    numbers = numbers / 2
    gap = {"a/gap": Distribution.of(numbers, torch.ones_like(numbers, dtype=torch.bool)), "a/min": Min(minimum=rank - 3.0)}
    found = values(collectives.reduce_metrics(gap, world, cpu))
    exact = {"a/gap": 100.25, "a/gap_max": 200.0, "a/gap_p50": 100.0, "a/gap_p90": 180.0, "a/gap_p99": 198.0, "a/gap_p999": 200.0}
    assert found.pop("a/min") == -3.0 and (found["a/gap"], found["a/gap_max"]) == (100.25, 200.0)
    assert all(abs(found[name] / value - 1) < 0.016 for name, value in exact.items())
    wide = collectives.gather_columns(torch.full((2, 1 + rank), float(rank)), world)
    assert wide.tolist() == [[0.0, 1.0, 1.0]] * 2
    message = raised(ValueError, lambda: collectives.raise_everywhere(ValueError("only rank 1") if rank == 1 else None))
    assert message == "only rank 1"
    collectives.raise_everywhere(None)


def check_a_failing_environment_fails_on_all_ranks(policy, inputs: dict) -> None:
    """It is called on the leading rank only; the other one hears of it."""
    from fake_environment import Repeats

    from aligner.environments.exchange import EpisodeError
    from aligner.errors import EngineError

    def fail(self, state, turn):
        raise OSError("connection refused")

    whole, Repeats.step = Repeats.step, fail
    message = raised(EpisodeError if dist.get_rank() == 0 else EngineError, lambda: converse(policy, inputs))
    said = ("connection refused (at ", "; it was in turn 1") if dist.get_rank() == 0 else ("see its own message",)
    assert all(one in message for one in said), message
    Repeats.step = whole


def check_ranks_of_a_replica_follow() -> None:
    """Both ranks are one of two replicas; the other one is its leader's doing here."""
    from torch.distributed import HashStore

    from aligner.errors import EngineError
    from aligner.parallel.collectives import gather_objects
    from aligner.protocols import Replica
    from aligner.rollout.engine import GenRequest
    from aligner.rollout.engine.work import Queue, SharedWork, divide

    class Gone(HashStore):
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("connection reset")

    rank = dist.get_rank()
    division = divide([GenRequest(index=index, tokens=(index,), seed=0) for index in range(8)], 2)
    replica = Replica(index=1, count=2, is_leader=rank == 0)
    for store, ends in ((HashStore(), True), (Gone(), False)):
        queue = Queue(store, "1", 2)  # only the leader's is asked
        work = SharedWork(division, replica, queue, dist.group.WORLD)
        taken = [[request.index for request in work.take(2)]]
        if ends:
            for others in (0, 2, 0):
                if rank == 0:
                    queue.add(others)
                taken.append([request.index for request in work.take(2)])
            assert gather_objects(taken) == [[[1, 3], [4], [7], []]] * 2
        else:
            message = raised(EngineError, lambda work=work: work.take(2))
            assert ("it did not answer (connection reset)" if rank == 0 else "see its own message") in message


def raised(kind: type[Exception], action: Callable[[], object]) -> str:
    """The message of the error that `action` must raise."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def load(directory: Path, topology, parallel, *, divisor: int, **fields):
    from aligner.models.config import ModelConfig
    from aligner.models.create import create_policy, read_architecture
    from aligner.models.training.optimizer import OptimizerConfig
    from aligner.models.training.trainable import Training

    config = ModelConfig(path=str(directory), make_vocab_divisible_by=divisor, **fields)
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0, eps=1e-3)
    training = Training(optimizer=optimizer, total_steps=4, micro_batch_size=2, temperature=0.9)
    return create_policy(config, read_architecture(config, vocab_size=0), parallel, topology, training)


def generate(policy, inputs: dict, *, tp: int = 0) -> dict[int, tuple]:
    """(tokens, log-probs, finish reason) by seed."""
    from aligner.rollout.config import RolloutConfig
    from aligner.rollout.create import create_engine
    from aligner.types import Prompt, SamplingConfig

    sampling = SamplingConfig(temperature=0.9, top_k=40, top_p=0.98, max_response_length=24, stop_token_ids=[5, 6, 7])
    engine = create_engine(policy, RolloutConfig(sampling=sampling, max_batch_size=4, tp=tp), eos_id=2)
    prompts = [Prompt(id=i, tokens=tuple(tokens), source=f"p:{i}") for i, tokens in enumerate(inputs["prompts"])]
    rollouts = [rollout for part in engine.generate(prompts, inputs["seeds"]) for rollout in part]
    return {r.seed: (r.response, r.logprobs, r.finish_reason.value) for r in rollouts}


class Lengths:
    """A reward model: how long the response is."""

    def score(self, responses) -> Future:
        from aligner.types import Scores

        scores: Future = Future()
        scores.set_result(Scores.of(torch.tensor([float(len(one.response)) for one in responses])))
        return scores

    def close(self) -> None: ...


def converse(policy, inputs: dict) -> dict[int, tuple]:
    """Episodes of several turns, by seed; on the rank that leads."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes"))
    from fake_environment import repeats

    from aligner.rollout.config import RolloutConfig
    from aligner.rollout.create import create_engine
    from aligner.types import Prompt, SamplingConfig

    sampling = SamplingConfig(temperature=0.9, max_response_length=24, stop_token_ids=list(range(5, 20)))
    engine = create_engine(policy, RolloutConfig(sampling=sampling, max_batch_size=4), eos_id=2, follow_up=repeats())
    prompts = [Prompt(id=i, tokens=tuple(tokens), source=f"p:{i}") for i, tokens in enumerate(inputs["prompts"])]
    episodes = [episode for part in engine.generate(prompts, inputs["seeds"]) for episode in part]
    return {e.seed: (e.response, e.logprobs, e.written, e.num_turns, e.reward) for e in episodes}


def collect(policy, inputs: dict):
    """What `collect` gives where the replicas share the prompts; the reward is the length of the response."""
    from aligner.online import collect as rollouts
    from aligner.rollout.config import RolloutConfig, ShareWork
    from aligner.rollout.create import create_engine
    from aligner.types import Prompt, SamplingConfig

    sampling = SamplingConfig(temperature=0.9, top_k=40, top_p=0.98, max_response_length=24, stop_token_ids=[5, 6, 7])
    engine = create_engine(policy, RolloutConfig(sampling=sampling, max_batch_size=2, share_work=ShareWork.always), eos_id=2)
    prompts = [Prompt(id=i, tokens=tuple(tokens), source=f"p:{i}") for i, tokens in enumerate(inputs["prompts"])]
    return rollouts.collect(engine, prompts, inputs["seeds"], scorers=rollouts.Scorers(reward=Lengths()))


def sampled_ahead(directory: Path, topology, parallel, inputs: dict) -> None:
    """Rounds that are sampled while the policy trains, each held and given new weights before its tenth step: all ranks of a replica take
    them before the same token, and every log-prob is the trainer's under the version that sampled it."""
    from aligner.data.collate import EpochSampler, rollout_batch
    from aligner.loop.loop import Clock
    from aligner.losses.sft import sft_loss
    from aligner.online.async_rollout_source import AsyncRolloutSource
    from aligner.online.collect import Scorers
    from aligner.online.task import OnlineTask, Validation
    from aligner.parallel.collectives import gather_objects
    from aligner.rollout.config import AsynchronousConfig, RolloutConfig
    from aligner.rollout.create import create_engine
    from aligner.types import Prompt, SamplingConfig

    policy = load(directory, topology, parallel, divisor=8)
    ahead = AsynchronousConfig(max_staleness=1, recompute=True, timeout_seconds=60)
    sampling = SamplingConfig(temperature=0.9, max_response_length=24, stop_token_ids=[5])
    engine = create_engine(policy, RolloutConfig(sampling=sampling, max_batch_size=4, asynchronous=ahead), eos_id=2)
    prompts = [Prompt(id=i, tokens=tuple(tokens), source=f"p:{i}") for i, tokens in enumerate(inputs["prompts"])]
    order = EpochSampler(len(prompts), 4, seed=1)
    parts = {
        "engine": engine,
        "reference": None,
        "judges": Scorers(reward=Lengths()),
        "topology": topology,
        "train": prompts,
        "order": order,
    }
    rest = {"validation": Validation(sampling=sampling), "decode": str, "seed": 3}
    rounds = AsyncRolloutSource(OnlineTask(**parts, **rest, max_response_length=24), 2, ahead, engine.gate, last=4)
    gate, steps = engine.gate, Counter()
    between_steps, num_holds = gate.between_steps, gate._wanted

    def wait_at_the_tenth(settle: Callable[[], None]) -> int | None:
        """Of a round but the first: until its weights are to be replaced."""
        number = gate._ended + 1
        steps[number] += 1
        if steps[number] == 10:
            assert eventually(lambda: gate._wanted - num_holds >= number - 1)
        return between_steps(settle)

    gate.between_steps = wait_at_the_tenth
    weights, taken = [_copy(policy)], []
    for step in range(1, 5):
        taken += rounds.take(step, Clock()).rollouts
        policy.train_step(inputs["batch"], sft_loss)
        weights.append(_copy(policy))
        assert step == 4 or eventually(lambda step=step: steps[step + 1] >= 10 or gate._ended > step)
        rounds.trained(policy.version)
    engine.shutdown()
    rounds.close()
    batch, partial = rollout_batch(taken, 0), 0
    found = []
    for version in weights:
        with torch.no_grad():
            for parameter, saved in zip(policy.module.parameters(), version, strict=True):
                parameter.copy_(saved)
        found.append(policy.logprobs(batch))
    for row, rollout in enumerate(taken):
        by_version = [logprobs[row, batch.loss_mask[row]] for logprobs in found]
        oldest = rollout.policy_version if rollout.oldest_version is None else rollout.oldest_version
        old, new = ((by_version[v] - torch.tensor(rollout.logprobs)).abs() < 1e-4 for v in (oldest, rollout.policy_version))
        first_new = int((~old).float().argmax()) if not old.all() else len(old)
        assert bool(new[first_new:].all()), (row, rollout, old, new)
        partial += oldest < rollout.policy_version
    assert partial > 2
    assert len(set(map(str, gather_objects([(one.seed, one.response, one.oldest_version, one.policy_version) for one in taken])))) == 1


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it came true within a minute."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def _copy(policy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in policy.module.parameters()]


def tensor_parallel(directory: Path, topology, parallel, inputs: dict) -> dict:
    from aligner.losses.sft import sft_loss

    result = {}
    for divisor in (8, 128):  # with 128, rank 1 holds nothing but vocabulary padding
        policy = load(directory, topology, parallel, divisor=divisor)
        vocabulary = policy.module.vocabulary_weight()[0].shape[0]
        assert vocabulary == {8: (32, 29), 128: (61, 0)}[divisor][topology.tp_rank]
        first = {"rollouts": generate(policy, inputs), "logprobs": policy.logprobs(inputs["batch"])}
        metrics = policy.train_step(inputs["batch"], sft_loss)
        first |= {"metrics": {name: metric.value() for name, metric in metrics.items()}}
        first |= {"trained_rollouts": generate(policy, inputs), "trained_logprobs": policy.logprobs(inputs["batch"])}
        first |= {"episodes": converse(policy, inputs)}
        result[divisor] = first
    check_a_failing_environment_fails_on_all_ranks(policy, inputs)
    return result


def batch_invariant(directory: Path, topology, inputs: dict) -> dict:
    """Sampler and trainer to the bit, on two ranks, and with a sampler of one rank each; with and without sequence parallelism."""
    from aligner.parallel.collectives import gather_objects
    from aligner.parallel.topology import ParallelConfig
    from aligner.types import LabeledBatch, LossOutput

    policy = load(directory, topology, ParallelConfig(tp=2), divisor=8, batch_invariant=True)
    rollouts = generate(policy, inputs)
    rows = [(*prompt, *rollouts[seed][0]) for prompt, seed in zip(inputs["prompts"], inputs["seeds"], strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.stack([torch.tensor([*row, *[0] * (int(lengths.max()) - len(row))]) for row in rows])
    starts = torch.tensor([len(prompt) for prompt in inputs["prompts"]])[:, None]
    positions = torch.arange(tokens.shape[1])
    batch = LabeledBatch(tokens=tokens, lengths=lengths, loss_mask=(positions >= starts) & (positions < lengths[:, None]))
    sampled = torch.zeros(batch.loss_mask.shape)
    sampled[batch.loss_mask] = torch.tensor([logprob for seed in inputs["seeds"] for logprob in rollouts[seed][1]])
    assert torch.equal(policy.logprobs(batch), sampled)
    alone: dict[int, tuple] = {}
    for part in gather_objects(generate(policy, inputs, tp=1)):
        alone |= part
    assert alone == rollouts
    split = load(directory, topology, ParallelConfig(tp=2, sequence_parallel=True), divisor=128, batch_invariant=True)
    assert torch.equal(split.logprobs(batch), sampled)
    seen = []

    def loss(outputs, part) -> LossOutput:
        seen.extend(outputs.logprobs.detach()[part.loss_mask].tolist())
        return LossOutput(total=-outputs.logprobs[part.loss_mask].sum(), count=part.loss_mask.sum(), metrics={})

    norms = [model.train_step(batch, loss)["optim/grad_norm"].value() for model in (policy, split)]
    assert sorted(seen) == sorted(sampled[batch.loss_mask].tolist() * 2)
    return {"rollouts": rollouts, "logprobs": sampled, "grad_norms": norms, "batch": batch}


def data_parallel(directory: Path, topology, parallel, inputs: dict, output: Path) -> dict:
    """Fewer rows than replicas; errors that only one rank can see reach both."""
    from aligner.errors import AlignerError, CheckpointError, ConfigError
    from aligner.losses.sft import sft_loss
    from aligner.models.checkpoint import checkpoint
    from aligner.models.training.guard import Guard, GuardConfig, NonFinite
    from aligner.types import LossOutput
    from aligner.types.rows import select_rows

    policy = load(directory, topology, parallel, divisor=8)
    one = select_rows(inputs["batch"], 0, 1)
    result = {"logprobs": policy.logprobs(inputs["batch"]), "one": policy.logprobs(one), "collected": collect(policy, inputs)}
    result["small"] = raised(ConfigError, lambda: policy.train_step(one, sft_loss))

    def broken(outputs, part) -> LossOutput:
        bad = float("nan") if topology.dp_rank == 1 else 1.0
        return LossOutput(total=outputs.logprobs.sum() * bad, count=part.loss_mask.sum(), metrics={})

    result["nan"] = raised(AlignerError, lambda: policy.train_step(inputs["batch"], broken))
    policy.model.guard = Guard(GuardConfig(non_finite=NonFinite.skip))
    result["skipped"] = policy.train_step(inputs["batch"], broken)["optim/skipped"].value()  # on one replica; both leave it out
    assert policy.version == 0 and torch.equal(policy.logprobs(inputs["batch"]), result["logprobs"])
    request = checkpoint.SaveRequest(step=1, state={"thing": object()})  # only rank 0 writes it
    result["unwritable"] = raised(CheckpointError, lambda: checkpoint.save(output / "checkpoints", policy.model, request))
    policy.model.guard, step = Guard(GuardConfig()), policy.model.optimizer.step

    def spoiling():
        made = step()
        if topology.rank == 1:  # as a fault of one device would
            policy.module.decoder.final_layernorm.weight.data[0] = float("inf")
        return made

    policy.model.optimizer.step = spoiling
    result["spoilt"] = raised(AlignerError, lambda: policy.train_step(inputs["batch"], sft_loss))
    result["unsound"] = raised(CheckpointError, lambda: checkpoint.save(output / "checkpoints", policy.model, request))
    if topology.rank == 0:
        (output / "checkpoints").mkdir(exist_ok=True)
        (output / "checkpoints" / "latest").write_text("step_000001\n")
    dist.barrier()
    result["latest"] = raised(CheckpointError, lambda: checkpoint.resolve(output / "checkpoints"))
    return result


def main() -> None:
    tp, directory, output = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    launch.initialize("gloo", timeout_seconds=60, fingerprint="engine", collective_timeout_seconds=60)
    from aligner.parallel.topology import ParallelConfig, initialize

    check_collectives()
    parallel = ParallelConfig(tp=tp)
    topology = initialize(parallel, seed=11)
    inputs = torch.load(output / "inputs.pt", weights_only=False)
    if tp == 2:
        check_ranks_of_a_replica_follow()
        sampled_ahead(directory, topology, parallel, inputs)
        result = tensor_parallel(directory, topology, parallel, inputs)
        result["batch_invariant"] = batch_invariant(directory, topology, inputs)
    else:
        sampled_ahead(directory, topology, parallel, inputs)
        result = data_parallel(directory, topology, parallel, inputs, output)
    torch.save(result, output / f"tp{tp}_rank{dist.get_rank()}.pt")
    launch.shutdown()


if __name__ == "__main__":
    main()
