"""The policy's weights on their way into an engine of another package: Hugging Face names, full tensors, in buckets.

Engines fuse q, k and v, gate and up, and a layer's experts into one tensor each, and some can only be given all of a fused tensor's parts
at once: such a group is never cut, even where it alone exceeds the size of a bucket.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

from aligner.errors import EngineError

Bucket = list[tuple[str, Tensor]]

# What is fused: the part of the name that stands for the group, and what tells its members apart.
_GROUPS = (
    re.compile(r"(.*\.experts)\.\d+\..*"),
    re.compile(r"(.*)\.(?:q|k|v)_proj\.(?:weight|bias)"),
    re.compile(r"(.*)\.(?:gate|up)_proj\.(?:weight|bias)"),
)


def fusion_group(name: str) -> str:
    """What all tensors that an engine may fuse with this one (Hugging Face name) have in common; its own name where there are none."""
    for kind, pattern in enumerate(_GROUPS):
        if found := pattern.fullmatch(name):
            return f"{found[1]}/{kind}"
    return name


def weight_buckets(named: Iterator[tuple[str, Tensor]], *, bucket_bytes: int) -> Iterator[Bucket]:
    """Collect a stream of full tensors into buckets of at most `bucket_bytes`, whole fusion groups each.

    A larger group gets a bucket to itself. The tensors are the stream's own, contiguous ones: no copy is made of them where they are, so
    the buckets must be used while the weights stay as they are. At any time there are a bucket and the group that comes after it.

    Raises EngineError where the stream does not keep a group together.
    """
    bucket: Bucket = []
    size = 0
    for group in _groups(named):
        group_size = sum(tensor.numel() * tensor.element_size() for _, tensor in group)
        if bucket and size + group_size > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket += group
        size += group_size
    if bucket:
        yield bucket


def _groups(named: Iterator[tuple[str, Tensor]]) -> Iterator[Bucket]:
    """The stream's fusion groups, each a list of its tensors."""
    group: Bucket = []
    current, closed = "", set()
    for name, tensor in named:
        key = fusion_group(name)
        if group and key != current:
            closed.add(current)
            yield group
            group = []
        if key in closed:
            raise EngineError(f"refit: {name} came apart from the tensors that it is fused with")
        current = key
        group.append((name, tensor.contiguous()))
        del tensor
    if group:
        yield group
