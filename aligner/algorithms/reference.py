"""Where a frozen reference's log-probs come from: a setting of algorithms that compare the policy with the model that it was at first."""

from __future__ import annotations

from enum import Enum

from aligner.errors import ConfigError


class ReferenceLogprobs(str, Enum):
    """When they are computed."""

    live = "live"  # for every batch, by a frozen copy of the weights in host memory
    precomputed = "precomputed"  # for all examples before the first step, to files; no copy is kept


def check_reference(reference: ReferenceLogprobs, part_size: int, *, is_needed: bool, loss: str) -> None:
    """Raise ConfigError for a setting that the loss does not read, or an empty file."""
    if part_size < 1:
        raise ConfigError(f"algorithm.reference_part_size={part_size}: must be at least 1")
    if reference is ReferenceLogprobs.precomputed and not is_needed:
        raise ConfigError(f"algorithm.reference={reference.value}: loss={loss} has no reference; allowed: {ReferenceLogprobs.live.value}")
