"""PPO on a model that has no layers here, with a critic and a reward server of the same kind: `transformers`' own modules everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from own_models import write_granite
from training_jobs import PLAIN_SERVERS, launcher, metrics_of, ppo_settings, run_aligner, run_job, series, train, write_rows, write_task

pytestmark = pytest.mark.timeout(600)
STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Granite with the tokenizer of the sums, a licence, and a reward model trained from it."""
    folder = tmp_path_factory.mktemp("own")
    write_task(folder)
    write_granite(folder / "model", folder / "tokenizer", vocab_size=18)
    (folder / "model" / "LICENSE").write_text("as the base model's\n")
    write_rows(folder / "pairs.jsonl", ({"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": str(a)} for a in range(8)))
    own = [f"model.path={folder / 'model'}", f"data.train={folder / 'pairs.jsonl'}", "data.max_length=16", "algorithm.batch_size=8"]
    run_job(train("reward_model"), folder / "reward", [*own, "loop.max_steps=2", "logging.tensorboard=false"])
    return folder


@pytest.fixture(scope="module")
def output(folder: Path) -> str:
    model = [f"model.path={folder / 'model'}", f"reward.model.path={folder / 'reward' / 'export'}", "optimizer.lr=1e-3"]
    settings = [one for one in ppo_settings(folder) if not one.startswith(("model.architecture", "model.tokenizer"))]
    return run_job(launcher("ppo"), folder / "run", [*settings, *PLAIN_SERVERS, *model, f"loop.max_steps={STEPS}", "loop.save_every=2"])


def test_it_trains_and_samples_with_the_same_numbers(folder: Path, output: str) -> None:
    assert "granite: transformers' own modules; parallel.tp, pp, cp and ep must be 1" in output
    assert len(series(folder / "run", "policy/kl")) == STEPS and max(series(folder / "run", "rollout/logprob_gap")) < 1e-4
    assert all(line.values["critic/loss"] > 0 for line in metrics_of(folder / "run")[1:])  # of the step before


def test_its_export_has_the_models_other_files(folder: Path, output: str) -> None:
    export = folder / "run" / "export"
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (folder / "model", export))
    assert type(before) is type(after) and not torch.equal(before.lm_head.weight, after.lm_head.weight)
    assert (export / "LICENSE").read_text() == "as the base model's\n"


def test_plan_and_preflight_know_it(folder: Path, output: str) -> None:
    typed = [f"model.path={folder / 'model'}", f"data.train={folder / 'pairs.jsonl'}", "data.max_length=16"]
    code, planned = run_aligner("plan", "dpo", *typed)
    count = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_pretrained(folder / "model").parameters())
    assert code == 0 and f"{count:,} parameters" in planned and "granite: weights are those of transformers' modules" in planned
    code, checked = run_aligner("preflight", "dpo", *typed, "--only", "layers,weights")
    assert "transformers' own modules of granite" in checked, checked
