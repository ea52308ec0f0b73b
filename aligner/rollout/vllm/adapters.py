"""A policy's adapters in vLLM, whose weights are those under them: each refit is another adapter of vLLM's.

vLLM reads it from a folder in PEFT's format, and its caches know it by name and number: no two refits have the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from aligner.rollout.engine.manifest import Manifest, named_few

USED = (
    ("vllm", "ModelRegistry.models.__len__"),
    ("vllm.lora.request", "LoRARequest lora_name lora_int_id lora_path"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.add_lora lora_request, LLMEngine.remove_lora lora_id"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.add_request request_id prompt params lora_request"),
)
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def unsupported(path: Path, rank: int) -> str:
    """Why vLLM cannot apply adapters to the model with the config.json in `path`; empty: it can."""
    if rank > RANKS[-1]:
        return f"vLLM's adapters have a rank of at most {RANKS[-1]}, and these {rank}"
    from vllm import ModelRegistry

    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    model = ModelRegistry.models.get(name)
    can = model is not None and getattr(model.load_model_cls(), "supports_lora", False)
    return "" if can else f"vLLM's {name} takes none"


def settings(manifest: Manifest) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    parts = {_projection(name).rpartition(".")[2] for name in manifest.tensors}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= rank_of(manifest)),
        "lora_target_modules": sorted(parts),
    }


def rank_of(manifest: Manifest) -> int:
    """Of adapters that have these tensors."""
    return next(spec.shape[0] for name, spec in manifest.tensors.items() if name.endswith(_A))


def layer_of(model: Any, projection: str) -> tuple[Any, Sequence[int]] | None:
    """The layer of vLLM's model that adds the adapter of one of Hugging Face's projections, and the numbers of its parts that are this
    projection's; None: no layer does."""
    prefix, _, own = projection.rpartition(".")
    for fused, parts in ((own, [own]), *model.lora_manager.packed_modules_mapping.items()):
        layer = model.lora_manager.modules.get(f"{prefix}.{fused}")
        if own in parts and layer is not None:
            return layer, range(len(layer.lora_b_stacked)) if len(parts) == 1 else [parts.index(own)]
    return None


def _projection(name: str) -> str:
    return name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)


class VLLMAdapters:
    """`aligner.rollout.engine.Receiver` of the adapters of a started engine. `finish` is called with each refit's version."""

    def __init__(self, llm: Any, folder: Path, manifest: Manifest, finish: Callable[[int], None]) -> None:
        self._llm, self._folder, self._manifest, self._finish = llm, folder, manifest, finish
        (self._layers,) = llm.apply_model(lambda model: {name: layer_of(model, _projection(name)) for name in manifest.tensors})
        self._numbers, self._arrived = count(1), dict[str, Tensor]()
        self.request: Any = None  # what each of vLLM's requests gets

    def without_layer(self) -> str:
        """A message naming adapters that no layer of vLLM's model adds; empty: each has one."""
        lost = [name for name, layer in self._layers.items() if layer is None]
        return f"vLLM's model adds no adapter to {named_few(lost)} of {len(self._layers)}" if lost else ""

    def begin_refit(self, manifest: Manifest) -> None:
        self._arrived = {}

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self._arrived |= {name: tensor.to("cpu", copy=True) for name, tensor in bucket}

    def finish_refit(self, version: int) -> None:
        from vllm.lora.request import LoRARequest

        self.abort_refit()
        rank, number = rank_of(self._manifest), next(self._numbers)
        targets = settings(self._manifest)["lora_target_modules"]
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}  # the scaling is in the B's
        with TemporaryDirectory(dir=self._folder) as folder:
            save_file(self._arrived, Path(folder) / "adapter_model.safetensors")
            (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
            request = LoRARequest(lora_name=f"refit {number}", lora_int_id=number, lora_path=folder)
            self._llm.llm_engine.add_lora(request)
        self.request, self._arrived = request, {}
        self._finish(version)

    def abort_refit(self) -> None:
        """The former adapter goes: an engine whose refit failed does not sample."""
        if self.request is not None:
            self._llm.llm_engine.remove_lora(self.request.lora_int_id)
            self.request = None

    def read_back(self, name: str) -> Tensor | None:
        """From the tensors that vLLM computes with, in its only slot."""
        layer, parts = self._layers[name]
        shape = self._manifest.tensors[name].shape
        if name.endswith(_A):
            return layer.lora_a_stacked[parts[0]][0, 0, : shape[0], : shape[1]]
        return torch.cat([layer.lora_b_stacked[part][0, 0, :, : shape[1]] for part in parts])
