"""Weights between Hugging Face files and a Megatron module's shards, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from aligner.errors import CheckpointError
from aligner.models.build import Transformer
from aligner.models.families import architecture_to_hf
from aligner.models.families.mapping import Rule, find_rule, shard, to_hf, to_megatron, unshard

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_FILE_BYTES = 5 * 2**30


class HFWeights:
    """The tensors of a Hugging Face directory, read on demand by name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if (directory / INDEX_FILE).exists():
            files: dict[str, str] = json.loads((directory / INDEX_FILE).read_text())["weight_map"]
        elif (directory / SINGLE_FILE).exists():
            with safe_open(directory / SINGLE_FILE, framework="pt") as handle:
                files = dict.fromkeys(handle.keys(), SINGLE_FILE)
        else:
            raise CheckpointError(f"{directory}: no {SINGLE_FILE} and no {INDEX_FILE}; only safetensors weights are read")
        self._files = files
        self._handles = {name: safe_open(directory / name, framework="pt") for name in sorted(set(files.values()))}

    def names(self) -> set[str]:
        return set(self._files)

    def get(self, name: str) -> Tensor:
        """The full tensor. Raises CheckpointError where the directory has none of that name."""
        if name not in self._files:
            raise CheckpointError(f"{self.directory}: no tensor named {name}")
        return self._handles[self._files[name]].get_tensor(name)

    def get_shaped(self, name: str, shape: torch.Size) -> Tensor:
        """The full tensor. Raises CheckpointError where it is missing or has another shape."""
        tensor = self.get(name)
        if tensor.shape != shape:
            raise CheckpointError(f"{self.directory}: {name} is {tuple(tensor.shape)}, the model's config makes it {tuple(shape)}")
        return tensor


def load_hf(module: Transformer, directory: Path) -> None:
    """Fill this rank's shards from a Hugging Face directory; heads that it lacks (a new value head) keep their initialisation.

    Raises CheckpointError for a tensor that is missing, has the wrong shape, or is in the files but belongs to no parameter.
    """
    source = HFWeights(directory)
    used: set[str] = set()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            rule = find_rule(name)
            if rule is not None:
                used.update(rule.hf_names)
                parameter.copy_(_import(module, parameter, rule, source))
            elif name.startswith("score_head.") and name in source.names():
                used.add(name)
                parameter.copy_(source.get_shaped(name, parameter.shape))
    allowed = {"lm_head.weight"}  # a tied file may repeat the embedding; a scalar model has no use for it
    if unknown := sorted(n for n in source.names() - used - allowed if not n.endswith("rotary_emb.inv_freq")):
        raise CheckpointError(f"{directory}: {len(unknown)} tensors belong to no parameter of the model, e.g. {unknown[:3]}")


def _import(module: Transformer, parameter: Tensor, rule: Rule, source: HFWeights) -> Tensor:
    """This rank's part of a parameter, from tensors that must have the very shapes an export would give them."""
    tp = module.pg_collection.tp
    shape = list(parameter.shape)
    if _is_split(parameter):
        shape[parameter.partition_dim] *= tp.size()
    expected = to_hf(rule.layout, torch.empty(shape, device="meta"), module.architecture)
    tensors = [source.get_shaped(name, like.shape) for name, like in zip(rule.hf_names, expected, strict=True)]
    full = to_megatron(rule.layout, tensors, module.architecture, module.vocab_size)
    if not _is_split(parameter):
        return full
    return shard(rule.layout, full, dim=parameter.partition_dim, num_shards=tp.size(), index=tp.rank())


def _is_split(parameter: Tensor) -> bool:
    # Megatron marks split parameters with an attribute that others do not have at all.
    return "tensor_model_parallel" in parameter.__dict__ and parameter.tensor_model_parallel


def export_hf(module: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Stream (Hugging Face name, full tensor in the parameter's dtype). Collective over the tensor-parallel group, one tensor at a time."""
    tp = module.pg_collection.tp
    for name, parameter in module.named_parameters():
        full = parameter.detach()
        rule = find_rule(name)
        if rule is None:
            yield name, full
            continue
        if _is_split(parameter) and tp.size() > 1:
            parts = [torch.empty_like(full) for _ in range(tp.size())]
            dist.all_gather(parts, full.contiguous(), group=tp)
            full = unshard(rule.layout, parts, dim=parameter.partition_dim)
        yield from zip(rule.hf_names, to_hf(rule.layout, full, module.architecture), strict=True)


def save_hf(module: Transformer, directory: Path, *, writer: bool) -> None:
    """Write `config.json` and sharded safetensors. Every rank calls it; the one `writer` writes, holding one file's tensors at a time."""
    if writer:
        directory.mkdir(parents=True, exist_ok=True)
        for old in (directory / INDEX_FILE, directory / SINGLE_FILE, *directory.glob("model-*-of-*.safetensors")):
            old.unlink(missing_ok=True)  # an index that stayed would have the tensors of the export before read
        hf_config = architecture_to_hf(module.architecture) | {"dtype": str(module.config.params_dtype).removeprefix("torch.")}
        (directory / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    sizes, written = [0], 0
    pending: dict[str, Tensor] = {}
    weight_map: dict[str, int] = {}
    for name, tensor in export_hf(module):
        if not writer:
            continue
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and sizes[-1] + num_bytes > MAX_FILE_BYTES:
            save_file(pending, directory / f"part-{written}.safetensors", metadata={"format": "pt"})
            pending, written = {}, written + 1
            sizes.append(0)
        pending[name] = tensor.cpu().contiguous().clone()
        weight_map[name] = written
        sizes[-1] += num_bytes
    if writer:
        save_file(pending, directory / f"part-{written}.safetensors", metadata={"format": "pt"})
        _name_files(directory, weight_map, written + 1, sum(sizes))


def _name_files(directory: Path, weight_map: dict[str, int], num_files: int, num_bytes: int) -> None:
    """Give the parts the names that Hugging Face tools look for, and an index where there are several."""
    if num_files == 1:
        (directory / "part-0.safetensors").replace(directory / SINGLE_FILE)
        return
    names = [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
    for i, name in enumerate(names):
        (directory / f"part-{i}.safetensors").replace(directory / name)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": {name: names[part] for name, part in weight_map.items()}}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
