"""95 % intervals of what examples/learning measures."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Z = 1.959964  # of a normal distribution, 95 % within
RESAMPLES = 2000

# Column sums [R, K] of R resamples -> their statistic [R].
Statistic = Callable[[Tensor], Tensor]


def wilson(right: int, total: int) -> tuple[float, float]:
    """Of a share, from `right` of `total` independent trials (Wilson 1927). Raises ValueError without trials."""
    if not 0 <= right <= total or not total:
        raise ValueError(f"{right} of {total}: expected a share of at least one trial")
    share, spread = right / total, Z * Z / total
    centre = (share + spread / 2) / (1 + spread)
    half = Z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return centre - half, centre + half


def bootstrap(sums: Tensor, statistic: Statistic, seed: int = 0) -> tuple[float, float, float]:
    """(value, low, high) of a statistic of column sums, resampling the rows [N, K]: one row per independent unit.

    What belongs together, such as the responses to one prompt, is one row. Percentiles of RESAMPLES draws with replacement; the same seed
    gives the same interval. Raises ValueError for fewer than two rows.
    """
    if sums.dim() != 2 or len(sums) < 2:
        raise ValueError(f"sums is {tuple(sums.shape)}, expected [N, K] with N at least 2")
    sums = sums.double()
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(sums), (RESAMPLES, len(sums)), generator=generator)
    times = torch.zeros(RESAMPLES, len(sums), dtype=torch.float64).scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    found = statistic(times @ sums)
    low, high = torch.quantile(found, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return statistic(sums.sum(0, keepdim=True)).item(), low, high


def ratio(sums: Tensor) -> Tensor:
    """Column 0 over column 1: a mean, from sums and counts."""
    return sums[:, 0] / sums[:, 1]


def ratio_change(sums: Tensor) -> Tensor:
    """Columns 0 / 1 less columns 2 / 3: how two means of the same units differ."""
    return sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3]


def correlation(sums: Tensor) -> Tensor:
    """Pearson's, from the columns n, sum x, sum y, sum xx, sum yy, sum xy."""
    count, x, y, xx, yy, xy = sums.unbind(dim=1)
    return (count * xy - x * y) / ((count * xx - x * x) * (count * yy - y * y)).sqrt()
