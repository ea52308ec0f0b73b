"""DPO from the entry script: it learns a rule that holds for unseen pairs, and on real human preferences its numbers are transformers'."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from training_jobs import checkpoint_steps, launcher, metrics_of, run_job, series, supervised_settings, train, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from aligner.data.config import BadLines, Overlong, PreferenceDataConfig
from aligner.data.supervised import load_preferences
from aligner.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.timeout(600)
TRAIN = train("dpo")
BETA = 0.1


def write_pairs(path: Path, *, seed: int, count: int) -> None:
    """Prompts like `3+4=`; the chosen response is of even digits, the rejected one of odd digits, of 2 to 6 each."""
    draw = random.Random(seed)

    def digits(some: str) -> str:
        return "".join(draw.choices(some, k=draw.randint(2, 6)))

    rows = [(f"{draw.randrange(10)}+{draw.randrange(10)}=", digits("02468"), digits("13579")) for _ in range(count)]
    write_rows(path, (dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows))


@pytest.fixture(scope="module")
def rule(task: Path) -> Path:
    """The run directory of 20 steps on pairs that follow the rule."""
    write_pairs(task / "pairs.jsonl", seed=1, count=200)
    write_pairs(task / "held_out.jsonl", seed=2, count=50)
    run_job(launcher("dpo"), task / "run", rule_settings(task))
    return task / "run"


def rule_settings(folder: Path) -> list[str]:
    loop = ("loop.max_steps=20", "loop.validate_first=true", "loop.validate_every=10")
    own = ("algorithm.batch_size=32", "optimizer.lr=3e-3", f"data.validation={folder / 'held_out.jsonl'}")
    return supervised_settings(folder, folder / "pairs.jsonl", *own, *loop)


@pytest.mark.parametrize(("preset", "settings"), [("simpo", ["algorithm.gamma=0.5"]), ("orpo", ["algorithm.beta=1.0"])])
def test_losses_without_a_reference_learn_the_rule_too(rule: Path, preset: str, settings: list[str]) -> None:
    """Margins are of mean log-probs; ORPO's supervised term makes the chosen responses likelier besides."""
    directory = rule.parent / preset
    run_job(TRAIN, directory, [*rule_settings(rule.parent), f"algorithm={preset}", *settings, "run.export_hf=false"])
    before, *_, after = _validated(directory)
    assert after["validation/accuracy"] > 0.95 and after["validation/margin"] > before["validation/margin"] + 0.5
    assert preset == "simpo" or after["validation/sft_loss"] < before["validation/sft_loss"] - 0.3


def test_it_prefers_what_it_was_shown_on_unseen_pairs(rule: Path) -> None:
    before, *_, after = _validated(rule)
    assert before["validation/loss"] == pytest.approx(math.log(2)) and before["validation/margin"] == 0  # the policy is the reference
    assert after["validation/accuracy"] > 0.95
    assert after["validation/margin"] > 0.5 and after["validation/loss"] < 0.5
    assert after["validation/chosen_reward"] > after["validation/rejected_reward"]
    lines = [line.values for line in metrics_of(rule) if line.step]
    assert len(lines) == 20
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert lines[0]["preference/loss"] == pytest.approx(math.log(2)) and lines[0]["preference/margin"] == 0
    assert lines[-1]["preference/accuracy"] > 0.95
    assert checkpoint_steps(rule / "checkpoints" / "policy") == [20]


LENGTH = 96  # of the 1,500 pairs 86 are that short for a vocabulary of 512, and have two replies


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    """The run directory of training the small pretrained model on human preferences; validated on the pairs that it is trained on."""
    directory = tmp_path_factory.mktemp("preferences") / "run"
    pairs = shared_data / "hh_harmless" / "comparisons.jsonl"
    settings = [
        *(f"model.path={shared_data / 'stories260k'}", f"data.train={pairs}", f"data.validation={pairs}"),
        *(f"data.max_length={LENGTH}", "data.overlong=drop", "data.bad_lines=skip", "model.micro_batch_size=8"),
        *("algorithm.batch_size=22", "algorithm.validation_batch_size=22", f"algorithm.beta={BETA}"),
        *("optimizer.lr=5e-4", "optimizer.min_lr=5e-5", "optimizer.warmup_steps=2", "optimizer.weight_decay=0"),
        *("loop.max_steps=12", "loop.validate_every=6", "logging.tensorboard=false", "logging.progress=plain"),
    ]
    run_job(TRAIN, directory, settings)
    return directory


@pytest.mark.shared
def test_accuracy_and_margin_rise_on_human_preferences(preferences: Path) -> None:
    accuracy, margin = ([values[name] for values in _validated(preferences)] for name in ("validation/accuracy", "validation/margin"))
    assert accuracy[-1] > 0.8 and accuracy[-1] > accuracy[0]
    assert margin[-1] > margin[0] > 0
    losses = series(preferences, "preference/loss")
    assert losses[0] == pytest.approx(math.log(2)) and sum(losses[-4:]) / 4 < 0.6


@pytest.mark.shared
def test_its_validation_is_what_transformers_computes(preferences: Path, shared_data: Path) -> None:
    """beta * (log pi - log ref) of each response from the exported model and the original one, row by row, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(preferences / "export")
    policy = AutoModelForCausalLM.from_pretrained(preferences / "export")
    original = AutoModelForCausalLM.from_pretrained(shared_data / "stories260k")
    margins = [
        BETA * (_log_ratio(policy, original, *chosen) - _log_ratio(policy, original, *rejected))
        for chosen, rejected in _short_pairs(tokenizer, shared_data / "hh_harmless" / "comparisons.jsonl")
    ]
    last = _validated(preferences)[-1]
    assert len(margins) == 86
    assert last["validation/margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-4)
    assert last["validation/accuracy"] == pytest.approx(sum(m > 0 for m in margins) / len(margins), abs=0.012)  # one pair may be a near-tie
    assert last["validation/loss"] == pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins) / len(margins), abs=1e-4)


def _validated(directory: Path) -> list[dict[str, float]]:
    return [line.values for line in metrics_of(directory) if "validation/accuracy" in line.values]


def _short_pairs(tokenizer, path: Path):
    """(tokens, number of prompt tokens) of both responses of every pair that is short enough, as `aligner.data` makes them."""
    config = PreferenceDataConfig(train=str(path), max_length=LENGTH, overlong=Overlong.drop, bad_lines=BadLines.skip)
    for pair in load_preferences(str(path), config, load_tokenizer(tokenizer.name_or_path))[0]:
        yield tuple((row.tokens, row.loss_mask.index(True)) for row in (pair.chosen, pair.rejected))


@torch.no_grad()
def _log_ratio(policy, reference, tokens: tuple[int, ...], num_prompt_tokens: int) -> float:
    """log pi - log ref of the response, in float64."""
    rows = torch.tensor([tokens])
    logprobs = [
        model(rows).logits[0, :-1].double().log_softmax(-1).gather(1, rows[0, 1:, None])[num_prompt_tokens - 1 :].sum().item()
        for model in (policy, reference)
    ]
    return logprobs[0] - logprobs[1]
