"""The policy's weights on their way into vLLM's model in the same process, as a backend of vLLM's weight-transfer interface.

Imported by vLLM, under the name that `aligner.rollout.vllm.engine` registers. How an update begins and ends is vLLM's own: layers are
loaded one by one into the tensors that its compiled code and CUDA graphs read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

from aligner.errors import EngineError
from aligner.rollout.engine.foreign import fusion_group
from aligner.rollout.engine.manifest import named_few


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Full tensors by Hugging Face name; the names of what they went into are added to `loaded`."""

    weights: Sequence[tuple[str, Tensor]]
    loaded: set[str]


class InProcessWeights(IPCWeightTransferEngine):  # type: ignore[misc]
    """Takes the tensors themselves, where its base takes handles of another process's memory."""

    update_info_cls = Bucket

    def start_weight_update(self) -> None:
        """On the CPU experts are packed when their kernel is made, and then no more: it is made again."""
        for module in self.model.modules() if self.device.type == "cpu" else ():
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None
        super().start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a bucket. After an error the model has left the update, and may hold anything."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            with suppress(Exception):  # what went wrong first is raised
                self.finish_weight_update()
            raise

    def receive_weights(self, update_info: Bucket) -> None:
        """A layer holds on to what it was given until it has everything, and the bucket's memory is used again: it gets copies.

        Raises EngineError naming tensors that the model ignores, as Cohere's does an output layer of its own.
        """
        for _, group in groupby(update_info.weights, key=lambda named: fusion_group(named[0])):
            members = list(group)
            loaded = self.model.load_weights((name, tensor.clone()) for name, tensor in members)
            if not loaded:
                raise EngineError(f"{type(self.model).__name__} of vLLM has no place for {named_few([name for name, _ in members])}")
            update_info.loaded.update(loaded)

    def finish_weight_update(self) -> None:
        """vLLM forgets that modules which share a weight with another, as a tied output layer does, may have a packed copy of their own."""
        super().finish_weight_update()
        first: dict[int, Any] = {}
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                if first.setdefault(id(parameter), module) is not module and hasattr(module, "quant_method"):
                    module.quant_method.process_weights_after_loading(module)
