"""Are the models' files complete? Only headers, indexes and sizes are read, not the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aligner.commands.preflight.items import Context, Finding, Item, Level, Where
from aligner.errors import CheckpointError
from aligner.models.checkpoint.files import MARKER, read_marker, resolve
from aligner.models.checkpoint.hf_files import stored_tensors
from aligner.models.modules.scalar_head import HF_HEADS
from aligner.run.settings import JobRun
from aligner.run.traits import UsedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Readable:
    """One node's reading of the models' files: component -> a few words; notes are warnings."""

    described: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _observe(context: Context) -> Readable:
    described, notes = {}, []
    for model in context.config.models():
        described[model.component], found = check_model(model)
        notes += found
    for name, folder in resumed_from(context.config).items():
        described[f"resumes {name}"] = check_checkpoint(folder)[0]
    return Readable(described=described, notes=notes)


def check_model(model: UsedModel) -> tuple[str, list[str]]:
    """(a few words, warnings) on the files of `model.path`. Raises CheckpointError naming file and fault."""
    from aligner.models.checkpoint.foreign.model import is_foreign, open_weights
    from aligner.models.create import read_architecture, source_directory  # Megatron-Core comes with it
    from aligner.models.families import weight_names
    from aligner.models.weights.weights import HFWeights

    source = source_directory(model.config, key=model.key)
    if source is None:
        if model.needs_head:
            raise CheckpointError(f"{model.key}.path='': a frozen reward model needs weights")
        return "random weights", [f"{model.component} starts from random weights ({model.key}.path is empty)"]
    if (source / MARKER).exists():
        words, kind = check_checkpoint(source)
        if model.needs_head and kind != "scalar":
            raise CheckpointError(f"{model.key}.path={model.config.path}: a {kind} model's checkpoint; a reward model has a scalar head")
        if not model.is_scalar and kind != "language":
            raise CheckpointError(f"{model.key}.path={model.config.path}: a {kind} model's checkpoint; a language model is needed")
        return words, []
    if is_foreign(source):
        with open_weights(source) as weights:
            weights.check(weights.description.architecture, is_scalar=model.is_scalar)
        if model.needs_head and weights.description.head is None:
            raise CheckpointError(f"{model.key}.path={model.config.path}: has no rm_head: its scores would be those of a random head")
        return f"{source}: a model of Megatron-LM or NeMo, read in place", []
    tensors, num_bytes = stored_tensors(source)
    architecture = read_architecture(model.config, vocab_size=0)
    HFWeights(source, weight_names(architecture), tensors).check(architecture, is_scalar=model.is_scalar)
    if model.needs_head and not any(name.startswith(HF_HEADS) for name in tensors):
        raise CheckpointError(f"{model.key}.path={model.config.path}: has no {HF_HEADS[0]}*: its scores would be those of a random head")
    return f"{source}: {len(tensors)} tensors, {num_bytes / 2**30:.1f} GiB", []


def resumed_from(config: JobRun) -> dict[str, Path]:
    """The run directory's newest checkpoints, from which this run would resume: model name -> directory."""
    folder = Path(config.run.directory).expanduser() / "checkpoints"
    return {path.parent.name: resolve(path.parent) for path in sorted(folder.glob("*/latest"))}


def check_checkpoint(directory: Path) -> tuple[str, str]:
    """(a few words, kind) of a checkpoint of this project: its marker, its manifest, and that every file has its size."""
    from aligner.models.checkpoint import manifest

    marker = read_marker(directory)
    entries = manifest.read(directory)
    for name, entry in entries.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != entry.size:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, its manifest says {entry.size}")
    total = sum(entry.size for entry in entries.values())
    return f"{directory}: step {marker['step']}, {len(entries)} files, {total / 2**30:.1f} GiB", str(marker["kind"])


def judge(context: Context, seen: Mapping[int, Readable]) -> Finding:
    """Unreadable files have already raised."""
    first = seen[0]
    found = "\n".join(f"{component}: {words}" for component, words in first.described.items())
    if first.notes:
        return Finding(level=Level.warning, found=found, advice="; ".join(first.notes) + ": right only for a trial")
    return Finding(level=Level.ok, found=found)


WEIGHTS = Item(
    "weights",
    Where.every_node,
    _observe,
    judge,
    timeout_seconds=180.0,
    needs=("tokenizer",),
    advice="copy or convert that model again, or name another path",
)
