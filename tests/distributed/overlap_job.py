"""Trains with the exchange of weights overlapped and without, reads the weights in every way in between, and compares to the bit.

usage: overlap_job.py SPEC OUTPUT      (SPEC: JSON of the fields of `optimizer_state_job.Spec`)

With the overlap, a weight is NaN until somebody waits for it, so that whoever reads too early is found. Every rank checks for itself.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from aligner.parallel import launch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from optimizer_state_job import Spec, force_buckets, make_model, train


class LateWeights:
    """Makes the gathers of a model late: until somebody waits for one, the weights that other ranks have updated are NaN."""

    def __init__(self, model) -> None:
        self.groups = [g for runner in model.runners for g in (*runner.bucket_groups, *runner.expert_parallel_bucket_groups)]
        for group in self.groups:
            group.start_param_sync = partial(self._start, group, group.start_param_sync)

    def _start(self, group, start) -> None:
        start()
        group.param_gather_handle.wait()
        group.param_gather_handle = Arrival(group)


class Arrival:
    """The weights of one gather."""

    def __init__(self, group) -> None:
        size, own = group.intra_distributed_optimizer_instance_size, group.intra_distributed_optimizer_instance_rank
        self._weights = [(bucket.param_data, bucket.param_data.clone()) for bucket in group.buckets]
        for bucket in group.buckets:
            for rank, shard in enumerate(bucket.param_data.chunk(size)):
                if rank != own:
                    shard.fill_(torch.nan)

    def wait(self) -> None:
        for place, weights in self._weights:
            place.copy_(weights)


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        copy = tensor.detach().contiguous().clone()  # memory that numpy has seen cannot be resized
        found.update(copy.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def values(batch: dict, model, *, is_policy: bool) -> Tensor:
    from aligner.types import LabeledBatch

    rows = LabeledBatch(**batch)
    return model.logprobs(rows) if is_policy else model.values(rows)


def trace(model, spec: Spec, output: Path) -> list:
    """Metrics of eight steps, and what is read of the weights between them."""
    from aligner.models.checkpoint import checkpoint
    from aligner.models.training.policy import ReferencePolicy

    is_policy = spec.kind == "policy"
    # One row: a replica has none, and issues no collective of its own.
    one = {"tokens": torch.arange(1, 17)[None], "lengths": torch.tensor([16]), "loss_mask": torch.arange(16)[None] > 3}
    found: list = [train(model, spec, range(1, 3)), digest([values(one, model, is_policy=is_policy)])]
    found += train(model, spec, range(3, 4))
    if is_policy:
        found.append(digest(tensor for _, tensor in model.export_weights()))
        found += train(model, spec, range(4, 5))
        reference = ReferencePolicy(model)
        found += train(model, spec, range(5, 6))
        found.append(digest([reference.logprobs_of([_masked(one)])[0]]))
        found += train(model, spec, range(6, 7))
        reference.renew()
        found.append(digest(reference._weights))
        found += [train(model, spec, range(7, 8)), generated(model)]
    model.model.sleep()
    found += train(model, spec, range(8, 9))
    model.model.leave_device()
    model.model.enter_device()
    found += train(model, spec, range(9, 10))
    saved = checkpoint.save(output, model.model, checkpoint.SaveRequest(step=9, state={}))
    found.append(digest([torch.frombuffer(bytearray((saved / "sums.json").read_bytes()), dtype=torch.uint8)]))
    found += train(model, spec, range(10, 11))
    checkpoint.load(model.model, saved)  # while the weights of step 10 may be under way
    found += train(model, spec, range(10, 12))
    model.model.settle()
    found.append(digest(p for chunk in model.model.chunks for p in chunk.parameters()))
    return found


def _masked(one: dict):
    from aligner.types import LabeledBatch

    return LabeledBatch(**one)


def generated(policy) -> list:
    """Responses of an engine that has lived through an update."""
    from aligner.rollout.config import RolloutConfig
    from aligner.rollout.create import create_engine
    from aligner.types import Prompt, SamplingConfig

    sampling = SamplingConfig(max_response_length=5)
    engine = create_engine(policy, RolloutConfig(sampling=sampling, max_batch_size=4), eos_id=2)
    policy.train_step(*_sft(policy))
    engine.refit(policy.version)
    prompts = [Prompt(id=number, tokens=(3, 4, 5 + number), source=f"p:{number}") for number in range(5)]
    rollouts = [rollout for part in engine.generate(prompts, list(range(5))) for rollout in part]
    return sorted((one.seed, list(one.response), list(one.logprobs)) for one in rollouts)


def _sft(policy) -> tuple:
    from aligner.losses.sft import sft_loss
    from aligner.types import LabeledBatch

    tokens = torch.arange(1, 61).remainder(11).add(2).reshape(6, 10)
    return LabeledBatch(tokens=tokens, lengths=torch.full((6,), 10), loss_mask=torch.arange(10).expand(6, 10) > 2), sft_loss


def trained(model) -> list[Tensor]:
    return [p.detach() for chunk in model.model.chunks for p in chunk.parameters() if p.requires_grad]


def main() -> None:
    spec, output = Spec(**json.loads(sys.argv[1])), Path(sys.argv[2])
    launch.initialize("gloo", timeout_seconds=120, fingerprint="overlap", collective_timeout_seconds=120)
    from aligner.parallel.topology import ParallelConfig, initialize

    if spec.bucket:
        force_buckets(spec.bucket)
    topology = initialize(ParallelConfig(**spec.parallel), seed=5)
    apart = trace(make_model(spec, topology), spec, output / "apart")
    model = make_model(replace(spec, overlap=True), topology)
    late = LateWeights(model.model)
    together = trace(model, spec, output / "together")
    for number, (wanted, got) in enumerate(zip(apart, together, strict=True)):
        assert got == wanted, (number, got, wanted)
    train(model, spec, range(12, 13))
    assert late.groups and all(group.param_gather_handle is not None for group in late.groups)
    assert not all(parameter.isfinite().all() for parameter in trained(model))  # what would be read without waiting
    model.model.settle()
    assert all(parameter.isfinite().all() for parameter in trained(model))
    launch.shutdown()


if __name__ == "__main__":
    main()
