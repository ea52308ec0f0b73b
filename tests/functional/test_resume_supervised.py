"""Supervised recipes and their files: killed with SIGKILL, or in two parts, they end with the same bits; and what they learn and export."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from resumed_runs import kill_when, killed_and_resumed
from training_jobs import (
    SAYS_77,
    Job,
    grpo_settings,
    launcher,
    metrics_of,
    read_rows,
    run_job,
    series,
    supervised_settings,
    tiny_settings,
    train,
    without_times,
    write_rows,
)
from transformers import AutoModelForTokenClassification, AutoTokenizer

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_dpo(task: Path) -> None:
    """Pairs of several lengths, 16 of 100 a step (so that steps straddle epochs), cosine decay. Killed after step 23 (or soon after: a step
    takes little). Also the log-ratios: the reference of the resumed run is the model that the run began with, not the checkpoint."""
    draw, numbers = random.Random(1), [(a, b) for a in range(10) for b in range(10)]
    pairs = ({"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + draw.choice((-10, -1, 1, 100)))} for a, b in numbers)
    sizes = ("algorithm.batch_size=16", "algorithm.sft_coef=0.1", "model.micro_batch_size=4", "optimizer.decay=cosine")
    settings = supervised_settings(task, write_rows(task / "dpo.jsonl", pairs), *sizes)
    settings += ["loop.max_steps=60", "loop.save_every=10", "loop.validate_every=5"]
    whole, _, output = killed_and_resumed("dpo", task, settings, 23, last=60)
    (resumed,) = (int(line.rsplit(" ", 1)[1]) for line in output.splitlines() if "resumed after step" in line)
    assert 10 <= resumed < 60 and without_times(whole)[-1]["preference/margin"] > 0.01


def judged(seed: int, count: int):
    """Prompts like `3+4=`; responses of even digits are good, responses of odd digits bad: one of the former to two of the latter."""
    draw = random.Random(seed)
    for number in range(count):
        good = number % 3 == 0
        response = "".join(draw.choices("02468" if good else "13579", k=draw.randint(2, 6)))
        prompt = f"{draw.randrange(10)}+{draw.randrange(10)}="
        yield {"prompt": prompt, "response": response, "preference": "chosen" if good else "rejected"}


def test_kto_tells_good_from_bad_on_unseen_responses(task: Path) -> None:
    files = [write_rows(task / f"{name}.jsonl", judged(seed, count)) for name, seed, count in (("judged", 1, 150), ("held_out", 2, 60))]
    own = (f"data.validation={files[1]}", "algorithm.batch_size=32", "algorithm.desirable_weight=2.0", "loop.max_steps=12")
    settings = supervised_settings(task, files[0], *own)
    settings += ["optimizer.lr=5e-3", "model.micro_batch_size=8", "loop.validate_first=true", "loop.validate_every=6"]
    said = run_job(train("kto"), task / "kto", settings)
    assert "50 desirable and 100 undesirable responses\n" in said  # weights that make up for the numbers need no advice
    before, *_, after = (line.values for line in metrics_of(task / "kto") if "validation/accuracy" in line.values)
    # The policy is the reference: all sigma(0), z is 0, a third has weight 2.
    assert before["validation/loss"] == pytest.approx(0.5 * 4 / 3) and before["validation/kl"] == before["validation/accuracy"] == 0
    assert after["validation/accuracy"] > 0.9 and after["validation/loss"] < 0.55
    assert after["validation/desirable_reward"] > after["validation/undesirable_reward"] + 0.3


@pytest.fixture(scope="module")
def sources(task: Path) -> Path:
    records = [{"prompt": f"{a}+{b}=", "response": f"{a + b}"[: 1 + b % 2] * (1 + a)} for a in range(6) for b in range(5)]
    for name, rows in (("sums", records[:10]), ("rest", records[10:])):
        write_rows(task / f"{name}.jsonl", rows)
    return task


def test_other_ranks_continue_a_mixture_with_the_same_batches(sources: Path) -> None:
    whole, parts, task = sources / "mixture_whole", sources / "mixture_parts", sources
    given = f"[{{path: {task}/sums.jsonl, weight: 3}}, {{path: {task}/rest.jsonl, weight: 1, max_records: 15}}]"
    settings = supervised_settings(task, task / "sums.jsonl", f"data.train={given}", "data.validation=''", "loop.validate_every=0")
    settings += [f"data.cache={task}/cache", "data.num_workers=2", "algorithm.batch_size=8", "model.micro_batch_size=4"]
    said = run_job(train("sft"), whole, [*settings, "loop.max_steps=4"])
    assert "shares of the 2 sources: sums 75.0%, rest 25.0%" in said
    assert f"{task}/rest.jsonl: 15 of 15 records used" in said and "25 rows of " in said
    # 4 steps of 8: of the 10 and 15 examples 24 and 8 were drawn
    assert series(whole, "data/share/sums") == [0.75] * 4 and series(whole, "data/epoch/sums")[-1] == 2.4
    assert series(whole, "data/epoch/rest")[-1] == pytest.approx(8 / 15)
    run_job(train("sft"), parts, [*settings, "loop.max_steps=2"])
    assert without_times(parts) == without_times(whole)[:2]
    run_job(launcher("sft"), parts, [*settings, "loop.max_steps=4", "num_processes=2"])
    assert "resumed after step 2" in "".join(log.read_text() for log in (parts / "logs").glob("*.log"))
    data = ("data/share/sums", "data/share/rest", "data/epoch/sums", "data/epoch/rest", "learnt/tokens", "learnt/samples")
    assert all(series(parts, name) == series(whole, name) for name in data)
    assert series(parts, "sft/loss") == pytest.approx(series(whole, "sft/loss"), rel=1e-5)
    assert len(list((task / "cache").glob("*/manifest.json"))) == 2  # of three runs and four processes


def test_prompts_are_sampled_by_their_weights(task: Path) -> None:
    for name, most in (("low", 40), ("high", 64)):
        lines = (task / "prompts.jsonl").read_text().splitlines()[most - 40 if name == "low" else 40 : most]
        (task / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    sources = f"data.train=[{{path: {task}/low.jsonl, weight: 1}}, {{path: {task}/high.jsonl, weight: 3}}]"
    run_job(train("grpo"), task / "grpo", [*grpo_settings(task), *SAYS_77, sources, "loop.max_steps=1"])
    assert series(task / "grpo", "data/share/low") == [0.25] and series(task / "grpo", "data/share/high") == [0.75]


def reward_model_settings(task: Path, kind: str) -> list[str]:
    """Of 64 rows 24 a step: step 3 straddles epochs."""
    numbers = [(a, b) for a in range(8) for b in range(8)]
    labelled = [{"prompt": f"{a}+{b}=", "response": str(a + b), "label": [(a + b) / 7, -100 if b % 2 else a / 7]} for a, b in numbers]
    stepped = [{"prompt": f"{a}+{b}=", "steps": [str(a + b), str(a)], "labels": [1, (a + b) % 2]} for a, b in numbers]
    own = ("data.attributes=[sum,digits]", "algorithm.pooling=mean") if kind == "regression" else ('data.step_separator="="',)
    data = write_rows(task / f"{kind}.jsonl", labelled if kind == "regression" else stepped)
    common = ("loop.validate_every=2", "algorithm.batch_size=24", "model.micro_batch_size=8", "loop.max_steps=14", "loop.save_every=3")
    return supervised_settings(task, data, *common, *own)


@pytest.fixture(scope="module")
def reward_models(task: Path) -> dict[str, Path]:
    """The directories of runs of both kinds; that of the first was killed and resumed."""
    settings = {kind: reward_model_settings(task, kind) for kind in ("regression", "process")}
    resumed = killed_and_resumed("regression_reward_model", task, settings["regression"], 4, last=14, components=["reward_model"])
    process = task / "process_reward_model"
    for output in (resumed[2], run_job(train("process_reward_model"), process, settings["process"])):
        assert "64 rows of" in output and "% padding" in output
    return {"regression": resumed[1], "process": process}


def test_what_reward_models_report_and_export(reward_models: dict[str, Path]) -> None:
    """transformers scores with what was exported."""
    last = without_times(reward_models["regression"])[-1]
    assert {"validation/mse", "validation/mse_sum", "validation/correlation_digits", "reward/mse_sum"} < set(last)
    assert {"validation/accuracy", "validation/first_error_accuracy"} < set(without_times(reward_models["process"])[-1])
    for kind, names in (("regression", ["sum", "digits"]), ("process", ["step"])):
        model, report = AutoModelForTokenClassification.from_pretrained(reward_models[kind] / "export", output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert list(model.config.id2label.values()) == names and model.config.pad_token_id == 0


@torch.no_grad()
def test_a_model_of_several_attributes_serves_grpo(reward_models: dict[str, Path], task: Path) -> None:
    """The reward is the weighted sum of its outputs: the mean over tokens of what transformers gives for the exported model."""
    directory = reward_models["regression"]
    given = [
        *grpo_settings(task),
        *("reward.serve=true", f"reward.model.path={directory / 'checkpoints' / 'reward_model'}"),
        *("reward.attribute_weights=[2.0,-0.5]", "loop.max_steps=1", "loop.table_every=1", "run.export_hf=false"),
        "rollout.sampling.max_response_length=1",  # so that the table tells what was sampled
    ]
    run_job(launcher("grpo"), task / "served", given)
    model = AutoModelForTokenClassification.from_pretrained(directory / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(directory / "export")
    rows = read_rows(task / "served" / "rollouts" / "step_000001.jsonl")
    rows = [row for row in rows if row["response"] or row["finish_reason"] == "stop"]
    assert len(rows) >= 2
    for row in rows:
        tokens = tokenizer.encode(row["prompt"] + row["response"], add_special_tokens=False)
        tokens = [tokenizer.bos_token_id, *tokens, *[tokenizer.eos_token_id] * (not row["response"])]
        scores = model(torch.tensor([tokens])).logits[0].mean(dim=0)
        assert row["reward"] == pytest.approx((2.0 * scores[0] - 0.5 * scores[1]).item(), abs=1e-4)


def shards(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted((run / "teacher").rglob("*.safetensors"))}


@pytest.fixture(scope="module")
def teacher(task: Path) -> Path:
    """The run whose files are learnt from, of a model that has seen 60 sums. It was killed between files and, for all that is seen of that,
    while it wrote one; another that was not has the same files."""
    data = write_rows(task / "sft.jsonl", ({"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(10) for b in range(6)))
    run_job(
        train("sft"),
        task / "sft",
        supervised_settings(task, data, "model.micro_batch_size=4", "algorithm.batch_size=20", "loop.max_steps=40"),
    )
    given = [f"data.train={data}", f"data.validation={data}", "data.max_length=16", "logging.tensorboard=false", "logging.progress=plain"]
    given += ["algorithm.top_k=5", "algorithm.shard_size=7", "algorithm.batch_size=4", "model.make_vocab_divisible_by=2"]
    given += [f"model.path={task / 'sft' / 'export'}"]
    whole, killed, program = task / "teacher_whole", task / "teacher_killed", train("teacher_logprobs")
    run_job(launcher("teacher_logprobs"), whole, given)
    with Job(program, killed, given) as job:
        kill_when(job, lambda: len(shards(killed)) >= 2)
    before = shards(killed)
    assert 2 <= len(before) < 18
    half = before["teacher/train/shard_000000.safetensors"][:-50]
    (killed / "teacher" / "train" / f".shard_{len(before):06d}.safetensors.new").write_bytes(half)
    assert f"resumed after step {len(before)}" in run_job(program, killed, given)
    assert shards(killed) == shards(whole) and len(shards(whole)) == 18  # 60 examples in files of 7, twice
    return killed


@pytest.fixture(scope="module")
def student(task: Path, teacher: Path) -> Path:
    data = [f"data.{name}={teacher / 'teacher' / name}" for name in ("train", "validation")]
    sizes = ["algorithm.batch_size=16", "algorithm.ce_coef=0.1", "algorithm.divergence=jsd", "model.micro_batch_size=4"]
    settings = supervised_settings(task, teacher, *data, *sizes, "loop.max_steps=60", "loop.validate_every=20")
    run_job(train("distill"), task / "student", settings)
    return task / "student"


def test_a_student(student: Path) -> None:
    losses, agreement = series(student, "distillation/loss"), series(student, "distillation/agreement")
    assert losses[-1] < losses[0] / 4 and agreement[-1] > agreement[0] + 0.2


def test_on_the_students_own_samples(task: Path, student: Path) -> None:
    """They come nearer to the teacher; a teacher of another shape is refused."""
    settings = [
        *(*tiny_settings(task), "loop.max_steps=8"),
        *("algorithm.prompts_per_step=16", "algorithm.mini_batch_size=8", "algorithm.top_k=6", f"teacher.path={student / 'export'}"),
        *(f"data.validation={task / 'prompts.jsonl'}", "loop.validate_every=4"),
    ]
    whole = task / "online_distill"
    run_job(train("online_distill"), whole, settings)
    apart = [line["validation/reverse_kl"] for line in without_times(whole) if "validation/reverse_kl" in line]
    losses = series(whole, "distillation/loss")
    assert apart[1] < apart[0] and losses[-1] < losses[0] / 2
    with Job(train("online_distill"), task / "refused", [*settings, "model.architecture.num_layers=3"]) as job:
        assert "another architecture than the student's: num_layers (2, the student's is 3)" in job.finish(expected=2)
