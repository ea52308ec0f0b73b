"""Distributed checkpoints of one model: complete or invisible, loadable at another layout, with everything a resume needs.

    step_000030/
      aligner.json   kind of model, format version
      config.json    the architecture, in Hugging Face's form       tokenizer files
      weights/       Megatron-Core distributed checkpoint of the module
      optimizer/     the same of the optimizer's state, in a form that any layout can read
      state.pt       per-rank random-generator states
      state.json     step, optimizer version, learning-rate schedule, whatever the training loop adds
      config.yaml    the resolved config of the run

A checkpoint is written under a name that starts with `.writing_`, renamed when every rank has written, and only then named in `latest`.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException

from aligner.errors import CheckpointError
from aligner.models.build import ScalarModel, Transformer
from aligner.models.families import architecture_from_hf, architecture_to_hf
from aligner.models.trainable import TrainableModel
from aligner.parallel.collectives import broadcast_object, gather_objects, raise_everywhere
from aligner.parallel.mcore import dist_checkpointing, tensor_parallel

MARKER = "aligner.json"
FORMAT = 1
LATEST = "latest"
# Gathers optimizer shards into per-parameter tensors, so that any other layout can load them (the default raises in 0.16).
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """What goes into a checkpoint besides the model's own state."""

    step: int
    state: dict[str, Any]  # JSON-able: data position, controllers
    config_yaml: str = ""
    tokenizer: Path | None = None  # directory whose files are copied, so that the checkpoint stands alone


def step_directory(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:06d}"


def resolve(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or what `latest` names where it is a directory of checkpoints.

    Raises CheckpointError where there is none.
    """
    if (path / MARKER).exists():
        return path
    if (path / LATEST).exists():
        named = path / (path / LATEST).read_text().strip()
        if not (named / MARKER).exists():
            raise CheckpointError(f"{path / LATEST} names {named.name}, which is not a complete checkpoint")
        return named
    raise CheckpointError(f"{path}: no checkpoint here (neither {MARKER} nor {LATEST}{'' if path.exists() else '; no such directory'})")


def find_latest(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint of a run, None where there is none yet. Every rank gets rank 0's answer."""
    found: list[Path] = []
    _on_rank_0(lambda: found.append(resolve(checkpoints)) if (checkpoints / LATEST).exists() else None)
    return broadcast_object(found[0] if found else None)


def save(checkpoints: Path, model: TrainableModel, request: SaveRequest) -> Path:
    """Write and publish one checkpoint. Every rank calls it. Returns its directory; one that exists already is left as it is."""
    final = step_directory(checkpoints, request.step)
    writing = checkpoints / f".writing_{final.name}"
    exists = broadcast_object(final.exists())
    if not exists:
        _on_rank_0(lambda: _start(writing, model.module, request))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist_checkpointing.save(model.module.sharded_state_dict(), str(writing / "weights"))
            if _has_optimizer_state(model):
                shards = model.optimizer.sharded_state_dict(model.module.sharded_state_dict(), metadata=SHARDING)
                dist_checkpointing.save({"optimizer": shards}, str(writing / "optimizer"))
        generators = gather_objects(_generator_state())
        _on_rank_0(lambda: _finish(writing, final, model, request, generators))
    _on_rank_0(lambda: _point_latest(checkpoints, final))
    return final


def load_weights(module: Transformer, path: Path) -> None:
    """Fill the module from a checkpoint of this project. Every rank calls it.

    A scalar model may start from a language model's checkpoint: its head then keeps its initialisation.
    """
    directory = resolve(path)
    kind = read_marker(directory)["kind"]
    _check_architecture(directory, module)
    wanted = module.sharded_state_dict()
    if isinstance(module, ScalarModel) and kind == "language":
        wanted = {name: shard for name, shard in wanted.items() if not name.startswith("score_head.")}
    elif kind != _kind(module):
        raise CheckpointError(f"{directory}: a {kind} model's checkpoint cannot be loaded into a {_kind(module)} model")
    _load(wanted, directory / "weights", module)


def load(model: TrainableModel, path: Path) -> dict[str, Any]:
    """Restore weights, optimizer, schedule and random generators into a model that has not trained yet, to continue the saved run.

    Returns the saved `state`. Every rank calls it.
    """
    directory = resolve(path)
    load_weights(model.module, directory)
    state = json.loads((directory / "state.json").read_text())
    if model.optimizer is not None:
        if state["scheduler"] is None:
            raise CheckpointError(f"{directory}: holds no optimizer state; it can initialise a model but not continue a run")
        if state["version"] > 0:
            _load_optimizer(model, directory)
        else:
            model.optimizer.reload_model_params()
        model.scheduler.num_steps = 0  # loading *adds* the saved number of steps
        model.scheduler.load_state_dict(state["scheduler"])
    model.version = state["version"]
    generators = torch.load(directory / "state.pt", weights_only=True)
    if len(generators) == dist.get_world_size():  # at another world size the generators stay freshly seeded
        _set_generator_state(generators[dist.get_rank()])
    return state["loop"]


def read_marker(directory: Path) -> dict[str, Any]:
    """What `aligner.json` says. Raises CheckpointError for a format that this version does not read."""
    marker = json.loads((directory / MARKER).read_text())
    if marker["format"] != FORMAT:
        raise CheckpointError(f"{directory / MARKER}: format {marker['format']}; this version reads {FORMAT}")
    return marker


def _kind(module: Transformer) -> str:
    return "scalar" if isinstance(module, ScalarModel) else "language"


def _on_rank_0(action: Callable[[], Any]) -> None:
    """Run `action` on rank 0; every rank raises what it raised, so that none goes on alone."""
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            action()
        except CheckpointError as failed:
            error = failed
        except Exception as failed:  # of whatever kind: the other ranks wait to hear of it
            error = CheckpointError(f"writing a checkpoint failed: {failed}")
            error.__cause__ = failed
    raise_everywhere(error)


def _has_optimizer_state(model: TrainableModel) -> bool:
    """Adam has moments from its first step on; before it Megatron-Core writes a state that it cannot read."""
    return model.optimizer is not None and model.version > 0


def _start(writing: Path, module: Transformer, request: SaveRequest) -> None:
    shutil.rmtree(writing, ignore_errors=True)  # of an attempt that was killed
    for name in ("weights", "optimizer"):
        (writing / name).mkdir(parents=True)
    if request.tokenizer is not None:
        copy_tokenizer(request.tokenizer, writing)
    (writing / "config.json").write_text(json.dumps(architecture_to_hf(module.architecture), indent=2) + "\n")
    (writing / "config.yaml").write_text(request.config_yaml)


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy the files of a tokenizer (not weights, not the model's config)."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "vocab.json", "merges.txt")
    for name in (*names, "added_tokens.json", "chat_template.jinja", "generation_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, destination / name)


def _finish(writing: Path, final: Path, model: TrainableModel, request: SaveRequest, generators: list[dict[str, Any]]) -> None:
    if not _has_optimizer_state(model):
        (writing / "optimizer").rmdir()
    torch.save(generators, writing / "state.pt")
    state = {
        "step": request.step,
        "version": model.version,
        "scheduler": None if model.scheduler is None else model.scheduler.state_dict(),
        "loop": request.state,
    }
    (writing / "state.json").write_text(json.dumps(state, indent=2) + "\n")
    marker: dict[str, Any] = {"format": FORMAT, "kind": _kind(model.module), "step": request.step}
    if isinstance(model.module, ScalarModel):
        marker["num_outputs"] = model.module.score_head.out_features
    (writing / MARKER).write_text(json.dumps(marker) + "\n")
    writing.rename(final)


def _point_latest(checkpoints: Path, final: Path) -> None:
    new = checkpoints / f".{LATEST}"
    new.write_text(final.name + "\n")
    new.replace(checkpoints / LATEST)


def _check_architecture(directory: Path, module: Transformer) -> None:
    """Megatron-Core lets vocabularies of different sizes pass, and knows nothing of norms' epsilons or rotary bases."""
    saved = asdict(architecture_from_hf(json.loads((directory / "config.json").read_text())))
    ours = asdict(architecture_from_hf(architecture_to_hf(module.architecture)))
    free = {"max_position_embeddings", "initializer_range"} | ({"tied_embeddings"} if isinstance(module, ScalarModel) else set())
    if differing := [
        f"{name} is {saved[name]} there and {ours[name]} here" for name in ours if saved[name] != ours[name] and name not in free
    ]:
        raise CheckpointError(f"{directory}: does not fit the model: {', '.join(differing)}")


def _load(wanted: dict[str, Any], directory: Path, module: Transformer) -> None:
    loaded = _read(wanted, directory)
    module.load_state_dict(loaded, strict=False)
    missing = {name for name, _ in module.named_parameters()} - loaded.keys() - {"score_head.weight", "score_head.bias"}
    if missing:
        raise CheckpointError(f"{directory}: holds no value for {sorted(missing)[:3]}")


def _load_optimizer(model: TrainableModel, directory: Path) -> None:
    """Moments and step counts are the checkpoint's; learning rates, betas and epsilon stay those of this run's config."""
    configured = [{name: group[name] for name in ("max_lr", "min_lr", "betas", "eps")} for group in model.optimizer.param_groups]
    wanted = model.optimizer.sharded_state_dict(model.module.sharded_state_dict(), is_loading=True, metadata=SHARDING)
    model.optimizer.load_state_dict(_read({"optimizer": wanted}, directory / "optimizer")["optimizer"])
    for group, settings in zip(model.optimizer.param_groups, configured, strict=True):
        group.update(settings)


def _read(wanted: dict[str, Any], directory: Path) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dist_checkpointing.load(wanted, str(directory))
    except (KeyError, OSError, dist_checkpointing.core.CheckpointingException, TorchCheckpointException) as error:
        raise CheckpointError(f"{directory}: cannot be read into the model: {error}") from error


def _generator_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "tracker": dict(tensor_parallel.get_cuda_rng_tracker().get_states())}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_generator_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
