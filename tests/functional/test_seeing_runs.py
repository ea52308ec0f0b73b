"""PPO on prompts with images, whose layers are Megatron-Core's on two tensor-parallel ranks, with a critic that sees them too."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file
from training_jobs import launcher, run_aligner, run_job, series
from vision_models import write_questions, write_seeing

pytestmark = pytest.mark.timeout(600)
STEPS = 2
SHORT = ("data.max_prompt_length=120", "rollout.sampling.max_response_length=8", "logging.tensorboard=false", "loop.table_every=0")
SIZES = ("algorithm.rollouts_per_step=8", "algorithm.mini_batch_size=4", "critic.mini_batch_size=4", "model.micro_batch_size=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-VL, four pictures, and questions on no, one and two of them."""
    folder = tmp_path_factory.mktemp("seeing")
    write_seeing("qwen3_vl", folder / "model", num_hidden_layers=3)  # behind the last one no feature would count
    write_questions(folder)
    return folder


@pytest.fixture(scope="module")
def output(folder: Path) -> str:
    model = [
        f"model.path={folder / 'model'}",
        "model.images=true",
        "model.freeze=[vision]",
        "critic.model.images=true",
        "model.dtype=float32",
    ]
    layout = ["num_processes=2", "parallel.tp=2", "parallel.sequence_parallel=true", "critic.parallel.tp=1"]
    layout += ["critic.num_processes=1", "critic.parallel.sequence_parallel=false", "optimizer.lr=1e-3", "critic.optimizer.lr=1e-3"]
    reward = ["reward.function.path=aligner.rewards.builtin:fixed_string", "+reward.function.arguments.target=a"]
    data = [f"data.train={folder / 'prompts.jsonl'}", f"loop.max_steps={STEPS}", "checkpoint.asynchronous=false"]
    return run_job(launcher("ppo"), folder / "run", [*data, *model, *layout, *reward, *SHORT, *SIZES])


def test_it_trains_and_samples_with_the_same_numbers(folder: Path, output: str) -> None:
    assert len(series(folder / "run", "policy/kl")) == STEPS
    assert max(series(folder / "run", "rollout/logprob_gap")) < 1e-4
    assert "transformers' own modules" not in output


def test_its_export_is_a_whole_model_whose_projector_has_learnt(folder: Path, output: str) -> None:
    export = folder / "run" / "export"
    before, after = (load_file(path / "model.safetensors") for path in (folder / "model", export))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert before.keys() == after.keys()
    assert {name for name in changed if "visual" in name} == {name for name in before if "merger" in name}
    transformers.AutoModelForImageTextToText.from_pretrained(export)
    assert (export / "preprocessor_config.json").exists()
    code, said = run_aligner("convert", "--from-megatron", folder / "run" / "checkpoints" / "policy", "--to-hf", folder / "converted")
    assert code == 0, said
    assert all(tensor.equal(after[name]) for name, tensor in load_file(folder / "converted" / "model.safetensors").items())


def test_a_model_without_images_refuses_the_records_and_says_how_it_would_read_them(folder: Path) -> None:
    typed = [f"model.path={folder / 'model'}", f"data.train={folder / 'prompts.jsonl'}", f"run.directory={folder / 'blind'}", *SHORT]
    code, said = run_aligner("train", "grpo", *typed, "reward.function.path=aligner.rewards.builtin:fixed_string")
    assert code == 2
    assert "its text part alone; images are read with model.images=true or model.implementation=transformers" in said
    assert "a part of the content has the type 'image', expected text" in said
