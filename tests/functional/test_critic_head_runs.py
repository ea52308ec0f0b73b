"""PPO whose critic is a head on the policy (`critic.kind=head`): it learns in one component, two ranks give the numbers of one, a kill changes
no bit, and a critic of another kind and a new run start from the head that is exported.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_jobs import SAYS_77, ppo_settings, run_job, series, slow_reward, train

pytestmark = pytest.mark.timeout(600)
NUM_STEPS = 4
HEAD = "value_head.safetensors"
LAYOUTS = {
    "tp2": ("parallel.tp=2", "parallel.sequence_parallel=true"),
    "pp2": ("parallel.pp=2",),
    "dp2": (),
    "cp2_packed": ("parallel.cp=2", "model.packing=true", "model.micro_batch_tokens=64"),
}


def settings(folder: Path, gradient: str = "joint", reward_seconds: float = 0.0) -> list[str]:
    """Two epochs over 24 rollouts a step, with text beside (PPO-ptx), an average of the weights, and a learning rate of the head's own."""
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": "abcde"[: number % 5 + 1] * 2}) + "\n" for number in range(7)))
    return [
        *("algorithm.pretraining_coef=0.3", f"pretraining.train={text}", "pretraining.batch_size=3"),
        *ppo_settings(folder),
        *("critic.kind=head", f"critic.head.gradient={gradient}", "critic.head.coef=0.5", "critic.optimizer.lr=3e-3"),
        *("reward.serve=false", slow_reward(folder, reward_seconds), "model.make_vocab_divisible_by=5"),
        *("algorithm.rollouts_per_step=24", "algorithm.mini_batch_size=12", "algorithm.num_epochs=2", "critic.mini_batch_size=12"),
        *("optimizer.lr=1e-3", "optimizer.ema_decay=0.5", f"loop.max_steps={NUM_STEPS}", "loop.save_every=2"),
    ]


@pytest.fixture(scope="module")
def whole(task: Path) -> Path:
    run_job(train("ppo"), task / "whole", settings(task))
    return task / "whole"


def test_it_learns_the_fixed_string(task: Path) -> None:
    run = task / "learns"
    own = [*ppo_settings(task), *SAYS_77, "critic.kind=head", "reward.serve=false", "loop.max_steps=40", "run.export_hf=false"]
    run_job(train("ppo"), run, own)
    rewards, losses = series(run, "rollout/reward"), series(run, "critic/loss")
    assert sum(rewards[:3]) / 3 < 0.2 and sum(rewards[-5:]) / 5 > 0.9
    assert losses[-1] < 0.5 * losses[0]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["policy"] and not (run / "logs" / "critic.0.log").exists()
