"""Where the rest of a model of images and text is whose text part is trained, and how weights in other places are known again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from aligner.errors import CheckpointError
from aligner.hub.names import name_of, parse
from aligner.models.checkpoint.files import MARKER, read_marker
from aligner.models.checkpoint.hf_files import CONFIG_FILE, read_json
from aligner.models.families.wrappers import wrapper_of

WRAPPER = "wrapper"  # key of a marker
_LOOKED_AT = 65536  # bytes at the beginning, the middle and the end of a file


def weights_digest(source: Path) -> str:
    """A digest of the weights in a directory, independent of its path. It reads little, however large they are.

    For a checkpoint, the digest of its marker, which covers every file; for Hugging Face files, of their sizes and of some places.
    """
    if (source / MARKER).exists():
        return hashlib.sha256((source / MARKER).read_bytes()).hexdigest()
    content = hashlib.sha256()
    for path in sorted(source.glob("*.safetensors")):
        size = path.stat().st_size
        content.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for place in (0, size // 2, max(0, size - _LOOKED_AT)):
                file.seek(place)
                content.update(file.read(_LOOKED_AT))
    return content.hexdigest()


def named(source: Path) -> str:
    """How a marker names a directory of weights: by its name on the Hub, or its path."""
    return str(name_of(source) or source.absolute())


def same_weights(base: str, digest: str, *, what: str) -> Path:
    """The directory of a marker's weights, to which `what` belongs; downloaded if the Hub's. Raises CheckpointError if gone or changed."""
    if (name := parse(base)) is not None:
        from aligner.hub.download import Wanted, fetch  # huggingface_hub, which other checkpoints do not need

        base = str(fetch(Wanted(key=f"base of {what.split(':')[0]}", name=name), print).directory)
    if not Path(base).is_dir():
        raise CheckpointError(f"{what} to the model in {base}, which is not there; a link to it there is enough")
    if weights_digest(Path(base)) != digest:
        raise CheckpointError(f"{what} to the model that was in {base}; other weights are there now")
    return Path(base)


def find(source: Path) -> dict[str, str]:
    """What a marker says of the model around the text part in `source`, a Hugging Face directory or a checkpoint; empty without one."""
    if (source / MARKER).exists():
        return dict(read_marker(source).get(WRAPPER, {}))
    if not (source / CONFIG_FILE).exists() or wrapper_of(hf := read_json(source / CONFIG_FILE)) is None:
        return {}
    return {"model_type": hf["model_type"], "path": named(source), "digest": weights_digest(source)}


def directory_of(wrapper: Mapping[str, str]) -> Path:
    """The directory of the whole model. Raises CheckpointError as `same_weights`."""
    return same_weights(wrapper["path"], wrapper["digest"], what=f"model.path: the text part of a {wrapper['model_type']} model belongs")
