"""The policy's weights on their way into an engine of another package: Hugging Face names, full tensors, in buckets.

Engines fuse q, k and v, gate and up, and a layer's experts into one tensor each, and some can only be given all of a fused tensor's parts
at once: such a group is never cut, even if it alone exceeds the size of a bucket.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

from torch import Tensor

from aligner.errors import EngineError
from aligner.rollout.manifest import Manifest

Bucket = list[tuple[str, Tensor]]

# What is fused: the part of the name that stands for the group, and what tells its members apart.
_GROUPS = (
    re.compile(r"(.*\.experts)\.\d+\..*"),
    re.compile(r"(.*)\.(?:q|k|v)_proj\.(?:weight|bias)"),
    re.compile(r"(.*)\.(?:gate|up)_proj\.(?:weight|bias)"),
)


def fusion_group(name: str) -> str:
    """A key shared by all tensors that an engine may fuse with this one (Hugging Face name); its own name if there are none."""
    for kind, pattern in enumerate(_GROUPS):
        if found := pattern.fullmatch(name):
            return f"{found[1]}/{kind}"
    return name


def weight_buckets(named: Iterator[tuple[str, Tensor]], *, bucket_bytes: int, manifest: Manifest) -> Iterator[Bucket]:
    """Collect the full tensors of a model, in `manifest`'s order, into buckets of at most `bucket_bytes`, whole fusion groups each.

    A larger group gets a bucket to itself. The tensors are the stream's own, made contiguous; contiguous ones are not copied, so
    the buckets must be used while the weights stay as they are. The next tensor is asked for when a bucket has been used, so a caller that
    drops it then never has more than one, and what the stream needs to make the next tensor.

    Raises EngineError if the stream does not keep a group together. A tensor that the manifest has not, or that is missing, is for
    `Receipt` to find.
    """
    ends = _last_names(manifest, bucket_bytes)
    bucket: Bucket = []
    for name, tensor in _kept_together(named):
        bucket.append((name, tensor.contiguous()))
        del tensor
        if name in ends:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _last_names(manifest: Manifest, bucket_bytes: int) -> frozenset[str]:
    """The tensor that ends each bucket."""
    ends: list[str] = []
    size, last = 0, ""
    for _, group in groupby(manifest.tensors.items(), key=lambda item: fusion_group(item[0])):
        members = list(group)
        group_size = sum(spec.num_bytes for _, spec in members)
        if last and size + group_size > bucket_bytes:
            ends.append(last)
            size = 0
        size, last = size + group_size, members[-1][0]
    return frozenset(ends)


def _kept_together(named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    current, closed = "", set()
    for name, tensor in named:
        group = fusion_group(name)
        if group != current:
            closed.add(current)
            current = group
        if group in closed:
            raise EngineError(f"refit: {name} came apart from the tensors that it is fused with")
        yield name, tensor
        del tensor
