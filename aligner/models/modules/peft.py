"""What adapters begin with and end as: the format of Hugging Face's PEFT, a directory with `adapter_config.json` and
`adapter_model.safetensors`; and PiSSA, which starts them from the weights under them.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from aligner.errors import CheckpointError, ConfigError
from aligner.files import with_umask_mode
from aligner.hub.names import parse
from aligner.models.config import Architecture, Family, LoraConfig, SeeingArchitecture
from aligner.models.families import weight_names
from aligner.models.families.mapping import ADAPTER
from aligner.models.families.wrappers import module_name
from aligner.models.modules.chunk import Chunk, global_name
from aligner.models.modules.lora import Adapter, named_adapters, pairs_of
from aligner.models.modules.scalar_head import HEAD, ScalarHead
from aligner.models.weights import all_places, export_hf, gathered, named_shards, places_everywhere, shard_anywhere
from aligner.parallel.collectives import gather_objects

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MAGNITUDE = "lora_magnitude_vector"  # [outputs]
_USUAL_HEADS = ("classifier", "score")  # PEFT names both for a model that classifies, which has one of them
# What makes an adapter compute something else than W x + scaling B A x, with the value that does not. Fields that are absent are neutral.
_OTHER_KINDS = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "alora_invocation_tokens": ([],),
    "layer_replication": ([],),
    "use_bdlora": ({}, False),
    "arrow_config": ({},),
    "kasa_config": ({},),
    "monteclora_config": ({},),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others (PiSSA, OLoRA, LoftQ) change the weights under it
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """One of Hugging Face's projections with its pair; all names are global."""

    name: str  # Hugging Face's, without `.weight`
    a: str  # Megatron's parameter, of whose rows the A is block number `block`
    block: int
    b: tuple[str, ...]  # Megatron's parameters, whose rows one after the other are the B

    def like_b(self, kind: str) -> tuple[str, ...]:
        """Megatron's parameters that lie as the B's do: magnitudes (`m`) or frozen first B's (`b0`), if the adapters have those."""
        return tuple(f"{prefix}{ADAPTER}{kind}.{part}" for prefix, part in (name.split(f"{ADAPTER}b.") for name in self.b))


def projections(architecture: Architecture, lora: LoraConfig) -> list[Projection]:
    """Every projection of the whole model that has a pair, in Hugging Face's order."""
    found = []
    for weight in weight_names(architecture).names(architecture):
        pairs = pairs_of(weight, architecture, lora)
        prefix = weight.removesuffix(".weight") + ADAPTER
        for block, (name, parts) in enumerate(pairs.projections.items() if pairs is not None else ()):
            found.append(Projection(name=name, a=f"{prefix}a", block=block, b=tuple(f"{prefix}b.{part}" for part in parts)))
    return found


def export_adapters(chunks: Sequence[Chunk]) -> Iterator[tuple[str, Tensor]]:
    """(PEFT's name, full tensor) of a head's parameters and of every A, B and magnitude. Collective: every rank consumes it to its end."""
    chunk = chunks[0]
    own = {part.place.name: part for part in named_shards(chunks, adapters=True)}
    places = {place.name: place for place in places_everywhere(chunks, [part.place for part in own.values()])}

    def whole(name: str) -> Tensor:
        held = own[name].parameter.detach() if name in own else None
        return gathered(chunk, places[name], shard_anywhere(chunk, places[name], held))

    if chunk.head is not None:
        heads = {part.place.name: part.parameter.detach() for part in named_shards(chunks) if part.place.name.startswith(HEAD)}
        for place in all_places(chunks):
            if place.name.startswith(HEAD):
                yield _head_name(chunk, place.name), shard_anywhere(chunk, place, heads.get(place.name))
    for one in projections(chunk.architecture, chunk.lora):
        a, b = whole(one.a).split(chunk.lora.rank)[one.block], torch.cat([whole(name) for name in one.b])
        if chunk.lora.is_pissa:
            a = torch.cat([a, whole(f"{one.a}0").split(chunk.lora.rank)[one.block]])
            b = torch.cat([b, -torch.cat([whole(name) for name in one.like_b("b0")])], dim=1)
        yield from zip(pair_names(chunk, one.name), (a, b), strict=True)
        if chunk.lora.dora:
            yield f"{_PREFIX}{_module(chunk, one.name)}.{_MAGNITUDE}", torch.cat([whole(name) for name in one.like_b("m")])[:, 0]


def save_peft(chunks: Sequence[Chunk], directory: Path, *, writer: bool) -> None:
    """Write the adapters as a directory that `peft.PeftModel.from_pretrained` loads. Every rank calls it; the one `writer` writes."""
    tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in export_adapters(chunks) if writer}
    if not writer:
        return
    directory.mkdir(parents=True, exist_ok=True)
    with_umask_mode(directory / WEIGHTS_FILE, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    config = peft_config(chunks[0].architecture, chunks[0].lora.plain, base=chunks[0].base, head=chunks[0].head)
    config |= targets_in_wrapper(chunks[0])
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def peft_config(architecture: Architecture, lora: LoraConfig, *, base: str, head: ScalarHead | None = None) -> dict[str, Any]:
    """The content of `adapter_config.json`; of a value or reward model, which trains its `head` too."""
    task = "CAUSAL_LM" if head is None else "TOKEN_CLS" if head.has_bias else "SEQ_CLS"
    name, targets = parse(base), _targets(architecture, lora)
    plain = "target_parameters" not in targets  # PEFT drops nothing of parameters, and of two pairs in one it takes both ranks for rsLoRA's
    alpha = lora.alpha if plain else lora.scaling * lora.rank
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base if name is None else name.repo,
        "revision": None if name is None else name.revision,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,  # PEFT's is an int
        "lora_dropout": lora.dropout if plain else 0.0,
        "use_rslora": lora.rslora and plain,
        "use_dora": lora.dora,
        **targets,
        "alpha_pattern": {both: 2 * alpha for both in targets["rank_pattern"]},
        "fan_in_fan_out": architecture.family is Family.gpt2,  # its layers are Conv1D
        "bias": "none",
        "modules_to_save": None if head is None else [_head_module(head, architecture)],
    }


def _targets(architecture: Architecture, lora: LoraConfig) -> dict[str, Any]:
    """The fields of `adapter_config.json` that select the layers with pairs.

    Modules go by name suffixes that only they have: GPT-2 has a c_proj in its attention and one after it. transformers 5 has the experts of
    a layer in two parameters, and PEFT takes every module that is called like an expert's projection for them: such ones, and the experts
    themselves, are named as the parameters that they are. That of gate and up has both pairs.
    """
    trained, table = {one.name for one in projections(architecture, lora)}, weight_names(architecture)
    rules = {weight: table.find(weight) for weight in table.names(architecture)}
    every = {name.removesuffix(".weight"): weight for weight, rule in rules.items() for name in rule.hf_names}
    experts = {name for name, weight in every.items() if "local_experts" in weight and rules[weight].expert is None}
    called, ambiguous = ({_ending(name, 1) for name in names} for names in (experts, every.keys() - trained))
    modules = {name for name in trained if _ending(name, 1) not in called}
    fused = [f"experts.{name}" for name in ("gate_up_proj", "down_proj") if trained & experts]
    parameters = [f"{name}.weight" for name in sorted(trained - modules - experts)] + fused
    if lora.dora and parameters:
        raise ConfigError(
            f"model.lora.targets: PEFT takes {parameters[0]} of family {architecture.family.value} for an expert's, of which it has no "
            "DoRA; allowed with model.lora.dora=true: qkv, q, k, v, proj"
        )
    return {
        "target_modules": sorted({_ending(name, 2 if _ending(name, 1) in ambiguous else 1) for name in modules}),
        **({"target_parameters": parameters} if parameters else {}),
        "rank_pattern": {re.escape(name): 2 * lora.rank for name in fused[:1]},
    }


def targets_in_wrapper(chunk: Chunk) -> dict[str, Any]:
    """What selects the layers of a text part in the model of images and text around it, which has others of the same names; empty for other
    models.

    Raises ConfigError for layers that PEFT cannot select so: of mixtures it takes such ones for experts.
    """
    kind = _kind_around(chunk)
    if not kind:
        return {}
    if "target_parameters" in _targets(chunk.architecture, chunk.lora):
        raise ConfigError(f"model.lora.targets: of a {kind} model only adapters of attention have a form in PEFT; allowed: q, k, v, proj")
    names = {_module(chunk, one.name) for one in projections(chunk.architecture, chunk.lora)}
    return {"target_modules": "|".join(sorted({re.sub(r"\\\.\d+\\\.", lambda _: r"\.\d+\.", re.escape(name)) for name in names}))}


def _kind_around(chunk: Chunk) -> str:
    """The kind of model of images and text that a text part belongs to; empty for other models."""
    sees = isinstance(chunk.architecture, SeeingArchitecture)
    return str((chunk.architecture.hf if sees else chunk.wrapper).get("model_type", ""))


def _module(chunk: Chunk, name: str) -> str:
    """transformers' name of a layer in the model that PEFT loads."""
    kind = _kind_around(chunk)
    return module_name(kind, name) if kind else name


def _ending(name: str, parts: int) -> str:
    return ".".join(name.split(".")[-parts:])


def _head_name(chunk: Chunk, name: str) -> str:
    return f"{_PREFIX}{chunk.head.hf_name(name, chunk.architecture.family)}"


def load_peft(chunks: Sequence[Chunk], directory: Path) -> None:
    """Fill this rank's adapters from a PEFT directory, and a head that was trained with them. No communication.

    Raises CheckpointError for files that are missing, damaged or of other layers, ConfigError for an adapter of another kind or scaling.
    """
    config, stored = _read(directory)
    chunk = chunks[0]
    heads = _saved_head(chunk, config, directory)
    check_peft_config(config, chunk.architecture, chunk.lora, directory)
    named = [f"{_PREFIX}{_module(chunk, one.name)}" for one in projections(chunk.architecture, chunk.lora)]
    kinds = ("lora_A.weight", "lora_B.weight", *([_MAGNITUDE] if chunk.lora.dora else []))
    names = {f"{name}.{kind}" for name in named for kind in kinds} | heads.keys()
    if difference := sorted(stored.keys() ^ names):
        where = "there and in no adapter of the model" if difference[0] in stored else "missing there"
        raise CheckpointError(f"model.lora.path={directory}: {difference[0]} is {where} (model.lora.targets); {len(difference)} differ")
    fill_adapters(chunks, stored, directory)
    for chunk in chunks:
        for theirs, ours in heads.items() if chunk.post_process else ():
            _copy(chunk.get_parameter(ours), stored[theirs], directory, theirs)


def fill_adapters(chunks: Sequence[Chunk], stored: dict[str, Tensor], source: Path | str) -> None:
    """Fill this rank's adapters from whole tensors by PEFT's names. No communication. `source`: for messages."""
    wanted: dict[str, list[Projection]] = {}
    for one in projections(chunks[0].architecture, chunks[0].lora):
        wanted.setdefault(one.a, []).append(one)
    for chunk in chunks:
        for name, adapter in named_adapters(chunk):
            _fill(chunk, adapter, wanted[f"{global_name(chunk, name)}{ADAPTER}a"], stored, source)


def pair_names(chunk: Chunk, name: str) -> tuple[str, str]:
    """PEFT's names of the A and the B of one of Hugging Face's projections."""
    module = f"{_PREFIX}{_module(chunk, name)}"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise CheckpointError(f"model.lora.path={directory}: no {name} there")
    try:
        config = json.loads((directory / CONFIG_FILE).read_text())
        stored = load_file(directory / WEIGHTS_FILE)
    except (ValueError, SafetensorError) as error:
        raise CheckpointError(f"model.lora.path={directory}: cannot be read: {error}") from error
    if missing := [name for name in ("r", "lora_alpha") if name not in config]:
        raise CheckpointError(f"model.lora.path={directory}: {CONFIG_FILE} has no {missing[0]}")
    return config, stored


def _saved_head(chunk: Chunk, config: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """Our names, by PEFT's, of a head's saved parameters. Raises ConfigError where other modules than the model's head were saved."""
    saved = config.get("modules_to_save") or []
    if not saved:
        return {}
    head = None if chunk.head is None else _head_module(chunk.head, chunk.architecture)
    if chunk.head is None or head not in saved or not set(saved) <= {head, *_USUAL_HEADS}:
        allowed = "none" if head is None else f"none, [{head}]"
        raise ConfigError(f"model.lora.path={directory}: modules_to_save={saved} is not supported; allowed: {allowed}")
    return {_head_name(chunk, name): name for name in (f"{HEAD}weight", *([f"{HEAD}bias"] if chunk.head.has_bias else []))}


def _head_module(head: ScalarHead, architecture: Architecture) -> str:
    return head.hf_name(HEAD, architecture.family).rstrip(".")


def check_peft_config(config: Mapping[str, Any], architecture: Architecture, lora: LoraConfig, directory: Path) -> None:
    """Raise ConfigError unless an adapter with this `adapter_config.json` is one of `lora`'s."""
    ours = _targets(architecture, lora)
    ours["alpha_pattern"] = {both: 2 * config["lora_alpha"] for both in ours["rank_pattern"]}
    for name, allowed in _OTHER_KINDS.items():
        value = config.get(name)
        if value is not None and value not in allowed and value != ours.get(name):
            raise ConfigError(
                f"model.lora.path={directory}: {name}={value} is not supported; allowed: {', '.join(str(one) for one in allowed)}"
            )
    if bool(config.get("use_dora")) is not lora.dora:
        raise ConfigError(
            f"model.lora.dora={str(lora.dora).lower()}: the adapter at model.lora.path={directory} has use_dora={not lora.dora}; "
            "allowed: that"
        )
    if config["r"] != lora.rank:
        raise ConfigError(f"model.lora.rank={lora.rank}: the adapter at model.lora.path={directory} has r={config['r']}; allowed: that")
    scaling = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    if not math.isclose(scaling, lora.scaling, rel_tol=1e-6):
        raise ConfigError(
            f"model.lora.alpha={lora.alpha}, rslora={lora.rslora}: the adapter at model.lora.path={directory} has lora_alpha="
            f"{config['lora_alpha']}, use_rslora={config.get('use_rslora', False)}; allowed: those"
        )


def _fill(chunk: Chunk, adapter: Adapter, found: Sequence[Projection], stored: dict[str, Tensor], source: Path | str) -> None:
    ranks, index = adapter.group.size(), adapter.group.rank()
    splits_output = adapter.pairs.splits_output
    whole_a = torch.cat([stored[pair_names(chunk, one.name)[0]] for one in found])
    _copy(adapter.a, whole_a if splits_output else whole_a.chunk(ranks, dim=1)[index], source, found[0].name)
    for one in found:
        whole_b = stored[pair_names(chunk, one.name)[1]]
        parts = [name.rsplit(".", 1)[1] for name in one.b]
        sizes = [adapter.b[part].shape[0] * (ranks if splits_output else 1) for part in parts]
        if whole_b.shape[0] != sum(sizes):
            raise CheckpointError(f"{source}: lora_B of {one.name} has {whole_b.shape[0]} rows, the model's layer has {sum(sizes)}")
        stacks = [(adapter.b, whole_b)]
        if adapter.m:
            stacks.append((adapter.m, stored[f"{_PREFIX}{_module(chunk, one.name)}.{_MAGNITUDE}"][:, None]))
        for ours, whole in stacks:
            for part, rows in zip(parts, whole.split(sizes), strict=True):
                _copy(ours[part], rows.chunk(ranks)[index] if splits_output else rows, source, one.name)


@torch.no_grad()
def _copy(target: Tensor, found: Tensor, source: Path | str, name: str) -> None:
    if found.shape != target.shape:
        raise CheckpointError(f"{source}: a matrix of {name} is {tuple(found.shape)} on this rank, the model's {tuple(target.shape)}")
    target.copy_(found)


@torch.no_grad()
def start_from_weights(chunks: Sequence[Chunk]) -> None:
    """Fill new adapters, which add nothing yet, with the largest singular values and vectors of the weights (PiSSA; Meng et al. 2024,
    2404.02948). Collective: every rank decomposes its share of the matrices, each of them whole, so that every layout starts the same.

    With W = U S V', A = sqrt(S_r / scaling) V_r' and B = U_r sqrt(S_r / scaling). The paper puts the residual W - scaling B A in W's place.
    Here W stays, and the layer subtracts the product of the frozen first pair: the same function and gradients, nothing is rounded away.
    The export is an adapter of the original weights, of twice the rank.
    """
    chunk, rank, size = chunks[0], dist.get_rank(), dist.get_world_size()
    transposed = chunk.architecture.family is Family.gpt2
    names = {f"{one.name}.weight" for one in projections(chunk.architecture, chunk.lora)}
    found: dict[str, Tensor] = {}
    own: tuple[str, Tensor] | None = None
    wanted = ((name, weight) for name, weight in export_hf(chunks) if name in names)
    for number, (name, weight) in enumerate(wanted, start=1):
        names.remove(name)
        if chunk.lora.rank > min(weight.shape):
            raise ConfigError(f"model.lora.rank={chunk.lora.rank}: {name} has {min(weight.shape)} singular values (model.lora.init=pissa)")
        if number % size == rank:
            own = name, (weight.t() if transposed else weight).float().clone()
        if own is not None and (number % size == 0 or not names):  # every rank has one: all of them compute at the same time
            found |= zip(pair_names(chunk, own[0].removesuffix(".weight")), pair_of(*own, chunk.lora), strict=True)
            own = None
    if names:
        raise ConfigError(f"model.lora.init=pissa: {min(names)} is no matrix of its own in the model's files; allowed: uniform")
    fill_adapters(chunks, {name: tensor for part in gather_objects(found) for name, tensor in part.items()}, "model.lora.init=pissa")
    for chunk in chunks:
        for _, adapter in named_adapters(chunk):
            adapter.freeze_start()


def pair_of(name: str, weight: Tensor, lora: LoraConfig) -> tuple[Tensor, Tensor]:
    """A [rank, inputs] and B [outputs, rank] of a float32 matrix, on the CPU."""
    if lora.pissa_iterations:
        with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
            torch.manual_seed(zlib.crc32(name.encode()))
            left, values, right = torch.svd_lowrank(weight, lora.rank, niter=lora.pissa_iterations)
            right = right.t()
    else:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    roots = (values[: lora.rank] / lora.scaling).sqrt()
    return (roots[:, None] * right[: lora.rank]).cpu(), (left[:, : lora.rank] * roots).cpu()
