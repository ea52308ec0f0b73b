"""Loads the policy's weights into vLLM's model in the same process, as a backend of vLLM's weight-transfer interface.

vLLM imports it under the name that `aligner.rollout.vllm.engine` registers, and begins and ends an update itself: layers are loaded one by
one into the tensors that its compiled code and CUDA graphs read.
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
from aligner.models.families.wrappers import is_of_images
from aligner.rollout.engine.foreign import fusion_group
from aligner.rollout.engine.manifest import named_few


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Full tensors by Hugging Face name; the names of the filled parameters are added to `loaded`."""

    weights: Sequence[tuple[str, Tensor]]
    loaded: set[str]


class InProcessWeights(IPCWeightTransferEngine):  # type: ignore[misc]
    """Accepts the tensors themselves; its base accepts handles of another process's memory."""

    update_info_cls = Bucket

    def start_weight_update(self) -> None:
        """On the CPU experts are packed only when their kernel is made, so it is made again."""
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
        """A layer keeps its tensors until it has all of them, and the bucket's memory is reused, so it gets copies.

        Raises EngineError naming tensors that the model ignores, as Cohere's does an output layer of its own. A tower's last layers may be
        of no use to it, as to LLaVA.
        """
        for _, group in groupby(update_info.weights, key=lambda named: fusion_group(named[0])):
            members = list(group)
            loaded = self.model.load_weights((name, tensor.clone()) for name, tensor in members)
            if not loaded and not all(is_of_images(name) for name, _ in members):
                raise EngineError(f"{type(self.model).__name__} of vLLM has no place for {named_few([name for name, _ in members])}")
            update_info.loaded.update(loaded)

    def finish_weight_update(self) -> None:
        """vLLM does not update the packed copy of a module that shares a weight with another, such as a tied output layer."""
        super().finish_weight_update()
        first: dict[int, Any] = {}
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                if first.setdefault(id(parameter), module) is not module and hasattr(module, "quant_method"):
                    module.quant_method.process_weights_after_loading(module)
