"""Self-rewarding: killed with SIGKILL while it samples, judges and trains it ends with the same weights; and a rule as judge is learnt."""

from __future__ import annotations

from pathlib import Path

import pytest
from resumed_runs import kept, kill_after, kill_when, same_runs
from training_jobs import Job, checkpoint_steps, metrics_of, run_job, series, slow_reward, tiny_settings, train

pytestmark = pytest.mark.timeout(600)
TRAIN = train("self_rewarding")


@pytest.fixture(scope="module")
def task(task: Path) -> Path:
    """A judge's template that the eighteen tokens of the model can say; its score is the last digit."""
    (task / "template.txt").write_text("{prompt}{response}=")
    return task


@pytest.mark.slow
def test_killed_while_it_samples_judges_and_trains(task: Path) -> None:
    """Iterations of 24 of 64 prompts in six steps; responses and judgements in files of four prompts."""
    whole, killed = task / "whole", task / "killed"
    common = [
        *tiny_settings(task),
        *("algorithm.batch_size=4", "algorithm.prompts_per_iteration=24", "algorithm.sampled_together=4", "algorithm.group_size=3"),
        *("algorithm.num_judgements=2", "algorithm.max_judgement_length=6", "algorithm.drop_truncated=false"),
        *(f"algorithm.judge_template={task / 'template.txt'}", "algorithm.score_pattern='(\\d)'", "algorithm.highest_score=6"),
        *(slow_reward(task, 0.02), "loop.max_steps=15", "loop.save_every=4"),  # not what it learns from: reported beside its judge
        *(f"data.validation={task / 'prompts.jsonl'}", "data.num_validation_prompts=8", "loop.validate_every=5"),
    ]
    run_job(TRAIN, whole, common)
    files = [sorted(path.name[:-5] for path in folder.iterdir()) for folder in sorted((whole / "self_rewarding").iterdir())]
    assert files == [[f"{stem}_{part:06d}" for stem in ("judgements", "responses") for part in range(6)]] * 3
    for found in ("iteration_0001*/responses", "iteration_0002*/judgements"):
        with Job(TRAIN, killed, common) as job:
            kill_when(job, lambda found=found: list((killed / "self_rewarding").glob(f"{found}_*.json")))
    with Job(TRAIN, killed, common) as job:
        kill_after(job, 14)
    assert "resumed after step 12" in run_job(TRAIN, killed, common)
    same_runs(killed, whole, 15)
    assert kept(killed, "self_rewarding") == kept(whole, "self_rewarding")
    assert kept(whole, "self_rewarding") and checkpoint_steps(killed / "checkpoints" / "reference")[-1] == 12
    assert min(series(whole, "preference/loss")) > 0
    first = metrics_of(whole)[0].values  # of the step that begins the first iteration
    assert first["judge/judgements"] == 144 and 0 < first["judge/unparsed"] < 144
    assert 0 <= first["rollout/reward"] <= 6 and 0 <= first["judge/reward"] <= 1 and first["pairs/count"] > 4


def test_a_rule_in_the_judges_place_is_learnt(task: Path) -> None:
    """Iterative DPO: the more sevens the better. Each iteration's own samples are better than those before."""
    run = task / "rule"
    settings = [
        *tiny_settings(task),
        *("algorithm.judge=reward", slow_reward(task, 0.0), "algorithm.batch_size=16", "algorithm.epochs_per_iteration=2"),
        *("algorithm.drop_truncated=false", "loop.max_steps=17", "run.export_hf=false"),
    ]
    run_job(TRAIN, run, settings)
    rewards = [line.values["rollout/reward"] for line in metrics_of(run) if "rollout/reward" in line.values]
    assert len(rewards) == 3  # of eight steps each
    assert rewards[2] > rewards[1] + 0.1 > rewards[0] + 0.2
