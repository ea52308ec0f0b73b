"""A teacher's log-probs of supervised examples, on disk: its K likeliest tokens at the position of each trained one.

    <directory>/manifest.json              the inputs; written first
    <directory>/shard_000000.safetensors   `shard_size` examples each, in the order of the data; complete as soon as it has its name

A run reads rows as it needs them: the whole would rarely fit into memory. Records of NeMo-Aligner's distillation are read too.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aligner.data.supervised import SupervisedExample
from aligner.errors import ConfigError, DataError
from aligner.files import publish

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilledExample:
    """One row. The teacher's K tokens, int64 [T, K], and their log-probs, float32 [T, K], are for the T tokens in `loss_mask`, in order."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    teacher_tokens: Tensor
    teacher_logprobs: Tensor
    source: str

    def first(self, length: int | None) -> DistilledExample:
        """Its first `length` tokens; None: all."""
        learnt = sum(self.loss_mask[:length])
        return replace(
            self,
            tokens=self.tokens[:length],
            loss_mask=self.loss_mask[:length],
            teacher_tokens=self.teacher_tokens[:learnt],
            teacher_logprobs=self.teacher_logprobs[:learnt],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The properties that all files of a directory share."""

    format: int = FORMAT
    top_k: int
    num_examples: int
    shard_size: int  # examples per file, the last one has the rest
    data: str  # digest of the examples' tokens and masks
    tokenizer: str  # digest of its vocabulary
    model: str  # digest of the teacher's files
    made_of: str  # for people: the teacher's directory and the data's

    @property
    def num_shards(self) -> int:
        return math.ceil(self.num_examples / self.shard_size)

    def size(self, shard: int) -> int:
        """Examples in a shard."""
        return min(self.shard_size, self.num_examples - shard * self.shard_size)


def shard_path(directory: Path, shard: int) -> Path:
    """Path of a complete shard, whether it exists or not."""
    return directory / f"shard_{shard:06d}.safetensors"


def num_complete(directory: Path, manifest: Manifest) -> int:
    """How many shards are there before the first that is not."""
    return next((shard for shard in range(manifest.num_shards) if not shard_path(directory, shard).exists()), manifest.num_shards)


def data_digest(examples: Sequence[SupervisedExample]) -> str:
    """Changes with any token or mask of the examples, and with their order."""
    content = hashlib.sha256()
    for example in examples:
        content.update(array("q", (len(example.tokens), *example.tokens)).tobytes())
        content.update(bytes(example.loss_mask))
    return content.hexdigest()


def begin(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, or find that the directory has this one. Raises DataError if its files were made of something else."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / MANIFEST
    if not path.exists():
        publish(path, lambda new: new.write_text(json.dumps(asdict(manifest), indent=2) + "\n"))
        return
    found = read_manifest(directory)
    other = [f.name for f in fields(Manifest) if f.name != "made_of" and getattr(found, f.name) != getattr(manifest, f.name)]
    if other:
        raise DataError(
            f"{directory} holds the log-probs of another job ({found.made_of}): {', '.join(other)} differ; "
            "allowed: the same settings and files, another directory, or to remove it"
        )


def read_manifest(directory: Path) -> Manifest:
    """Raises DataError if there is none that this version reads."""
    path = directory / MANIFEST
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            raise DataError(f"{path}: format {found['format']}; this version reads {FORMAT}")
        return Manifest(**found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not the manifest of a teacher's log-probs: {error}") from error


def write_shard(directory: Path, shard: int, examples: Sequence[DistilledExample]) -> None:
    """Atomically: a file that has its name is complete and on disk."""
    tensors = {
        "lengths": torch.tensor([len(example.tokens) for example in examples], dtype=torch.int64),
        "learnt": torch.tensor([sum(example.loss_mask) for example in examples], dtype=torch.int64),
        "tokens": torch.tensor([token for example in examples for token in example.tokens], dtype=torch.int32),
        "loss_mask": torch.tensor([learnt for example in examples for learnt in example.loss_mask], dtype=torch.bool),
        "teacher_tokens": torch.cat([example.teacher_tokens for example in examples]).int(),
        "teacher_logprobs": torch.cat([example.teacher_logprobs for example in examples]),
    }
    sources = {"sources": json.dumps([example.source for example in examples])}
    publish(shard_path(directory, shard), lambda new: save_file(tensors, new, metadata=sources))


class _Shard:
    """An open file: where its rows begin."""

    def __init__(self, path: Path, manifest: Manifest, number: int) -> None:
        try:
            self._file = safe_open(path, framework="pt")
            lengths, learnt = self._file.get_tensor("lengths"), self._file.get_tensor("learnt")
            self.sources: list[str] = json.loads(self._file.metadata()["sources"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is not a complete shard of a teacher's log-probs: {error}") from error
        shape = self._file.get_slice("teacher_logprobs").get_shape()
        if len(lengths) != manifest.size(number) or shape != [int(learnt.sum()), manifest.top_k]:
            raise DataError(f"{path} holds {len(lengths)} examples and log-probs {shape}, not what {MANIFEST} says")
        self.lengths: list[int] = lengths.tolist()
        self.learnt: list[int] = learnt.tolist()
        self._starts = [0, *lengths.cumsum(0).tolist()]
        self._learnt_starts = [0, *learnt.cumsum(0).tolist()]

    def example(self, row: int) -> DistilledExample:
        tokens = slice(self._starts[row], self._starts[row + 1])
        learnt = slice(self._learnt_starts[row], self._learnt_starts[row + 1])
        read = self._file.get_slice
        return DistilledExample(
            tokens=tuple(read("tokens")[tokens].tolist()),
            loss_mask=tuple(read("loss_mask")[tokens].tolist()),
            teacher_tokens=read("teacher_tokens")[learnt].long(),
            teacher_logprobs=read("teacher_logprobs")[learnt],
            source=self.sources[row],
        )


class TeacherFiles(Sequence[DistilledExample]):
    """The examples of a directory, read when they are asked for. Raises DataError if it is not complete."""

    def __init__(self, directory: Path) -> None:
        self.manifest = read_manifest(directory)
        there = num_complete(directory, self.manifest)
        if there < self.manifest.num_shards:
            raise DataError(f"{directory} has {there} of {self.manifest.num_shards} shards: the job that writes them has not finished")
        self._shards = [_Shard(shard_path(directory, number), self.manifest, number) for number in range(there)]

    def __len__(self) -> int:
        return self.manifest.num_examples

    def __getitem__(self, index: int) -> DistilledExample:
        shard, row = divmod(index, self.manifest.shard_size)
        return self._shards[shard].example(row)

    def length(self, index: int) -> int:
        """Tokens of an example."""
        shard, row = divmod(index, self.manifest.shard_size)
        return self._shards[shard].lengths[row]

    def check_tokenizer(self, digest: str) -> None:
        """Raise ConfigError if the teacher's tokens are not those of the tokenizer with this digest."""
        if self.manifest.tokenizer != digest:
            raise ConfigError(
                f"data: the log-probs of {self.manifest.made_of} are of another vocabulary than model.path's; "
                "allowed: a teacher with the student's tokenizer"
            )
