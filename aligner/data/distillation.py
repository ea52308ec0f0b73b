"""Examples for distillation: a directory that `teacher_logprobs` wrote, or records with NeMo-Aligner's fields.

The directory holds a teacher's view of supervised examples: its K likeliest tokens at each trained position, with their log-probs.

    <directory>/manifest.json              the inputs; written first
    <directory>/shard_000000.safetensors   `shard_size` examples each, in the order of the data; complete as soon as it has its name
    <directory>/images/                    the examples' images, by digest

A run reads rows on demand: all of them would rarely fit into memory.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aligner.data.collate import SupervisedExample, supervised_batch
from aligner.data.config import DistillationDataConfig
from aligner.data.images import images_in, only_images
from aligner.data.messages import shown
from aligner.data.reading import Reader, read_all, reads_sources
from aligner.data.records import raw_object
from aligner.data.report import LoadReport, too_long
from aligner.data.sources import RawRecord
from aligner.data.tokenizer import Tokenizer
from aligner.data.vision import ImageStore, Vision
from aligner.errors import ConfigError, DataError
from aligner.files import publish
from aligner.types import DistillationBatch
from aligner.types.batches import of_kind
from aligner.types.extras import from_json, to_json

MANIFEST, IMAGES = "manifest.json", "images"
FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilledExample:
    """One row. The teacher's K tokens, int64 [T, K], and their log-probs, float32 [T, K], are for the T tokens in `loss_mask`, in order."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    teacher_tokens: Tensor
    teacher_logprobs: Tensor
    source: str
    extras: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)  # images alone

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
    """The properties shared by all files of a directory."""

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
        return min(self.shard_size, self.num_examples - shard * self.shard_size)


def shard_path(directory: Path, shard: int) -> Path:
    """Path of a complete shard, whether it exists or not."""
    return directory / f"shard_{shard:06d}.safetensors"


def num_complete(directory: Path, manifest: Manifest) -> int:
    """The number of shards before the first missing one."""
    return next((shard for shard in range(manifest.num_shards) if not shard_path(directory, shard).exists()), manifest.num_shards)


def data_digest(examples: Sequence[SupervisedExample]) -> str:
    """Changes with any token, mask or image of the examples, and with their order."""
    content = hashlib.sha256()
    for example in examples:
        content.update(array("q", (len(example.tokens), *example.tokens)).tobytes())
        content.update(bytes(example.loss_mask))
        content.update("".join(images_in(example.extras)).encode())
    return content.hexdigest()


def begin(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, or check the existing one. Raises DataError if the directory's files were made of something else."""
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
            "allowed: the same settings and files, another directory, or removing it"
        )


def read_manifest(directory: Path) -> Manifest:
    """Raises DataError if this version cannot read it."""
    path = directory / MANIFEST
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            raise DataError(f"{path}: format {found['format']}; this version reads {FORMAT}")
        return Manifest(**found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not the manifest of a teacher's log-probs: {error}") from error


def write_shard(directory: Path, shard: int, examples: Sequence[DistilledExample], store: ImageStore | None = None) -> None:
    """Atomic: a file of that name is complete and on disk. `store`: of the examples' images."""
    for digest in {digest for example in examples for digest in images_in(example.extras)} if store else ():
        ImageStore(directory / IMAGES).put(store.get(digest))  # type: ignore[union-attr]
    tensors = {
        "lengths": torch.tensor([len(example.tokens) for example in examples], dtype=torch.int64),
        "learnt": torch.tensor([sum(example.loss_mask) for example in examples], dtype=torch.int64),
        "tokens": torch.tensor([token for example in examples for token in example.tokens], dtype=torch.int32),
        "loss_mask": torch.tensor([learnt for example in examples for learnt in example.loss_mask], dtype=torch.bool),
        "teacher_tokens": torch.cat([example.teacher_tokens for example in examples]).int(),
        "teacher_logprobs": torch.cat([example.teacher_logprobs for example in examples]),
    }
    more = {"sources": json.dumps([example.source for example in examples])}
    if any(example.extras for example in examples):
        more["extras"] = json.dumps([to_json(example.extras) for example in examples])
    publish(shard_path(directory, shard), lambda new: save_file(tensors, new, metadata=more))


class _Shard:
    """An open file: where its rows begin."""

    def __init__(self, path: Path, manifest: Manifest, number: int) -> None:
        try:
            self._file = safe_open(path, framework="pt")
            lengths, learnt = self._file.get_tensor("lengths"), self._file.get_tensor("learnt")
            self.sources: list[str] = json.loads(self._file.metadata()["sources"])
            self.extras = [from_json(one) for one in json.loads(self._file.metadata().get("extras", "[]"))] or [{}] * len(lengths)
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
            extras=self.extras[row],
        )


class TeacherFiles(Sequence[DistilledExample]):
    """The examples of a directory, read on demand. Raises DataError if it is not complete."""

    def __init__(self, directory: Path) -> None:
        self.manifest, self._directory = read_manifest(directory), directory
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
        shard, row = divmod(index, self.manifest.shard_size)
        return self._shards[shard].lengths[row]

    def hand_over(self, vision: Vision | None) -> None:
        """Put the images into the store of a student's run. Raises DataError if it does not see, or one is missing."""
        for digest in {digest for shard in self._shards for extras in shard.extras for digest in images_in(extras)}:
            if vision is None:
                raise DataError(f"data: the log-probs of {self.manifest.made_of} are of examples with images, and the model does not see")
            if not vision.store.take(self._directory / IMAGES / digest):
                raise DataError(f"{self._directory / IMAGES / digest} is missing, an image of the examples")

    def check_tokenizer(self, digest: str) -> None:
        """Raise ConfigError if the teacher's tokens are not those of the tokenizer with this digest."""
        if self.manifest.tokenizer != digest:
            raise ConfigError(
                f"data: the log-probs of {self.manifest.made_of} are of another vocabulary than model.path's; "
                "allowed: a teacher with the student's tokenizer"
            )


FIELDS = ("tokens", "labels", "loss_mask", "topk_logits", "topk_token_ids")


@dataclass(frozen=True, eq=False)
class Selected(Sequence[DistilledExample]):
    """Some of the examples of another sequence, each cut to `max_length` tokens if that is given."""

    examples: Sequence[DistilledExample]
    chosen: Sequence[int]
    max_length: int | None

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> DistilledExample:
        return self.examples[self.chosen[index]].first(self.max_length)


def _load_one(
    location: str, config: DistillationDataConfig, tokenizer: Tokenizer, *, first: int | None = None
) -> tuple[Sequence[DistilledExample], LoadReport]:
    """Examples at `location`. Raises also DataError for an incomplete directory, ConfigError for a teacher's other vocabulary."""

    def read(raw: RawRecord, reader: Reader) -> DistilledExample:
        return _fitted(parse_distilled(raw, tokenizer.max_token_id), reader)

    if not (Path(location) / MANIFEST).exists():
        examples, report = read_all(read, location, config, tokenizer, first=first)
        if len(widths := {example.teacher_tokens.shape[1] for example in examples}) > 1:
            raise DataError(f"{location}: the records name {shown(sorted(widths))} tokens per position, expected the same number in all")
        return examples, report
    files = TeacherFiles(Path(location))
    files.check_tokenizer(tokenizer.digest)
    files.hand_over(tokenizer.vision)

    def chosen(raw: RawRecord, reader: Reader) -> int:
        if 0 < config.max_length < files.length(raw.index):
            _fitted(files[raw.index], reader)
        return raw.index

    rows = [RawRecord(file=location, line=row, index=row) for row in range(len(files) if first is None else min(first, len(files)))]
    numbers, report = read_all(chosen, location, config, tokenizer, first=0, items=lambda _: iter(rows))
    return Selected(files, numbers, config.max_length or None), report


load_distillation = reads_sources(DistilledExample, _load_one)


def _fitted(example: DistilledExample, reader: Reader) -> DistilledExample:
    """The example, or its beginning. Raises TooLong, or DataError."""
    length, most = len(example.tokens), reader.config.max_length
    if not reader.exceeds(length):
        return example
    if example.extras:
        too_long(length, most, reader.config.overlong)
    if not any(example.loss_mask[:most]):
        raise DataError(f"has no response token within max_length={most} ({length} tokens), expected a shorter prompt")
    return example.first(most)


def check_logprobs(examples: Sequence[DistilledExample]) -> None:
    """Raise DataError, naming the record, if a record's numbers are not log-probs over a vocabulary: K of them sum to more than 1."""
    if isinstance(examples, Selected):
        return  # teacher_logprobs wrote them
    for example in examples:
        if (mass := float(example.teacher_logprobs.logsumexp(dim=-1).max().exp())) > 1.001:
            raise DataError(
                f"{example.source}: field 'topk_logits' gives {example.teacher_logprobs.shape[1]} tokens a probability of {mass:.4g} "
                "together, expected log-probs over the whole vocabulary, or algorithm.tail_bucket=false"
            )


def parse_distilled(raw: RawRecord, max_token_id: int) -> DistilledExample:
    """NeMo-Aligner's `{tokens, labels, loss_mask, topk_logits, topk_token_ids}` of S positions each: entry t of all but `tokens` is about
    token t + 1. Logits work as well as log-probs: the loss normalises over the K."""
    record = raw_object(raw)
    if missing := [name for name in FIELDS if name not in record]:
        raise DataError(f"field {missing[0]!r} is missing, expected {{{', '.join(FIELDS)}}} or a directory that teacher_logprobs wrote")
    tokens, labels = (_ids(record[name], name, max_token_id) for name in ("tokens", "labels"))
    if len(labels) != len(tokens) or labels[:-1] != tokens[1:]:
        raise DataError("field 'labels' is not 'tokens' moved by one, expected labels[t] = tokens[t + 1]")
    mask = record["loss_mask"]
    if not isinstance(mask, list) or len(mask) != len(tokens) or any(value not in (0, 1) for value in mask) or not any(mask):
        raise DataError(f"field 'loss_mask' is {shown(mask)}, expected {len(tokens)} times 0 or 1, and a 1 among them")
    positions = [t for t, learnt in enumerate(mask) if learnt]
    named, logits = record["topk_token_ids"], record["topk_logits"]
    for name, value in (("topk_token_ids", named), ("topk_logits", logits)):
        if not isinstance(value, list) or len(value) != len(tokens):
            raise DataError(f"field {name!r} is {shown(value)}, expected a list of {len(tokens)} lists")
    ids = [_ids(named[t], f"topk_token_ids[{t}]", max_token_id) for t in positions]
    if len({len(row) for row in ids}) > 1 or any(len(set(row)) < len(row) for row in ids):
        raise DataError("field 'topk_token_ids' names a different number of tokens in some positions, or a token twice")
    return DistilledExample(
        tokens=(*tokens, labels[-1]),
        loss_mask=(False, *map(bool, mask)),
        teacher_tokens=torch.tensor(ids, dtype=torch.int64),
        teacher_logprobs=torch.tensor([_numbers(logits[t], t, len(row)) for t, row in zip(positions, ids, strict=True)]),
        source=raw.source,
    )


def _ids(value: object, name: str, max_token_id: int) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(one) is int and 0 <= one <= max_token_id for one in value):
        raise DataError(f"field {name!r} is {shown(value)}, expected a list of token ids from 0 to {max_token_id}")
    return value


def _numbers(value: object, position: int, count: int) -> list[float]:
    if not isinstance(value, list) or len(value) != count or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in value):
        raise DataError(f"field 'topk_logits[{position}]' is {shown(value)}, expected {count} finite numbers")
    return [float(x) for x in value]


def distillation_batch(examples: Sequence[DistilledExample], pad_id: int) -> DistillationBatch:
    rows = [SupervisedExample(tokens=one.tokens, loss_mask=one.loss_mask, source=one.source, extras=one.extras) for one in examples]
    batch = supervised_batch(rows, pad_id)
    shape = (*batch.tokens.shape, examples[0].teacher_tokens.shape[1])
    named, logprobs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    named[batch.loss_mask] = torch.cat([one.teacher_tokens for one in examples])
    logprobs[batch.loss_mask] = torch.cat([one.teacher_logprobs for one in examples])
    return of_kind(DistillationBatch, batch, teacher_tokens=named, teacher_logprobs=logprobs)


def distilled(
    examples: Sequence[SupervisedExample], mask: torch.Tensor, named: torch.Tensor, logprobs: torch.Tensor
) -> list[DistilledExample]:
    """The rows of a teacher's pass over a batch: `mask` bool [B, S], its output [B, S, K]."""
    return [
        DistilledExample(
            tokens=example.tokens,
            loss_mask=example.loss_mask,
            teacher_tokens=named[row][mask[row]],
            teacher_logprobs=logprobs[row][mask[row]],
            source=example.source,
            extras=only_images(example.extras),
        )
        for row, example in enumerate(examples)
    ]
