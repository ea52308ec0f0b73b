"""Recipes on a model that has no layers here, one for each of its uses. What a run reports is what plain `transformers` computes from its
export, or it learns.

`test_own_modules_runs.py` has PPO with its servers, reward models of pairs, and DPO's plan; `test_vision_runs.py` has GRPO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders import load_module
from own_models import write_granite
from safetensors.torch import load_file
from torch import Tensor
from training_jobs import ROOT, launcher, metrics_of, model_settings, run_job, series, train, write_rows

from aligner.data.collate import SupervisedExample
from aligner.data.config import DistillationDataConfig, RegressionDataConfig, StepDataConfig, UnpairedDataConfig
from aligner.data.distillation import load_distillation
from aligner.data.judged import load_regression, load_steps, load_unpaired, mismatched
from aligner.data.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.timeout(600)
SUMS = [(a, b) for a in range(4) for b in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random Granites of one shape, `model` and `other`, with one token per printable character."""
    folder = tmp_path_factory.mktemp("own")
    characters = load_module(ROOT / "tests" / "unit" / "data" / "conftest.py", "character_tokenizer")
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    characters.write_tokenizer(folder / "tokenizer", **names)
    for seed, name in enumerate(("model", "other")):
        size = len(characters.SPECIAL) + len(characters.PRINTABLE)
        write_granite(folder / name, folder / "tokenizer", vocab_size=size, seed=seed, positions=256, spread=0.15)
    write_rows(folder / "prompts.jsonl", ({"prompt": f"{a}+{b}="} for a in range(4) for b in range(8)))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder / "model")


def settings_of(folder: Path, *more: str, model: str = "model") -> list[str]:
    own = [one for one in model_settings(folder) if not one.startswith(("model.architecture", "model.tokenizer", "model.make_vocab"))]
    return [*own, f"model.path={folder / model}", "model.micro_batch_size=4", *more]


def supervised(folder: Path, recipe: str, rows: Iterable[dict[str, Any]], *more: str, steps: int = 6) -> Path:
    """A run on the rows, validated on all of them before and after. Returns its directory."""
    data = write_rows(folder / f"{recipe}.jsonl", rows)
    given = (
        f"data.train={data}",
        f"data.validation={data}",
        "algorithm.batch_size=8",
        f"loop.max_steps={steps}",
        "loop.validate_first=true",
    )
    run_job(train(recipe), folder / recipe, settings_of(folder, *given, f"loop.validate_every={steps}", *more))
    return folder / recipe


def first_and_last(run: Path, name: str) -> tuple[float, float]:
    found = [line.values[name] for line in metrics_of(run) if name in line.values]
    return found[0], found[-1]


@torch.no_grad()
def logprobs(path: Path, rows: Sequence[SupervisedExample]) -> list[Tensor]:
    """Of the trained tokens of each row, by plain `transformers` one row at a time: [tokens, vocabulary]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    every = [model(torch.tensor([row.tokens])).logits[0, :-1].log_softmax(-1) for row in rows]
    return [own[torch.tensor(row.loss_mask[1:])] for own, row in zip(every, rows, strict=True)]


def chosen(path: Path, rows: Sequence[SupervisedExample]) -> list[Tensor]:
    """Log-probs [tokens] of the trained tokens of each row."""
    learnt = [torch.tensor(row.tokens)[torch.tensor(row.loss_mask)] for row in rows]
    return [own.gather(1, tokens[:, None])[:, 0] for own, tokens in zip(logprobs(path, rows), learnt, strict=True)]


@torch.no_grad()
def scores(path: Path, rows: Sequence[SupervisedExample]) -> list[Tensor]:
    """Of every token of each row [S, outputs]: the exported head on the hidden states of plain `transformers`."""
    body, stored = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval(), load_file(path / "model.safetensors")
    hidden = [body(torch.tensor([row.tokens])).last_hidden_state[0] for row in rows]
    return [states @ stored["score.weight"].t() + stored.get("score.bias", 0.0) for states in hidden]


def test_kto(folder: Path, tokenizer: Tokenizer) -> None:
    rows = ({"prompt": f"{a}+{b}=", "response": str(a * 7 + b), "preference": ("chosen", "rejected")[(a + b) % 3 > 0]} for a, b in SUMS)
    run = supervised(folder, "kto", rows, "algorithm.beta=0.5", "data.max_length=16")
    examples, _ = load_unpaired(str(folder / "kto.jsonl"), UnpairedDataConfig(max_length=16), tokenizer)
    ratios = []
    for given in (examples, mismatched(examples, 16)):
        own, theirs = (chosen(path, [one.row for one in given]) for path in (run / "export", folder / "model"))
        ratios.append(torch.stack([(a - b).sum() for a, b in zip(own, theirs, strict=True)]))
    kl, sign = max(0.0, float(ratios[1].mean())), torch.tensor([1.0 if one.desirable else -1.0 for one in examples])
    loss = torch.sigmoid(-0.5 * sign * (ratios[0] - kl)).mean()
    before, after = first_and_last(run, "validation/loss")
    assert before == pytest.approx(0.5) and after < 0.45  # the policy was the reference
    assert after == pytest.approx(float(loss), abs=1e-5)
    assert first_and_last(run, "validation/kl")[1] == pytest.approx(kl, abs=1e-4)


def test_a_regression_reward_model(folder: Path, tokenizer: Tokenizer) -> None:
    rows = ({"prompt": f"{a}+{b}=", "response": str(a + b), "label": [a / 3, -100 if b == 2 else b / 3]} for a, b in SUMS)
    own = ("data.attributes=[first,second]", "data.max_length=16")
    run = supervised(folder, "regression_reward_model", rows, *own, steps=16)
    config = RegressionDataConfig(attributes=["first", "second"], max_length=16)
    examples, _ = load_regression(str(folder / "regression_reward_model.jsonl"), config, tokenizer)
    found = torch.stack([one[-1] for one in scores(run / "export", [one.row for one in examples])])
    labels = torch.tensor([one.labels for one in examples])
    before, after = first_and_last(run, "validation/mse")
    assert after < before / 2
    assert after == pytest.approx(float((found - labels)[labels > -100].square().mean()), rel=1e-4)


def test_a_process_reward_model(folder: Path, tokenizer: Tokenizer) -> None:
    rows = ({"prompt": f"{a}+{b}=", "steps": [str(a), str(a + b)], "labels": [1, int(b > 1)]} for a, b in SUMS)
    run = supervised(folder, "process_reward_model", rows, 'data.step_separator="="', "data.max_length=16", steps=16)
    config = StepDataConfig(step_separator="=", max_length=16)
    examples, _ = load_steps(str(folder / "process_reward_model.jsonl"), config, tokenizer)
    every = zip(scores(run / "export", [one.row for one in examples]), examples, strict=True)
    found = torch.cat([own[torch.tensor(one.row.loss_mask), 0] for own, one in every])
    labels = torch.tensor([label for one in examples for label in one.labels])
    before, after = first_and_last(run, "validation/loss")
    assert after < before - 0.1
    assert after == pytest.approx(float(torch.nn.functional.binary_cross_entropy_with_logits(found, labels)), abs=1e-5)


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Path:
    data = write_rows(folder / "taught.jsonl", ({"prompt": f"{a}+{b}=", "response": str(a + b)} for a, b in SUMS))
    given = (f"data.train={data}", f"data.validation={data}", "data.max_length=16", "algorithm.top_k=5", "algorithm.batch_size=6")
    own = [one for one in settings_of(folder, *given) if not one.startswith(("optimizer", "checkpoint", "loop"))]
    run_job(train("teacher_logprobs"), folder / "teacher", own)
    return folder / "teacher" / "teacher"


def test_a_teacher_and_its_student(folder: Path, tokenizer: Tokenizer, teacher: Path) -> None:
    examples, _ = load_distillation(str(teacher / "train"), DistillationDataConfig(max_length=16), tokenizer)
    for own, one in zip(logprobs(folder / "model", examples), examples, strict=True):
        likeliest = own.topk(5)
        assert torch.equal(likeliest.indices, one.teacher_tokens) and torch.allclose(likeliest.values, one.teacher_logprobs, atol=1e-5)
    data = (f"data.train={teacher / 'train'}", f"data.validation={teacher / 'validation'}", "data.max_length=16")
    steps = ("algorithm.batch_size=8", "loop.max_steps=8", "loop.validate_first=true", "loop.validate_every=8")
    run_job(train("distill"), folder / "student", settings_of(folder, *data, *steps, model="other"))
    before, after = first_and_last(folder / "student", "validation/loss")
    apart = []
    for own, one in zip(logprobs(folder / "student" / "export", examples), examples, strict=True):
        theirs, ours = one.teacher_logprobs.log_softmax(-1), own.gather(1, one.teacher_tokens).log_softmax(-1)
        apart.append((theirs.exp() * (theirs - ours)).sum(-1))
    assert after < before / 2
    assert after == pytest.approx(float(torch.cat(apart).mean()), abs=1e-5)


def sampled(folder: Path, recipe: str, *more: str, model: str = "model", start: Callable[[str], tuple[str, ...]] = train) -> Path:
    lengths = ("data.max_prompt_length=8", "rollout.sampling.max_response_length=6")
    given = (f"data.train={folder / 'prompts.jsonl'}", *lengths, "run.export_hf=false", *more)
    run_job(start(recipe), folder / recipe, settings_of(folder, *given, model=model))
    return folder / recipe


def test_online_dpo(folder: Path) -> None:
    digits = folder / "digits.py"
    digits.write_text("def reward(prompts, responses, answers):\n    return [sum(map(str.isdigit, one)) / 6 for one in responses]\n")
    sizes = ("algorithm.prompts_per_step=16", "algorithm.group_size=8", "algorithm.mini_batch_size=4", "algorithm.min_gap=0.1")
    run = sampled(folder, "online_dpo", *sizes, f"reward.function.path={digits}:reward", "loop.max_steps=8")
    values = series(run, "rollout/reward")
    assert values[-1] > 2 * sum(values[:2]) / 2 and max(series(run, "rollout/logprob_gap")) < 1e-4, values
    assert series(run, "preference/loss")[0] == pytest.approx(0.6931, abs=0.03)  # the policy is the reference


def test_on_the_students_own_samples(folder: Path) -> None:
    """On two ranks; the teacher has the student's kind, and weights of its own."""
    sizes = ("algorithm.prompts_per_step=16", "algorithm.mini_batch_size=8", "algorithm.top_k=8")
    own = (*sizes, f"teacher.path={folder / 'model'}", "loop.max_steps=6", "num_processes=2")
    run = sampled(folder, "online_distill", *own, model="other", start=launcher)
    losses = series(run, "distillation/loss")
    assert losses[-1] < losses[0] / 2 and max(series(run, "rollout/logprob_gap")) < 1e-4


def test_spin(folder: Path) -> None:
    """Two iterations: the reference of the second is what the first made of the policy."""
    data = write_rows(folder / "given.jsonl", ({"prompt": f"{a}+{b}=", "response": str(a + b)} for a, b in SUMS))
    own = (f"data.train={data}", f"data.validation={data}", "data.max_length=16", "data.max_prompt_length=0", "loop.validate_every=8")
    run = sampled(
        folder, "spin", *own, "algorithm.batch_size=8", "algorithm.epochs_per_iteration=2", "loop.max_steps=8", "algorithm.beta=0.5"
    )
    margins, losses = series(run, "preference/margin"), series(run, "preference/loss")
    assert abs(margins[0]) < 1e-5 and abs(margins[4]) < 1e-5 and margins[3] > 0.1 and margins[7] > 0.1
    assert losses[0] == losses[4] == pytest.approx(0.6931, abs=1e-3)
