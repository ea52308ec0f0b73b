"""Tiny models for single-process tests: random Hugging Face directories, and policies and scalar models built from sizes alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import HF_MODELS, VOCAB, randomize, write
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="session")
def hf_directory(tmp_path_factory) -> Callable[[str], Path]:
    """`hf_directory(name)`: a random model of `HF_MODELS`, or of own_models.py, written by transformers."""
    from own_models import make_directory

    own = make_directory(tmp_path_factory)
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in HF_MODELS:
            return own(name)
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            write(name, made[name])
        return made[name]

    return make


@pytest.fixture
def changed(hf_directory, tmp_path) -> Callable[..., Path]:
    """`changed(name, change of tensors, **config)`: a copy of a model of `HF_MODELS` with other tensors, other lines in its config (...: or
    without one)."""

    def make(name: str, change: Callable[[dict[str, torch.Tensor]], object] | None = None, **config: Any) -> Path:
        directory = tmp_path / "model"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(hf_directory(name), directory)
        if change is not None:
            tensors = load_file(directory / "model.safetensors")
            change(tensors)
            save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        said = json.loads((directory / "config.json").read_text())
        said = {key: value for key, value in (said | config).items() if value is not ...}
        (directory / "config.json").write_text(json.dumps(said))
        return directory

    return make


@pytest.fixture(scope="session")
def load_policy(topology) -> Callable[..., Any]:
    """`load_policy(path, optimizer=None, config=ModelConfig fields, training=Training fields)`: `create_policy`, from a directory."""
    from aligner.models.config import Dtype, ModelConfig
    from aligner.models.create import create_policy, read_architecture
    from aligner.models.training.trainable import Training
    from aligner.parallel.topology import ParallelConfig

    def load(path: Path, *, optimizer: Any = None, config: dict[str, Any] | None = None, training: dict[str, Any] | None = None) -> Any:
        model = ModelConfig(path=str(path), **({"dtype": Dtype.float32, "make_vocab_divisible_by": 8} | (config or {})))
        architecture = read_architecture(model, vocab_size=0)
        return create_policy(model, architecture, ParallelConfig(), topology, Training(optimizer=optimizer, **(training or {})))

    return load


@pytest.fixture(scope="session")
def make_model(topology) -> Callable[..., Any]:
    """`make_model(kind, optimizer=None, seed=0, architecture=..., config=..., training=...)`: a random policy, value or reward model.

    kind: "policy", "value" or "reward" (with its `head`); others are fields of `Architecture`, `ModelConfig` and `Training`.
    """
    from aligner.models.config import Architecture, Dtype, Family, ModelConfig
    from aligner.models.modules.build import build_model
    from aligner.models.modules.scalar_head import VALUES, ScalarHead
    from aligner.models.training.policy import MegatronPolicy, MegatronRewardModel, MegatronValueModel
    from aligner.models.training.trainable import TrainableModel, Training
    from aligner.parallel.topology import ParallelConfig

    def make(kind: str, *, optimizer: Any = None, seed: int = 0, architecture=None, config=None, training=None, head=None) -> Any:
        sizes = {"family": Family.qwen2, "num_layers": 2, "hidden_size": 32, "num_key_value_heads": 2, "ffn_hidden_size": 48}
        sizes |= {"vocab_size": VOCAB, "max_position_embeddings": 64, "qkv_bias": True} | (architecture or {})
        own = {"dtype": Dtype.float32, "make_vocab_divisible_by": 8, "logits_chunk_size": 16}
        model = ModelConfig(**(own | (config or {})))
        head = {"value": VALUES, "reward": head or ScalarHead()}.get(kind)
        (module,) = build_model(Architecture(**sizes), model, ParallelConfig(), load=False, head=head)
        randomize(module, seed)
        trainable = TrainableModel([module], topology, Training(optimizer=optimizer, **({"total_steps": 10} | (training or {}))))
        if kind == "policy":
            return MegatronPolicy(trainable, temperature=(training or {}).get("temperature", 1.0))
        return {"value": MegatronValueModel, "reward": MegatronRewardModel}[kind](trainable)

    return make
