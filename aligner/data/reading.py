"""Reading records, for every `load_*`: one path or a mixture of sources, the cache of tokenized data, limits of length.

A `load_*` returns all usable examples at a location, in order, and a report of the records that were dropped or cut. `first`: the number of
records to read. It raises DataError that lists all bad records (`file:line: what is wrong`), or if no example is left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from aligner.data.cache import load_cached
from aligner.data.config import Overlong
from aligner.data.encoding import Encoded, PromptStyle, truncated
from aligner.data.forms import Purpose, extras_of, recognised
from aligner.data.images import ImageReader
from aligner.data.mixture import Location, Mixture, Source, sources
from aligner.data.report import LoadReport, Tally, combined, too_long
from aligner.data.sources import RawRecord, left_out, located, read_records
from aligner.data.stored import row_counts, rows_of
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.types import Prompt
from aligner.types.extras import Images

Example = TypeVar("Example")
Other = TypeVar("Other")
Item = TypeVar("Item")
Load = Callable[..., tuple[Sequence[Example], LoadReport]]


class Reader:
    """What a conversion of records needs: the settings, the tokenizer, and how prompts are written (`plain`: never as a chat)."""

    def __init__(self, config: Any, tokenizer: Tokenizer, tally: Tally) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.plain = PromptStyle(apply_chat_template=False, add_bos=getattr(config, "add_bos", None))
        self.style = replace(self.plain, apply_chat_template=getattr(config, "apply_chat_template", False))
        self._tally = tally
        vision = tokenizer.vision
        self._images = None if vision is None else ImageReader(config, vision, tally.images)

    def see(self, raws: Sequence[RawRecord]) -> None:
        """Read the images of records, for a model that sees."""
        for raw in raws if self._images else ():
            self._images.read(raw)  # type: ignore[union-attr]

    def cut(self) -> None:
        """Count this record as truncated, if it is used."""
        self._tally.was_cut = True

    def exceeds(self, length: int) -> bool:
        """Whether an example of this many tokens has to be cut. Raises TooLong, or DataError, if the settings do not allow that."""
        most = self.config.max_length
        if not most or length <= most:
            return False
        if self.config.overlong is not Overlong.truncate:
            too_long(length, most, self.config.overlong)
        self.cut()
        return True

    def fit(self, encoded: Encoded) -> Encoded:
        """`encoded` itself if it is short enough, else its beginning. Raises as `exceeds`, and DataError if that has nothing to learn."""
        return truncated(encoded, self.config.max_length) if self.exceeds(len(encoded.tokens)) else encoded

    def check_prompt(self, length: int) -> None:
        """Raise TooLong, or DataError, for a prompt that is longer than allowed."""
        if 0 < self.config.max_prompt_length < length:
            too_long(length, self.config.max_prompt_length, self.config.overlong, "data.max_prompt_length")

    def prompt(self, raw: RawRecord, tokens: Sequence[int], text: str | None = None, images: Sequence[str] = (), **more: Any) -> Prompt:
        """The prompt of a record, with these images; `text`: as the tokens spell it, if it is not given."""
        text = self.tokenizer.decode(tokens, skip_special=False) if text is None else text
        for digest in images if (vision := self.tokenizer.vision) is not None else ():  # in their places one mark, not a thousand slots
            text = text.replace(vision.expansion(digest), vision.image_token, 1)
        return Prompt(id=raw.index, tokens=tuple(tokens), source=raw.source, text=text, extras=self.extras(raw, tokens, images), **more)

    def extras(self, raw: RawRecord, tokens: Sequence[int], images: Sequence[str] = (), length: int = 0) -> dict[str, Tensor]:
        """The tensors of a record's row of these tokens, the first of `length` (0: all), which have slots for these images.

        Images behind the end are left out. Raises TooLong, or DataError, for a row that ends among an image's slots; DataError for slots
        without an image, and for images without slots.
        """
        found, vision = extras_of(raw, len(tokens)), self.tokenizer.vision
        if vision is None or vision.failure:
            return found
        if (seen := getattr(raw.value, "images", None)) is not None and seen.number != len(images):
            raise DataError(f"has {seen.number} images, of which this form or use of records can hold {len(images)}, expected all of them")
        there = left = vision.count_slots(tokens)
        shown = list[str]()
        for digest in images:
            if left > 0:
                shown, left = [*shown, digest], left - vision.num_slots(digest)
        is_cut = length > len(tokens)
        if left == 0 and (is_cut or len(shown) == len(images)):
            return found | ({Images.name: Images.of(shown)} if shown else {})
        if is_cut and left < 0:
            too_long(length, self.config.max_length, self.config.overlong)
        raise DataError(
            f"has {there} slots of images among its tokens, expected {sum(map(vision.num_slots, images))} for its {len(images)} images"
        )


def read_all(
    convert: Callable[[Item, Reader], Example | list[Example]],
    location: str,
    config: Any,
    tokenizer: Tokenizer,
    *,
    first: int | None,
    purpose: Purpose | None = None,
    items: Callable[[Iterator[RawRecord]], Iterator[Any]] = iter,
    records: Callable[[Any], Sequence[RawRecord]] = lambda item: (item,),
    **tally: Any,
) -> tuple[list[Example], LoadReport]:
    """The examples that `convert` makes of the records of one path, recognised for a `purpose` if one is given.

    `items`: what is converted, if that is not one record; `records`: those of an item. `tally`: options of `Tally`.
    """
    counts = Tally(location, config, **tally)
    reader = Reader(config, tokenizer, counts)
    raws = recognised(location, config, purpose, first) if purpose else read_records(location, first)

    def seen(item: Item) -> Example | list[Example]:
        reader.see(records(item))
        return convert(item, reader)

    return counts.convert(items(raws), seen, records), counts.finish()


class Mixed(Sequence[Example]):
    """The examples of several sources, numbered consecutively; prompts have ids as if the sources were one data set."""

    def __init__(self, mixture: Mixture, parts: Sequence[Sequence[Example]], num_records: Sequence[int]) -> None:
        self.mixture = mixture
        self.parts = parts
        self._starts = [0, *accumulate(mixture.sizes)]
        self._first_ids = [0, *accumulate(num_records)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        part = bisect_right(self._starts, number) - 1
        return _renumbered(self.parts[part][number - self._starts[part]], self._first_ids[part])

    def shares(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """The share of each source among these prompts of the mixture."""
        parts = [bisect_right(self._first_ids, prompt.id) - 1 for prompt in prompts]
        return {f"data/share/{one.name}": parts.count(number) / len(parts) for number, one in enumerate(self.mixture.sources)}

    def map(self, change: Callable[[Example], Other]) -> Mixed[Other]:
        """`change` of every example, as a mixture of the same shares."""
        return Mixed(self.mixture, [[change(example) for example in part] for part in self.parts], np.diff(self._first_ids).tolist())

    def row_counts(self) -> np.ndarray[Any, Any]:
        return np.concatenate([row_counts(part) for part in self.parts])


def loader(kind: type[Example], convert: Callable[[Any, Reader], Any], **options: Any) -> Load[Example]:
    """A `load_*` of examples of this kind, which `convert` makes; `options` of `read_all`."""
    return reads_sources(kind, partial(read_all, convert, **options))


def reads_sources(kind: type[Example], load: Callable[..., tuple[Sequence[Any], LoadReport]]) -> Load[Example]:
    """A `load_*` of one path that accepts lists of sources too, and uses the cache of the settings.

    For a list it returns a `Mixed`; `options` are passed on. Raises ConfigError for an unusable list, DataError for sources that do not
    match.
    """

    def read(
        location: Location,
        config: Any,
        tokenizer: Tokenizer,
        *,
        first: int | None = None,
        heartbeat: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> tuple[Sequence[Example], LoadReport]:
        def read_one(path: str, own: Any, tokenizer: Tokenizer, most: int | None) -> tuple[Sequence[Example], LoadReport]:
            path = located(path, location, config)
            if own.cache and first is None:
                examples, report = load_cached(load, kind, path, own, tokenizer, heartbeat=heartbeat, first=most, **options)
            else:
                least = min((one for one in (first, most) if one is not None), default=None)
                examples, report = load(path, own, tokenizer, first=least, **options)
            return examples, replace(report, left_out=left_out(path))

        if isinstance(location, str):
            return read_one(location, config, tokenizer, None)
        named, found = sources(config, location), []
        for one in named:
            own = one.config(config)
            chats = tokenizer.chatting(own) if one.settings else tokenizer
            found.append(read_one(one.path, own, chats, one.max_records or None))
        return _mixed(named, config, found)

    return read


def _mixed(
    named: Sequence[Source], config: Any, found: Sequence[tuple[Sequence[Example], LoadReport]]
) -> tuple[Mixed[Example], LoadReport]:
    parts, reports = [part for part, _ in found], [report for _, report in found]
    widths = {source.path: _width(part[0]) for source, part in zip(named, parts, strict=True)}
    if len(set(widths.values())) > 1:
        told = ", ".join(f"{path}: {width}" for path, width in widths.items())
        raise DataError(f"the sources have different numbers of responses, or of a teacher's tokens ({told}), expected the same in all")
    mixture = Mixture(tuple(named), tuple(map(len, parts)), config.mixture_temperature)
    return Mixed(mixture, parts, [one.num_records for one in reports]), combined(reports, mixture.summary())


def _width(example: Any) -> int:
    """What must be equal in all examples of a batch: the number of responses, or of a teacher's tokens."""
    named = getattr(example, "teacher_tokens", None)
    return len(rows_of(example)) if named is None else int(named.shape[1])


def _renumbered(example: Any, first_id: int) -> Any:
    """The example with its prompt's id, if any, in the whole data set."""
    if not first_id:
        return example
    if isinstance(example, Prompt):
        return replace(example, id=first_id + example.id)
    if isinstance(prompt := getattr(example, "prompt", None), Prompt):
        return replace(example, prompt=replace(prompt, id=first_id + prompt.id))
    return example
