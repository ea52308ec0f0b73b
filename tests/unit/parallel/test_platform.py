"""Which GPUs a rank may see whose rollout engine would take the first one."""

from __future__ import annotations

import pytest

from aligner.errors import ConfigError
from aligner.parallel.platform import block_of


def test_a_rank_sees_its_blocks_devices() -> None:
    eight = [str(number) for number in range(8)]
    assert [block_of(eight, rank, 1) for rank in (0, 7)] == [["0"], ["7"]]
    assert [block_of(eight, rank, 4) for rank in (0, 3, 4)] == [["0", "1", "2", "3"]] * 2 + [["4", "5", "6", "7"]]
    assert block_of(["GPU-a", "GPU-c"], 1, 1) == ["GPU-c"]  # names of the scheduler's own


def test_a_node_with_too_few_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"local rank 2, in a block of 2, has no GPUs among 0,1,2 \(CUDA_VISIBLE_DEVICES\)"):
        block_of(["0", "1", "2"], 2, 2)
