"""What a run learnt from: the names of the counts that every step adds (`aligner.loop.learnt`), and their sums over a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aligner.models.guard import SKIPPED, UPDATES

TOKENS, TOKENS_SEEN, SAMPLES, SEEN = "learnt/tokens", "learnt/tokens_seen", "learnt/samples", "learnt/samples_seen"
LEFT_OUT = "left_out/"
REASONS = {
    "truncated": "cut at the length limit",
    "no_reward": "without a valid reward",
    "no_signal": "without a signal (an advantage of 0, as where the rewards of a group are equal)",
    "below_min_reward": "below algorithm.min_reward",
    "not_best": "not among the best (algorithm.keep)",
    "not_paired": "in no pair",
    "identical": "the same as what they are compared with",
    "surplus": "dropped by dynamic sampling",
    "no_token": "without a token to learn",
}


def totals(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The counts of all of these steps, by name."""
    found: dict[str, float] = {}
    for metrics in steps:
        for name, value in metrics.items():
            if name in (TOKENS, TOKENS_SEEN, SAMPLES, SEEN, UPDATES, SKIPPED) or name.startswith(LEFT_OUT):
                found[name] = found.get(name, 0.0) + value
    return found


def reasons(counts: Mapping[str, float]) -> list[str]:
    """Which share of the samples was left out, and why, the most first; `counts` are those of `totals`."""
    seen = counts.get(SEEN, 0.0)
    left = sorted(((n, name) for name, n in counts.items() if name.startswith(LEFT_OUT) and n), reverse=True) if seen else []
    return [f"{n / seen:.1%} {REASONS[name.removeprefix(LEFT_OUT)]}" for n, name in left]


def is_empty(metrics: Mapping[str, float]) -> bool:
    """Whether a step that says what it learnt from has learnt from nothing: no token had a weight, or no update a gradient."""
    if TOKENS not in metrics:
        return False
    return 0 in (metrics[TOKENS], metrics.get("optim/grad_norm"), metrics.get(UPDATES))
