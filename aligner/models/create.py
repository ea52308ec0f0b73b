"""Ready-to-use models from configs: reads the architecture, checks the layout, builds the module and loads its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from aligner.data.vision import Vision
from aligner.errors import ConfigError
from aligner.models.architecture import rope
from aligner.models.architecture.divisible import check_divisible, check_together
from aligner.models.checkpoint import checkpoint, files, weights, wrapper
from aligner.models.checkpoint.foreign.model import METADATA, NEMO_CONFIG, describe, is_foreign
from aligner.models.checkpoint.hf_files import CONFIG_FILE, has_weights, read_json
from aligner.models.checkpoint.hf_weights import HFWeights, described
from aligner.models.config import Architecture, HFArchitecture, Implementation, ModelConfig, PositionEmbedding, SeeingArchitecture
from aligner.models.families import architecture_from_hf, architecture_to_hf, has_layers, weight_names
from aligner.models.families.own_modules import hf_architecture
from aligner.models.families.wrappers import around, can_see, has_images, seeing
from aligner.models.modules.build import build_model
from aligner.models.modules.chunk import Chunk, WholeChunk
from aligner.models.modules.fusions import fusions, note_once, say_once
from aligner.models.modules.heads import add_value_head, combine_outputs
from aligner.models.modules.hf_chunk import HFChunk, probe
from aligner.models.modules.layers import attention_of, feed_forward_of
from aligner.models.modules.lora import initialise_adapters
from aligner.models.modules.megatron_config import resolve_dtype
from aligner.models.modules.peft import CONFIG_FILE as ADAPTER_CONFIG_FILE, load_peft, peft_config, start_from_weights, targets_in_wrapper
from aligner.models.modules.scalar_head import VALUES, PolicyHead, ScalarHead, read_head
from aligner.models.training.guard import Guard, GuardConfig
from aligner.models.training.optimizer import OptimizerConfig
from aligner.models.training.policy import MegatronPolicy, MegatronRewardModel, MegatronValueModel
from aligner.models.training.trainable import TrainableModel, Training
from aligner.parallel import platform
from aligner.parallel.collectives import from_rank_0
from aligner.parallel.exact import check_arithmetic
from aligner.parallel.topology import ParallelConfig, Topology


def source_directory(config: ModelConfig, *, key: str = "model") -> Path | None:
    """The directory of the weights, `latest` resolved; None without. `key`: of its settings. Raises ConfigError or CheckpointError."""
    if not config.path:
        return None
    path = Path(config.path)
    if path.is_file() and path.name in (files.LATEST, files.BEST):
        return checkpoint.resolve(path)
    if is_foreign(path):
        if config.lora.is_on:
            raise ConfigError(
                f"{key}.lora.rank={config.lora.rank}: adapters belong to Hugging Face models and checkpoints of this project; "
                f"allowed: 0, or {key}.path=DIR of `aligner convert --from-megatron {path} --to-hf DIR`"
            )
        return path
    if not path.is_dir():
        raise ConfigError(f"{key}.path={config.path}: no such directory")
    if (path / files.LATEST).exists() or (path / files.MARKER).exists():
        return checkpoint.resolve(path)
    if (path / ADAPTER_CONFIG_FILE).exists():
        adapter = read_json(path / ADAPTER_CONFIG_FILE)
        base = adapter.get("base_model_name_or_path") or "the model that it was trained on"
        beside = ", or without its files if the model beside it is meant" if (path / CONFIG_FILE).exists() else ""
        raise ConfigError(  # also for one beside a model, which transformers would add to the adapter's own base
            f"{key}.path={config.path}: an adapter ({ADAPTER_CONFIG_FILE}), not a model by itself; allowed: {key}.path={base} with "
            f"{key}.lora.path={config.path} {key}.lora.rank={adapter.get('r')} {key}.lora.alpha={adapter.get('lora_alpha')}{beside}"
        )
    if not (path / CONFIG_FILE).exists():
        raise ConfigError(
            f"{key}.path={config.path}: neither a Hugging Face model ({CONFIG_FILE}) nor a checkpoint ({files.MARKER}; of Megatron-LM "
            f"{METADATA}; of NeMo {NEMO_CONFIG})"
        )
    return path


def read_architecture(config: ModelConfig, *, vocab_size: int) -> Architecture:
    """The architecture of `config`: its path's, else the one written in the config with the tokenizer's vocabulary size."""
    source = source_directory(config)
    if source is not None and _has_own_modules(config, source):
        architecture = hf_architecture(read_json(source / CONFIG_FILE), where=str(source / CONFIG_FILE))
    elif source is not None and is_foreign(source):
        architecture = describe(source).architecture
    elif source is not None:
        architecture, hf = described(source), read_json(source / CONFIG_FILE)
        if config.images:
            architecture = seeing(architecture, hf, where=str(source / CONFIG_FILE))
        elif can_see(hf) and (source / files.MARKER).exists():
            raise ConfigError(f"model.images=false: the checkpoint in {source} is of a model that reads images; allowed: true")
    elif config.implementation is Implementation.transformers:
        raise ConfigError("model.implementation=transformers: needs model.path, whose config.json describes the model")
    else:
        architecture = replace(config.architecture, vocab_size=config.architecture.vocab_size or vocab_size)
        ours = replace(architecture, vocab_size=architecture.vocab_size or 1)  # whatever the tokenizer will have
        theirs = architecture_from_hf(architecture_to_hf(ours), where="architecture")
        for name, value in asdict(ours).items():  # the export of a model that no Hugging Face config describes would be another model
            if (other := getattr(theirs, name)) != value:
                raise ConfigError(f"model.architecture.{name}={value}: models of family {ours.family.value} have {other}")
        if config.images:
            architecture = seeing(architecture, around(architecture_to_hf(ours), config.vision), where="model.vision")
    if config.seq_length > architecture.max_position_embeddings:
        raise ConfigError(
            f"model.seq_length={config.seq_length}: the model was made for at most {architecture.max_position_embeddings} positions"
        )
    return architecture


def how_to_see(config: ModelConfig) -> str:
    """Which setting lets the model of `config` read images, whose text part alone is used; empty for other models."""
    source = source_directory(config)
    if source is None or not (source / CONFIG_FILE).exists() or is_foreign(source):
        return ""
    hf = read_json(source / CONFIG_FILE)
    allowed = "model.images=true or model.implementation=transformers"
    return f"{config.path}: its text part alone; images are read with {allowed}" if has_images(hf) else ""


def _has_own_modules(config: ModelConfig, source: Path) -> bool:
    """Whether the model in `source` is made of `transformers`' own modules. Raises ConfigError if its files are of the other kind."""
    asked, key = config.implementation, f"model.implementation={config.implementation.value}"
    if is_foreign(source):
        if asked is Implementation.transformers:
            raise ConfigError(f"{key}: {source} was written by Megatron-LM or NeMo; allowed: auto, megatron")
        return False
    if (source / files.MARKER).exists():
        saved = Implementation(files.read_marker(source).get(checkpoint.IMPLEMENTATION, Implementation.megatron.value))
        if asked not in (Implementation.auto, saved):
            raise ConfigError(f"{key}: the checkpoint in {source} is of the other one; allowed: auto, {saved.value}, or `aligner convert`")
        return saved is Implementation.transformers
    if asked is not Implementation.auto:
        return asked is Implementation.transformers
    hf = read_json(source / CONFIG_FILE)
    return not has_layers(hf) or config.images and not can_see(hf)


def context_length(config: ModelConfig, architecture: Architecture) -> int:
    """Longest sequence that the run may hold, in tokens."""
    return config.seq_length or architecture.max_position_embeddings


def training(
    config: ModelConfig,
    optimizer: OptimizerConfig | None,
    *,
    total_steps: int = 1,
    temperature: float = 1.0,
    guard: Guard | None = None,
    replay_routes: bool = False,
    vision: Vision | None = None,
    neftune_alpha: float = 0.0,
    value_head: PolicyHead | None = None,
) -> Training:
    """How the model of `config` is trained, or used frozen where `optimizer` is None. Without a `guard`: the default settings' one.
    `vision` reads the images of rows. `value_head`: a policy has it beside its output layer."""
    return Training(
        optimizer=optimizer,
        total_steps=total_steps,
        micro_batch_size=config.micro_batch_size,
        micro_batch_tokens=config.micro_batch_tokens,
        packing=config.packing,
        share_prompts=config.share_prompts,
        neftune_alpha=neftune_alpha,
        temperature=temperature,
        router_aux_loss_coef=config.router_aux_loss_coef,
        router_z_loss_coef=config.router_z_loss_coef,
        guard=guard or Guard(GuardConfig()),
        replay_routes=replay_routes,
        sees=vision,
        value_head=value_head,
    )


def create_policy(
    config: ModelConfig, architecture: Architecture, parallel: ParallelConfig, topology: Topology, training: Training
) -> MegatronPolicy:
    """A language model with its weights; frozen where `training.optimizer` is None. Every rank calls it."""
    _check(config, architecture, parallel, topology, is_scalar=False)
    if config.batch_invariant:
        check_arithmetic(platform.device())
    chunks = _chunks(architecture, config, parallel, topology, head=None)
    for chunk in chunks if training.value_head is not None else ():
        add_value_head(chunk, training.value_head.gradient)
    return MegatronPolicy(_ready(chunks, config, topology, training), temperature=training.temperature)


def create_value_model(
    config: ModelConfig,
    architecture: Architecture,
    parallel: ParallelConfig,
    topology: Topology,
    training: Training,
    *,
    output_weights: Sequence[float] = (),
) -> MegatronValueModel:
    """A value model, usually from a reward model's checkpoint, whose head it keeps. Every rank calls it.

    `output_weights`: the weights that combine several outputs of a reward model into one value. Raises ConfigError if they are missing.
    """
    _check(config, architecture, parallel, topology, is_scalar=True)
    found = head_of(config) or VALUES
    head = replace(found, pooling=VALUES.pooling)
    if head.num_outputs > 1 and len(output_weights) != head.num_outputs:
        raise ConfigError(
            f"reward.attribute_weights={list(output_weights)}: the critic starts from a reward model with {head.num_outputs} outputs "
            f"({', '.join(head.outputs)}), allowed: one weight for each"
        )
    chunks = _chunks(architecture, config, parallel, topology, head=head)
    load_source(chunks, config)
    for chunk in chunks:
        combine_outputs(chunk, output_weights if head.num_outputs > 1 else (1.0,), VALUES)
    _start_adapters(chunks, config, topology.seed)
    return MegatronValueModel(TrainableModel(chunks, topology, training))


def _chunks(
    architecture: Architecture, config: ModelConfig, parallel: ParallelConfig, topology: Topology, *, head: ScalarHead | None
) -> Sequence[Any]:
    """Before their weights are read. The one of a model of `transformers`' own modules is probed."""
    if not isinstance(architecture, HFArchitecture):
        return build_model(architecture, config, parallel, load=bool(config.path), head=head, seed=topology.seed)
    chunk = HFChunk(architecture, config, source=source_directory(config), head=head).to(platform.device())
    initialise_adapters([chunk], topology.seed)
    kind = f"{config.path}: {architecture.model_type}: transformers' own modules; parallel.tp, pp, cp and ep must be 1"
    adapters = [chunk.adapted()] if config.lora.is_on else []
    for note in (kind, *adapters, *probe(chunk, packing=config.packing)):
        note_once(note, rank=topology.rank)
    return [chunk]


def _check(config: ModelConfig, architecture: Architecture, parallel: ParallelConfig, topology: Topology, *, is_scalar: bool) -> None:
    """Raise ConfigError for a model that cannot be built so, or whose files do not fit; log its layers, what they fuse, LongRoPE's choice,
    and which of the files' tensors are not read. Set the precision of float32 products."""
    platform.set_float32_matmul(config.float32_matmul.value)
    check_divisible(architecture, parallel)
    if isinstance(architecture, HFArchitecture):
        check_together(architecture, config, parallel)
        return
    if isinstance(architecture, SeeingArchitecture) and not config.path:
        raise ConfigError("model.path='': a model that reads images is trained from weights; allowed: a directory, or ORG/NAME of the Hub")
    dtype, source = resolve_dtype(config.dtype), source_directory(config)
    _check_memory(architecture, config, parallel)
    if source is not None and has_weights(source):
        weights = HFWeights(source, weight_names(architecture))
        weights.check(architecture, is_scalar=is_scalar)
        for note in weights.notes(architecture, is_scalar=is_scalar):
            note_once(note, rank=topology.rank)
    say_once(fusions(architecture, config, dtype), rank=topology.rank)
    if architecture.rope_long_factors:
        note_once(rope.choice(architecture, config.seq_length), rank=topology.rank)


def _check_memory(a: Architecture, config: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError for sizes whose weights and rotary tables, of which a part is counted, cannot be in this rank's memory."""
    of_layers = sum(kind.numbers(a) for layer in range(a.num_layers) for kind in (attention_of(a, layer), feed_forward_of(a, layer)))
    numbers = a.hidden_size * a.max_position_embeddings if a.position_embedding is PositionEmbedding.learned else 0
    numbers += a.vocabulary_width * a.vocab_size + context_length(config, a) * a.rotated
    itemsize = resolve_dtype(config.dtype).itemsize
    size = int(numbers * itemsize + of_layers * (config.quantization.num_bytes or itemsize))
    size = size // parallel.pp // max(parallel.tp, parallel.ep * parallel.etp)
    room = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else psutil.virtual_memory().total
    if size > room:
        largest = sorted(((value, name) for name, value in asdict(a).items() if type(value) is int), reverse=True)[:3]
        raise ConfigError(
            f"{config.path or 'model.architecture'}: its weights and tables take more than {size >> 30} GiB on each rank, which has "
            f"{room >> 30}; the largest sizes are {', '.join(f'{name}={value}' for value, name in largest)}; "
            "allowed: smaller ones, or more ranks (parallel.tp, pp, ep)"
        )


def head_of(config: ModelConfig) -> ScalarHead | None:
    """The head that the model at `config.path` has; None for a language model, and without a path."""
    source = source_directory(config)
    if source is None:
        return None
    return describe(source).head if is_foreign(source) else read_head(source)


def create_reward_model(
    config: ModelConfig,
    architecture: Architecture,
    parallel: ParallelConfig,
    topology: Topology,
    training: Training,
    *,
    head: ScalarHead | None = None,
) -> MegatronRewardModel:
    """A reward model with this head; with that of `config.path` where none is given. Every rank calls it."""
    _check(config, architecture, parallel, topology, is_scalar=True)
    head = head or head_of(config) or ScalarHead()
    chunks = _chunks(architecture, config, parallel, topology, head=head)
    return MegatronRewardModel(_ready(chunks, config, topology, training))


def _ready(chunks: Sequence[Chunk], config: ModelConfig, topology: Topology, training: Training) -> TrainableModel:
    load_source(chunks, config)
    remember_wrapper(chunks, source_directory(config), is_trained=training.optimizer is not None)
    _start_adapters(chunks, config, topology.seed)
    return TrainableModel(chunks, topology, training)


def remember_wrapper(chunks: Sequence[Chunk], source: Path | None, *, is_trained: bool) -> None:
    """Let a language model that is the text part of the model in `source`, or of that of the checkpoint there, be exported as that one.

    Raises CheckpointError if a model that is trained, and so exported, has lost the other part.
    """
    if source is None or is_foreign(source) or chunks[0].head is not None or isinstance(chunks[0], WholeChunk):
        return
    if isinstance(chunks[0].architecture, SeeingArchitecture):  # nothing of it is elsewhere
        return
    found = from_rank_0(lambda: wrapper.find(source))
    for chunk in chunks:
        chunk.wrapper = found
    if found and is_trained:
        from_rank_0(lambda: wrapper.directory_of(found))


def _start_adapters(chunks: Sequence[Chunk], config: ModelConfig, seed: int) -> None:
    """Attach adapters if `config` asks for them: new ones, or those that it names (PEFT's, or a checkpoint's on the same weights)."""
    if not config.lora.is_on:
        return
    source = source_directory(config)
    digest = f"random weights of seed {seed}" if source is None else from_rank_0(lambda: wrapper.weights_digest(source))
    for chunk in chunks:
        chunk.base, chunk.base_digest = "" if source is None else wrapper.named(source), digest
    initialise_adapters(chunks, seed)
    peft_config(chunks[0].architecture, config.lora, base="") | targets_in_wrapper(chunks[0])  # refused before it is trained
    path = Path(config.lora.path)
    if not config.lora.path:
        if config.lora.is_pissa:
            start_from_weights(chunks)
    elif (path / files.MARKER).exists():
        checkpoint.load_same(chunks, path)
    elif config.lora.is_pissa:
        raise ConfigError(
            f"model.lora.path={path}: PEFT's adapters have no first pair, as model.lora.init=pissa needs; allowed: uniform, with the rank "
            "of the adapter there"
        )
    else:
        load_peft(chunks, path)


def load_source(chunks: Sequence[Chunk], config: ModelConfig) -> None:
    """Fill the chunks from `config.path`, where there is one; adapters that they have add nothing afterwards."""
    source = source_directory(config)
    if source is not None:
        weights.load_source(chunks, source)
    initialise_adapters(chunks, seed=0)
