"""Slurm's compressed lists: `node[01-03,7],gpu4` (hosts) and `4(x2),3` (tasks per node)."""

from __future__ import annotations

import re

from aligner.errors import LaunchError

_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hostlist(text: str) -> list[str]:
    """Host names in order: `n[01-03,7]` -> n01 n02 n03 n7; several brackets multiply. Raises LaunchError on a malformed list."""
    hosts = [host for part in _split_outside_brackets(text) for host in _expand(part, whole=text)]
    if not hosts:
        raise LaunchError(f"Slurm node list {text!r} names no host")
    return hosts


def expand_counts(text: str) -> list[int]:
    """Tasks per node: `4(x2),3` -> [4, 4, 3]. Raises LaunchError on a malformed list."""
    counts: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part)
        if match is None:
            raise LaunchError(f"Slurm tasks-per-node list {text!r} is malformed at {part!r}; expected for example 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise LaunchError(f"Slurm node list {text!r} has unbalanced brackets")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if depth:
        raise LaunchError(f"Slurm node list {text!r} has unbalanced brackets")
    return [part for part in parts if part]


def _expand(part: str, *, whole: str) -> list[str]:
    """Expand the first bracket of one element, then the rest of it."""
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    ranges, _, tail = rest.partition("]")
    numbers = [number for item in ranges.split(",") for number in _range(item, whole=whole)]
    return [head + number + ending for number in numbers for ending in _expand(tail, whole=whole)]


def _range(item: str, *, whole: str) -> list[str]:
    """`01-03` -> 01 02 03 (the width of the first number is kept); `7` -> 7."""
    first, dash, last = item.partition("-")
    last = last if dash else first
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise LaunchError(f"Slurm node list {whole!r} has a malformed range {item!r}")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
