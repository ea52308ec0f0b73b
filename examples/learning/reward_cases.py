"""Cases of models that score: Bradley-Terry on human preferences, regression on attributes, process reward models."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from bench import Bench, Row, Run
from exported import mean_scores, step_scores
from intervals import bootstrap, correlation, ratio, ratio_change, wilson
from stories import ATTRIBUTES, Files, Record, read, write
from torch import Tensor

from aligner.data.config import BadLines, Overlong, PreferenceDataConfig, RegressionDataConfig, StepDataConfig
from aligner.data.judged import load_regression, load_steps
from aligner.data.records import split_dialogue
from aligner.data.supervised import load_preferences

FOLDS = 3
HH_LENGTH, HH_PROMPT_CHARACTERS = 192, 160
MODEL_LENGTH = 128  # of stories


def reward_model(bench: Bench) -> list[Row]:
    """Bradley-Terry on HH-RLHF's harmlessness pairs, cross-validated: each is judged once, by a model that has not seen its dialogue."""
    settings = [
        *(f"data.max_length={HH_LENGTH}", "data.overlong=truncate", "data.bad_lines=skip", "algorithm.pooling=mean"),
        *("algorithm.batch_size=32", "loop.max_steps=45", "optimizer.lr=5e-4", "optimizer.min_lr=5e-5", "optimizer.warmup_steps=5"),
    ]
    found, seconds = [], 0.0
    for fold in range(FOLDS):
        files = hh_fold(bench.data / "hh_harmless" / "comparisons.jsonl", bench.root / "data" / f"hh_{fold}", fold)
        run = bench.train(f"reward_model_{fold}", "reward_model", [*files.settings[:1], *settings])
        found.append(judged_pairs(bench, run, files.held_out))
        seconds += run.cpu_seconds
    pairs = torch.cat(found)
    right, tried, shorter = int(pairs[:, 0].sum()), len(pairs), pairs[:, 1].mean().item()
    _, low, high = bootstrap(pairs[:, [0, 2]], ratio)
    more, at_least, at_most = bootstrap(pairs[:, [0, 2, 1, 2]], ratio_change)
    note = (
        f"{tried} pairs, {FOLDS} folds; Wilson's interval (bootstrap: {low:.3f} to {high:.3f}); 'the shorter one is better' "
        f"is right in {shorter:.3f}, and the model {more:.3f} ({at_least:.3f} to {at_most:.3f}) more often"
    )
    measured = (right / tried, *wilson(right, tried))
    metric = "accuracy on held-out pairs of hh_harmless"
    return [Row.of("reward_model", metric, measured, before=0.5, needed=0.53, cpu_seconds=seconds, note=note)]


def judged_pairs(bench: Bench, run: Run, path: Path) -> Tensor:
    """Of every pair in the file [N, 3]: whether the model is right, whether the shorter response is the better one, and 1.

    Pairs are read as the recipe reads them; the model is wrong about those that are equal after cutting.
    """
    config = PreferenceDataConfig(train=str(path), max_length=HH_LENGTH, overlong=Overlong.truncate, bad_lines=BadLines.skip)
    pairs, _ = load_preferences(str(path), config, bench.tokenizer)
    scores = mean_scores(run.export, [row for pair in pairs for row in pair.rows])[:, 0]
    right = {pair.source for pair, higher in zip(pairs, scores[0::2] > scores[1::2], strict=True) if higher}
    records = enumerate(read(path), start=1)
    return torch.tensor(
        [[f"{path}:{line}" in right, len(record["chosen"]) < len(record["rejected"]), True] for line, record in records],
        dtype=torch.float64,
    )


def hh_fold(source: Path, directory: Path, fold: int) -> Files:
    """The pairs for training and those held out, told apart by how their dialogue begins; of the dialogue before them the last question.

    Pairs without two different responses are left out.
    """
    files = Files(train=directory / "train.jsonl", held_out=directory / "held_out.jsonl")
    parts: dict[bool, list[Record]] = {True: [], False: []}
    for record in read(source):
        prompt, chosen, rejected = split_dialogue(record["chosen"], record["rejected"])
        if chosen.strip() and rejected.strip() and chosen.strip() != rejected.strip():
            opening = prompt.split("\n\nAssistant:")[0]
            held_out = int(hashlib.sha256(opening.encode()).hexdigest(), 16) % FOLDS == fold
            question = prompt.split("\n\nHuman:")[-1].removesuffix("\n\nAssistant:")[-HH_PROMPT_CHARACTERS:]
            parts[held_out].append({"prompt": question + "\n\nAssistant:", "chosen": chosen, "rejected": rejected})
    write(files.train, parts[False])
    write(files.held_out, parts[True])
    return files


def regression_reward_model(bench: Bench) -> list[Row]:
    """Attributes that rules give to stories: does a held-out story's score go with its label?"""
    files = bench.stories.labelled
    names = f"data.attributes=[{','.join(ATTRIBUTES)}]"
    settings = [
        *(*files.settings, names, f"data.max_length={MODEL_LENGTH}", "algorithm.pooling=mean", "algorithm.batch_size=64"),
        *("loop.max_steps=60", "optimizer.lr=1e-3", "optimizer.min_lr=1e-4", "optimizer.warmup_steps=5"),
    ]
    run = bench.train("regression_reward_model", "regression_reward_model", settings)
    config = RegressionDataConfig(train=str(files.held_out), max_length=MODEL_LENGTH, attributes=list(ATTRIBUTES))
    examples, _ = load_regression(str(files.held_out), config, bench.tokenizer)
    scores = mean_scores(run.export, [example.row for example in examples])
    labels = torch.tensor([example.labels for example in examples], dtype=torch.float64)
    prompts = [record["prompt"] for record in read(files.held_out)]
    rows = []
    for column, name in enumerate(ATTRIBUTES):
        x, y = scores[:, column], labels[:, column]
        sums = by_prompt(prompts, torch.stack([torch.ones_like(x), x, y, x * x, y * y, x * y], dim=1))
        metric = f"correlation with {name} of held-out stories"
        seconds = run.cpu_seconds if not column else 0.0
        rows.append(Row.of("regression_reward_model", metric, bootstrap(sums, correlation), before=0.0, needed=0.3, cpu_seconds=seconds))
    return rows


def process_reward_model(bench: Bench) -> list[Row]:
    """Stories with a sentence in disorder, or none: is the first such sentence found?"""
    files = bench.stories.stepped
    settings = [
        *(*files.settings, f"data.max_length={MODEL_LENGTH}", "algorithm.batch_size=64", "loop.max_steps=90"),
        *("optimizer.lr=1e-3", "optimizer.min_lr=1e-4", "optimizer.warmup_steps=5"),
    ]
    run = bench.train("process_reward_model", "process_reward_model", settings)
    config = StepDataConfig(train=str(files.held_out), max_length=MODEL_LENGTH)
    examples, _ = load_steps(str(files.held_out), config, bench.tokenizer)
    scores = step_scores(run.export, [example.row for example in examples])
    found = [_first([one <= 0 for one in row.tolist()]) for row in scores]
    true = [_first([one <= 0.5 for one in example.labels]) for example in examples]
    most_common = max(true.count(place) for place in set(true)) / len(true)
    prompts = [record["prompt"] for record in read(files.held_out)]
    right = torch.tensor([[float(one == other), 1.0] for one, other in zip(found, true, strict=True)])
    measured = bootstrap(by_prompt(prompts, right), ratio)
    note = f"before: always the commonest place (none); {len(true)} stories of {sum(map(len, scores)) / len(true):.1f} sentences"
    margin = {"before": most_common, "needed": most_common + 0.05}
    metric = "first error found in held-out stories"
    return [Row.of("process_reward_model", metric, measured, **margin, cpu_seconds=run.cpu_seconds, note=note)]


def by_prompt(prompts: list[str], columns: Tensor) -> Tensor:
    """Sums [P, K] of rows [N, K] over those of each prompt, which resampling keeps together."""
    order = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    rows = torch.tensor([order[prompt] for prompt in prompts])
    return torch.zeros(len(order), columns.shape[1], dtype=torch.float64).index_add_(0, rows, columns.double())


def _first(bad: list[bool]) -> int:
    """Where the first bad step is; -1: nowhere."""
    return bad.index(True) if True in bad else -1
