"""PPO with both models saved in the background at every step: pairs, the newest two of them, with the same bits as a run that waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from resumed_runs import same_runs
from training_jobs import checkpoint_steps, launcher, ppo_settings, run_job, write_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LAUNCH = launcher("ppo")
BACKGROUND = ("loop.save_every=1", "checkpoint.asynchronous=true", "checkpoint.keep=2")


def settings(folder: Path, max_steps: int) -> list[str]:
    reward = ("reward.function.path=aligner.rewards.builtin:fixed_string", '+reward.function.arguments.target="7-"')
    small = ("algorithm.rollouts_per_step=24", "algorithm.mini_batch_size=12", "critic.mini_batch_size=12")
    sized = tuple(name.split("=")[0] for name in small)
    return [*(setting for setting in ppo_settings(folder) if not setting.startswith(sized)), *small, *reward, f"loop.max_steps={max_steps}"]


def test_a_run_that_saves_in_the_background(tmp_path: Path) -> None:
    write_task(tmp_path)
    waiting, background = tmp_path / "waiting", tmp_path / "background"
    run_job(LAUNCH, waiting, settings(tmp_path, 4))
    run_job(LAUNCH, background, [*settings(tmp_path, 3), *BACKGROUND])
    for component in ("policy", "critic"):
        assert checkpoint_steps(background / "checkpoints" / component) == [2, 3]
        assert not list((background / "checkpoints" / component).glob(".[wr]*"))
    output = run_job(LAUNCH, background, [*settings(tmp_path, 4), *BACKGROUND])
    assert "resumed after step 3" in output and "critic: resumed after step 3" in output
    for component in ("policy", "critic"):
        assert checkpoint_steps(background / "checkpoints" / component) == [3, 4]
    same_runs(background, waiting, 4, components=["policy", "critic"])
