"""The planner's sizes against those of real models: training state to the byte, activations within 20 %."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import pytest
import torch
from plan_parts import activations
from ranks import world
from tiers import cases

from aligner.losses.sft import sft_loss
from aligner.losses.value import value_loss
from aligner.models import create
from aligner.models.config import Architecture, Dtype, Family, LoraConfig, ModelConfig, Quantization, Recompute
from aligner.models.modules.linear import linear_weight, weight_storage
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel.mcore import ChainedOptimizer, parallel_state
from aligner.parallel.topology import ParallelConfig
from aligner.planner import dry_run
from aligner.planner.config import ClusterConfig
from aligner.planner.estimate import plan_component, replication, state_bytes
from aligner.planner.workload import Component, Head, Phase, Work
from aligner.types import LabeledBatch, ValueBatch

LENGTH, RESPONSE, VOCABULARY, ROWS = 128, 127, 250, 8
LAYOUTS = {  # fields of `component`; "rank" is that of adapters
    "single": {"ranks": 1},
    "single_plain_optimizer": {"ranks": 1, "optimizer": {"distributed": False}},
    "single_bf16": {"ranks": 1, "dtype": "bfloat16"},
    "full_recompute": {"ranks": 1, "recompute": "full"},
    "untied": {"ranks": 1, "tied": False},
    "tp2": {"ranks": 2, "parallel": {"tp": 2}},
    "tp2_sp": {"ranks": 2, "parallel": {"tp": 2, "sequence_parallel": True}},
    "tp2_sp_adapters": {"ranks": 2, "parallel": {"tp": 2, "sequence_parallel": True}, "rank": 4},
    "tp2_packed": {"ranks": 2, "parallel": {"tp": 2}, "rank": 4, "packed": "nf4", "inner": 256, "hidden": 128, "dtype": "bfloat16"},
    "ep2_packed": {"ranks": 2, "experts": True, "parallel": {"ep": 2}, "rank": 4, "packed": "nf4", "inner": 128, "hidden": 128},
    "pp2": {"ranks": 2, "parallel": {"pp": 2}},
    "pp2_interleaved": {"ranks": 2, "parallel": {"pp": 2, "vpp": 2}},
    "cp2": {"ranks": 2, "parallel": {"cp": 2}},
    "dp2": {"ranks": 2},
    "dp2_plain_optimizer": {"ranks": 2, "optimizer": {"distributed": False}},
    "dp2_bf16": {"ranks": 2, "dtype": "bfloat16"},
    "dp2_critic": {"ranks": 2, "head": "scalar"},
    "ep2": {"ranks": 2, "experts": True, "parallel": {"ep": 2}},
    "tp2_pp2": {"ranks": 4, "parallel": {"tp": 2, "pp": 2}},
}

FAST = ("single", "full_recompute", "tp2_sp", "tp2_sp_adapters", "tp2_packed", "pp2_interleaved", "cp2", "dp2", "dp2_critic", "ep2")


def component(spec: dict) -> Component:
    experts = {"family": Family.mixtral, "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": spec.get("inner", 96)}
    sizes = {
        "num_layers": 4,
        "hidden_size": spec.get("hidden", 64),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
    }
    sizes |= {"max_position_embeddings": 256, "tied_embeddings": spec.get("tied", True)}
    sizes |= {"ffn_hidden_size": 96, **experts} if spec.get("experts") else {"ffn_hidden_size": spec.get("inner", 200)}
    model = {"dtype": Dtype(spec.get("dtype", "float32")), "recompute": Recompute(spec.get("recompute", "none"))}
    model |= {"micro_batch_size": 2, "make_vocab_divisible_by": 8, "logits_chunk_size": 64, "lora": LoraConfig(rank=spec.get("rank", 0))}
    model |= {"quantization": Quantization(spec.get("packed", "none"))}
    lengths = {"rows": ROWS, "length": LENGTH, "response_length": RESPONSE, "update_rows": ROWS, "num_updates": 1}
    return Component(
        name="trainer",
        head=Head(spec.get("head", "language")),
        num_ranks=spec["ranks"],
        architecture=Architecture(**sizes),
        model=ModelConfig(**model),
        parallel=ParallelConfig(**spec.get("parallel", {})),
        optimizer=OptimizerConfig(lr=1e-3, min_lr=1e-3, warmup_steps=0, **spec.get("optimizer", {})),
        work=Work(phases=(Phase.train,), **lengths),
    )


def batch(spec: dict) -> LabeledBatch | ValueBatch:
    tokens = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
    common = {"tokens": tokens, "lengths": torch.full((ROWS,), LENGTH), "loss_mask": (torch.arange(LENGTH) > 0).expand_as(tokens)}
    if spec.get("head") != "scalar":
        return LabeledBatch(**common)
    zeros = torch.zeros(tokens.shape)
    return ValueBatch(**common, old_values=zeros, returns=zeros + 1)


def measure(spec: dict) -> dict[str, int]:
    own, is_scalar = component(spec), spec.get("head") == "scalar"
    make = create.create_value_model if is_scalar else create.create_policy
    loss = partial(value_loss, clip=None) if is_scalar else sft_loss
    with world(spec.get("parallel"), seed=1) as topology:
        model = make(own.model, own.architecture, own.parallel, topology, create.training(own.model, own.optimizer))
        model.train_step(batch(spec), loss)  # the optimizer's state appears
        with dry_run.LiveStorage() as tracker:
            model.train_step(batch(spec), loss)
        chunks = model.model.chunks
        parameters = [p for chunk in chunks for p in chunk.parameters()]
        return {
            "weights": storage_bytes(weight_storage(chunks)),
            "gradients": storage_bytes(p.main_grad for p in parameters if p.requires_grad),
            "optimizer": storage_bytes(optimizer_state(model.model.optimizer)),
            "peak": tracker.peak,
            "gathered": storage_bytes(parallel_state.get_global_memory_buffer().buffer.values()),
            "stage": topology.pp_rank,
            "parameters": sum(linear_weight(p).shape.numel() for p in parameters),
            "replica": chunks[0].pg_collection.dp_cp.rank(),
        }


def storage_bytes(tensors) -> int:
    """Bytes of the distinct storages under some tensors."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def optimizer_state(optimizer):
    """Moments, and the float32 main weights that are not the model's own."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for part in parts:
        state = part.optimizer.state
        yield from (value for values in state.values() for value in values.values() if isinstance(value, torch.Tensor) and value.dim())
        if part.config.bf16:
            yield from (p for group in part.optimizer.param_groups for p in group["params"])


def predict(specs: dict[str, dict]) -> dict[str, dict]:
    return {name: predict_one(spec) for name, spec in specs.items()}


def predict_one(spec: dict) -> dict:
    own, cluster = component(spec), ClusterConfig()
    planned = plan_component(own, cluster)
    exact = {}
    for stage in range(own.parallel.pp):
        chunks = dry_run.shard_parameters(own, stage)
        for replica in range(own.dp * own.parallel.cp):
            parts = [
                asdict(state_bytes(chunk, replication(own, cluster, stage=stage, chunk=number), dp_rank=replica))
                for number, chunk in enumerate(chunks)
            ]
            exact[stage, replica] = {name: sum(part[name] for part in parts) for name in ("weights", "gradients", "optimizer")}
    return {
        "state": exact,
        "fullest": [asdict(state) for state in planned.sizes.stages],
        "gathered": max(planned.sizes.train.kept, planned.sizes.inference.kept),
        "activations": [activations(planned, Phase.train, stage) for stage in range(own.parallel.pp)],
        "parameters": list(planned.stage_parameters),
    }


@pytest.fixture(scope="module")
def plans(on_ranks, request) -> dict[str, dict]:
    """Of all layouts that tests were chosen of, by one process."""
    chosen = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    return on_ranks(predict, 1, {name: LAYOUTS[name] for name in LAYOUTS if name in chosen})[0]


@pytest.mark.parametrize("name", cases(LAYOUTS, fast=FAST))
def test_sizes_are_the_real_ones(name: str, plans, on_ranks) -> None:
    plan, ranks = plans[name], on_ranks(measure, LAYOUTS[name]["ranks"], LAYOUTS[name])
    for rank in ranks:
        stage = rank["stage"]
        assert plan["parameters"][stage] == rank["parameters"]
        exact = plan["state"][stage, rank["replica"]]
        assert {key: rank[key] for key in exact} == exact
        assert rank["gathered"] == plan["gathered"] and bool(rank["gathered"]) == (name == "tp2_sp")
        assert plan["activations"][stage] == pytest.approx(rank["peak"], rel=0.2)
    for stage, fullest in enumerate(plan["fullest"]):
        own = [rank for rank in ranks if rank["stage"] == stage]
        assert fullest == {key: max(rank[key] for rank in own) for key in fullest}
