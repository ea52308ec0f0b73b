"""Hugging Face model <-> Megatron-Core checkpoint, and either from Megatron-LM's and NeMo's: in one process, or split over ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

from aligner.commands.model_card import Origin, model_card, origin_of
from aligner.data.tokenizer import check_vocabulary, load_tokenizer
from aligner.errors import CheckpointError, ConfigError
from aligner.hub import push
from aligner.hub.names import HubName
from aligner.jobs.parts import name_special_tokens
from aligner.models import create
from aligner.models.architecture.divisible import check_divisible
from aligner.models.checkpoint import checkpoint
from aligner.models.checkpoint.foreign.model import open_weights
from aligner.models.checkpoint.hf_files import CONFIG_FILE, read_json
from aligner.models.config import Architecture, Dtype, ModelConfig
from aligner.models.modules.build import Transformer, build_language_model, build_scalar_model
from aligner.models.modules.scalar_head import ScalarHead, read_head
from aligner.models.weights.weights import save_hf
from aligner.parallel import launch, platform, topology
from aligner.parallel.collectives import from_rank_0
from aligner.parallel.topology import ParallelConfig, Topology
from aligner.run.from_hub import fetch_one


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """A model that is not a checkpoint of this project."""

    path: Path
    dtype: Dtype
    architecture: Architecture
    head: ScalarHead | None
    tokenizer: Path | None  # directory with its files
    note: str = ""  # what the user should hear of it


def hf_to_megatron(source: Path, target: Path, parallel: ParallelConfig) -> Path:
    """Write `target`/step_000000 (and `latest`) from a Hugging Face directory, or a name of the Hub. Returns the checkpoint's directory.

    Every rank calls it.

    Raises CheckpointError if the source is no model, or the target holds a checkpoint already.
    """
    source = fetch_one("--from-hf", str(source))
    if not (source / CONFIG_FILE).exists():
        raise CheckpointError(f"--from-hf {source}: no config.json there")
    _check_empty("--to-megatron", target, checkpoint.LATEST, "checkpoint")
    dtype = _dtype(source)
    architecture = create.read_architecture(ModelConfig(path=str(source), dtype=dtype), vocab_size=0)
    read = _Source(path=source, dtype=dtype, architecture=architecture, head=read_head(source), tokenizer=source)
    return _to_megatron(read, target, parallel)


def foreign_to_megatron(source: Path, target: Path, parallel: ParallelConfig, *, tokenizer: Path | None = None) -> Path:
    """`hf_to_megatron` from what Megatron-LM or NeMo wrote; `tokenizer` as for `foreign_to_hf`."""
    _check_empty("--to-megatron", target, checkpoint.LATEST, "checkpoint")
    with _foreign(source, tokenizer) as read:
        return _to_megatron(read, target, parallel)


def _to_megatron(source: _Source, target: Path, parallel: ParallelConfig) -> Path:
    here = _world(parallel)
    config = ModelConfig(path=str(source.path), dtype=source.dtype)
    make = create.create_policy if source.head is None else create.create_reward_model
    made = make(config, source.architecture, parallel, here, create.training(config, None))
    request = checkpoint.SaveRequest(step=0, state={}, tokenizer=source.tokenizer)
    written = checkpoint.save(target, made.model, request)
    _say(f"Megatron-Core checkpoint written to {written}", source.note)
    launch.shutdown()
    return written


def megatron_to_hf(source: Path, target: Path, parallel: ParallelConfig, *, push_to: str = "") -> None:
    """Write a Hugging Face model (with its tokenizer) from a checkpoint of any layout. A reward model becomes a classifier.

    With `push_to`, ORG/NAME, it is then uploaded there with a card. Every rank calls it; rank 0 writes, holding one file's tensors at a
    time. Raises CheckpointError if the source is no complete checkpoint, or the target holds a model already; as `push_export` does.
    """
    directory = checkpoint.resolve(source)
    _check_empty("--to-hf", target, CONFIG_FILE, "model")
    dtype = _dtype(directory)
    architecture = create.read_architecture(ModelConfig(path=str(directory), dtype=dtype), vocab_size=0)
    read = _Source(path=directory, dtype=dtype, architecture=architecture, head=read_head(directory), tokenizer=directory)
    _to_hf(read, target, parallel, push_to=push_to)


def foreign_to_hf(source: Path, target: Path, parallel: ParallelConfig, *, push_to: str = "", tokenizer: Path | None = None) -> None:
    """`megatron_to_hf` from what Megatron-LM or NeMo wrote.

    `tokenizer`: a directory with one, else the archive's own is taken where it can be. It says where a padded vocabulary ends, if
    the source does not.
    """
    _check_empty("--to-hf", target, CONFIG_FILE, "model")
    with _foreign(source, tokenizer) as read:
        _to_hf(read, target, parallel, push_to=push_to)


def _to_hf(source: _Source, target: Path, parallel: ParallelConfig, *, push_to: str) -> None:
    here = _world(parallel)
    name = from_rank_0(lambda: push.prepare(push_to)) if push_to else None  # before the work
    config = ModelConfig(path=str(source.path), dtype=source.dtype)
    check_divisible(source.architecture, parallel)
    chunks: Sequence[Transformer]
    if source.head is not None:
        chunks = build_scalar_model(source.architecture, config, parallel, load=True, head=source.head)
    else:
        chunks = build_language_model(source.architecture, config, parallel, load=True)
    checkpoint.load_source(chunks, source.path)
    save_hf(chunks, target, writer=here.rank == 0)
    from_rank_0(lambda: _finish(source.tokenizer, target))
    _say(f"Hugging Face model written to {target}", source.note)
    launch.shutdown()
    if name is not None and here.rank == 0:  # the others need not wait
        _push(target, name, origin_of(source.path))


def _check_empty(option: str, target: Path, name: str, what: str) -> None:
    """Raise CheckpointError where the target holds one already."""
    if (target / name).exists():
        raise CheckpointError(f"{option} {target}: holds a {what} already; name an empty directory")


@contextmanager
def _foreign(path: Path, tokenizer: Path | None) -> Iterator[_Source]:
    """A model of Megatron-LM or NeMo, with a tokenizer for as long as the context lasts."""
    with TemporaryDirectory() as unpacked:
        with open_weights(path) as weights:
            found = weights.description
            own = Path(unpacked) if tokenizer is None and weights.copy_tokenizer(Path(unpacked)) else None
        read = _Source(
            path=path,
            dtype=Dtype(str(found.dtype).removeprefix("torch.")),
            architecture=found.architecture,
            head=found.head,
            tokenizer=None,
        )
        try:
            loaded = None if tokenizer is None and own is None else load_tokenizer(tokenizer or own)
            if own is not None:
                loaded.save(own)  # with tokenizer.json, which loads beside any model's config
        except ConfigError as error:
            if tokenizer is not None:
                raise
            loaded, read = None, replace(read, note=f"the archive's own tokenizer cannot be read here ({error}); ")
        if loaded is None:
            named = found.tokenizer.get("type") or found.tokenizer.get("model") or "of its training"
            yield replace(read, note=f"{read.note}no tokenizer written: give --tokenizer DIR with the one {named}")
            return
        check_vocabulary(loaded, found.architecture.vocab_size)
        if found.is_padded:
            read = replace(read, architecture=replace(found.architecture, vocab_size=loaded.max_token_id + 1))
        yield replace(read, tokenizer=tokenizer or own)


def push_export(directory: Path, push_to: str) -> None:
    """Upload a Hugging Face directory, such as the `export` of a run, to the Hub as ORG/NAME, with a card of what the run recorded.

    Raises CheckpointError if there is no model; ConfigError for a name or token that the Hub refuses, AlignerError without a network.
    """
    if not (directory / CONFIG_FILE).exists():
        raise CheckpointError(f"--from-hf {directory}: no config.json there")
    _push(directory, push.prepare(push_to), origin_of(directory.absolute()))


def _push(directory: Path, name: HubName, origin: Origin) -> None:
    title = name.repo.partition("/")[2]
    address = push.push(directory, name, card=model_card(title, directory, origin), message=f"Upload {title} with aligner")
    print(f"pushed to {address} (a new repository is private until its settings say otherwise)", flush=True)


def _finish(tokenizer: Path | None, target: Path) -> None:
    if tokenizer is not None:
        checkpoint.copy_tokenizer(tokenizer, target)
    if (target / "tokenizer_config.json").exists():
        name_special_tokens(target, checkpoint.special_ids(tokenizer))


def _world(parallel: ParallelConfig) -> Topology:
    """One process for a layout of one rank, else the launcher's ranks."""
    environ = dict(os.environ) if parallel.replica_size > 1 else {"ALIGNER_LAUNCH": "single"}
    launch.initialize(
        platform.backend(),
        timeout_seconds=300.0,
        fingerprint=f"convert {parallel}",
        claim_gpu=lambda world: platform.claim_device(world.local_rank),
        environ=environ,
    )
    return topology.initialize(parallel, seed=1)


def _dtype(directory: Path) -> Dtype:
    """The weights' own precision, so that the conversion is exact."""
    config = read_json(directory / CONFIG_FILE)
    stored = config.get("dtype") or config.get("torch_dtype")
    return Dtype(stored) if stored in (Dtype.bfloat16.value, Dtype.float16.value) else Dtype.float32


def _say(*lines: str) -> None:
    if dist.get_rank() == 0:
        print(*filter(None, lines), sep="\n")
