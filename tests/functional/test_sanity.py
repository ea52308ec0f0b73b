"""The sanity run of the field by GRPO: reward 1 for a fixed string, from random weights. PPO's is in test_ppo_end_to_end.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_jobs import SAYS_77, grpo_settings, run_job, series, train, write_task

pytestmark = pytest.mark.timeout(300)


def test_grpo_learns_a_fixed_string(tmp_path: Path) -> None:
    write_task(tmp_path)
    run_job(train("grpo"), tmp_path / "run", [*grpo_settings(tmp_path), *SAYS_77, "loop.max_steps=35", "run.export_hf=false"])
    rewards = series(tmp_path / "run", "rollout/reward")
    assert sum(rewards[:3]) / 3 < 0.2  # chance gives 2 %
    assert sum(rewards[-5:]) / 5 > 0.9
    assert max(series(tmp_path / "run", "rollout/logprob_gap")) < 1e-4
