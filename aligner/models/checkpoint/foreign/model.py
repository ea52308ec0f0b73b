"""One model of Megatron-LM or NeMo: what it is (`describe`), and its weights for a model of any layout (`open_weights`)."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from aligner.errors import CheckpointError, ConfigError
from aligner.models.checkpoint import safe_pickle
from aligner.models.checkpoint.files import LATEST, MARKER
from aligner.models.checkpoint.foreign import settings
from aligner.models.checkpoint.foreign.tensors import Archive, Files, TorchDist, Zarr
from aligner.models.checkpoint.hf_files import CONFIG_FILE
from aligner.models.config import Architecture
from aligner.models.families import weight_names
from aligner.models.families.mapping import EMBEDDING, OUTPUT_LAYER, Layout, Rule
from aligner.models.modules.scalar_head import HEAD, ScalarHead

NEMO_CONFIG = "model_config.yaml"
_NEMO_WEIGHTS = "model_weights"
_TRACKER = "latest_checkpointed_iteration.txt"
METADATA = "metadata.json"
_FORMATS = {"torch_dist": TorchDist, "zarr": Zarr}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NEMO_HEAD = "rm_head."
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.*)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.*)")
_FUSED_NORMS = {"self_attention.linear_qkv.layer_norm_": "input_layernorm.", "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}
_HALVES = ("_w", "_v")  # of a gated layer, where Megatron-Core keeps them apart
# Of a training state, beside the model.
_NO_WEIGHTS = re.compile(
    r"(optimizer|chained_\d+|rng_state|rerun_state_machine_state|opt_param_scheduler)\b.*|.*(_extra_state|rotary_pos_emb\.inv_freq).*"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What kind of model it is."""

    architecture: Architecture
    head: ScalarHead | None  # of a reward model or critic
    dtype: torch.dtype  # of its weights
    tokenizer: Mapping[str, Any]  # from NeMo's config
    is_padded: bool  # the vocabulary has all rows of the embedding: how many are padding is unknown


def is_foreign(path: Path) -> bool:
    """Whether Megatron-LM or NeMo has written this, and not this project or transformers."""
    if any((path / name).exists() for name in (MARKER, LATEST, CONFIG_FILE)):
        return False
    if path.is_file():
        return path.name.endswith((".nemo", ".tar", ".tar.gz", ".tgz"))
    names = (NEMO_CONFIG, _TRACKER, METADATA, "context/io.json", "context/model.yaml", "mp_rank_00", "mp_rank_00_000")
    return any((path / name).exists() for name in names)


def describe(path: Path) -> Description:
    """What the model at `path` is. Raises CheckpointError and ConfigError, naming file and setting, for one that is not read."""
    with open_weights(path) as weights:
        return weights.description


@contextlib.contextmanager
def open_weights(path: Path) -> Iterator[ForeignWeights]:
    """The weights of the model at `path`: an archive, its unpacked directory, or an iteration of Megatron-LM. Raises as `describe`."""
    with Archive(path) if path.is_file() else Files(_iteration(path)) as files:
        yield ForeignWeights(files)


def _iteration(path: Path) -> Path:
    """The directory that Megatron-LM's file of the latest iteration names, else `path`."""
    if not (path / _TRACKER).is_file():
        return path
    text = (path / _TRACKER).read_text(errors="replace").strip()
    found = path / ("release" if text == "release" else f"iter_{text:0>7}")
    if not (text == "release" or text.isdecimal()) or not found.is_dir():
        raise CheckpointError(f"{path / _TRACKER} names {text[:40]!r}, but {found.name[:40]} is not beside it")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """A parameter of the model: `parts` are one tensor after the other along the first dimension."""

    parts: tuple[str, ...]
    index: tuple[int, ...]
    shape: tuple[int, ...]


class ForeignWeights:
    """The tensors of the model in `files`, by the names that they have here."""

    def __init__(self, files: Files) -> None:
        self._files = files
        names = set(files.names())
        self._is_nemo = NEMO_CONFIG in names
        _refuse_others(files, names)
        self._folder = f"{_NEMO_WEIGHTS}/" if self._is_nemo else ""
        self.directory = files.where(_NEMO_WEIGHTS) if self._is_nemo else str(files.root)
        backend = files.json(self._folder + METADATA).get("sharded_backend")
        if backend not in _FORMATS:
            where = files.where(self._folder + METADATA)
            raise CheckpointError(f"{where}: sharded_backend={backend!r} is not read; allowed: {', '.join(_FORMATS)}")
        self._tensors: TorchDist | Zarr = _FORMATS[backend](files, self._folder)
        shapes = self._tensors.shapes()
        self._prefix = _prefix(shapes, self.directory)
        rows = shapes[self._prefix + EMBEDDING][0]
        config, where = self._nemo_config() if self._is_nemo else self._arguments()
        try:
            architecture = (settings.from_nemo if self._is_nemo else settings.from_megatron_lm)(config, rows=rows)
            self._stored = _by_name(shapes, self._prefix, architecture, self.directory)
            head = f"{HEAD}weight"
            outputs = settings.nemo_head(config, self._stored[head].shape[0]) if head in self._stored else None
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        tokenizer = (config.get("tokenizer") if self._is_nemo else None) or {}
        dtype = self._tensors.dtype(self._prefix + EMBEDDING)
        is_padded = not config.get("override_vocab_size" if self._is_nemo else "vocab_size")
        self.description = Description(architecture=architecture, head=outputs, dtype=dtype, tokenizer=tokenizer, is_padded=is_padded)

    def check(self, architecture: Architecture, *, is_scalar: bool) -> None:
        """Raise CheckpointError where the tensors are not those of the whole model."""
        names = [name for name in weight_names(architecture).names(architecture) if not (is_scalar and name == OUTPUT_LAYER)]
        if missing := [name for name in names if name not in self._stored]:
            raise CheckpointError(f"{self.directory}: no tensor for {missing[0]}, and {len(missing) - 1} more are missing")
        unknown = [name for name in self._stored if name not in {*names, OUTPUT_LAYER} and not (is_scalar and name.startswith(HEAD))]
        if unknown:
            raise CheckpointError(
                f"{self.directory}: {len(unknown)} tensors belong to no parameter of the model, e.g. {sorted(unknown)[:3]}"
            )
        bias = f"{HEAD}bias"
        if bias in self._stored and self.description.head is not None and not self.description.head.has_bias and self._get(bias).any():
            raise CheckpointError(
                f"{self.directory}: {_NEMO_HEAD}bias is not 0: heads that score the last token have none here; allowed: 0, as a loss of "
                "pairs leaves it, or use_avg_pool=True"
            )

    def full(self, name: str, rule: Rule, shape: tuple[int, ...], architecture: Architecture) -> Tensor:
        """The whole parameter, in Megatron's layout; `shape` is with the model's padding of the vocabulary."""
        stored = self._stored[name].shape
        if rule.layout is not Layout.vocabulary:
            return self._get(name, expected=shape)
        size = architecture.vocab_size
        if stored[0] < size or stored[1:] != shape[1:]:
            raise CheckpointError(f"{self.directory}: {name} is {stored}, the model's settings make it at least {(size, *shape[1:])}")
        rows = self._get(name)[:size]
        return torch.cat([rows, rows.new_zeros(shape[0] - size, *shape[1:])])

    def head(self, name: str, shape: torch.Size) -> Tensor | None:
        """A parameter of the head; None if the files have no such tensor."""
        return self._get(name, expected=shape) if name in self._stored else None

    def copy_tokenizer(self, target: Path) -> bool:
        """Write the tokenizer of a NeMo archive as Hugging Face reads it. False if it has none in such a form."""
        config = self.description.tokenizer
        files = {"tokenizer.model": config.get("model"), "vocab.json": config.get("vocab_file"), "merges.txt": config.get("merge_file")}
        found = {name: str(value).removeprefix("nemo:") for name, value in files.items() if value}
        found = {name: member for name, member in found.items() if member in self._files.names()}
        kinds = {("tokenizer.model",): "LlamaTokenizer", ("vocab.json", "merges.txt"): "GPT2Tokenizer"}
        if tuple(found) not in kinds:
            return False
        for name, member in found.items():
            (target / name).write_bytes(self._files.read(member))
        (target / "tokenizer_config.json").write_text(f'{{"tokenizer_class": "{kinds[tuple(found)]}"}}\n')
        return True

    def _get(self, name: str, *, expected: tuple[int, ...] | None = None) -> Tensor:
        stored = self._stored[name]
        if expected is not None and stored.shape != tuple(expected):
            raise CheckpointError(f"{self.directory}: {name} is {stored.shape}, the model's settings make it {tuple(expected)}")
        parts = []
        for part in stored.parts:
            if self._tensors.dtype(part) not in _DTYPES:
                raise CheckpointError(f"{self.directory}: {part} is {self._tensors.dtype(part)}; allowed: {', '.join(map(str, _DTYPES))}")
            parts.append(self._tensors.read(part, stored.index))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _nemo_config(self) -> tuple[dict[str, Any], str]:
        where = self._files.where(NEMO_CONFIG)
        try:
            config = yaml.safe_load(self._files.read(NEMO_CONFIG))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{where} is damaged: {' '.join(str(error).split())}") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{where} is damaged: no mapping of settings")
        return config, where

    def _arguments(self) -> tuple[dict[str, Any], str]:
        if safe_pickle.COMMON in self._files.names():
            data, where = self._files.read(safe_pickle.COMMON), self._files.where(safe_pickle.COMMON)
        elif (found := self._tensors.common_state()) is not None:
            data, where = found
        else:
            raise CheckpointError(
                f"{self.directory}: has neither {safe_pickle.COMMON} nor a common state, which hold Megatron-LM's arguments"
            )
        state = safe_pickle.load_inert(io.BytesIO(data), where)
        state = state[0] if isinstance(state, list) and state else state
        args = state.get("args") if isinstance(state, dict) else None
        if args is None or isinstance(args, safe_pickle.Inert):
            raise CheckpointError(f"{where}: holds no args of Megatron-LM, which describe the model")
        return (args if isinstance(args, dict) else vars(args)), f"{where}: args"


def _refuse_others(files: Files, names: set[str]) -> None:
    if {"context/io.json", "context/model.yaml"} & names:
        raise CheckpointError(f"{files.root}: is of NeMo 2; allowed: the Hugging Face model that `nemo llm export` writes")
    folder = f"{_NEMO_WEIGHTS}/" if NEMO_CONFIG in names else ""
    if folder + METADATA in names:
        return
    if old := [name for name in sorted(names) if re.search(r"(mp_rank_\d+|tp_rank_\d+)|model_weights\.ckpt$", name)]:
        raise CheckpointError(
            f"{files.where(old[0])}: is of the form with a pickle per rank; allowed: distributed checkpoints ({', '.join(_FORMATS)}), "
            "which NeMo writes since mcore_gpt=True and Megatron-LM with --ckpt-format torch_dist (--ckpt-convert-format converts)"
        )
    raise CheckpointError(f"{files.where(folder + METADATA)} is missing: not a distributed checkpoint of Megatron-Core")


def _prefix(shapes: Mapping[str, Any], where: str) -> str:
    for prefix in ("", "model.", "module.", "model.module."):
        if prefix + EMBEDDING in shapes:
            return prefix
    raise CheckpointError(f"{where}: has no tensor {EMBEDDING}: no language model of Megatron-Core; it has e.g. {sorted(shapes)[:3]}")


def _by_name(shapes: Mapping[str, tuple[int, ...]], prefix: str, architecture: Architecture, where: str) -> dict[str, _Stored]:
    """The parameters in the tensors: names here, every layer and expert by itself."""
    found: dict[str, _Stored] = {}
    for key, shape in shapes.items():
        if not key.startswith(prefix) or _NO_WEIGHTS.fullmatch(key.removeprefix(prefix)):
            continue
        parts = (key,)
        if key.endswith(_HALVES):
            if key.endswith(_HALVES[1]):
                continue
            parts = (key, key.removesuffix(_HALVES[0]) + _HALVES[1])
            if (other := shapes.get(parts[1])) != shape:
                raise CheckpointError(f"{where}: {key} is {shape}, its other half {other or 'missing'}")
            shape = (2 * shape[0], *shape[1:])
        own = key.removeprefix(prefix).removesuffix(_HALVES[0])
        for name, index in _names(own, shape, architecture, where):
            found[name] = _Stored(parts=parts, index=index, shape=tuple(shape[len(index) :]))
    return found


def _names(own: str, shape: tuple[int, ...], architecture: Architecture, where: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name here, index into the tensor) of all parameters in a tensor."""
    layer = _LAYER.fullmatch(own)
    if layer is None:
        yield own.replace(_NEMO_HEAD, HEAD, 1) if own.startswith(_NEMO_HEAD) else own, ()
        return
    rest = layer[2]
    for fused, name in _FUSED_NORMS.items():
        rest = name + rest.removeprefix(fused) if rest.startswith(fused) else rest
    stacked = layer[1] is None
    if stacked and (not shape or shape[0] != architecture.num_layers):
        raise CheckpointError(f"{where}: {own} is {shape}, the model has num_layers={architecture.num_layers}")
    for number in range(architecture.num_layers) if stacked else (int(layer[1]),):
        begin = f"decoder.layers.{number}."
        index = (number,) if stacked else ()
        expert = _EXPERT.fullmatch(rest)
        if expert is None:
            yield begin + rest, index
        elif expert[1] is not None:
            yield f"{begin}mlp.experts.local_experts.{expert[1]}.{expert[2]}", index
        else:
            if shape[len(index) :][:1] != (architecture.num_experts,):
                raise CheckpointError(f"{where}: {own} is {shape}, the model has {architecture.num_experts} experts")
            for one in range(architecture.num_experts):
                yield f"{begin}mlp.experts.local_experts.{one}.{expert[2]}", (*index, one)
