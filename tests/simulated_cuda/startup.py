"""Imported by every Python of the environment that environment.py makes: the simulation is installed when torch is."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _InstallAfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        loader = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                from simulated_cuda.device import install

                install()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("SIMULATED_CUDA", "1") != "0" and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    # No GPU compiler is there to compile for; Megatron-Core's fused functions run as they are written.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    sys.meta_path.insert(0, _InstallAfterTorch())
