"""Labels of responses: a number for each attribute, some of which nobody judged; and of the steps of a response."""

from __future__ import annotations

import math
from collections.abc import Sequence

from aligner.data.records import shown
from aligner.errors import DataError

MISSING = -100.0  # of an attribute, or a step, that nobody judged; null in JSON too


def parse_labels(value: object, attributes: Sequence[str], what: str) -> tuple[float, ...]:
    """One number per attribute: from a list of as many, an object by name, or SteerLM's "quality:4,toxicity:0"; MISSING if it has none.

    Raises DataError for another number of labels, an unknown name, a number that is not finite, or only missing labels.
    """
    if isinstance(value, str):
        value = _named(value, what)
    if isinstance(value, dict):
        if unknown := [name for name in value if name not in attributes]:
            raise DataError(f"{what} has {shown(unknown[0])}, allowed: {', '.join(attributes)} (data.attributes)")
        value = [value.get(name) for name in attributes]
    if not isinstance(value, list) or len(value) != len(attributes):
        raise DataError(f"{what} is {shown(value)}, expected {len(attributes)} numbers: {', '.join(attributes)} (data.attributes)")
    labels = tuple(_number(label, f"{what}: {name}") for name, label in zip(attributes, value, strict=True))
    if all(label == MISSING for label in labels):
        raise DataError(f"{what} is {shown(value)}, expected at least one number that is not missing ({MISSING:g} or null)")
    return labels


def parse_step_labels(value: object, num_steps: int, what: str) -> tuple[float, ...]:
    """One label per step: true or false, or a number from 0 to 1; MISSING if nobody judged it. Raises DataError as `parse_labels`."""
    if not isinstance(value, list) or len(value) != num_steps:
        raise DataError(f"{what} is {shown(value)}, expected a list of {num_steps} labels, one per step")
    labels = tuple(float(label) if isinstance(label, bool) else _number(label, f"{what}[{i}]") for i, label in enumerate(value))
    if bad := [label for label in labels if label != MISSING and not 0 <= label <= 1]:
        raise DataError(f"{what} has {bad[0]:g}, expected true, false or a number from 0 to 1 ({MISSING:g} or null: not judged)")
    if all(label == MISSING for label in labels):
        raise DataError(f"{what} is {shown(value)}, expected at least one step that was judged")
    return labels


def _named(text: str, what: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for part in text.split(","):
        name, colon, number = part.partition(":")
        try:
            found[name.strip()] = float(number)
        except ValueError as error:
            raise DataError(f"{what} is {shown(text)}, expected numbers such as 'quality:4,toxicity:0'") from error
        if not colon:
            raise DataError(f"{what} is {shown(text)}, expected numbers such as 'quality:4,toxicity:0'")
    return found


def _number(value: object, what: str) -> float:
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DataError(f"{what} is {shown(value)}, expected a finite number ({MISSING:g} or null: missing)")
    return float(value)
