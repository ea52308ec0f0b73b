"""PPO on a real pretrained model, imported from Hugging Face's format, with a lexical reward function served over PyTriton."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_jobs import ROOT, launcher, run_job, series

pytestmark = [pytest.mark.slow, pytest.mark.shared, pytest.mark.timeout(600)]
LENGTH, KL_COEF = 48, 0.02
SETTINGS = [
    f"data.train={ROOT / 'examples' / 'nlp' / 'data' / 'story_prompts.jsonl'}",
    *("data.max_prompt_length=64", f"rollout.sampling.max_response_length={LENGTH}"),
    "reward.function.path=aligner.rewards.builtin:happy_words",
    *("algorithm.rollouts_per_step=64", "algorithm.mini_batch_size=32", f"algorithm.kl_coef={KL_COEF}", "critic.mini_batch_size=32"),
    *("optimizer.lr=4e-4", "optimizer.min_lr=4e-5", "optimizer.warmup_steps=4"),
    *("critic.optimizer.lr=1e-3", "critic.optimizer.min_lr=1e-4", "critic.optimizer.warmup_steps=4"),
    *("model.micro_batch_size=32", "loop.max_steps=30", "loop.table_every=0", "logging.tensorboard=false", "logging.progress=plain"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    directory = tmp_path_factory.mktemp("stories") / "run"
    run_job(launcher("ppo"), directory, [*SETTINGS, f"model.path={shared_data / 'stories260k'}"])
    return directory


def test_the_reward_rises_and_the_policy_stays_near(run: Path) -> None:
    rewards, kl = series(run, "rollout/reward"), series(run, "policy/kl")
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert len(rewards) == 30
    assert last > first + 0.05
    # The reward is at most 1, so a policy further away than this pays more for its KL than it can have won.
    assert max(kl) < (1 - rewards[0]) / (KL_COEF * LENGTH)
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 0.001
    assert max(series(run, "rollout/logprob_gap")) < 1e-4


def test_the_export_loads_and_differs_from_the_model_it_came_from(run: Path, shared_data: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    prompt = tokenizer("Once upon a time", return_tensors="pt").input_ids
    trained = AutoModelForCausalLM.from_pretrained(run / "export")
    original = AutoModelForCausalLM.from_pretrained(shared_data / "stories260k")
    with torch.no_grad():
        difference = (trained(prompt).logits.log_softmax(-1) - original(prompt).logits.log_softmax(-1)).abs().max()
    assert 0.01 < difference < 10  # it moved, and is still the same model
    story = tokenizer.decode(trained.generate(prompt, max_new_tokens=20, do_sample=False)[0], skip_special_tokens=True)
    assert len(story.split()) > 5
