"""Images by the digest of their files, and what a model's own processor makes of them: slots among the tokens, and pixels."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import secrets
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aligner.errors import ConfigError, DataError

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")  # of files; others may run programs, or are no images
_MOST_KEPT = 1 << 30  # bytes of pixels that a process keeps
_MOST_TEXT = 1 << 26  # characters of expansions


class ImageStore:
    """Files of images, named by their SHA-256 digests, in a directory that every process of a run sees; None: a temporary one."""

    def __init__(self, directory: Path | None) -> None:
        self._temporary = TemporaryDirectory() if directory is None else None  # removed with this object
        self.directory = directory or Path(self._temporary.name if self._temporary else "")

    def put(self, content: bytes) -> str:
        """Keep a file; returns its digest in hexadecimal. One that a crash of the machine cut short is written again."""
        digest = hashlib.sha256(content).hexdigest()
        path = self.directory / digest
        if not path.exists() or path.stat().st_size != len(content):
            self.directory.mkdir(parents=True, exist_ok=True)
            own = path.with_name(f".{digest}.{secrets.token_hex(8)}")
            own.write_bytes(content)
            own.replace(path)
        return digest

    def take(self, path: Path) -> bool:
        """Keep the file of another store, as a link if possible; False if it is missing."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            os.link(path, self.directory / path.name)
        except FileExistsError:
            pass
        except OSError:  # another file system, or one without links
            if not path.exists():
                return False
            self.put(path.read_bytes())
        return True

    def get(self, digest: str) -> bytes:
        """The file with this digest. Raises DataError if it is missing, or has another content."""
        try:
            content = (self.directory / digest).read_bytes()
        except OSError as error:
            raise DataError(f"image {digest}: {self.directory / digest} cannot be read any more: {error.strerror}") from error
        if hashlib.sha256(content).hexdigest() != digest:
            raise DataError(f"image {digest}: the content of {self.directory / digest} has changed")
        return content


class Vision:
    """The image processor in a model's directory, for the images of a store."""

    def __init__(self, directory: Path, store: ImageStore) -> None:
        self.directory, self.store = directory, store
        self.refusal = ""  # why a run whose data have images cannot be; empty: it can
        self._kept: OrderedDict[str, tuple[str, dict[str, Tensor]]] = OrderedDict()
        self._bytes = 0
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._characters = 0

    @classmethod
    def of(cls, directories: Sequence[Path | None], images: Path | None) -> Vision | None:
        """The image processor in the first of these directories that has one, for files in `images` (see `ImageStore`); else None."""
        found = next((one for one in directories if one is not None and any((one / name).is_file() for name in PROCESSOR_FILES)), None)
        return None if found is None else cls(found, ImageStore(images))

    @cached_property
    def failure(self) -> ConfigError | None:
        """Why the processor does not load, which matters only where there are images; None if it does."""
        try:
            return None if self._processor else None
        except ConfigError as error:
            return error

    def storing(self, directory: Path) -> Vision:
        """The same processor, for the images in another directory."""
        other = copy(self)
        other.store, other._kept, other._texts, other._bytes, other._characters = ImageStore(directory), OrderedDict(), OrderedDict(), 0, 0
        return other

    def add(self, content: bytes) -> str:
        """Keep the file of an image; returns its digest. Raises DataError if it cannot be decoded, or the processor refuses it."""
        digest = hashlib.sha256(content).hexdigest()
        self._processed(digest, content)
        return self.store.put(content)

    @property
    def image_token(self) -> str:
        """What a chat template writes for an image."""
        return str(self._processor.image_token)

    @cached_property
    def slot_ids(self) -> tuple[int, ...]:
        """The tokens in whose places the features of images come."""
        return tuple(number for number in self._processor.image_token_ids if number is not None)

    def expansion(self, digest: str) -> str:
        """The text with a slot for each feature of an image, in place of `image_token`."""
        if digest not in self._texts:
            return self._processed(digest)[0]
        self._texts.move_to_end(digest)
        return self._texts[digest]

    def num_slots(self, digest: str) -> int:
        text = self.expansion(digest)
        return sum(text.count(slot) for slot in self.slots)

    def count_slots(self, tokens: Sequence[int]) -> int:
        slots = set(self.slot_ids)
        return sum(token in slots for token in tokens)

    @cached_property
    def slots(self) -> list[str]:
        """The tokens of `slot_ids`, spelled out."""
        return [str(token) for token in self._processor.tokenizer.convert_ids_to_tokens(list(self.slot_ids))]

    def inputs(self, digests: Sequence[str]) -> dict[str, Tensor]:
        """The pixels of these images as the model takes them, one image's behind the other's; empty for none."""
        return joined([self._processed(digest)[1] for digest in digests])

    def types(self, tokens: Tensor) -> Tensor:
        """1 for slots of images, 0 for other tokens; of the shape of `tokens`."""
        return torch.isin(tokens, torch.tensor(self.slot_ids, device=tokens.device)).long()

    def _processed(self, digest: str, content: bytes = b"") -> tuple[str, dict[str, Tensor]]:
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return self._kept[digest]
        processor = self._processor
        images, text, *_ = processor.prepare_inputs_layout(images=[decoded(content or self.store.get(digest))], text=[self.image_token])
        settings = {"tokenizer_init_kwargs": processor.tokenizer.init_kwargs, "return_tensors": "pt"}
        options = processor._merge_kwargs(processor.valid_processor_kwargs, **settings)["images_kwargs"]
        try:
            features, replacements = processor._process_images(images, **options)
        except Exception as error:  # of a program that comes with transformers, for an image from outside
            raise DataError(f"image {digest}: the image processor of {self.directory} refuses it: {error}") from error
        unused = {*processor.unused_input_names, "rows", "cols"}
        found = replacements[0], {name: tensor for name, tensor in features.items() if isinstance(tensor, Tensor) and name not in unused}
        self._remember(digest, found[0])
        self._kept[digest] = found
        self._bytes += _size(found)
        while self._bytes > _MOST_KEPT and len(self._kept) > 1:
            self._bytes -= _size(self._kept.popitem(last=False)[1])
        return found

    def _remember(self, digest: str, text: str) -> None:
        """Keep an expansion: conversations are rendered several times, and texts are smaller than pixels."""
        self._characters += len(text) - len(self._texts.get(digest, ""))
        self._texts[digest] = text
        while self._characters > _MOST_TEXT and len(self._texts) > 1:
            self._characters -= len(self._texts.popitem(last=False)[1])

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor, AutoTokenizer, logging  # takes seconds, and models without images do not need it
        from transformers.models.auto.processing_auto import processor_class_from_name
        from transformers.processing_utils import ProcessorMixin

        where = f"{self.directory}: its image processor"
        level = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            settings, _ = ProcessorMixin.get_processor_dict(self.directory, local_files_only=True)
            kind = processor_class_from_name(_processor_name(self.directory))
            parts = {
                "image_processor": AutoImageProcessor.from_pretrained(self.directory, local_files_only=True),
                "tokenizer": AutoTokenizer.from_pretrained(self.directory, local_files_only=True),
            }
            # Without its video and audio processors, which need packages that images do not.
            own = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
            others = dict.fromkeys(name for name in kind.get_attributes() if name not in parts)
            processor = own.from_args_and_dict([{**others, **parts}[name] for name in kind.get_attributes()], settings)
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise ConfigError(f"{where} does not load: {type(error).__name__}: {error}") from error
        except ImportError as error:  # Pixtral's needs torchvision, SmolVLM's num2words
            raise ConfigError(f"{where} needs a package that is not installed: {str(error).strip().splitlines()[0]}") from error
        finally:
            logging.set_verbosity(level)
        writes_slots = getattr(kind, "replace_image_token", None) is not getattr(ProcessorMixin, "replace_image_token", None)
        if getattr(processor, "image_token", None) is None or not writes_slots:
            raise ConfigError(f"{where} ({kind.__name__}) does not say which tokens an image takes; allowed: records without images")
        return processor


def _processor_name(directory: Path) -> str:
    """The class of a directory's processor: as one of its files names it, else that of the kind of model."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    files = [directory / name for name in (*reversed(PROCESSOR_FILES), "tokenizer_config.json", "config.json")]
    settings = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
    named = [one["processor_class"] for one in settings if one.get("processor_class")]
    return str(named[0] if named else PROCESSOR_MAPPING_NAMES[settings[-1]["model_type"]])


def _opened(content: bytes) -> Any:
    """Pillow's lazy image of a file: only its header is read."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(io.BytesIO(content), formats=FORMATS)


def check_header(content: bytes, max_pixels: int, *, is_video: bool = False) -> None:
    """Raise DataError for a file that is no image, or one that is too large or (but for a video) animated, before it is decoded."""
    from PIL import Image

    try:
        image = _opened(content)
        is_animated = image.format != "MPO" and bool(getattr(image, "is_animated", False))  # a camera's second picture in a JPEG
    except Image.DecompressionBombError as error:
        raise DataError(f"is too large: {error}, allowed: at most data.images.max_pixels={max_pixels}") from error
    except Exception as error:  # a decoder may raise anything for a file from outside
        said = "is empty" if not content else "is no image, or a damaged one"
        raise DataError(f"{said}, expected {', '.join(FORMATS)}" + "; of other videos, a list of frames" * is_video) from error
    if image.width * image.height > max_pixels:
        size = f"{image.width} x {image.height} = {image.width * image.height} pixels"
        raise DataError(f"has {size}, allowed: at most data.images.max_pixels={max_pixels}")
    if is_animated and not is_video:
        raise DataError("has several frames or pages, expected a single image: store the frames as files of their own")
    if image.mode in ("I", "F"):
        raise DataError(f"has pixels of 32 bits (mode {image.mode}), expected 8 or 16 bits")


def decoded(content: bytes) -> Any:
    """A file's image as PIL's, RGB and upright, as `transformers` loads it. Raises DataError if it is damaged."""
    from PIL import Image, ImageOps

    try:
        image = ImageOps.exif_transpose(_opened(content))
        if image.mode.startswith("I;16"):
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return image.convert("RGB")
    except Exception as error:  # a decoder may raise anything for a file from outside
        raise DataError(f"is a damaged image: {type(error).__name__}: {error}") from error


def thumbnail(content: bytes, pixels: int = 128) -> str:
    """A small copy of an image as a data URI, as the model's processor gets it: upright, in RGB."""
    image, stream = decoded(content), io.BytesIO()
    image.thumbnail((pixels, pixels))
    image.save(stream, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def frames_of(content: bytes, most: int) -> list[bytes]:
    """At most `most` frames of a moving picture, each as a PNG file; of another image the file itself. Raises DataError for damage."""
    try:
        image = _opened(content)
        count = getattr(image, "n_frames", 1)
        if count == 1:
            return [content]
        files = []
        for number in spread(count, most):
            image.seek(number)
            file = io.BytesIO()
            image.convert("RGB").save(file, format="PNG")
            files.append(file.getvalue())
        return files
    except Exception as error:  # a decoder may raise anything for a file from outside
        raise DataError(f"is a damaged video: {type(error).__name__}: {error}") from error


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly, the first and the last among them; the first alone if only one is wanted."""
    return list(range(count)) if count <= most else [round(i * (count - 1) / max(most - 1, 1)) for i in range(most)]


def joined(images: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of several images, one's behind the other's, padded with zeros in their further dimensions: a tensor of sizes says what
    belongs to an image, or models leave out what is black."""
    found = {}
    for name in dict.fromkeys(name for image in images for name in image):
        parts = [image[name] for image in images if name in image]
        sizes = torch.tensor([list(part.shape[1:]) for part in parts]).amax(dim=0).tolist()
        whole = parts[0].new_zeros(sum(map(len, parts)), *sizes)
        start = 0
        for part in parts:
            whole[(slice(start, start + len(part)), *map(slice, part.shape[1:]))] = part
            start += len(part)
        found[name] = whole
    return found


def _size(processed: tuple[str, dict[str, Tensor]]) -> int:
    return sum(tensor.nbytes for tensor in processed[1].values())
