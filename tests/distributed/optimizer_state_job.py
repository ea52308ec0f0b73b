"""What a checkpoint holds of the optimizer against what the ranks hold in memory, element by element, and how training goes on from it.

usage: optimizer_state_job.py SPEC OUTPUT      (SPEC: JSON of the fields of `Spec`)

With no `source` the job trains, saves `SAVED_AT`, compares, trains on, and does the later steps once more with a model that was loaded.
With one it loads that at this layout, compares and trains on. Rank 0 writes the losses, and how many elements differed of each parameter.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from aligner.parallel import launch

SAVED_AT, STEPS = 3, 6
WIDTH = 16
OF_STATE = ("param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A model, its layout and its buckets."""

    parallel: dict = field(default_factory=dict)  # fields of ParallelConfig
    kind: str = "policy"  # or "value"
    architecture: dict = field(default_factory=dict)  # fields of Architecture
    path: str = ""  # a Hugging Face directory, in place of an architecture
    lora: dict = field(default_factory=dict)  # fields of LoraConfig
    bucket: int = 0  # elements that close a bucket of a gradient buffer; 0: one bucket
    dtype: str = "float32"
    rows: int = 12
    source: str = ""  # a checkpoint of step SAVED_AT, of any layout
    in_background: bool = False
    read_back: bool = False
    distributed_optimizer: bool = True
    overlap: bool = False
    offload: bool = False
    cpu_offload: float = 0.0  # the fraction
    recompute: str = "none"


def force_buckets(size: int) -> None:
    """Make every gradient buffer of this process, on every pipeline stage, close a bucket after `size` elements."""
    from megatron.core.distributed import distributed_data_parallel as module
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def forced(call):
        def calling(*args, **kwargs):
            bound = inspect.signature(call).bind(*args, **kwargs)
            bound.arguments["bucket_size"] = size
            return call(*bound.args, **bound.kwargs)

        return calling

    module._ParamAndGradBuffer = forced(module._ParamAndGradBuffer)
    if (layout := getattr(DistributedOptimizer, "_compute_per_buffer_param_layout", None)) is not None:  # Megatron-Core 0.19
        DistributedOptimizer._compute_per_buffer_param_layout = staticmethod(forced(layout))


def make_model(spec: Spec, topology):
    from aligner.models import create
    from aligner.models.config import Architecture, Dtype, Family, LoraConfig, LoraTarget, ModelConfig, Recompute
    from aligner.models.training.optimizer import OptimizerConfig
    from aligner.models.training.trainable import Training
    from aligner.parallel.topology import ParallelConfig

    sizes = {"family": Family(spec.architecture.get("family", "llama"))}
    lora = {**spec.lora, "targets": [LoraTarget(one) for one in spec.lora.get("targets", ())]} if spec.lora else {}
    config = ModelConfig(
        path=spec.path,
        dtype=Dtype(spec.dtype),
        make_vocab_divisible_by=2,
        lora=LoraConfig(**lora),
        recompute=Recompute(spec.recompute),
    )
    if spec.path:
        architecture = create.read_architecture(config, vocab_size=0)
    else:
        architecture = Architecture(**(spec.architecture | sizes))
    build = create.create_policy if spec.kind == "policy" else create.create_value_model
    optimizer = OptimizerConfig(
        lr=1e-3,
        min_lr=1e-4,
        warmup_steps=1,
        distributed=spec.distributed_optimizer,
        offload=spec.offload,
        cpu_offload=spec.cpu_offload > 0,
        cpu_offload_fraction=spec.cpu_offload or 1.0,
    )
    training = Training(optimizer=optimizer, total_steps=STEPS, micro_batch_size=2, overlap=spec.overlap)
    return build(config, architecture, ParallelConfig(**spec.parallel), topology, training)


def train(model, spec: Spec, steps: range) -> list[dict[str, float]]:
    from aligner.losses.sft import sft_loss
    from aligner.losses.value import value_loss
    from aligner.types import LabeledBatch, ValueBatch

    found = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        vocabulary = model.model.chunks[0].architecture.vocab_size
        tokens = torch.randint(1, vocabulary, (spec.rows, WIDTH), generator=generator)
        common = {"tokens": tokens, "lengths": torch.full((spec.rows,), WIDTH)}
        common["loss_mask"] = torch.arange(WIDTH).expand(spec.rows, WIDTH) > 3
        if spec.kind == "policy":
            metrics = model.train_step(LabeledBatch(**common), sft_loss)
        else:
            old, returns = torch.randn(2, spec.rows, WIDTH, generator=generator)
            batch = ValueBatch(**common, old_values=old, returns=returns)
            metrics = model.train_step(batch, partial(value_loss, clip=None))
        found.append({name: metric.value() for name, metric in metrics.items() if not math.isnan(metric.value())})
    return found


def held(part):
    """(parameter, range of its flattened elements, the optimizer's tensors) of all that this rank holds in one distributed optimizer."""
    for buffer in part.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    tensors = part._get_main_param_and_optimizer_states(parameter)
                    yield parameter, ranges["param"], {name: tensors[name].detach().float().cpu() for name in OF_STATE}


def local_part(shard, whole: torch.Tensor) -> torch.Tensor:
    """The elements of a whole tensor that belong to a local parameter, in that parameter's own shape."""
    positions = torch.arange(shard.data.numel()).view(shard.data.shape)
    local = torch.empty(shard.data.numel(), dtype=whole.dtype)
    if hasattr(shard, "build_fn"):
        built = shard.build_fn(shard.key, positions, shard.replica_id, shard.flattened_range)
        parts = list(built.values()) if isinstance(built, dict) else list(built)
    else:
        parts = [type(shard)(**{**vars(shard), "data": positions, "dtype": positions.dtype})]
    for part in parts:
        local[part.data.flatten()] = whole[part.global_slice()].flatten()
    return local


def differing(model, directory: Path) -> dict[str, int]:
    """How many elements of the optimizer's state in memory are not those in the checkpoint, by kind and parameter, over all ranks."""
    from aligner.models.checkpoint.checkpoint import sharded_state
    from aligner.parallel.mcore import dist_checkpointing

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stored = dist_checkpointing.load_plain_tensors(str(directory / "optimizer"))
    shards = {}
    for chunk in sharded_state(model.model.chunks).values():
        shards |= {shard.data: shard for shard in chunk.values() if isinstance(shard.data, torch.Tensor)}
    found: dict[str, int] = {}
    seen = 0
    for part in model.model.optimizer.chained_optimizers:
        for parameter, place, tensors in held(part) if not part.is_stub_optimizer else ():
            for name, tensor in tensors.items():
                shard = shards[parameter]
                key = f"optimizer.state.{name}.{shard.key}"
                if key not in stored:  # of a factory whose parts have keys of their own
                    raise AssertionError(f"{key} is not in the checkpoint")
                wanted = local_part(shard, stored[key])[place.start : place.end]
                found[key] = found.get(key, 0) + int((wanted.view(torch.int32) != tensor.view(torch.int32)).sum())
                seen += tensor.numel()
    total: dict[str, int] = {}
    everything: list = [None] * dist.get_world_size()
    dist.all_gather_object(everything, (found, seen))
    for one, _ in everything:
        for key, count in one.items():
            total[key] = total.get(key, 0) + count
    assert sum(seen for _, seen in everything) > 0
    return {key: count for key, count in sorted(total.items()) if count}


def run(spec: Spec, topology, output: Path) -> dict:
    from aligner.models.checkpoint import checkpoint

    model = make_model(spec, topology)
    if spec.source:
        checkpoint.load(model.model, Path(spec.source))
        return {"differing": differing(model, Path(spec.source)), "after": train(model, spec, range(SAVED_AT + 1, STEPS + 1))}
    train(model, spec, range(1, SAVED_AT + 1))
    request = checkpoint.SaveRequest(step=SAVED_AT, state={})
    began = checkpoint.start_save(output / "saved", model.model, request, in_background=spec.in_background, read_back=spec.read_back)
    saved = began.publish(60)
    compare = differing if spec.distributed_optimizer else lambda *_: {}
    result = {"differing": compare(model, saved), "buckets": buckets(model), "idle": idle(model)}
    result["after"] = train(model, spec, range(SAVED_AT + 1, STEPS + 1))
    again = make_model(spec, topology)
    checkpoint.load(again.model, saved)
    result["differing_when_loaded"] = compare(again, saved)
    result["after_loading"] = train(again, spec, range(SAVED_AT + 1, STEPS + 1))
    return result


def buckets(model) -> int:
    """The number of buckets of the largest buffer, over all ranks."""
    own = max(len(one.buckets) for runner in model.model.runners for one in (*runner.buffers, *runner.expert_parallel_buffers))
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return max(every)


def idle(model) -> int:
    """How many ranks hold padding only in one of their optimizers."""
    own = 0
    for part in model.model.optimizer.chained_optimizers:
        if hasattr(part, "gbuf_ranges"):
            own |= int(not any(True for _ in held(part)))
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return sum(every)


def main() -> None:
    spec, output = Spec(**json.loads(sys.argv[1])), Path(sys.argv[2])
    launch.initialize("gloo", timeout_seconds=120, fingerprint="optimizer state", collective_timeout_seconds=120)
    from aligner.parallel.topology import ParallelConfig, initialize

    if spec.bucket:
        force_buckets(spec.bucket)
    topology = initialize(ParallelConfig(**spec.parallel), seed=5)
    result = run(spec, topology, output)
    if dist.get_rank() == 0:
        (output / "result.json").write_text(json.dumps(result))
    launch.shutdown()


if __name__ == "__main__":
    main()
