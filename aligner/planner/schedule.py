"""Arithmetic of pipeline schedules: layers of a stage, micro-batches, how many are in flight. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aligner.parallel.topology import ParallelConfig
from aligner.planner.workload import Component


def stage_layers(num_layers: int, parallel: ParallelConfig) -> list[int]:
    """Layers of each pipeline stage (all its chunks together). The sizes have been checked (`check_divisible`)."""
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    others = parallel.pp - bool(first) - bool(last)
    share = (num_layers - first - last) // others if others else 0
    layers = [share] * parallel.pp
    if first:
        layers[0] = first
    if last:
        layers[-1] = last
    return layers


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatches:
    """`count` forward passes of `rows` sequences, each filled up to `length` tokens."""

    count: int
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def micro_batches(component: Component, rows: int) -> MicroBatches:
    """How a replica's share of `rows` sequences is cut, all of them at the work's full length."""
    model, work, parallel = component.model, component.work, component.parallel
    multiple = math.lcm(2 * parallel.cp if parallel.cp > 1 else 1, component.shards_sequences)
    length = math.ceil(work.length / multiple) * multiple
    units = math.ceil(rows / work.unit / component.dp)
    if model.micro_batch_tokens:
        per_pass = max(1, model.micro_batch_tokens // (length * work.unit))
    else:
        per_pass = model.micro_batch_size
    per_pass = min(per_pass, units)
    count = math.ceil(units / per_pass)
    if parallel.vpp > 1:  # the interleaved schedule works in groups of pp; the last one is filled up
        count = math.ceil(count / parallel.pp) * parallel.pp
    return MicroBatches(count=count, rows=per_pass * work.unit, length=length)


def in_flight(parallel: ParallelConfig, stage: int, count: int) -> int:
    """Chunks of micro-batches whose activations a stage holds at once: 1F1B's min(pp - stage, count) without interleaving.

    Interleaved (Narayanan et al. 2021, 2104.04473), with groups of pp micro-batches: the warm-up of 2 (pp - stage - 1) + (vpp - 1) pp chunk
    passes and the one that follows it.
    """
    if parallel.vpp == 1:
        return min(parallel.pp - stage, count)
    return min(2 * (parallel.pp - stage - 1) + (parallel.vpp - 1) * parallel.pp + 1, count * parallel.vpp)


def pipeline_slots(parallel: ParallelConfig, count: int, *, forward_only: bool) -> float:
    """How many micro-batch times a pass over `count` micro-batches takes, the bubble included."""
    bubble = (parallel.pp - 1) / (1 if forward_only else parallel.vpp)
    return count + bubble
