"""A teacher writes its log-probs and a student learns from them: both killed with SIGKILL on the way, with the same end to the last bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from resumed_runs import kill_after, kill_when, same_runs
from training_jobs import Job, launcher, run_job, series, steps_of, tiny_settings, train, without_times

from aligner.models.checkpoint.files import WRITING

pytestmark = pytest.mark.timeout(600)
TEACH, LEARN = train("teacher_logprobs"), train("distill")


def model_settings(folder: Path) -> list[str]:
    replaced = ("data.", "rollout.", "model.micro_batch_size=")
    return [one for one in tiny_settings(folder) if not one.startswith(replaced)] + ["model.micro_batch_size=4"]


@pytest.fixture(scope="module")
def task(task: Path) -> Path:
    """`sft.jsonl` with 60 sums, and `sft/export`, a model that has seen them."""
    records = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(10) for b in range(6)]
    (task / "sft.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = [*model_settings(task), f"data.train={task / 'sft.jsonl'}", "data.max_length=16"]
    run_job(train("sft"), task / "sft", [*settings, "algorithm.batch_size=20", "loop.max_steps=40"])
    return task


def teacher_settings(task: Path) -> list[str]:
    data = [f"data.train={task / 'sft.jsonl'}", f"data.validation={task / 'sft.jsonl'}", "data.max_length=16"]
    sizes = ["algorithm.top_k=5", "algorithm.shard_size=7", "algorithm.batch_size=4", "model.make_vocab_divisible_by=2"]
    return [f"model.path={task / 'sft' / 'export'}", *data, *sizes, "logging.tensorboard=false", "logging.progress=plain"]


def shards(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted((run / "teacher").rglob("*.safetensors"))}


@pytest.fixture(scope="module")
def teacher(task: Path) -> Path:
    """The run whose files are learnt from; it was killed between files and, for all that is seen of that, while it wrote one. Another that
    was not has the same files."""
    whole, killed = task / "teacher_whole", task / "teacher_killed"
    run_job(launcher("teacher_logprobs"), whole, teacher_settings(task))
    with Job(TEACH, killed, teacher_settings(task)) as job:
        kill_when(job, lambda: len(shards(killed)) >= 2)
    before = shards(killed)
    assert 2 <= len(before) < 18
    half = before["teacher/train/shard_000000.safetensors"][:-50]
    (killed / "teacher" / "train" / f".shard_{len(before):06d}.safetensors.new").write_bytes(half)
    output = run_job(TEACH, killed, teacher_settings(task))
    assert f"resumed after step {len(before)}" in output
    assert shards(killed) == shards(whole) and len(shards(whole)) == 18  # 60 examples in files of 7, twice
    return killed


def student_settings(task: Path, teacher: Path) -> list[str]:
    data = [f"data.{name}={teacher / 'teacher' / name}" for name in ("train", "validation")]
    sizes = ["algorithm.batch_size=16", "algorithm.ce_coef=0.1", "algorithm.divergence=jsd", "data.max_length=16"]
    return [*model_settings(task), *data, *sizes, "loop.max_steps=60", "loop.save_every=10", "loop.validate_every=20"]


@pytest.fixture(scope="module")
def student(task: Path, teacher: Path) -> Path:
    """A run that nothing disturbed."""
    run_job(LEARN, task / "student", student_settings(task, teacher))
    return task / "student"


def test_a_student_that_is_killed(task: Path, teacher: Path, student: Path) -> None:
    whole, killed, settings = student, task / "killed", student_settings(task, teacher)
    with Job(LEARN, killed, [*settings, "loop.save_every=1"]) as job:  # while it saves
        kill_when(job, lambda: 12 in steps_of(killed) and list((killed / "checkpoints" / "policy").glob(f"{WRITING}*")))
    with Job(LEARN, killed, settings) as job:
        kill_after(job, 29)
    assert "resumed after step" in run_job(LEARN, killed, settings)
    same_runs(killed, whole, 60)
    losses, agreement = series(whole, "distillation/loss"), series(whole, "distillation/agreement")
    assert losses[-1] < losses[0] / 4 and agreement[-1] > agreement[0] + 0.2


def test_on_the_students_own_samples(task: Path, student: Path) -> None:
    """In two parts as in one, and nearer to the teacher; a teacher of another shape is refused."""
    settings = [
        *tiny_settings(task),
        *("algorithm.prompts_per_step=16", "algorithm.mini_batch_size=8", "algorithm.top_k=6", f"teacher.path={student / 'export'}"),
        *(f"data.validation={task / 'prompts.jsonl'}", "loop.validate_every=4"),
    ]
    whole, parts, program = task / "online_whole", task / "online_parts", train("online_distill")
    run_job(program, whole, [*settings, "loop.max_steps=8"])
    run_job(program, parts, [*settings, "loop.max_steps=3"])
    assert "resumed after step 3" in run_job(program, parts, [*settings, "loop.max_steps=8"])
    same_runs(parts, whole, 8)
    apart = [line["validation/reverse_kl"] for line in without_times(whole) if "validation/reverse_kl" in line]
    losses = series(whole, "distillation/loss")
    assert apart[1] < apart[0] and losses[-1] < losses[0] / 2
    with Job(program, task / "refused", [*settings, "model.architecture.num_layers=3"]) as job:
        assert "another architecture than the student's: num_layers (2, the student's is 3)" in job.finish(expected=2)
