"""`aligner convert`: between Hugging Face models and Megatron-Core checkpoints, also from Megatron-LM and NeMo, on one or more ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

from aligner.commands.model_card import Origin, model_card, origin_of
from aligner.commands.parts import ConvertOptions
from aligner.data.tokenizer import check_vocabulary, load_tokenizer
from aligner.errors import AlignerError, CheckpointError, ConfigError
from aligner.hub import download
from aligner.hub.names import HubName
from aligner.jobs.parts import name_special_tokens
from aligner.models import create
from aligner.models.checkpoint import checkpoint, files
from aligner.models.checkpoint.foreign.model import is_foreign, open_weights
from aligner.models.checkpoint.hf_files import CONFIG_FILE, read_json
from aligner.models.checkpoint.wrapper import directory_of
from aligner.models.config import Architecture, Dtype, ModelConfig, SeeingArchitecture
from aligner.models.families.wrappers import can_see
from aligner.models.modules.scalar_head import HeadGradient, PolicyHead, ScalarHead, has_policy_head, read_head
from aligner.models.training.trainable import TrainableModel
from aligner.models.weights import save_hf
from aligner.parallel import launch, platform, topology
from aligner.parallel.collectives import from_rank_0
from aligner.parallel.topology import ParallelConfig, Topology
from aligner.run.from_hub import fetch_one


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    path: Path
    dtype: Dtype
    architecture: Architecture
    head: ScalarHead | None
    tokenizer: Path | None  # directory with its files
    value_head: PolicyHead | None = None  # beside a policy's output layer
    note: str = ""  # for the user

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(path=str(self.path), dtype=self.dtype, images=isinstance(self.architecture, SeeingArchitecture))

    def made(self, parallel: ParallelConfig, here: Topology) -> TrainableModel:
        make = create.create_policy if self.head is None else create.create_reward_model
        return make(self.config, self.architecture, parallel, here, create.training(self.config, None, value_head=self.value_head)).model


def convert(options: ConvertOptions) -> int:
    """Convert one source to one target, on every rank of the layout. A Megatron-Core checkpoint goes to `to_megatron`/step_000000; a
    Hugging Face model is written by rank 0, one file's tensors at a time, and uploaded if there is `push_to`. `tokenizer` replaces that of
    a model of Megatron-LM or NeMo, and determines where a padded vocabulary ends, unless the source does."""
    from_hf, from_megatron, to_megatron, to_hf = options.from_hf, options.from_megatron, options.to_megatron, options.to_hf
    tokenizer, push_to, parallel = options.tokenizer, options.push_to, ParallelConfig(tp=options.tp, pp=options.pp)
    foreign = from_megatron is not None and is_foreign(from_megatron)
    if tokenizer is not None and not foreign:
        raise AlignerError(
            f"convert: --tokenizer {tokenizer}: only for a model of Megatron-LM or NeMo (--from-megatron); others include theirs"
        )
    given = ((from_hf, "hf"), (from_megatron, "foreign" if foreign else "megatron")), ((to_megatron, "megatron"), (to_hf, "hf"))
    source, target = ([kind for path, kind in side if path is not None] for side in given)
    allowed = [(["megatron"], ["hf"]), (["foreign"], ["hf"]), (["hf"], [] if push_to else ["megatron"])]
    allowed += [(["foreign"], ["megatron"])] if not push_to else []
    if (source, target) not in allowed:
        others = "; --push-to-hub with --to-hf, or with --from-hf alone" if push_to else ""
        raise AlignerError(f"convert: use --from-hf with --to-megatron, or --from-megatron with --to-hf{others}")
    if to_megatron is not None:
        _check_empty("--to-megatron", to_megatron, files.LATEST, "checkpoint")
    if to_hf is not None:
        _check_empty("--to-hf", to_hf, CONFIG_FILE, "model")
    if from_hf is not None and to_megatron is None:
        _check_config(from_hf)
        _push(from_hf, download.prepare(push_to), origin_of(from_hf.absolute()))
        return 0
    with _opened(from_hf, from_megatron, tokenizer, foreign=foreign) as read:
        if to_megatron is not None:
            _to_megatron(read, to_megatron, parallel)
        elif to_hf is not None:
            _to_hf(read, to_hf, parallel, push_to=push_to)
    return 0


@contextmanager
def _opened(from_hf: Path | None, from_megatron: Path | None, tokenizer: Path | None, *, foreign: bool) -> Iterator[_Source]:
    if from_megatron is not None and foreign:
        with _foreign(from_megatron, tokenizer) as read:
            yield read
        return
    if from_megatron is not None:
        path = checkpoint.resolve(from_megatron)
    else:
        _check_config(path := fetch_one("--from-hf", str(from_hf)))
    dtype = _dtype(path)
    config = ModelConfig(path=str(path), dtype=dtype, images=from_megatron is not None and can_see(read_json(path / CONFIG_FILE)))
    architecture = create.read_architecture(config, vocab_size=0)
    head = read_head(path)
    values = PolicyHead(gradient=HeadGradient.detached, lr=0.0, min_lr=0.0) if head is None and has_policy_head(path) else None
    yield _Source(path=path, dtype=dtype, architecture=architecture, head=head, tokenizer=path, value_head=values)


def _to_megatron(source: _Source, target: Path, parallel: ParallelConfig) -> None:
    made = source.made(parallel, _world(parallel))
    request = checkpoint.SaveRequest(step=0, state={}, tokenizer=source.tokenizer)
    written = checkpoint.save(target, made, request)
    _print(f"Megatron-Core checkpoint written to {written}", source.note)
    launch.shutdown()


def _to_hf(source: _Source, target: Path, parallel: ParallelConfig, *, push_to: str) -> None:
    here = _world(parallel)
    name = from_rank_0(lambda: download.prepare(push_to)) if push_to else None  # before the work
    chunks = source.made(parallel, here).chunks
    save_hf(chunks, target, writer=here.rank == 0)
    from_rank_0(lambda: _write_tokenizer(source.tokenizer, target))
    if whole := chunks[0].wrapper:
        from_rank_0(lambda: checkpoint.carry_over(directory_of(whole), target))
    _print(f"Hugging Face model written to {target}", source.note)
    launch.shutdown()
    if name is not None and here.rank == 0:  # the others need not wait
        _push(target, name, origin_of(source.path))


def _check_config(path: Path) -> None:
    if not (path / CONFIG_FILE).exists():
        raise CheckpointError(f"--from-hf {path}: has no config.json")


def _check_empty(option: str, target: Path, name: str, what: str) -> None:
    if (target / name).exists():
        raise CheckpointError(f"{option} {target}: holds a {what} already; name an empty directory")


@contextmanager
def _foreign(path: Path, tokenizer: Path | None) -> Iterator[_Source]:
    """A model of Megatron-LM or NeMo; an unpacked tokenizer is removed at the end of the context."""
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
            yield replace(read, note=f"{read.note}no tokenizer written: give --tokenizer DIR with the tokenizer {named}")
            return
        check_vocabulary(loaded, found.architecture.vocab_size)
        if found.is_padded:
            read = replace(read, architecture=replace(found.architecture, vocab_size=loaded.max_token_id + 1))
        yield replace(read, tokenizer=tokenizer or own)


def _push(directory: Path, name: HubName, origin: Origin) -> None:
    title = name.repo.partition("/")[2]
    address = download.push(directory, name, card=model_card(title, directory, origin), message=f"Upload {title} with aligner")
    print(f"pushed to {address} (a new repository is private by default)", flush=True)


def _write_tokenizer(tokenizer: Path | None, target: Path) -> None:
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


def _print(*lines: str) -> None:
    if dist.get_rank() == 0:
        print(*filter(None, lines), sep="\n")
