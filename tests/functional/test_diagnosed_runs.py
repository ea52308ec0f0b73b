"""Runs that fail without an error: each provokes some of the rules of `aligner diagnose`, all together every one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_jobs import SAYS_77, grpo_settings, launcher, metrics_of, ppo_settings, run_job, train

from aligner import cli
from aligner.reporting.diagnosis_rules import RULES

pytestmark = pytest.mark.timeout(600)

REWARDS = """
from hashlib import sha256

scored, validated = [], []


def constant(prompts, responses, answers):
    return [-1.0] * len(responses)


def sevens(prompts, responses, answers):
    return [response.count("7") / 24 for response in responses]


def brief(prompts, responses, answers):
    return [-float(len(response)) for response in responses]


def growing(prompts, responses, answers):  # by chance, and ever larger
    scored.extend(responses)
    chance = [sha256((prompt + response).encode()).digest()[0] / 128 - 1 for prompt, response in zip(prompts, responses)]
    return [len(scored) / 128 * draw for draw in chance]


def fading(prompts, responses, answers):  # an accuracy that is lost while the reward rises
    validated.append(1)
    return [1.0 if len(validated) <= 4 else 0.2] * len(responses)
"""
GOES_ON = ("guard.learnt_nothing=warn", "run.export_hf=false")  # also where a group is never of two minds any more
ONE_UPDATE = ("algorithm.mini_batch_size=128",)
PROVOKED = {
    # REINFORCE without a baseline unlearns all that it samples, which cannot be the token that it comes to want: the one that ends.
    "nothing_to_learn": (
        {"entropy_collapse", "no_signal", "constant_reward", "kl_negative", "part_never_varies", "never_ends"},
        "algorithm=reinforce",
        *("algorithm.prompts_per_step=16", "algorithm.group_size=8", "algorithm.kl_coef=0.001", *ONE_UPDATE),
        *("+reward.functions.form.path={rewards}:constant", "rollout.sampling.min_response_length=8", "loop.max_steps=24"),
    ),
    "longer_is_better": (
        {"validation_falls", "length_grows", "kl_explodes", "unfinished_rewarded", "repetition"},
        *("reward.function.path={rewards}:sevens", "validation.scorer.path={rewards}:fading", "optimizer.lr=2e-3"),
        *("data.validation={prompts}", "data.num_validation_prompts=2", "loop.validate_every=4"),
        *("algorithm.prompts_per_step=8", "algorithm.mini_batch_size=32", "rollout.sampling.max_response_length=24", "loop.max_steps=48"),
    ),
    "shorter_is_better": (
        {"mode_collapse", "length_shrinks", "unfinished_rewarded"},
        *("reward.function.path={rewards}:brief", "optimizer.lr=4e-3", "algorithm.kl_coef=0", "loop.max_steps=24"),
    ),
    "too_many_updates": (
        {"clip_fraction"},
        *("reward.function.path={rewards}:sevens", "algorithm.num_epochs=8", *ONE_UPDATE),
        *("algorithm.clip_eps_low=0.01", "algorithm.clip_eps_high=0.01", "loop.max_steps=12"),
    ),
    "ever_older_weights": (  # as the learning rate rises, two steps of age become ever more
        {"gap_grows"},
        *(*SAYS_77, "rollout.asynchronous.max_staleness=2", "algorithm.kl_coef=0"),
        *("optimizer.lr=2e-2", "optimizer.warmup_steps=60", "loop.max_steps=30"),
    ),
}


def diagnosed(run: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    capsys.readouterr()
    code = cli.main(["diagnose", str(run), "--json"])
    found = {finding["rule"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert code == bool(found)
    return found


@pytest.fixture
def rewards(task: Path) -> Path:
    (task / "rewards.py").write_text(REWARDS)
    return task / "rewards.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", PROVOKED)
def test_a_run_that_fails_in_silence(name: str, task: Path, rewards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected, *settings = PROVOKED[name]
    own = [setting.format(rewards=rewards, prompts=task / "prompts.jsonl") for setting in settings]
    said = run_job(train("grpo"), task / name, [*grpo_settings(task), *own, *GOES_ON])
    assert expected <= diagnosed(task / name, capsys)
    recorded = {metric for line in metrics_of(task / name) for metric in line.values}
    for rule in RULES:
        if rule.name in expected:
            assert f"diagnosis/{rule.name}" in recorded and said.count(f"warning: {rule.title}: ") == 1, rule.name


@pytest.mark.slow
def test_a_critic_that_does_not_learn(task: Path, rewards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [*ppo_settings(task), f"reward.function.path={rewards}:growing", "reward.serve=false"]
    settings += ["algorithm.rollouts_per_step=32", "algorithm.mini_batch_size=32", "critic.mini_batch_size=32", "critic.optimizer.lr=1e-9"]
    run_job(launcher("ppo"), task / "critic", [*settings, "loop.max_steps=34", "run.export_hf=false"])
    assert {"critic_explains_little", "value_loss_grows"} <= diagnosed(task / "critic", capsys)


def test_every_rule_is_provoked() -> None:
    provoked = set().union(*(expected for expected, *_ in PROVOKED.values())) | {"critic_explains_little", "value_loss_grows"}
    assert provoked == {rule.name for rule in RULES}
