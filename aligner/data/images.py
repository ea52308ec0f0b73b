"""Images of records: every image becomes a file in the run's store once, when its record is read; after that it is known by its digest.

An image is a part of a message (OpenAI's `image_url`, or `image` with `image`, `path`, `url`, `base64` or `bytes`), or in the field `image`
or `images` of the record. The field's images belong in the places of bare `{type: image}` parts, else of the marks `<image>` in texts, else
before the first user's text. Paths begin at the data file's directory, or at `data.images.root`.

A video (a part `video`, the field `video` or `videos`, the mark `<video>`) is a list of images, or a file with several frames that Pillow
reads (GIF, WebP, APNG). It becomes at most `data.images.frames` images, evenly taken, the first and the last among them.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from torch import Tensor

from aligner.data.config import ImageConfig
from aligner.data.messages import Conversation, Image, Message, is_media, shown
from aligner.data.sources import Fields, RawRecord, parted
from aligner.data.vision import Vision, check_header, frames_of, spread
from aligner.errors import ConfigError, DataError, describe_os_error
from aligner.hub.names import DATASETS_PREFIX
from aligner.types.extras import Images

MARK = "<image>"  # LLaVA's, LLaMA-Factory's and verl's place of an image in a text
MOST_BYTES = 1 << 26  # of one file
VIDEO_MARK = "<video>"
FIELDS = ("image", "images")
_VIDEO = ("video", "videos")
_SAID = ("prompt", "messages", "response", "completion", "output", "chosen", "rejected", "chosen_response", "rejected_response")
# Of a part, and of a column's object: bytes rather than their path.
_KEYS = ("bytes", "base64", "image", "image_url", "video", "video_url", "url", "path")


@dataclass(frozen=True, slots=True)
class Found:
    """A record's images: of its own field (a tuple for each there), and how many in all. `may_chat`: text may become a message."""

    column: tuple[tuple[Image, ...], ...]
    number: int
    may_chat: bool
    name: str = ""

    @property
    def mark(self) -> str:
        return VIDEO_MARK if self.name in _VIDEO else MARK


@dataclass(slots=True)
class ImageReader:
    """Reads the images of records for a model that sees. `files`: (digest, path, size and times) of every image."""

    config: Any
    vision: Vision
    files: list[tuple[str, str, list[int]]] = field(default_factory=list)

    def read(self, raw: RawRecord) -> None:
        """Put a record's images into the store, and their digests into the record. Raises DataError for an image that cannot be used."""
        record = raw.value
        if raw.error or not isinstance(record, Fields) or record.images is not None:
            return
        base = _directory(raw.file)
        found: list[Image] = []
        for name in dict.fromkeys((*_SAID, getattr(self.config, "prompt_field", ""), getattr(self.config, "response_field", ""))):
            turns = dict.get(record, name)
            for number, turn in enumerate(turns if isinstance(turns, list) else ()):
                content = dict.get(turn, "content") if isinstance(turn, dict) else None
                if isinstance(content, list) and (number_here := sum(map(is_media, content))):
                    self._check_number(number_here)
                    parts = [one for part in content for one in self._part(part, f"field '{name}[{number}]'", base)]
                    dict.__setitem__(turn, "content", parts)
                    found += [part for part in parts if isinstance(part, Image) and part.digest]
        named = [name for name in (*FIELDS, *_VIDEO) if dict.get(record, name) not in (None, "", [])]
        if len(named) > 1:
            raise DataError(f"has {named[0]!r} and {named[1]!r}, which is ambiguous, expected one of them")
        column: tuple[tuple[Image, ...], ...] = ()
        for name in named:
            given = record[name]
            several = given if isinstance(given, list) and name != "video" else [given]
            self._check_number(len(several))
            is_video = name in _VIDEO
            column = tuple(self._seen(one, f"field '{name}[{i}]'", base, is_video=is_video) for i, one in enumerate(several))
            for fields in (record, getattr(record, "origin", record)):
                dict.__setitem__(fields, name, [image.digest for images in column for image in images])
        number = len(found) + sum(map(len, column))
        self._check_number(number)
        record.images = Found(column, number, getattr(self.config, "apply_chat_template", False), *named)

    def _check_number(self, number: int) -> None:
        most = self.config.images.max_per_record
        if number > most:
            raise DataError(f"has {number} images, allowed: at most data.images.max_per_record={most}")

    def _part(self, part: Any, what: str, base: Path | None) -> tuple[Any, ...]:
        """A part of a message, as the images that it names; anything else unchanged."""
        if not is_media(part):
            return (part,)
        kind = part["type"].removeprefix("input_").removesuffix("_url")
        if kind not in ("image", "video"):
            raise DataError(f"{what}: a part of the content has the type {part['type']!r}, expected text, an image or a video")
        if all(dict.get(part, key) is None for key in _KEYS):
            index = dict.get(part, "index")
            return (Image(index=index if type(index) is int else -1),)
        given = {key: part[key] for key in _KEYS if dict.get(part, key) is not None}
        return self._seen(given, what, base, is_video=kind == "video")

    def _seen(self, value: Any, what: str, base: Path | None, *, is_video: bool) -> tuple[Image, ...]:
        """One image, or the frames of a video."""
        frames = value.get("video") if is_video and isinstance(value, Mapping) else value
        if is_video and isinstance(frames, list):
            chosen = spread(len(frames), self.config.images.frames)
            return tuple(one for i in chosen for one in self._images(frames[i], f"{what}, frame {i}", base, is_video=False))
        return self._images(value, what, base, is_video=is_video)

    def _images(self, value: Any, what: str, base: Path | None, *, is_video: bool) -> tuple[Image, ...]:
        """The images of one file. Raises DataError that names its place in the record, its path if it has one, and its fault."""
        if self.vision.failure:
            raise self.vision.failure
        if self.vision.refusal:
            raise ConfigError(self.vision.refusal)
        path, stamp = "", list[int]()
        try:
            content = _content_of(value)
            if isinstance(content, str):
                path = str(_placed_path(content, base, self.config.images))
                content, stamp = _file(Path(path))
            if len(content) > MOST_BYTES:
                raise DataError(f"has {len(content)} bytes, allowed: at most {MOST_BYTES}")
            check_header(content, self.config.images.max_pixels, is_video=is_video)
            digests = [self.vision.add(one) for one in (frames_of(content, self.config.images.frames) if is_video else [content])]
        except DataError as error:
            if path:  # that a file is missing may change, too
                self.files.append(("", os.path.abspath(path), stamp or stamp_of(Path(path))))
            raise DataError(f"{what}: the {'video' if is_video else 'image'}{path and ' '}{path} {error}") from error
        self.files += [(digest, path and os.path.abspath(path), stamp) for digest in digests]
        return tuple(map(Image, digests))


def _content_of(value: Any) -> bytes | str:
    """The bytes of an image, or its path."""
    if isinstance(value, Mapping):
        key, inner = next(((key, value[key]) for key in _KEYS if value.get(key) is not None), ("", None))
        if not key:
            raise DataError(f"is {shown(dict(value))}, expected one of {', '.join(_KEYS)}")
        is_bare = key == "base64" and isinstance(inner, str) and not inner.startswith("data:")
        return _decoded_base64(inner) if is_bare else _content_of(inner)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if hasattr(value, "save") and hasattr(value, "mode"):  # PIL's
        stream = io.BytesIO()
        value.save(stream, format="PNG")
        return stream.getvalue()
    if not isinstance(value, str) or not value:
        raise DataError(f"is {shown(value)}, expected a path, bytes, {{bytes, path}}, or base64 as data:image/png;base64,...")
    if value.startswith("data:"):
        head, comma, text = value.partition(",")
        if not comma or not head.startswith("data:image") or not head.endswith(";base64"):
            raise DataError(f"is {shown(value)}, expected data:image/png;base64,...")
        return _decoded_base64(text)
    scheme = urlsplit(value).scheme if "://" in value else ""
    if scheme not in ("", "file"):
        raise DataError(f"is {shown(value)}: nothing is loaded over the network while a job reads data; allowed: a file, bytes, base64")
    return unquote(urlsplit(value).path) if scheme else value


def _decoded_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"is {shown(text)}, which is not base64: {error}") from error


def _directory(source: str) -> Path | None:
    """The directory of a data file, or of a saved data set; None if the data have none."""
    name = parted(source.removeprefix(DATASETS_PREFIX).partition(":")[0] if source.startswith(DATASETS_PREFIX) else source)[0]
    path = Path(name)
    if path.is_dir():
        return path
    return None if source.startswith(DATASETS_PREFIX) else path.parent


def _placed_path(name: str, base: Path | None, config: ImageConfig) -> Path:
    """The path of an image. Links are followed: whoever may write below the root decides what is in it."""
    if "\0" in name or len(name) > 4096:
        raise DataError(f"is {shown(name)}, expected a path; base64 begins with data:image/png;base64,")
    start = Path(config.root) if config.root else base
    if start is None and not os.path.isabs(name):
        raise DataError(f"{name} is a relative path, and the data have no directory; allowed: data.images.root=DIR")
    path = Path(os.path.normpath(Path(start or "/", name)))
    if config.root and not path.is_relative_to(os.path.normpath(config.root)):
        raise DataError(f"{name} is not below data.images.root={config.root}, allowed: paths below it")
    return path


def _file(path: Path) -> tuple[bytes, list[int]]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DataError("is not a regular file")
        if status.st_size > MOST_BYTES:
            raise DataError(f"has {status.st_size} bytes, allowed: at most {MOST_BYTES}")
        return path.read_bytes(), stamp_of(path, status)
    except FileNotFoundError as error:
        raise DataError("does not exist") from error
    except OSError as error:
        raise DataError(f"cannot be read: {describe_os_error(error, path)}") from error


def stamp_of(path: Path, status: os.stat_result | None = None) -> list[int]:
    """A file's size and times, to notice a change; empty if it is missing."""
    try:
        status = path.stat() if status is None else status
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def placed(said: str | Conversation, record: Mapping[str, Any]) -> str | Conversation:
    """A prompt with the images of the record's own field in their places. Raises DataError if these are not clear."""
    found: Found | None = getattr(record, "images", None)
    if isinstance(said, str):
        if found is None or not found.column:
            return said
        if not found.may_chat:
            raise DataError(f"has a plain text and images in field {found.name!r}, expected messages, or data.apply_chat_template=true")
        said = (Message(role="user", content=said),)
    images = () if found is None else found.column
    mark = MARK if found is None else found.mark
    bare = [one for message in said for one in message.images if not one.digest]
    if bare:
        return _filled(said, bare, images)
    if not images:
        return said
    if any(message.images for message in said):
        raise DataError(f"has images in its messages and in field {found.name if found else ''!r}, expected one of the two")
    marks = sum(message.content.count(mark) for message in said)
    if marks == 0:
        first = next((position for position, message in enumerate(said) if message.role == "user"), None)
        if first is None:
            raise DataError(f"has {len(images)} images and no message of a user, expected one to show them to")
        shown_first = [one for several in images for one in several]
        return (*said[:first], said[first].with_parts([*shown_first, said[first].content]), *said[first + 1 :])
    if marks != len(images) or any(mark in message.content for message in said if message.role == "assistant"):
        what = "videos" if mark == VIDEO_MARK else "images"
        raise DataError(f"has {marks} marks {mark!r} in its texts for {len(images)} {what}, expected one for each in prompts, or none")
    left = iter(images)
    return tuple(_split(message, left, mark) if mark in message.content else message for message in said)


def _filled(said: Conversation, bare: Sequence[Image], images: Sequence[tuple[Image, ...]]) -> Conversation:
    next_one = count()
    order = [one.index if one.index >= 0 else next(next_one) for one in bare]
    if sorted(order) != list(range(len(images))):
        raise DataError(
            f"has {len(bare)} image parts without an image, and {len(images)} images in a field 'images', expected one for each"
        )
    left = iter(images[number] for number in order)

    def fill(part: str | Image) -> tuple[str | Image, ...]:
        return next(left) if isinstance(part, Image) and not part.digest else (part,)

    return tuple(replace(message, parts=tuple(one for part in message.parts for one in fill(part))) for message in said)


def _split(message: Message, images: Iterator[tuple[Image, ...]], mark: str) -> Message:
    first, *others = message.content.split(mark)
    return message.with_parts([first, *(part for text in others for part in (*next(images), text))])


def digests_of(said: str | Conversation) -> tuple[str, ...]:
    """The images of a prompt, in order."""
    return () if isinstance(said, str) else tuple(one.digest for message in said for one in message.images)


def images_in(extras: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The images of a row, by its extras."""
    return tuple(Images.digests(extras[Images.name])) if Images.name in extras else ()


def only_images(extras: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a row's extras those that another row with the same prompt has, too."""
    return {name: row for name, row in extras.items() if name == Images.name}
