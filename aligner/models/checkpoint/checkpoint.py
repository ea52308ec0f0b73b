"""Distributed checkpoints of one model: complete or invisible, loadable at another layout, with everything a resume needs.

step_000030/
  aligner.json   kind of model, format version, checksums; the file that makes the directory a checkpoint
  manifest.json  SHA-256 and size of every other file
  sums.json      of every tensor a sum over its bits, taken from memory before it was written
  config.json    the architecture, in Hugging Face's form       tokenizer files
  weights/       Megatron-Core distributed checkpoint of the module; of a model with adapters, them and the head alone
  optimizer/     the same of the optimizer's state, in a form that any layout can read
  state.pt       per-rank random-generator states and the layout that they belong to
  state.json     step, optimizer version, learning-rate schedule, loss scale, validation metrics, whatever the training loop adds
  config.yaml    the resolved config of the run
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aligner.data.tokenizer import model_settings
from aligner.data.vision import PROCESSOR_FILES
from aligner.errors import CheckpointError, ConfigError, describe_os_error
from aligner.models.checkpoint import async_save, files, manifest, optimizer as checkpoint_optimizer, safe_pickle, sums as checkpoint_sums
from aligner.models.checkpoint.files import MARKER, read_marker, resolve, step_directory
from aligner.models.checkpoint.hf_files import CONFIG_FILE
from aligner.models.checkpoint.weights import kind_of, load_same, read, sharded_state, to_marker as adapters_to_marker
from aligner.models.checkpoint.wrapper import WRAPPER
from aligner.models.config import HFArchitecture, Implementation
from aligner.models.families import architecture_to_hf
from aligner.models.families.mapping import ADAPTER
from aligner.models.modules.scalar_head import POLICY_HEAD
from aligner.models.training.trainable import TrainableModel, check_before_save, generator_state, set_generator_state
from aligner.parallel.collectives import broadcast_object, from_rank_0, gather_objects, raise_everywhere

IMPLEMENTATION = "implementation"  # key of a marker: whose modules the model is made of; absent: Megatron-Core's
WRITE_TIMEOUT_SECONDS = 1200.0
RESERVED = ".reserved"
RESERVED_BYTES = 16 << 20
MAIN_COPY_BYTES = 4  # per parameter: the optimizer's float32 weights
ALWAYS_ROOM_FOR = 2  # checkpoints, where a run keeps all of them


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """What goes into a checkpoint besides the model's own state."""

    step: int
    state: dict[str, Any]  # JSON-able: data position, controllers
    config_yaml: str = ""
    tokenizer: Path | None = None  # directory whose files are copied, so that the checkpoint stands alone
    source: Path | None = None  # directory of the model that it began with, where that is not the tokenizer's
    validation: Mapping[str, float] = field(default_factory=dict)  # metrics of this step, where it was validated
    weights_only: bool = False  # without the optimizer: it can initialise a model but not continue a run


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingSave:
    """A checkpoint whose files are being written. The model may be trained on meanwhile. Every rank holds one."""

    final: Path
    writing: Path
    marker: Mapping[str, Any]
    writer: async_save.FileWriter
    vocabulary: int
    sums: Mapping[str, checkpoint_sums.Sum]  # of the tensors at the time the save started
    read_back: Mapping[str, Sequence[Any]]  # by folder: the shapes and places of what is read back before the checkpoint is published

    @property
    def is_written(self) -> bool:
        """Whether this rank has finished writing its files, or failed to."""
        return self.writer.is_done

    def publish(self, timeout_seconds: float = WRITE_TIMEOUT_SECONDS) -> Path:
        """Wait until every rank has written, then make the checkpoint visible and move `latest`. Every rank calls it.

        Returns its directory. If one rank fails, removes the written files and raises CheckpointError on every rank.
        """
        with _discarding(self.writing):
            self.writer.wait(timeout_seconds)
            _on_rank_0(lambda: (self.writing / RESERVED).unlink())  # its room is for the metadata
            for part in self.writer.planned:
                async_save.write_metadata(part)
            for folder, shards in self.read_back.items():
                found = checkpoint_sums.read_back(self.writing / folder, shards, vocabulary=self.vocabulary)
                checkpoint_sums.compare(self.sums, found, f"{self.writing / folder}: as it was read back")
            digests = {name: entry for part in gather_objects(self.writer.digests) for name, entry in part.items()}
            _on_rank_0(lambda: self._finish(digests))
        return self.final

    def _finish(self, digests: Mapping[str, manifest.Digest]) -> None:
        checkpoint_sums.write(self.writing, self.sums)
        manifest.write(self.writing, digests)
        files.write_marker(self.writing, self.marker)
        files.publish(self.writing, self.final)


def save(checkpoints: Path, model: TrainableModel, request: SaveRequest) -> Path:
    """Write and publish one checkpoint, in place of an older one of the same step. Every rank calls it. Returns its directory."""
    return start_save(checkpoints, model, request, in_background=False).publish()


def start_save(
    checkpoints: Path, model: TrainableModel, request: SaveRequest, *, in_background: bool, read_back: bool = False
) -> PendingSave:
    """Begin a checkpoint of the model's current state; `publish` of the result ends it. Every rank calls it.

    With `in_background` it returns as soon as the state is copied to host memory. With `read_back`, `publish` reads the checkpoint back
    into host memory and compares. Raises CheckpointError if the directory is not writable or the model has a non-finite number; earlier
    checkpoints stay.
    """
    final = step_directory(checkpoints, request.step)
    model.wake()
    model.settle()
    check_before_save(model.chunks, model.optimizer, model.topology.rank)
    generators = gather_objects(generator_state())
    made: list[Path] = []
    _on_rank_0(lambda: made.append(_start(final, model, request, generators)))
    writing = broadcast_object(made[0] if made else None)
    states = _states(model, with_optimizer=_has_optimizer_state(model) and not request.weights_only)
    vocabulary = model.chunks[0].architecture.vocab_size
    sums = checkpoint_sums.saved(checkpoint_sums.find(states.values(), vocabulary=vocabulary))
    shards = {folder: [one.without_data() for one in checkpoint_sums.tensors(state)] for folder, state in states.items()}
    planned = [async_save.plan(state, writing / folder) for folder, state in states.items()]
    needed = async_save.planned_bytes(planned)
    with _discarding(writing):
        _on_rank_0(lambda: files.check_room(writing, needed))
    marker: dict[str, Any] = {"kind": kind_of(model.chunks), "step": request.step, files.FINITE: True}
    if (made_of := _implementation(model)) != Implementation.megatron.value:
        marker[IMPLEMENTATION] = made_of
    marker |= adapters_to_marker(model.chunks[0]) | ({WRAPPER: dict(found)} if (found := model.chunks[0].wrapper) else {})
    if model.chunks[0].head is not None:
        marker |= model.chunks[0].head.to_marker()
    if model.chunks[0].value_gradient is not None:
        marker[POLICY_HEAD] = True
    writer = async_save.FileWriter(planned, writing, in_background=in_background)
    return PendingSave(
        final=final,
        writing=writing,
        marker=marker,
        writer=writer,
        vocabulary=vocabulary,
        sums=sums,
        read_back=shards if read_back else {},
    )


def _implementation(model: TrainableModel) -> str:
    is_whole = isinstance(model.chunks[0].architecture, HFArchitecture)
    return (Implementation.transformers if is_whole else Implementation.megatron).value


def _states(model: TrainableModel, *, with_optimizer: bool) -> dict[str, Any]:
    weights = sharded_state(model.chunks)
    if not with_optimizer:
        return {"weights": weights}
    shards = checkpoint_optimizer.sharded_state(model.optimizer, weights)
    # A rank that holds padding only has none.
    return {"weights": sharded_state(model.chunks), "optimizer": {"optimizer": shards} if shards else {}}


def load(model: TrainableModel, path: Path, *, verify: bool = True) -> dict[str, Any]:
    """Restore weights, optimizer, schedule and random generators into a model that has not trained yet, to continue the saved run.

    Returns the saved `state`. Every rank calls it. Raises CheckpointError.
    """
    directory = resolve(path)
    if verify:
        manifest.verify(directory, needed=lambda _: True)
    ours = _implementation(model)
    if (saved := read_marker(directory).get(IMPLEMENTATION, Implementation.megatron.value)) != ours:
        raise CheckpointError(f"{directory}: was saved with model.implementation={saved}, the model has {ours}'s modules; allowed: {saved}")
    model.wake()
    model.settle()
    load_same(model.chunks, directory, verify=False)
    state = read_state(directory)
    if model.optimizer is not None:
        if state["scheduler"] is None:
            raise CheckpointError(f"{directory}: holds no optimizer state; it can initialise a model but not continue a run")
        model.version = state["version"]
        if model.version > 0:
            _load_optimizer(model, directory)
        else:
            model.optimizer.reload_model_params()
        model.scheduler.num_steps = 0  # loading *adds* the saved number of steps
        model.scheduler.load_state_dict(state["scheduler"])
        model.loss_scale.load_state(state.get("loss_scale"))
    model.version = state["version"]
    if wanted := from_rank_0(lambda: checkpoint_sums.read(directory)):
        states = _states(model, with_optimizer=_has_optimizer_state(model))
        found = checkpoint_sums.find(states.values(), vocabulary=model.chunks[0].architecture.vocab_size)
        rounded = checkpoint_optimizer.rounds(model.optimizer) if model.optimizer is not None else ()
        checkpoint_sums.compare({key: one for key, one in wanted.items() if not key.startswith(rounded)}, found, str(directory))
    saved = safe_pickle.load_data(directory / "state.pt")
    if saved["layout"] == _layout(model):  # at another layout the generators stay freshly seeded
        set_generator_state(saved["generators"][dist.get_rank()])
    return state["loop"]


def read_state(directory: Path) -> dict[str, Any]:
    """The content of a checkpoint's `state.json`: step, version, scheduler, validation, loop."""
    return json.loads((directory / "state.json").read_text())


NAMED_TEMPLATES = "additional_chat_templates"  # a folder of a tokenizer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "vocab.json", "merges.txt")
TOKENIZER_FILES += ("added_tokens.json", "chat_template.jinja")
_NOT_CARRIED = {*TOKENIZER_FILES, CONFIG_FILE, "README.md", "adapter_config.json"}
_OF_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf"}


def carry_over(source: Path, destination: Path) -> None:
    """Copy what training does not change: licences, processors, the model's own code. Not the model card, which describes other weights."""
    for path in sorted(source.iterdir()) if not (source / MARKER).exists() else ():
        is_weights = path.suffix in _OF_WEIGHTS or path.name.endswith(".index.json")
        is_ours = path.name in _NOT_CARRIED or (destination / path.name).exists()
        if path.is_file() and not (is_weights or is_ours or path.name.startswith(".")):
            shutil.copyfile(path, destination / path.name)


def copy_tokenizer(source: Path, destination: Path, model: Path | None = None) -> None:
    """Copy the files of a tokenizer and an image processor, without weights and config, and `model`'s settings for generation."""
    for name in (*TOKENIZER_FILES, *PROCESSOR_FILES, "generation_config.json"):
        own = model if model is not None and name == "generation_config.json" else source
        if (own / name).exists():
            shutil.copyfile(own / name, destination / name)
    if (source / NAMED_TEMPLATES).is_dir():
        shutil.copytree(source / NAMED_TEMPLATES, destination / NAMED_TEMPLATES, dirs_exist_ok=True)


def special_ids(source: Path | None) -> dict[str, Any]:
    """The begin, end and padding ids of the config.json in a model's directory, as far as they can be read."""
    config: dict[str, Any] = {}
    with suppress(ConfigError):
        config = {} if source is None else model_settings(source / CONFIG_FILE)
    return {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}


def _layout(model: TrainableModel) -> dict[str, int]:
    """The layout settings that a rank's random generators depend on."""
    topology = model.topology
    sizes = {"world": topology.world_size, "tp": topology.tp_size, "pp": topology.pp_size, "cp": topology.cp_size, "dp": topology.dp_size}
    return sizes | {"ep": model.chunks[0].config.expert_model_parallel_size, "chunks": len(model.chunks)}


def _on_rank_0(action: Callable[[], Any]) -> None:
    """Run `action` on rank 0; every rank raises its error, so that none continues alone."""
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            action()
        except CheckpointError as failed:
            error = failed
        except Exception as failed:  # of whatever kind: the other ranks wait to hear of it
            what = f"rank 0: {describe_os_error(failed, 'a file of the checkpoint')}" if isinstance(failed, OSError) else str(failed)
            error = CheckpointError(f"writing a checkpoint failed: {what}")
            error.__cause__ = failed
    raise_everywhere(error)


def _has_optimizer_state(model: TrainableModel) -> bool:
    """Adam has moments from its first step on; before it Megatron-Core writes a state that it cannot read."""
    return model.optimizer is not None and model.version > 0


def _start(final: Path, model: TrainableModel, request: SaveRequest, generators: list[dict[str, Any]]) -> Path:
    state = {
        "step": request.step,
        "version": model.version,
        "scheduler": None if model.scheduler is None or request.weights_only else model.scheduler.state_dict(),
        "loss_scale": model.loss_scale.state(),
        "validation": dict(request.validation),
        "loop": request.state,
    }
    state_json = json.dumps(state, indent=2) + "\n"  # before anything is made: it may not be serialisable
    writing = files.new_writing_directory(final)
    try:
        _reserve(writing / RESERVED)
        for name in ("weights", "optimizer") if _has_optimizer_state(model) and not request.weights_only else ("weights",):
            (writing / name).mkdir()
        if request.tokenizer is not None:
            copy_tokenizer(request.tokenizer, writing, request.source)
        hf_config = architecture_to_hf(model.chunks[0].architecture) | {"dtype": str(model.config.params_dtype).removeprefix("torch.")}
        hf_config |= special_ids(request.source or request.tokenizer)
        files.write_text(writing / "config.json", json.dumps(hf_config, indent=2) + "\n")
        files.write_text(writing / "config.yaml", request.config_yaml)
        files.write_text(writing / "state.json", state_json)
        torch.save({"layout": _layout(model), "generators": generators}, writing / "state.pt")
    except Exception:
        files.discard(writing)
        raise
    return writing


@contextmanager
def _discarding(writing: Path) -> Iterator[None]:
    """Remove the directory where what happens meanwhile raises CheckpointError, which it does on every rank."""
    try:
        yield
    except CheckpointError:
        if dist.get_rank() == 0:
            files.discard(writing)
        raise


def _reserve(path: Path) -> None:
    """Reserve room for the small files that Megatron-Core writes inside collectives: an error there leaves the other ranks waiting."""
    with path.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that cannot reserve
                raise
            file.write(bytes(RESERVED_BYTES))


def _load_optimizer(model: TrainableModel, directory: Path) -> None:
    weights = sharded_state(model.chunks)
    # Nothing else holds the tensors that are read: they are released one by one as the optimizer takes them.
    wanted = checkpoint_optimizer.sharded_state(model.optimizer, weights, is_loading=True)
    loaded = read({"optimizer": wanted} if wanted else {}, directory / "optimizer").get("optimizer", {})
    del wanted
    strangers = checkpoint_optimizer.restore(model.optimizer, weights, loaded, step=model.version)
    if named := sorted({name for part in gather_objects(strangers) for name in part}):
        raise CheckpointError(
            f"{directory}: the optimizer's state is not that of the weights ({len(named)} parameters, the first is {named[0]}). Until "
            "checkpoints had sums.json, layouts whose gradient buffers are padded between buckets were saved so: with tied embeddings "
            "over pipeline stages, or if the number of data-parallel ranks is not a power of two. The weights are right: "
            f"model.path={directory} starts a new run from them"
        )


def estimated_bytes(model: TrainableModel) -> int:
    """Estimated bytes of a checkpoint of the model, from its parameters. Collective."""
    topology, config = model.topology, model.config
    dense_copies = topology.world_size // (topology.tp_size * topology.pp_size)
    expert_copies = topology.world_size // (config.expert_model_parallel_size * config.expert_tensor_parallel_size * topology.pp_size)
    state = 0  # bytes of the optimizer for each parameter
    if model.optimizer is not None:
        adam = model.optimizer.chained_optimizers[0].config
        moments = 2 * (adam.exp_avg_dtype.itemsize if adam.use_precision_aware_optimizer else torch.float32.itemsize)
        state = MAIN_COPY_BYTES + moments + (MAIN_COPY_BYTES if model.ema_decay else 0)
    own = 0.0
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            if chunk.lora.is_on and not parameter.requires_grad and ADAPTER not in name:  # of a model with adapters, they are saved alone
                continue
            copies = expert_copies if ".experts." in name else dense_copies
            own += parameter.numel() * (parameter.element_size() + state * parameter.requires_grad) / copies
    return int(sum(gather_objects(own)) * async_save.OVERHEAD)


def shortage(model: TrainableModel, directory: Path, *, keep: int) -> str:
    """A warning if fewer checkpoints fit than the run keeps at a time; empty if there is room. Collective.

    `keep`: how many stay; 0 keeps all. An older checkpoint is removed once the new one is complete. Raises ConfigError if not one fits.
    """
    size, wanted = estimated_bytes(model), keep + 1 if keep else ALWAYS_ROOM_FOR
    free = from_rank_0(lambda: files.free_bytes(directory))
    if free >= size * wanted:
        return ""
    room = f"{directory}: a checkpoint takes about {files.size_text(size)} and {files.size_text(free)} are free"
    if free < size:
        raise ConfigError(f"run.directory: {room}: not even one fits; make room there, or name another directory")
    return f"warning: {room}: room for {free // max(size, 1)}, the run needs {wanted} at a time (checkpoint.keep={keep})"
