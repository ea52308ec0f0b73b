"""Hugging Face model <-> Megatron-Core checkpoint: in one process, or split over a launcher's ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from aligner.config import fetch_one
from aligner.errors import CheckpointError
from aligner.hub import push
from aligner.hub.names import HubName
from aligner.jobs.model_card import Origin, model_card, origin_of
from aligner.loop.parts import name_special_tokens
from aligner.models import checkpoint, create
from aligner.models.build import Transformer, build_language_model, build_scalar_model
from aligner.models.config import Dtype, ModelConfig
from aligner.models.divisible import check_divisible
from aligner.models.hf_files import CONFIG_FILE, read_json
from aligner.models.scalar_head import read_head
from aligner.models.weights import save_hf
from aligner.parallel import launch, platform, topology
from aligner.parallel.collectives import from_rank_0
from aligner.parallel.topology import ParallelConfig, Topology


def hf_to_megatron(source: Path, target: Path, parallel: ParallelConfig) -> Path:
    """Write `target`/step_000000 (and `latest`) from a Hugging Face directory, or a name of the Hub. Returns the checkpoint's directory.

    Every rank calls it.

    Raises CheckpointError if the source is no model, or the target holds a checkpoint already.
    """
    source = fetch_one("--from-hf", str(source))
    if not (source / CONFIG_FILE).exists():
        raise CheckpointError(f"--from-hf {source}: no config.json there")
    if (target / checkpoint.LATEST).exists():
        raise CheckpointError(f"--to-megatron {target}: holds a checkpoint already; name an empty directory")
    here = _world(parallel)
    config = ModelConfig(path=str(source), dtype=_dtype(source))
    architecture = create.read_architecture(config, vocab_size=0)
    make = create.create_policy if read_head(source) is None else create.create_reward_model
    made = make(config, architecture, parallel, here, create.training(config, None))
    request = checkpoint.SaveRequest(step=0, state={}, tokenizer=source)
    written = checkpoint.save(target, made.model, request)
    _say(f"Megatron-Core checkpoint written to {written}")
    launch.shutdown()
    return written


def megatron_to_hf(source: Path, target: Path, parallel: ParallelConfig, *, push_to: str = "") -> None:
    """Write a Hugging Face model (with its tokenizer) from a checkpoint of any layout. A reward model becomes a classifier.

    With `push_to`, ORG/NAME, it is then uploaded there with a card. Every rank calls it; rank 0 writes, holding one file's tensors at a
    time. Raises CheckpointError if the source is no complete checkpoint, or the target holds a model already; as `push_export` does.
    """
    directory = checkpoint.resolve(source)
    if (target / CONFIG_FILE).exists():
        raise CheckpointError(f"--to-hf {target}: holds a model already; name an empty directory")
    head = read_head(directory)
    here = _world(parallel)
    name = from_rank_0(lambda: push.prepare(push_to)) if push_to else None  # before the work
    config = ModelConfig(path=str(directory), dtype=_dtype(directory))
    architecture = create.read_architecture(config, vocab_size=0)
    check_divisible(architecture, parallel)
    chunks: Sequence[Transformer]
    if head is not None:
        chunks = build_scalar_model(architecture, config, parallel, load=True, head=head)
    else:
        chunks = build_language_model(architecture, config, parallel, load=True)
    checkpoint.load_weights(chunks, directory)
    save_hf(chunks, target, writer=here.rank == 0)
    from_rank_0(lambda: _finish(directory, target))
    _say(f"Hugging Face model written to {target}")
    launch.shutdown()
    if name is not None and here.rank == 0:  # the others need not wait
        _push(target, name, origin_of(directory))


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


def _finish(directory: Path, target: Path) -> None:
    checkpoint.copy_tokenizer(directory, target)
    if (target / "tokenizer_config.json").exists():
        name_special_tokens(target)


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


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text)
