"""Models: their tokenizers and chat templates, their files, and the layers that they get on these nodes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aligner.commands.preflight.framework import Context, Finding, Where, agree, fatal, item, ok, warning
from aligner.data.messages import Message
from aligner.data.tokenizer import Tokenizer
from aligner.errors import CheckpointError, ConfigError
from aligner.models.checkpoint.files import MARKER, read_marker, resolve
from aligner.models.checkpoint.hf_files import stored_tensors
from aligner.models.config import HFArchitecture
from aligner.models.modules.scalar_head import HF_HEADS
from aligner.planner.config import Device
from aligner.run.settings import JobRun, UsedModel
from aligner.servers.components import in_section

SAMPLE = "The quick brown fox: 3 + 4 = 7, naïve café, 你好.\n\tdef f(x): return x"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """One node's tokenization of a sample."""

    described: dict[str, str] = field(default_factory=dict)  # component -> a few words
    digests: dict[str, str] = field(default_factory=dict)  # component -> of the sample's ids and the special tokens
    apart: list[str] = field(default_factory=list)  # components that may have a different tokenizer
    notes: list[str] = field(default_factory=list)  # for the user; not errors


def tokenizer_of(model: UsedModel) -> Tokenizer:
    """The tokenizer of a model, checked against the model's vocabulary. Raises ConfigError or CheckpointError naming the component."""
    from aligner.jobs.parts import load_model_files  # Megatron-Core comes with it

    with in_section(model.key.rpartition(".")[0]):
        return load_model_files(model.config)[0]


@item("tokenizer", Where.every_node, seconds=180.0, needs=("config", "hub"))
def tokenizer(context: Context) -> Tokens:
    described, digests, notes = {}, {}, []
    for model in context.config.models():
        try:
            own = tokenizer_of(model).chatting(context.config.data)
            described[model.component], found = look(own, context.config)
        except ConfigError as error:
            raise ConfigError(f"{model.component} ({model.key}): {error}") from error
        digests[model.component] = digest(own)
        notes += found if digests[model.component] not in list(digests.values())[:-1] else []  # once for the same tokenizer
    apart = [model.component for model in context.config.models() if model.reads_text]
    return Tokens(described=described, digests=digests, apart=apart, notes=notes)


def look(tokenizer: Tokenizer, config: JobRun) -> tuple[str, list[str]]:
    """(a few words, notes). Raises ConfigError if the data need a chat template that is missing or broken."""
    notes = []
    back = tokenizer.decode(tokenizer.encode(SAMPLE))
    if back.strip() != SAMPLE.strip():
        notes.append(f"a text with accents, Chinese and code does not survive encoding and decoding: {back!r}")
    if config.data.apply_chat_template or tokenizer.has_chat_template:
        try:
            rendered = tokenizer.apply_chat_template((Message(role="user", content="Hello"),), add_generation_prompt=True)
        except ConfigError:
            raise
        except Exception as error:  # a template is a program: whatever it raises
            raise ConfigError(f"the chat template of {tokenizer.path} fails: {type(error).__name__}: {error}") from error
        if not rendered:
            raise ConfigError(f"the chat template of {tokenizer.path} renders a message to zero tokens")
    template = "with" if tokenizer.has_chat_template else "without"
    if tokenizer.has_chat_template and not config.data.apply_chat_template:
        notes.append("has a chat template; plain-text prompts do not get it (data.apply_chat_template=false)")
    return f"{tokenizer.vocab_size} tokens, {template} chat template", notes


def digest(tokenizer: Tokenizer) -> str:
    """A digest of a sample's ids and of the special tokens; equal digests mean equal encoding."""
    ids = [tokenizer.encode(SAMPLE), tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


@tokenizer.judged
def judge_tokenizer(context: Context, seen: Mapping[int, Tokens]) -> Finding:
    """Fatal if nodes or components disagree: they exchange token ids."""
    first, node = seen[0], context.allocation.node_of(0)
    text = f": another tokenizer under the same path than on {node}"
    advice = "put models on a file system that all nodes share"
    if different := agree(context, seen, lambda theirs, ours: text, advice, of=lambda tokens: tokens.digests):
        return different
    main, *rest = first.digests
    if others := [name for name in rest if name not in first.apart and first.digests[name] != first.digests[main]]:
        text = f"the tokenizer of {' and '.join(others)} is not that of the {main}, whose token ids it is sent"
        return fatal(text, "train the reward model and critic on the actor's tokenizer")
    found = "; ".join(f"{name}: {words}" for name, words in first.described.items())
    return ok("\n".join([found, *first.notes]))


@item("weights", Where.every_node, seconds=180.0, needs=("tokenizer",), advice="copy or convert that model again, or name another path")
def weights(context: Context) -> tuple[dict[str, str], list[str]]:
    """(a few words by component, warnings) on the files of all models, as this node sees them."""
    described, notes = {}, []
    for model in context.config.models():
        described[model.component], found = check_model(model)
        notes += found
    for name, folder in resumed_from(context.config).items():
        described[f"resumes {name}"] = check_checkpoint(folder)[0]
    return described, notes


def check_model(model: UsedModel) -> tuple[str, list[str]]:
    """(a few words, warnings) on the files of `model.path`. Raises CheckpointError naming file and fault."""
    from aligner.models.checkpoint.foreign.model import is_foreign, open_weights
    from aligner.models.checkpoint.hf_weights import HFWeights
    from aligner.models.create import read_architecture, source_directory  # Megatron-Core comes with it
    from aligner.models.families import weight_names

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
        with open_weights(source) as opened:
            opened.check(opened.description.architecture, is_scalar=model.is_scalar)
        if model.needs_head and opened.description.head is None:
            raise CheckpointError(f"{model.key}.path={model.config.path}: has no rm_head: its scores would be those of a random head")
        return f"{source}: a model of Megatron-LM or NeMo, read in place", []
    tensors, num_bytes = stored_tensors(source)
    architecture = read_architecture(model.config, vocab_size=0)
    if not isinstance(architecture, HFArchitecture):  # transformers checks its own when it loads them
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
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, {entry.size} in its manifest")
    total = sum(entry.size for entry in entries.values())
    return f"{directory}: step {marker['step']}, {len(entries)} files, {total / 2**30:.1f} GiB", str(marker["kind"])


@weights.judged
def judge_weights(context: Context, seen: Mapping[int, tuple[dict[str, str], list[str]]]) -> Finding:
    """Unreadable files have already raised."""
    described, notes = seen[0]
    found = "\n".join(f"{component}: {words}" for component, words in described.items())
    return warning(found, "; ".join(notes) + ": right only for a trial") if notes else ok(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """One node's choice: by component whose layers, why, and which kernels are not fused; and the components with torch's layers."""

    described: dict[str, str] = field(default_factory=dict)
    of_torch: list[str] = field(default_factory=list)


@item("layers", Where.every_node, seconds=300.0, needs=("config", "hub", "devices"), advice="see model.layers")
def layers(context: Context) -> Chosen:
    from aligner.models.create import read_architecture  # Megatron-Core comes with it
    from aligner.models.modules.fusions import fusions
    from aligner.models.modules.megatron_config import resolve_dtype

    described, of_torch = {}, []
    for model in context.config.models():
        architecture = read_architecture(model.config, vocab_size=1)
        if isinstance(architecture, HFArchitecture):
            described[model.component] = f"transformers' own modules of {architecture.model_type}"
            continue
        found = fusions(architecture, model.config, resolve_dtype(model.config.dtype))
        whose = "Transformer Engine's" if found.transformer_engine else "torch's"
        off = ", ".join(f"{kernel.value} ({one.off})" for kernel, one in found.kernels.items() if one.off)
        rest = f"; not fused: {off}" if off and found.transformer_engine else ""
        products = f"float32 products: {model.config.float32_matmul.value}"  # whatever the node's environment says
        described[model.component] = f"layers are {whose} ({found.reason}), {products}{rest}"
        if not found.transformer_engine:
            of_torch.append(model.component)
    return Chosen(described=described, of_torch=of_torch)


@layers.judged
def judge_layers(context: Context, seen: Mapping[int, Chosen]) -> Finding:
    """Fatal: nodes that choose differently. Warning: torch's layers although the config is for GPUs. Impossible settings have raised."""
    ours = seen[0]
    advice = "one container or environment for all nodes"
    if different := agree(context, seen, lambda theirs, ours: f": {_text(theirs)}; and not {_text(ours)}", advice):
        return different
    if ours.of_torch and context.config.cluster.device == Device.gpu:
        models = [model.config for model in context.config.models() if model.component in ours.of_torch]
        if any(model.layers.value != "torch" for model in models):
            return warning(_text(ours), "install transformer-engine, or use the container; model.layers=torch confirms torch's layers")
    return ok(_text(ours))


def _text(chosen: Chosen) -> str:
    texts = set(chosen.described.values())
    return texts.pop() if len(texts) == 1 else "; ".join(f"{component}: {text}" for component, text in chosen.described.items())
