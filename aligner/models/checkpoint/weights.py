"""The weights in a checkpoint of any layout: which are saved, and how a model of this layout loads them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException

from aligner.errors import CheckpointError
from aligner.models.checkpoint import manifest, safe_pickle, sums as checkpoint_sums
from aligner.models.checkpoint.files import MARKER, read_marker, resolve
from aligner.models.checkpoint.foreign.model import is_foreign, open_weights
from aligner.models.checkpoint.foreign.tensors import Files, TorchDist
from aligner.models.checkpoint.hf_files import CONFIG_FILE, read_json
from aligner.models.checkpoint.hf_weights import HFWeights
from aligner.models.checkpoint.wrapper import same_weights
from aligner.models.config import HFArchitecture, LoraConfig, LoraInit, LoraTarget, Part, Quantization
from aligner.models.families import architecture_from_hf, architecture_to_hf, weight_names
from aligner.models.families.mapping import ADAPTER
from aligner.models.modules.chunk import Chunk, WholeChunk, global_name
from aligner.models.modules.linear import linear_weight
from aligner.models.modules.lora import Adapter, make_adapters, named_adapters
from aligner.models.modules.packed import dense, round_as
from aligner.models.modules.scalar_head import HEAD, POLICY_HEAD, has_policy_head, read_head
from aligner.models.weights import fill, load_hf
from aligner.parallel.collectives import from_rank_0, gather_objects, raise_everywhere, together
from aligner.parallel.mcore import NEEDS_COMMON_FILE, ShardedTensor, dist_checkpointing, parallel_state, version


def kind_of(chunks: Sequence[Chunk]) -> str:
    return "scalar" if chunks[0].head is not None else "language"


def sharded_state(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """The saved parameters with their place in the whole model. On disk they have the whole model's names, not the chunks'."""
    return {f"model{number}": saved_state(chunk) for number, chunk in enumerate(chunks)}


def load_source(chunks: Sequence[Chunk], source: Path, *, verify: bool = True, with_head: bool = True) -> None:
    """Fill the chunks from a Hugging Face directory, Megatron-LM's or NeMo's files, or a checkpoint (`load_weights`). Collective."""
    if (source / MARKER).exists():
        load_weights(chunks, source, verify=verify, with_head=with_head)
    elif is_foreign(source):
        with open_weights(source) as weights:
            fill(chunks, weights, with_head=with_head)
    else:
        load_hf(chunks, source, with_head=with_head)


def load_weights(chunks: Sequence[Chunk], path: Path, *, verify: bool = True, with_head: bool = True) -> None:
    """Fill the chunks of a model from a checkpoint of this project, written at any layout. Every rank calls it.

    A scalar model may start from a language model's checkpoint: its head then keeps its initialisation. The saved model's adapters are
    merged into the weights, which are first rounded as they were under them (`model.quantization`); the chunks' own stay unchanged. With
    `verify`, first compare the files with their SHA-256. Without `with_head`, a head stays unchanged. Raises CheckpointError.
    """
    source, adapted = resolve(path), list[_Adapted]()
    while (source / MARKER).exists():
        directory, marker = _verified(source, verify), read_marker(source)
        if LORA not in marker:
            break
        # A head is saved with the adapters: that of a critic has one output, whatever the reward model under it has.
        adapted.append(_adapted(chunks, directory, marker, with_head=with_head and not adapted))
        source = base_of(marker, directory)
    if (source / MARKER).exists():
        parts, sums = _parts(chunks), list[checkpoint_sums.Found]()
        layers = None
        if chunks[0].quantization.is_on:
            layers = together(lambda: TorchDist(Files(source), "weights"), f"reading {source}", error=CheckpointError)
        for part in parts:
            with dense(part.parameters):
                sums.append(_load_part(part, source, layers, with_head=with_head and not adapted))
                _merge_all(part, adapted)
        checkpoint_sums.compare(from_rank_0(lambda: checkpoint_sums.read(source)), checkpoint_sums.joined(sums), str(source))
    elif isinstance(chunks[0], WholeChunk):
        chunks[0].read_files(source, with_head=False, then=lambda name: _merge_all(_Part(chunks, lambda _, one: one == name), adapted))
    else:
        weights = HFWeights(source, weight_names(chunks[0].architecture))
        for part in _parts(chunks):
            with dense(part.parameters):
                fill(chunks, weights, with_head=False, only=part.parameters)
                _merge_all(part, adapted)


class _Part:
    """What is filled at a time of a model, of which all else stays packed. `has`: whether the tensor of a name in a chunk belongs to it."""

    def __init__(self, chunks: Sequence[Chunk], has: Callable[[int, str], bool] = lambda number, name: True) -> None:
        self.chunks, self.has = chunks, has
        named = ((number, name, p) for number, chunk in enumerate(chunks) for name, p in chunk.named_parameters())
        self.parameters = [p for number, name, p in named if has(number, name) and ADAPTER not in name]

    def states(self) -> list[dict[str, Any]]:
        """Of each chunk what belongs to it, with its place in the whole model."""
        return [
            {name: shard for name, shard in whole_state(chunk).items() if self.has(number, name)}
            for number, chunk in enumerate(self.chunks)
        ]


def _layer(name: str) -> str:
    """What a tensor's name begins with if it is a layer's; else empty."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else ""


def _parts(chunks: Sequence[Chunk]) -> list[_Part]:
    """As many on every rank; the last may be empty. Packed models are filled layer by layer. Collective if they are."""
    if not chunks[0].quantization.is_on:
        return [_Part(chunks)]
    layers = [((number, layer),) for number, chunk in enumerate(chunks) for layer in dict.fromkeys(map(_layer, chunk.state_dict()))]
    most = max(gather_objects(len(layers)))
    return [_Part(chunks, lambda number, name, own=own: (number, _layer(name)) in own) for own in (*layers, *([()] * (most - len(layers))))]


def _load_part(part: _Part, directory: Path, layers: TorchDist | None, *, with_head: bool) -> checkpoint_sums.Found:
    """Fill it from a checkpoint without adapters; the sums of what it holds then. `layers`: its tensors, unless the part is whole.
    Collective."""
    if layers is None:
        for chunk, state in zip(part.chunks, _read_states(part.chunks, directory, part.states(), with_head=with_head), strict=True):
            _fill(chunk, state, directory)
    else:
        absent = _absent(part.chunks, directory, with_head=with_head)
        states = [{name: shard for name, shard in state.items() if not name.startswith(absent)} for state in part.states()]
        shards = [shard for state in states for shard in checkpoint_sums.tensors(state)]
        together(lambda: _read_in_place(shards, layers), f"reading {directory}", error=CheckpointError)
    return checkpoint_sums.find(part.states(), vocabulary=part.chunks[0].architecture.vocab_size)


@torch.no_grad()
def _read_in_place(shards: Iterable[ShardedTensor], source: TorchDist) -> None:
    """Read some of a checkpoint's tensors into the shards' data: Megatron-Core reads stacked layers together. No communication. Raises
    CheckpointError for one that is missing or has another shape."""
    shapes = source.shapes()
    for shard in shards:
        saved, wanted, depth = shapes.get(shard.key, ()), shard.global_shape, shard.prepend_axis_num
        is_padded = shard.allow_shape_mismatch and len(saved) == len(wanted)  # rows of a vocabulary, which has more or less padding there
        if saved != tuple(wanted) and not (is_padded and saved[1:] == tuple(wanted[1:])):
            raise CheckpointError(f"{source.where}: {shard.key} is {saved or 'missing'}, the model has {tuple(wanted)}")
        part = tuple(slice(first, first + size) for first, size in zip(shard.global_offset[depth:], shard.local_shape, strict=True))
        found = source.read(shard.key, shard.global_offset[:depth])[part]
        data = shard.data.view(shard.local_shape)
        data[: len(found)] = found
        data[len(found) :] = 0


@dataclass(frozen=True, slots=True)
class _Adapted:
    """A checkpoint of adapters, read: of each chunk the adapters, and what they and the head had."""

    adapters: Sequence[Mapping[str, Adapter]]
    loaded: Sequence[Mapping[str, Any]]
    packed: tuple[Quantization, torch.dtype, bool] | None  # the weights under them


def _merge_all(part: _Part, adapted: Sequence[_Adapted]) -> None:
    """Merge adapters into a part's weights, those that were trained first of all (the last) first, and load the head there."""
    for one in reversed(adapted):
        if one.packed is not None:
            kind, dtype, nested = one.packed
            round_as(part.chunks, kind, dtype, nested=nested, only=part.parameters)
        for number, (chunk, own, state) in enumerate(zip(part.chunks, one.adapters, one.loaded, strict=True)):
            merge(chunk, {layer: adapter for layer, adapter in own.items() if part.has(number, f"{layer}.weight")}, state)


def _adapted(chunks: Sequence[Chunk], directory: Path, marker: Mapping[str, Any], *, with_head: bool) -> _Adapted:
    lora = saved_lora(marker)
    adapters = [make_adapters(chunk, lora) for chunk in chunks]
    states = [head_state(chunk) | adapter_state(chunk, own) for chunk, own in zip(chunks, adapters, strict=True)]
    loaded = _read_states(chunks, directory, states, with_head=with_head)
    return _Adapted(adapters, loaded, saved_quantization(marker) if QUANTIZATION in marker else None)


def load_same(chunks: Sequence[Chunk], path: Path, *, verify: bool = True) -> None:
    """Fill the chunks of a model like the saved one; if it has adapters (the same ones), only those. Collective. Raises CheckpointError."""
    directory = _verified(path, verify)
    check_same(read_marker(directory), chunks[0], directory)
    states = [saved_state(chunk) for chunk in chunks]
    for chunk, state in zip(chunks, _read_states(chunks, directory, states), strict=True):
        _fill(chunk, state, directory)


def _verified(path: Path, verify: bool) -> Path:
    directory = resolve(path)
    if verify:
        manifest.verify(directory, needed=lambda name: not name.startswith("optimizer/"))
    return directory


def _read_states(
    chunks: Sequence[Chunk], directory: Path, states: Sequence[dict[str, Any]], *, with_head: bool = True
) -> list[dict[str, Any]]:
    absent = _absent(chunks, directory, with_head=with_head)
    wanted = {
        f"model{number}": {name: shard for name, shard in state.items() if not name.startswith(absent)}
        for number, state in enumerate(states)
    }
    loaded = read(wanted, directory / "weights")
    return [loaded[name] for name in wanted]


def _absent(chunks: Sequence[Chunk], directory: Path, *, with_head: bool) -> tuple[str, ...]:
    """Prefixes of the parameters that are not read. Raises CheckpointError for a checkpoint of another model."""
    kind = read_marker(directory)["kind"]
    _check_architecture(directory, chunks[0])
    if kind != kind_of(chunks) and kind != "language":
        raise CheckpointError(f"{directory}: a {kind} model's checkpoint cannot be loaded into a {kind_of(chunks)} model")
    return _heads_absent(chunks[0], directory) if with_head else (HEAD,)


def _heads_absent(chunk: Chunk, directory: Path) -> tuple[str, ...]:
    """Prefixes of the head's parameters that the checkpoint lacks. Raises CheckpointError for a head with another number of outputs."""
    if chunk.gives_values and has_policy_head(directory):
        return ()
    head = read_head(directory) if chunk.head is not None else None
    if head is None:
        return (HEAD,)
    if head.num_outputs != chunk.head.num_outputs:
        raise CheckpointError(
            f"{directory}: its head has {head.num_outputs} outputs ({', '.join(head.outputs)}), this model's {chunk.head.num_outputs} "
            f"({', '.join(chunk.head.outputs)})"
        )
    return () if head.has_bias else (f"{HEAD}bias",)


def _check_architecture(directory: Path, chunk: Chunk) -> None:
    """Megatron-Core accepts vocabularies of different sizes, and checks neither norms' epsilons nor rotary bases."""
    file = directory / CONFIG_FILE
    if isinstance(chunk.architecture, HFArchitecture):
        saved, ours = HFArchitecture(hf=read_json(file)).arithmetic(), chunk.architecture.arithmetic()
        ours |= dict.fromkeys(saved.keys() - ours.keys())
        saved |= dict.fromkeys(ours.keys() - saved.keys())
    else:
        saved = asdict(architecture_from_hf(read_json(file), where=str(file)))
        ours = asdict(architecture_from_hf(architecture_to_hf(chunk.architecture)))
    free = {"max_position_embeddings", "initializer_range"} | ({"tied_embeddings"} if chunk.head is not None else set())
    if differing := [
        f"{name} is {saved[name]} there and {ours[name]} here" for name in ours if saved[name] != ours[name] and name not in free
    ]:
        raise CheckpointError(f"{directory}: does not fit the model: {', '.join(differing)}")


def _fill(chunk: Chunk, loaded: dict[str, Any], directory: Path) -> None:
    chunk.load_state_dict(loaded, strict=False)
    of_adapters = any(ADAPTER in name for name in loaded)
    wanted = {name for name, _ in chunk.named_parameters() if (ADAPTER in name) == of_adapters}
    missing = wanted - loaded.keys() - {f"{HEAD}weight", f"{HEAD}bias"}
    if missing:
        raise CheckpointError(f"{directory}: holds no value for {sorted(missing)[:3]}")


def read(wanted: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The tensors of a sharded state from a distributed checkpoint. Every rank calls it. Raises CheckpointError on every rank."""
    error: CheckpointError | None = None
    try:
        if dist.get_rank() == 0:
            safe_pickle.check(directory)
            if NEEDS_COMMON_FILE and not (directory / safe_pickle.COMMON).exists():
                raise CheckpointError(
                    f"{directory}: has no {safe_pickle.COMMON}, which Megatron-Core {version} needs and 0.19 does not write; "
                    "allowed: to read it with the release that wrote it, or the Hugging Face model that `aligner convert` makes of it there"
                )
    except (CheckpointError, OSError) as refused:
        error = refused if isinstance(refused, CheckpointError) else CheckpointError(f"{directory}: cannot be read: {refused}")
    raise_everywhere(error)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dist_checkpointing.load(wanted, str(directory))
    except (KeyError, OSError, dist_checkpointing.core.CheckpointingException, TorchCheckpointException) as error:
        raise CheckpointError(f"{directory}: cannot be read into the model: {error}") from error


LORA, QUANTIZATION = "lora", "quantization"  # keys of a marker


def whole_state(chunk: Chunk) -> dict[str, Any]:
    """All parameters of a chunk but adapters', with their place in the whole model."""
    return {name: shard for name, shard in chunk.sharded_state_dict().items() if ADAPTER not in name}


def saved_state(chunk: Chunk) -> dict[str, Any]:
    """The part of this chunk that a checkpoint holds: the trained parameters."""
    return head_state(chunk) | adapter_state(chunk, dict(named_adapters(chunk))) if chunk.lora.is_on else whole_state(chunk)


def head_state(chunk: Chunk) -> dict[str, Any]:
    """The head's parameters of a value or reward model's last chunk; empty for other chunks."""
    return {name: shard for name, shard in chunk.sharded_state_dict().items() if name.startswith(HEAD)}


def adapter_state(chunk: Chunk, adapters: Mapping[str, Adapter]) -> dict[str, ShardedTensor]:
    """Parameters of adapters, by their names in the chunk, with their place in the whole model; `adapters` by their layer's name there."""
    found = {}
    for layer, adapter in adapters.items():
        if adapter.pairs.is_expert:
            replica = parallel_state.get_expert_data_parallel_rank()
        else:
            replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        rank, size = adapter.group.rank(), adapter.group.size()
        for own, parameter in adapter.named_parameters():
            name, dim = f"{layer}{ADAPTER}{own}", parameter.partition_dim
            offsets = [(dim, rank, size)] if dim >= 0 else []
            same = (0, 0 if dim >= 0 else rank, replica)
            found[name] = ShardedTensor.from_rank_offsets(global_name(chunk, name), parameter, *offsets, replica_id=same)
    return found


def to_marker(chunk: Chunk) -> dict[str, Any]:
    """The adapters' entry in a checkpoint's marker; empty if the model has none."""
    lora = chunk.lora
    if not lora.is_on:
        return {}
    described = {"rank": lora.rank, "alpha": lora.alpha, "rslora": lora.rslora, "targets": [target.value for target in lora.targets]}
    if lora.dora:
        described["dora"] = True
    if lora.is_pissa:
        described["init"] = lora.init.value
    if lora.parts != LoraConfig().parts:
        described["parts"] = [part.value for part in lora.parts]
    packed = {"kind": chunk.quantization.value, "dtype": str(chunk.config.params_dtype).removeprefix("torch.")}
    if chunk.double_quantization:
        packed["scales"] = "8 bits"
    quantization = {QUANTIZATION: packed} if chunk.quantization.is_on else {}
    return {LORA: described, "base": chunk.base, "base_digest": chunk.base_digest} | quantization


def check_same(marker: Mapping[str, Any], chunk: Chunk, directory: Path) -> None:
    """Raise CheckpointError unless the checkpoint is of a model with the same adapters on the same weights, or both have none."""
    own = to_marker(chunk)
    then, now = ("with" if one else "without" for one in (POLICY_HEAD in marker, chunk.value_gradient is not None))
    if then != now:
        raise CheckpointError(f"{directory}: a policy {then} a head of values cannot be continued {now} one (critic.kind=head)")
    here, there = own.get(LORA), marker.get(LORA)
    if here != there:
        raise CheckpointError(
            f"{directory}: was saved with {there or 'no adapters'}, the model has {here or 'none'} (model.lora): it cannot be continued so"
        )
    packed, then = (" of ".join(found.get(QUANTIZATION, {"kind": "none"}).values()) for found in (own, marker))
    if packed != then:
        raise CheckpointError(
            f"{directory}: its adapters were trained with model.quantization={then}, the model has {packed}: it cannot be continued so"
        )
    if here and marker["base_digest"] != chunk.base_digest:
        ours, theirs = chunk.base or "random ones of this run.seed", marker["base"] or "random ones of another run.seed"
        raise CheckpointError(
            f"{directory}: its adapters belong to other weights ({theirs}) than this run's ({ours}): they have been replaced"
        )


def saved_lora(marker: Mapping[str, Any]) -> LoraConfig:
    """The adapters that a marker describes."""
    described = marker[LORA]
    parts = [Part(part) for part in described.get("parts", LoraConfig().parts)]
    targets, init = [LoraTarget(target) for target in described["targets"]], LoraInit(described.get("init", LoraConfig().init))
    return LoraConfig(**{**described, "targets": targets, "parts": parts, "init": init})


def saved_quantization(marker: Mapping[str, Any]) -> tuple[Quantization, torch.dtype, bool]:
    """(form of the packed weights under a marker's adapters, dtype that they were packed from, whether their scales have 8 bits)."""
    found = marker[QUANTIZATION]
    return Quantization(found["kind"]), getattr(torch, found["dtype"]), "scales" in found


def base_of(marker: Mapping[str, Any], directory: Path) -> Path:
    """The directory of the weights that a checkpoint's adapters belong to; downloaded if the Hub's. Raises as `same_weights`."""
    if not (base := marker["base"]):
        raise CheckpointError(f"{directory}: its adapters belong to random weights that are in no file; start such runs from model.path")
    return same_weights(base, marker["base_digest"], what=f"{directory}: its adapters belong")


@torch.no_grad()
def merge(chunk: Chunk, adapters: Mapping[str, Adapter], loaded: Mapping[str, Any]) -> None:
    """Merge adapters into a chunk's weights. `loaded`: the adapters' parameters, and any head's, by their names in the chunk."""
    if head := {name: tensor for name, tensor in loaded.items() if name.startswith(HEAD)}:
        chunk.load_state_dict(head, strict=False)
    for layer, adapter in adapters.items():
        for own, parameter in adapter.named_parameters():
            parameter.copy_(loaded[f"{layer}{ADAPTER}{own}"])
        weight = linear_weight(chunk.get_submodule(layer).weight)
        weight.write(adapter.merged(weight))
