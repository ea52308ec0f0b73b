"""Cases of models that write: supervised fine-tuning, preference losses, SPIN, rejection sampling, distillation."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from bench import Bench, Row, Run
from evaluate import Measured, measure, read_prompts
from exported import divergences, losses
from intervals import bootstrap, ratio, ratio_change
from reward_cases import by_prompt
from stories import PROMPT_LENGTH, RESPONSE_LENGTH, Files, read, write

from aligner.data.collate import SupervisedExample
from aligner.data.config import Learn, Overlong, PreferenceDataConfig, SFTDataConfig
from aligner.data.supervised import load_preferences, load_supervised
from aligner.rewards.builtin import happy_words

MATHS_LENGTH, NUM_MATHS, NUM_HELD_OUT_MATHS = 256, 1000, 200
STORY_LENGTH = 128  # a prompt and a response
LEARNING_RATE = ("optimizer.lr=5e-4", "optimizer.min_lr=5e-5", "optimizer.warmup_steps=4")
PAIRS = ("algorithm.batch_size=32", "loop.max_steps=24", f"data.max_length={STORY_LENGTH}", *LEARNING_RATE)


def sft(bench: Bench) -> list[Row]:
    """A model of children's stories learns how answers to maths questions are written (GSM8K)."""
    directory = bench.root / "data"
    files = Files.below(directory, "maths")
    for name, path, number in (("train", files.train, NUM_MATHS), ("test", files.held_out, NUM_HELD_OUT_MATHS)):
        records = read(bench.data / "gsm8k" / f"{name}.jsonl")[:number]
        write(path, ({"prompt": f"{record['question']}\n", "response": record["answer"]} for record in records))
    cut = [f"data.max_length={MATHS_LENGTH}", "data.overlong=drop"]
    settings = [*files.settings, *cut, "model.packing=true", "algorithm.batch_size=16", "loop.max_steps=60"]
    run = bench.train("sft", "sft", [*settings, "optimizer.lr=2e-3", "optimizer.min_lr=2e-4", "optimizer.warmup_steps=5"])
    rows = supervised_rows(bench, files.held_out, max_length=MATHS_LENGTH)
    return [loss_row(bench, "sft", "loss on held-out answers of GSM8K", run, rows, needed=0.5)]


def best_of_n(bench: Bench) -> Run:
    """Supervised fine-tuning on the best of the model's own stories to each prompt."""
    settings = [*bench.stories.best.settings, f"data.max_length={STORY_LENGTH}", "algorithm.batch_size=48", "loop.max_steps=30"]
    return bench.train("best_of_n_sft", "sft", [*settings, *LEARNING_RATE])


def best_of_n_sft(bench: Bench) -> list[Row]:
    """Offline rejection sampling: the `generate` recipe, the rule, supervised fine-tuning."""
    run = best_of_n(bench)
    rows = supervised_rows(bench, bench.stories.best.held_out)
    name = "best_of_n_sft"
    return [loss_row(bench, name, "loss on held-out best stories", run, rows), win_row(bench, name, run)]


def rejection_sampling(bench: Bench) -> list[Row]:
    """The same with fresh samples in every step."""
    prompts = bench.stories.prompts
    settings = [
        *(f"data.train={prompts.train}", f"data.max_prompt_length={PROMPT_LENGTH}", *LEARNING_RATE),
        *(f"rollout.sampling.max_response_length={RESPONSE_LENGTH}", "reward.function.path=aligner.rewards.builtin:happy_words"),
        *("algorithm.prompts_per_step=16", "algorithm.group_size=4", "algorithm.drop_truncated=false", "loop.max_steps=20"),
    ]
    return [win_row(bench, "rejection_sampling", bench.train("rejection_sampling", "rejection_sampling", settings))]


def preference(bench: Bench, *, name: str, recipe: str = "dpo", settings: tuple[str, ...] = ()) -> list[Row]:
    """A loss on pairs (or, for KTO, on their responses one by one), labelled by the rule."""
    run = bench.train(name, recipe, [*bench.stories.pairs.settings, *PAIRS, *settings])
    return [margin_row(bench, name, run, bench.stories.pairs.held_out), win_row(bench, name, run)]


def spin(bench: Bench) -> list[Row]:
    """SPIN on the best stories: the model learns to prefer them to its own, without a label. Two iterations of 288 prompts."""
    settings = [
        *(*bench.stories.best.settings, f"data.max_length={STORY_LENGTH}", f"data.max_prompt_length={PROMPT_LENGTH}"),
        *("algorithm.batch_size=32", "algorithm.prompts_per_iteration=288", "algorithm.epochs_per_iteration=1", "loop.max_steps=18"),
        *("optimizer.lr=2e-4", "optimizer.min_lr=5e-5", "optimizer.warmup_steps=2"),
        f"rollout.sampling.max_response_length={RESPONSE_LENGTH}",
    ]
    run = bench.train("spin", "spin", settings)
    rows = supervised_rows(bench, bench.stories.best.held_out)
    return [loss_row(bench, "spin", "loss on held-out best stories", run, rows), win_row(bench, "spin", run)]


def distill(bench: Bench) -> list[Row]:
    """A small student from scratch: the teacher's distributions against the same text as plain supervision, in as many steps.

    tail_bucket: where the teacher's K likeliest tokens are compared among themselves, a student that begins with all tokens equally likely
    leaves most of its probability outside them.
    """
    files = bench.stories.stories
    data = [*files.settings, f"data.max_length={STORY_LENGTH}", "data.learn=everything"]
    teacher = bench.run("teacher", "teacher_logprobs", [*data, "algorithm.top_k=64", "logging.tensorboard=false", "logging.progress=plain"])
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "ffn_hidden_size": 128}
    student = [
        *("model.path=", f"model.tokenizer={bench.model}", *(f"model.architecture.{name}={size}" for name, size in sizes.items())),
        *("model.architecture.initializer_range=0.06", "algorithm.batch_size=64", "loop.max_steps=60"),
        *("optimizer.lr=5e-3", "optimizer.min_lr=5e-4", "optimizer.warmup_steps=5"),
    ]
    plain = bench.train("student_sft", "sft", [*data, *student])
    own = teacher.directory / "teacher"
    what = [f"data.train={own / 'train'}", f"data.validation={own / 'validation'}", f"data.max_length={STORY_LENGTH}"]
    taught = bench.train("distill", "distill", [*what, *student, "algorithm.tail_bucket=true"])
    rows = supervised_rows(bench, files.held_out, learn=Learn.everything)
    before, after = (divergences(run.export, bench.model, rows) for run in (plain, taught))
    sums = by_prompt([record["prompt"] for record in read(files.held_out)], torch.cat([after, before], dim=1))
    mean = ratio(before.sum(0, keepdim=True)).item()
    seconds = teacher.cpu_seconds + plain.cpu_seconds + taught.cpu_seconds
    metric, note = "KL(teacher || student), nats per token of held-out stories", "before: as many steps on the text alone"
    found = shifted(bootstrap(sums, ratio_change), mean)
    return [Row.of("distill", metric, found, before=mean, needed=mean, rises=False, cpu_seconds=seconds, note=note)]


def online_distill(bench: Bench) -> list[Row]:
    """The pretrained model learns from the one that `best_of_n_sft` made, on its own samples."""
    teacher = best_of_n(bench).export
    prompts = bench.stories.prompts
    settings = [
        *(f"teacher.path={teacher}", f"data.train={prompts.train}", f"data.max_prompt_length={PROMPT_LENGTH}", *LEARNING_RATE),
        *(f"rollout.sampling.max_response_length={RESPONSE_LENGTH}", "algorithm.prompts_per_step=48", "algorithm.mini_batch_size=48"),
        "loop.max_steps=20",
    ]
    run = bench.train("online_distill", "online_distill", settings)
    before, after = (judged(bench, model, teacher, seed=2) for model in (bench.model, run.export))
    columns = [[one.kl, one.num_tokens, other.kl, other.num_tokens] for one, other in zip(after.samples, before.samples, strict=True)]
    sums = grouped(bench, torch.tensor(columns))
    found = shifted(bootstrap(sums, ratio_change), before.kl)
    metric = "KL(student || teacher), nats per token of its own samples"
    return [
        Row.of("online_distill", metric, found, before=before.kl, needed=0.8 * before.kl, rises=False, cpu_seconds=run.cpu_seconds),
        win_row(bench, "online_distill", run, cpu_seconds=0.0),
    ]


def supervised_rows(bench: Bench, path: Path, *, max_length: int = STORY_LENGTH, learn: Learn = Learn.responses) -> list[SupervisedExample]:
    """The examples of a file, as a run reads them."""
    config = SFTDataConfig(train=str(path), max_length=max_length, overlong=Overlong.drop, learn=learn)
    return load_supervised(str(path), config, bench.tokenizer)[0]


def loss_row(bench: Bench, case: str, metric: str, run: Run, rows: list[SupervisedExample], *, needed: float = 0.0) -> Row:
    """How much the loss per token falls from the pretrained model to the run's, examples resampled; by more than `needed`."""
    before, after = (losses(model, rows) for model in (bench.model, run.export))
    mean = ratio(before.sum(0, keepdim=True)).item()
    found = shifted(bootstrap(torch.cat([after, before], dim=1), ratio_change), mean)
    return Row.of(case, metric, found, before=mean, needed=mean - needed, rises=False, cpu_seconds=run.cpu_seconds)


def margin_row(bench: Bench, case: str, run: Run, path: Path) -> Row:
    """log p(chosen) - log p(rejected) in nats on held-out pairs, before and after; prompts resampled."""
    config = PreferenceDataConfig(train=str(path), max_length=STORY_LENGTH)
    pairs, _ = load_preferences(str(path), config, bench.tokenizer)
    rows = [row for pair in pairs for row in pair.rows]
    before, after = (-(found[0::2, 0] - found[1::2, 0]) for found in (losses(model, rows) for model in (bench.model, run.export)))
    sums = by_prompt([record["prompt"] for record in read(path)], torch.stack([after - before, torch.ones_like(after)], dim=1))
    mean = before.mean().item()
    metric = "log p(chosen) - log p(rejected), nats, held-out pairs"
    return Row.of(case, metric, shifted(bootstrap(sums, ratio), mean), before=mean, needed=mean, cpu_seconds=run.cpu_seconds)


def win_row(bench: Bench, case: str, run: Run, *, cpu_seconds: float = 0.0) -> Row:
    """How often a new sample has the better reward than one of the pretrained model's, ties a half; prompts resampled."""
    before, after = (judged(bench, bench.model, bench.model, seed=1), judged(bench, run.export, bench.model, seed=2))
    wins = [
        (one.reward > other.reward) + (one.reward == other.reward) / 2 for one, other in zip(after.samples, before.samples, strict=True)
    ]
    found = bootstrap(grouped(bench, torch.tensor([[win, 1.0] for win in wins])), ratio)
    note = f"reward {before.reward:.2f} to {after.reward:.2f}, KL {after.kl:.2f} nats per token"
    return Row.of(case, "win rate against the start, held-out prompts", found, before=0.5, needed=0.55, cpu_seconds=cpu_seconds, note=note)


def judged(bench: Bench, model: Path, start: Path, *, seed: int) -> Measured:
    """Samples of `model` to the held-out prompts, their rewards by the rule, and the KL to `start`."""
    prompts = read_prompts(bench.stories.prompts.held_out, bench.tokenizer)
    return measure(model, start, prompts, happy_words, max_response_length=RESPONSE_LENGTH, samples=bench.options.judged, seed=seed)


def grouped(bench: Bench, columns: torch.Tensor) -> torch.Tensor:
    """Sums over the samples of each prompt: they stand together."""
    return columns.double().view(-1, bench.options.judged, columns.shape[1]).sum(1)


def shifted(found: tuple[float, float, float], by: float) -> tuple[float, float, float]:
    """A change and its interval, put where it leads to."""
    value, low, high = found
    return value + by, low + by, high + by


CASES = {
    "sft": sft,
    "dpo": partial(preference, name="dpo"),
    "ipo": partial(preference, name="ipo", settings=("algorithm=ipo",)),
    "simpo": partial(preference, name="simpo", settings=("algorithm=simpo",)),
    "orpo": partial(preference, name="orpo", settings=("algorithm=orpo",)),
    "kto": partial(preference, name="kto", recipe="kto", settings=("algorithm.batch_size=64",)),
    "best_of_n_sft": best_of_n_sft,
    "rejection_sampling": rejection_sampling,
    "spin": spin,
    "distill": distill,
    "online_distill": online_distill,
}
