"""Small components with their sizes, for the planner's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aligner.models.config import Architecture, Dtype, ModelConfig
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel.topology import ParallelConfig
from aligner.planner.config import ClusterConfig
from aligner.planner.estimate import ComponentPlan
from aligner.planner.memory import Sizes, phase_memory
from aligner.planner.workload import BlockBytes, Component, Engine, Head, Phase, StateBytes, Work

NO_ACTIVATIONS = BlockBytes(layer=0, ends=0, backward=0, forward=0)


def architecture(**changes: Any) -> Architecture:
    """Eight layers of 64 numbers, with eight heads."""
    sizes = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "ffn_hidden_size": 128}
    return Architecture(**sizes | {"vocab_size": 1000, "max_position_embeddings": 1024} | changes)


def work(*phases: Phase, **changes: Any) -> Work:
    """64 sequences of 256 tokens, half of them the response; one update."""
    trains = {"update_rows": 64, "num_updates": 1} if Phase.train in phases else {}
    return Work(phases=phases, **{"rows": 64, "length": 256, "response_length": 128} | trains | changes)


def engine(**changes: Any) -> Engine:
    return Engine(**{"tp": 1, "max_batch_size": 8, "bucket_bytes": 0, "offload": False} | changes)


def component(**changes: Any) -> Component:
    """An actor in bfloat16 on eight ranks; `parallel` and `model` are settings of these sections."""
    model = {"dtype": Dtype.bfloat16, "make_vocab_divisible_by": 8} | changes.pop("model", {})
    own = {"name": "actor", "head": Head.language, "num_ranks": 8, "architecture": architecture(), "optimizer": OptimizerConfig()}
    own |= {"work": work(Phase.generate, Phase.train)} | changes
    return Component(model=ModelConfig(**model), parallel=ParallelConfig(**own.pop("parallel", {})), **own)


def sizes(*stages: StateBytes, block: BlockBytes = NO_ACTIVATIONS, engine_weights: int = 0, **state: int) -> Sizes:
    """Of these stages, or of one with this state."""
    own = stages or (StateBytes(**{"weights": 0, "gradients": 0, "optimizer": 0} | state),)
    return Sizes(stages=own, train=block, inference=block, engine_weights=engine_weights)


def memory_of(phase: Phase, own: Component, sizes: Sizes, cluster: ClusterConfig, stages: Sequence[int] = (0,)) -> dict[str, int]:
    """The parts of a phase's memory on the first of these stages."""
    return dict(next(moment.parts for moment in phase_memory(own, sizes, cluster, stages) if moment.phase == phase))


def activations(plan: ComponentPlan, phase: Phase, stage: int = 0) -> int:
    """Bytes of activations, workspace and logits at the fullest moment of a phase."""
    (moment,) = (m for m in plan.memory if m.phase == phase and m.stage == stage)
    return sum(moment.parts.get(name, 0) for name in ("activations", "backward workspace", "logits", "vision tower"))
