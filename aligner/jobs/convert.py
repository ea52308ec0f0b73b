"""Hugging Face model <-> Megatron-Core checkpoint, in one process."""

from __future__ import annotations

from pathlib import Path

from aligner.errors import CheckpointError
from aligner.jobs.parts import name_special_tokens
from aligner.models import checkpoint, create
from aligner.models.build import LanguageModel, ScalarModel, Transformer
from aligner.models.config import Dtype, ModelConfig
from aligner.models.trainable import TrainableModel, Training
from aligner.models.weights import save_hf
from aligner.parallel import launch, platform, topology
from aligner.parallel.topology import ParallelConfig, Topology


def hf_to_megatron(source: Path, target: Path) -> Path:
    """Write `target`/step_000000 (and `latest`) from a Hugging Face directory. Returns the checkpoint's directory.

    Raises CheckpointError where the source is no model, or the target holds a checkpoint already.
    """
    if not (source / "config.json").exists():
        raise CheckpointError(f"--from-hf {source}: no config.json there")
    if (target / checkpoint.LATEST).exists():
        raise CheckpointError(f"--to-megatron {target}: holds a checkpoint already; name an empty directory")
    here = _world()
    config = ModelConfig(path=str(source), dtype=Dtype.float32)
    architecture = create.read_architecture(config, vocab_size=0)
    policy = create.create_policy(config, architecture, ParallelConfig(), here, Training(optimizer=None))
    request = checkpoint.SaveRequest(step=0, state={}, tokenizer=source)
    written = checkpoint.save(target, policy.model, request)
    print(f"Megatron-Core checkpoint written to {written}")
    launch.shutdown()
    return written


def megatron_to_hf(source: Path, target: Path) -> None:
    """Write a Hugging Face model (with its tokenizer) from a checkpoint of any layout. A scalar model keeps its head as `score_head.*`.

    Raises CheckpointError where the source is no complete checkpoint, or the target holds a model already.
    """
    directory = checkpoint.resolve(source)
    if (target / "config.json").exists():
        raise CheckpointError(f"--to-hf {target}: holds a model already; name an empty directory")
    marker = checkpoint.read_marker(directory)
    here = _world()
    config = ModelConfig(path=str(directory), dtype=Dtype.float32)
    architecture = create.read_architecture(config, vocab_size=0)
    module: Transformer
    if marker["kind"] == "scalar":
        module = ScalarModel(architecture, config, ParallelConfig(), load=True, num_outputs=marker["num_outputs"])
    else:
        module = LanguageModel(architecture, config, ParallelConfig(), load=True)
    checkpoint.load_weights(module, directory)
    model = TrainableModel(module, here, Training(optimizer=None))
    save_hf(model.module, target, writer=True)
    checkpoint.copy_tokenizer(directory, target)
    if (target / "tokenizer_config.json").exists():
        name_special_tokens(target)
    print(f"Hugging Face model written to {target}")
    launch.shutdown()


def _world() -> Topology:
    launch.initialize(platform.backend(), timeout_seconds=60.0, fingerprint="convert", environ={"ALIGNER_LAUNCH": "single"})
    return topology.initialize(ParallelConfig(), seed=1)
