"""Updated weights travel between data-parallel replicas while the next batch is prepared and the first layers already compute.

With a distributed optimizer (ZeRO stage 1; Rajbhandari et al. 2020, 1910.02054) a rank updates its share of each bucket of weights, and an
all-gather brings the others'. Here it is asynchronous: `start` issues it for all buckets in the order in which a forward pass needs them,
a layer waits for its own buckets, and everything else that reads weights calls `finish` first (`Transformer.settle`). All ranks issue the
same collectives in the same order, whether they compute afterwards or not. Nothing is copied, and the numbers are those of the synchronous
exchange.

Megatron-Core's own hooks are not used. They issue the gathers, so that a replica without rows in a validation batch would leave the others
waiting, and they wait for the parameters of modules that are called: the output layer's weight and an adapter's B are read without that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn


class WeightGather:
    """The all-gathers of one chunk. `runner`: its DistributedDataParallel, made with `overlap_param_gather`."""

    def __init__(self, runner: Any) -> None:
        runner.disable_forward_pre_hook(param_sync=False)
        self._group_of = runner.param_to_bucket_group
        everything = (*runner.bucket_groups, *runner.expert_parallel_bucket_groups)
        order: dict[Any, None] = {}
        for module, parameters in _readers(runner.module):
            groups = self._groups(parameters)
            order |= dict.fromkeys(groups)
            if groups:
                module.register_forward_pre_hook(lambda *_, groups=groups: _finish(groups))
        self._groups_in_order = [*order, *(group for group in everything if group not in order)]
        runner.module.register_forward_hook(lambda *_: self.finish())  # what heads read of the chunk

    def start(self) -> None:
        """Issue the gathers; after an update of the weights, on every rank."""
        for group in self._groups_in_order:
            group.start_param_sync()

    def finish(self) -> None:
        """Wait until all weights are there (on a GPU the stream waits, not the host). Does nothing where they are."""
        _finish(self._groups_in_order)

    def _groups(self, parameters: Iterable[nn.Parameter]) -> list[Any]:
        return list(dict.fromkeys(self._group_of[p] for p in parameters if p in self._group_of))


def _readers(chunk: Any) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """(module, the parameters that its forward pass may read) in the order of a pass through the chunk."""
    whole = [*([chunk.embedding] if chunk.pre_process else []), *chunk.decoder.layers]
    inside = {id(module) for one in whole for module in one.modules()}
    for one in whole:
        yield one, list(one.parameters())
    for module in chunk.modules():
        if id(module) not in inside:
            yield module, list(module.parameters(recurse=False))


def _finish(groups: Iterable[Any]) -> None:
    for group in groups:
        if group.param_gather_handle is not None:
            group.finish_param_sync(skip_next_bucket_dispatch=True)
