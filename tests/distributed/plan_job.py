"""What a small model really holds under a layout, and what the planner says of it.

usage: plan_job.py measure SPEC DIRECTORY     (on every rank of the layout; writes rank<N>.json)
       plan_job.py predict SPECS DIRECTORY    (one process; SPECS: an object of specs by name; writes plan.json)
SPEC is JSON: {"ranks", "parallel", "optimizer", "recompute", "dtype", "experts", "head", "rows", "tied", "rank" (of adapters)}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

LENGTH, RESPONSE, VOCABULARY = 128, 127, 250


def component(spec: dict):
    from aligner.models.config import Architecture, Dtype, Family, LoraConfig, ModelConfig, Recompute
    from aligner.models.training.optimizer import OptimizerConfig
    from aligner.parallel.topology import ParallelConfig
    from aligner.planner.workload import Component, Head, Phase, Work

    experts = {"family": Family.mixtral, "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 96}
    architecture = Architecture(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        ffn_hidden_size=96 if spec.get("experts") else 200,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        tied_embeddings=spec.get("tied", True),
        **(experts if spec.get("experts") else {}),
    )
    return Component(
        name="trainer",
        head=Head(spec.get("head", "language")),
        num_ranks=spec["ranks"],
        architecture=architecture,
        model=ModelConfig(
            dtype=Dtype(spec.get("dtype", "float32")),
            micro_batch_size=2,
            make_vocab_divisible_by=8,
            logits_chunk_size=64,
            recompute=Recompute(spec.get("recompute", "none")),
            lora=LoraConfig(rank=spec.get("rank", 0)),
        ),
        parallel=ParallelConfig(**spec.get("parallel", {})),
        optimizer=OptimizerConfig(lr=1e-3, min_lr=1e-3, warmup_steps=0, **spec.get("optimizer", {})),
        work=Work(
            phases=(Phase.train,), rows=spec["rows"], length=LENGTH, response_length=RESPONSE, update_rows=spec["rows"], num_updates=1
        ),
    )


def batch(spec: dict):
    from aligner.types import LabeledBatch, ValueBatch

    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, VOCABULARY, (spec["rows"], LENGTH), generator=generator)
    lengths = torch.full((spec["rows"],), LENGTH)
    mask = (torch.arange(LENGTH) > 0).expand_as(tokens)
    if spec.get("head") == "scalar":
        zeros = torch.zeros(tokens.shape)
        return ValueBatch(tokens=tokens, lengths=lengths, loss_mask=mask, old_values=zeros, returns=zeros + 1)
    return LabeledBatch(tokens=tokens, lengths=lengths, loss_mask=mask)


def measure(spec: dict, directory: Path) -> None:
    from functools import partial

    from aligner.losses.sft import sft_loss
    from aligner.losses.value import value_loss
    from aligner.models import create
    from aligner.parallel import launch
    from aligner.parallel.mcore import parallel_state
    from aligner.parallel.topology import initialize
    from aligner.planner.dry_run import LiveStorage

    launch.initialize("gloo", timeout_seconds=60, fingerprint="plan")
    own = component(spec)
    topology = initialize(own.parallel, seed=1)
    is_scalar = spec.get("head") == "scalar"
    make = create.create_value_model if is_scalar else create.create_policy
    loss = partial(value_loss, clip=None) if is_scalar else sft_loss
    model = make(own.model, own.architecture, own.parallel, topology, create.training(own.model, own.optimizer))
    model.train_step(batch(spec), loss)  # the optimizer's state appears
    with LiveStorage() as tracker:
        model.train_step(batch(spec), loss)
    trainable = model.model
    found = {
        "weights": storage_bytes(p.data for chunk in trainable.chunks for p in chunk.parameters()),
        "gradients": storage_bytes(p.main_grad for chunk in trainable.chunks for p in chunk.parameters() if p.requires_grad),
        "optimizer": storage_bytes(optimizer_state(trainable.optimizer)),
        "peak": tracker.peak,
        "gathered": storage_bytes(parallel_state.get_global_memory_buffer().buffer.values()),
        "stage": topology.pp_rank,
        "parameters": sum(p.numel() for chunk in trainable.chunks for p in chunk.parameters()),
        "replica": trainable.chunks[0].pg_collection.dp_cp.rank(),
    }
    (directory / f"rank{topology.rank}.json").write_text(json.dumps(found))
    launch.shutdown()


def storage_bytes(tensors) -> int:
    """Bytes of the distinct storages under some tensors."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def optimizer_state(optimizer):
    """Moments, and the float32 main weights that are not the model's own."""
    from aligner.parallel.mcore import ChainedOptimizer

    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for part in parts:
        state = part.optimizer.state
        yield from (value for values in state.values() for value in values.values() if isinstance(value, torch.Tensor) and value.dim())
        if part.config.bf16:
            yield from (p for group in part.optimizer.param_groups for p in group["params"])


def predict(specs: dict, directory: Path) -> None:
    (directory / "plan.json").write_text(json.dumps({name: predict_one(spec) for name, spec in specs.items()}))


def predict_one(spec: dict) -> dict:
    from dataclasses import asdict

    from aligner.planner import dry_run
    from aligner.planner.config import ClusterConfig
    from aligner.planner.estimate import Scales, plan_component, replication, state_bytes
    from aligner.planner.workload import Phase

    own, cluster = component(spec), ClusterConfig()
    planned = plan_component(own, cluster, Scales(cluster.device))
    stages = range(own.parallel.pp)
    replicas = own.dp * own.parallel.cp
    exact = {}
    for stage in stages:
        chunks = dry_run.shard_parameters(own, stage)
        for replica in range(replicas):
            parts = [
                state_bytes(chunk, replication(own, cluster, stage=stage, chunk=number), dp_rank=replica)
                for number, chunk in enumerate(chunks)
            ]
            exact[f"{stage}/{replica}"] = {
                name: sum(asdict(part)[name] for part in parts) for name in ("weights", "gradients", "optimizer")
            }
    return {
        "state": exact,
        "fullest": [asdict(state) for state in planned.sizes.stages],
        "gathered": max(planned.sizes.train.kept, planned.sizes.inference.kept),
        "activations": [planned.activations(Phase.train, stage) for stage in stages],
        "parameters": list(planned.stage_parameters),
        "model_parameters": planned.model_parameters,
    }


if __name__ == "__main__":
    {"measure": measure, "predict": predict}[sys.argv[1]](json.loads(sys.argv[2]), Path(sys.argv[3]))
