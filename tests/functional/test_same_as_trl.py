"""The same experiment in TRL and here: `trl sft`, `trl dpo` and `trl grpo` with a config, and what `aligner migrate` makes of that config.

The first step takes every record, so the order in which the two sides draw them does not matter. For GRPO the same responses are given to
both: those that TRL sampled, which its reward function writes down.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file
from training_jobs import ROOT, run_job, series, train

from aligner.commands.migrate.command import migrate
from aligner.commands.parts import MigrateOptions

TRL = Path(os.environ.get("TRL_PYTHON", ROOT / ".venv-trl" / "bin" / "python"))
pytestmark = [
    pytest.mark.shared,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not TRL.is_file(), reason=f"there is no {TRL}: python benchmarks/trl_environment.py makes TRL's environment"),
]
PROMPT = "Once upon a time,"
CHOSEN = ["Lily had a red ball.", "Tom saw a big dog in the park.", "The cat sat on a mat.", "One day, a bird found a stone.", "A frog."]
REJECTED = ["a dog", "Red red red the the.", "He was sad. He did not like the stone at all.", "No.", "The moon was cold and far away."]
SETTINGS = {
    "learning_rate": 1e-4,
    "per_device_train_batch_size": 5,
    "max_steps": 1,
    "logging_steps": 1,
    "save_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": "none",
}
REWARD = '''import json
import os


def vowels(prompts, completions, completion_ids, **columns):
    """Per character; writes down what was sampled."""
    if path := os.environ.get("SAMPLED"):
        with open(path, "a") as file:
            file.writelines(json.dumps({"prompt": prompt, "ids": list(ids)}) + "\\n" for prompt, ids in zip(prompts, completion_ids))
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]
'''
TOLERANCE = 1e-4


def first_step_of_trl(what: str, settings: dict, folder: Path, **environment: str) -> tuple[float, float]:
    """Loss and gradient norm of `trl <what> --config`."""
    out = folder / "trl"
    (folder / "trl.yaml").write_text(yaml.safe_dump(settings | {"output_dir": str(out)}))
    variables = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    command = [str(TRL.with_name("trl")), what, "--config", str(folder / "trl.yaml")]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (logged, *_) = json.loads((out / "checkpoint-1" / "trainer_state.json").read_text())["log_history"]
    return logged["loss"], logged["grad_norm"]


def first_step_here(what: str, loss: str, folder: Path, command: tuple[str, ...], **environment: str) -> tuple[float, float]:
    """The same of what `aligner migrate` writes for the file that TRL read."""
    given = [str(folder / "trl.yaml")]
    assert migrate(given, MigrateOptions(trains=what, ranks=1, examples=5, output=folder / "mine.yaml")) == 0
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        run_job(command, folder / "run", ["--config-dir", str(folder), "--config-name", "mine", "run.export_hf=false"])
    return series(folder / "run", loss)[0], series(folder / "run", "optim/grad_norm")[0]


def records(folder: Path, *of: dict[str, str]) -> str:
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in of))
    return str(folder / "data")


def test_sft(tmp_path: Path, shared_data: Path) -> None:
    data = records(tmp_path, *({"prompt": PROMPT, "completion": f" {text}"} for text in CHOSEN))
    settings = SETTINGS | {"model_name_or_path": str(shared_data / "stories260k"), "dataset_name": data, "max_length": 64}
    theirs = first_step_of_trl("sft", settings, tmp_path)
    assert first_step_here("sft", "sft/loss", tmp_path, train("sft")) == pytest.approx(theirs, rel=TOLERANCE)
    assert theirs[0] > 1 and theirs[1] > 1


def test_dpo(tmp_path: Path, shared_data: Path) -> None:
    pairs = zip(CHOSEN, REJECTED, strict=True)
    data = records(tmp_path, *({"prompt": PROMPT, "chosen": f" {one}", "rejected": f" {other}"} for one, other in pairs))
    settings = SETTINGS | {"model_name_or_path": str(shared_data / "stories260k"), "dataset_name": data, "max_length": 64, "beta": 0.3}
    theirs = first_step_of_trl("dpo", settings, tmp_path)
    assert first_step_here("dpo", "preference/loss", tmp_path, train("dpo")) == pytest.approx(theirs, rel=TOLERANCE)
    assert theirs[1] > 1


def test_grpo(tmp_path: Path, shared_data: Path) -> None:
    """The model's end token is made as likely as a full stop: responses differ in length, so the loss, a mean over tokens, is not 0."""
    model = tmp_path / "model"
    shutil.copytree(shared_data / "stories260k", model)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][2] = weights["model.embed_tokens.weight"][426]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "my_rewards.py").write_text(REWARD)
    data = records(tmp_path, *({"prompt": prompt} for prompt in (PROMPT, "Lily had a", "The dog", "One day, Tom", "The sun")))
    settings = SETTINGS | {
        "model_name_or_path": str(model),
        "dataset_name": data,
        "reward_funcs": ["my_rewards.vowels"],
        "num_generations": 4,
        "gradient_accumulation_steps": 4,
        "max_completion_length": 24,
        "beta": 0.04,
    }
    sampled = str(tmp_path / "sampled.jsonl")
    theirs = first_step_of_trl("grpo", settings, tmp_path, SAMPLED=sampled, PYTHONPATH=str(tmp_path))
    replaying = (sys.executable, "-u", str(Path(__file__).with_name("replaying_grpo.py")))
    ours = first_step_here("grpo", "policy/loss", tmp_path, replaying, REPLAYED=sampled, MODEL=str(model))
    assert ours == pytest.approx(theirs, rel=TOLERANCE)
    assert abs(theirs[0]) > 1e-3 and theirs[1] > 0.1
