"""Generation over two tensor-parallel ranks is the single process's; two replicas agree on results and on errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_environment import Repeats, repeats
from layout_models import train_step
from ranks import world
from sampled_models import make_engine, make_inputs, make_policy, prompts_of, sample, write_model
from torch.distributed import HashStore
from training_jobs import eventually

from aligner.data.collate import rollout_batch
from aligner.data.order import EpochSampler
from aligner.environments.exchange import EpisodeError
from aligner.errors import AlignerError, CheckpointError, ConfigError, EngineError
from aligner.loop.loop import Clock
from aligner.losses.sft import sft_loss
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Family
from aligner.models.training.guard import Guard, GuardConfig, NonFinite
from aligner.online import collect as rollouts_of
from aligner.online.async_rollout_source import AsyncRolloutSource
from aligner.online.collect import Scorers
from aligner.online.task import OnlineTask, Validation
from aligner.parallel import collectives
from aligner.parallel.collectives import gather_objects
from aligner.parallel.topology import ParallelConfig
from aligner.protocols import Replica
from aligner.rollout.config import AsynchronousConfig, ShareWork
from aligner.rollout.engine import GenRequest
from aligner.rollout.engine.work import Queue, SharedWork, divide
from aligner.telemetry.metrics import Distribution, Max, Mean, Min, Sum, values as values_of
from aligner.types import LabeledBatch, LossOutput, SamplingConfig, Scores
from aligner.types.rows import take_rows


def check_collectives() -> None:
    rank, world, cpu = dist.get_rank(), dist.group.WORLD, torch.device("cpu")
    rows = torch.arange(10).reshape(5, 2)
    for shares in ([[0, 3], [1, 2, 4]], [[4, 1, 0, 2, 3], []], [[], [3, 0, 2, 1, 4]]):  # any assignment, empty shares too
        assert torch.equal(collectives.gather_assigned_rows(rows[shares[rank]], shares, group=world), rows)
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
    found = values_of(collectives.reduce_metrics(gap, world, cpu))
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

    def broken(self, state, turn):
        raise OSError("connection refused")

    with mock.patch.object(Repeats, "step", broken):
        message = raised(EpisodeError if dist.get_rank() == 0 else EngineError, lambda: converse(policy, inputs))
    said = ("connection refused (at ", "; it was in turn 1") if dist.get_rank() == 0 else ("see its own message",)
    assert all(one in message for one in said), message


def check_ranks_of_a_replica_follow() -> None:
    """Both ranks are one of two replicas; the other one is its leader's doing here."""

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
    with pytest.raises(kind) as error:
        action()
    return str(error.value)


def generate(policy, inputs: dict, **settings: Any) -> dict[int, tuple]:
    """(tokens, log-probs, finish reason) by seed."""
    return {r.seed: (r.response, r.logprobs, r.finish_reason.value) for r in sample(make_engine(policy, **settings), inputs)}


class Lengths:
    def score(self, responses) -> Future:
        scores: Future = Future()
        scores.set_result(Scores.of(torch.tensor([float(len(one.response)) for one in responses])))
        return scores

    def close(self) -> None: ...


def converse(policy, inputs: dict) -> dict[int, tuple]:
    """Episodes of several turns, by seed; on the rank that leads."""
    engine = make_engine(policy, stops=tuple(range(5, 20)), sampling={"temperature": 0.9}, follow_up=repeats())
    return {e.seed: (e.response, e.logprobs, e.written, e.num_turns, e.reward) for e in sample(engine, inputs)}


def collect(policy, inputs: dict):
    """What `collect` gives where the replicas share the prompts; the reward is the length of the response."""
    engine = make_engine(policy, max_batch_size=2, share_work=ShareWork.always)
    return rollouts_of.collect(engine, prompts_of(inputs), inputs["seeds"], scorers=Scorers(reward=Lengths()))


def sampled_ahead(directory: Path, topology, parallel: ParallelConfig, inputs: dict) -> None:
    """Rounds that are sampled while the policy trains, each held and given new weights before its tenth step: all ranks of a replica take
    them before the same token, and every log-prob is the trainer's under the version that sampled it."""
    policy = make_policy(directory, topology, parallel)
    ahead = AsynchronousConfig(max_staleness=1, recompute=True, timeout_seconds=60)
    engine = make_engine(policy, stops=(5,), sampling={"temperature": 0.9}, asynchronous=ahead)
    prompts = prompts_of(inputs)
    parts = {"engine": engine, "reference": None, "judges": Scorers(reward=Lengths()), "topology": topology}
    parts |= {"train": prompts, "order": EpochSampler(len(prompts), 4, seed=1), "decode": str, "seed": 3}
    task = OnlineTask(**parts, validation=Validation(sampling=SamplingConfig()), max_response_length=24)
    rounds = AsyncRolloutSource(task, 2, ahead, engine.gate, last=4)
    gate, steps = engine.gate, Counter()
    between_steps, num_holds = gate.between_steps, gate._wanted

    def wait_at_the_tenth(settle: Callable[[], None]) -> int | None:
        """Of a round but the first: until its weights are to be replaced."""
        number = gate._ended + 1
        steps[number] += 1
        if steps[number] == 10:
            assert eventually(lambda: gate._wanted - num_holds >= number - 1, 60)
        return between_steps(settle)

    gate.between_steps = wait_at_the_tenth
    weights, taken = [_copy(policy)], []
    for step in range(1, 5):
        taken += rounds.take(step, Clock()).rollouts
        policy.train_step(inputs["batch"], sft_loss)
        weights.append(_copy(policy))
        assert step == 4 or eventually(lambda step=step: steps[step + 1] >= 10 or gate._ended > step, 60)
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


def _copy(policy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in policy.module.parameters()]


def tensor_parallel(directory: Path, topology, parallel: ParallelConfig, inputs: dict) -> dict:
    result = {}
    for divisor in (8, 128):  # with 128, rank 1 holds nothing but vocabulary padding
        policy = make_policy(directory, topology, parallel, make_vocab_divisible_by=divisor)
        vocabulary = policy.module.vocabulary_weight()[0].shape[0]
        assert vocabulary == {8: (32, 29), 128: (61, 0)}[divisor][topology.tp_rank]
        result[divisor] = before_and_after_a_step(policy, inputs)
    check_a_failing_environment_fails_on_all_ranks(policy, inputs)
    return result


def before_and_after_a_step(policy, inputs: dict, **settings: Any) -> dict:
    first = {"rollouts": generate(policy, inputs, **settings), "logprobs": policy.logprobs(inputs["batch"])}
    first["metrics"] = train_step(policy, inputs["batch"], sft_loss)
    first |= {"trained_rollouts": generate(policy, inputs, **settings), "trained_logprobs": policy.logprobs(inputs["batch"])}
    return first | {"episodes": converse(policy, inputs)}


def batch_invariant(directory: Path, topology, inputs: dict) -> dict:
    """Sampler and trainer to the bit, on two ranks, and with a sampler of one rank each; with and without sequence parallelism."""
    policy = make_policy(directory, topology, ParallelConfig(tp=2), batch_invariant=True)
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
    split = make_policy(
        directory, topology, ParallelConfig(tp=2, sequence_parallel=True), make_vocab_divisible_by=128, batch_invariant=True
    )
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
    policy = make_policy(directory, topology, parallel)
    one = take_rows(inputs["batch"], slice(0, 1))
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


def two_ranks(tp: int, directory: Path, inputs: dict, output: Path) -> dict:
    """Collectives; tensor-parallel generation (TP 2), or what data-parallel replicas must do together when something is wrong (1)."""
    parallel = ParallelConfig(tp=tp)
    with world({"tp": tp}) as topology:
        check_collectives()
        sampled_ahead(directory, topology, parallel, inputs)
        if tp == 1:
            return data_parallel(directory, topology, parallel, inputs, output)
        check_ranks_of_a_replica_follow()
        found = tensor_parallel(directory, topology, parallel, inputs)
        return found | {"batch_invariant": batch_invariant(directory, topology, inputs)}


@pytest.fixture(scope="module")
def inputs() -> dict:
    return make_inputs()


@pytest.fixture(scope="module")
def directory(topology, tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), family=Family.qwen2, qkv_bias=True)


@pytest.fixture(scope="module")
def expected(directory, topology, inputs) -> dict:
    return before_and_after_a_step(make_policy(directory, topology, ParallelConfig()), inputs, max_batch_size=6)


def test_tensor_parallel_generation_is_the_single_processs(on_ranks, directory, expected, topology, inputs, tmp_path):
    ranks = on_ranks(two_ranks, 2, 2, directory, inputs, tmp_path)
    lengths = {len(response) for response, _, _ in expected["rollouts"].values()}
    assert len(lengths) > 2 and expected["rollouts"] != expected["trained_rollouts"]  # the comparison is of something
    for got in ranks:
        for divisor in (8, 128):
            for name in ("rollouts", "trained_rollouts"):
                assert got[divisor][name].keys() == expected[name].keys()
                for seed, (response, logprobs, reason) in expected[name].items():
                    assert got[divisor][name][seed][0] == response and got[divisor][name][seed][2] == reason
                    assert got[divisor][name][seed][1] == pytest.approx(logprobs, abs=1e-4)
            for name in ("logprobs", "trained_logprobs"):
                torch.testing.assert_close(got[divisor][name], expected[name], rtol=0, atol=1e-4)
            assert got[divisor]["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)
    for divisor in (8, 128):  # conversations are kept on the leading rank
        leader, follower = (got[divisor]["episodes"] for got in ranks)
        assert leader.keys() == expected["episodes"].keys() and not follower
        for seed, (response, logprobs, *others) in expected["episodes"].items():
            assert leader[seed][0] == response and list(leader[seed][2:]) == others
            assert leader[seed][1] == pytest.approx(logprobs, abs=1e-4)
    assert max(turns for *_, turns, _ in expected["episodes"].values()) == 3
    alone = make_policy(directory, topology, ParallelConfig(), batch_invariant=True)
    rollouts = generate(alone, inputs, max_batch_size=6)
    for exact in (got["batch_invariant"] for got in ranks):  # to the bit, whatever the number of ranks
        assert exact["rollouts"] == rollouts and torch.equal(exact["logprobs"], alone.logprobs(exact["batch"]))
        assert exact["grad_norms"] == pytest.approx([exact["grad_norms"][0]] * 2, rel=1e-4)


def test_two_replicas_agree_on_results_and_on_errors(on_ranks, directory, expected, inputs, tmp_path):
    for got in on_ranks(two_ranks, 2, 1, directory, inputs, tmp_path):
        collected = got["collected"]
        assert [rollout.seed for rollout in collected.rollouts] == inputs["seeds"]
        for rollout, reward in zip(collected.rollouts, collected.rewards.tolist(), strict=True):
            response, logprobs, reason = expected["rollouts"][rollout.seed]
            assert (rollout.response, rollout.finish_reason.value, reward) == (response, reason, len(response))
            assert rollout.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert len(collected.replica_stats) == 2 and min(share.tokens for share in collected.replica_stats) > 0
        assert sum(share.tokens for share in collected.replica_stats) == collected.rewards.sum()
        torch.testing.assert_close(got["logprobs"], expected["logprobs"], rtol=0, atol=1e-5)
        torch.testing.assert_close(got["one"], expected["logprobs"][:1], rtol=0, atol=1e-5)
        assert got["small"] == "a training batch of 1 is smaller than the 2 data-parallel replicas"
        assert "the gradient of optimizer step 1 is not finite (its norm on rank 1: nan, the loss of" in got["nan"]
        assert got["skipped"] == 1
        assert "writing a checkpoint failed: Object of type object is not JSON serializable" in got["unwritable"]
        assert "optimizer step 1 was made and left 1 of " in got["spoilt"] and "final_layernorm.weight: inf on rank 1)" in got["spoilt"]
        assert "rank 1: 1 of " in got["unsound"] and "tensors of the weights are not finite; nothing is saved" in got["unsound"]
        assert "latest names step_000001, which is not a complete checkpoint" in got["latest"]
    assert not (tmp_path / "checkpoints" / "step_000001").exists()
