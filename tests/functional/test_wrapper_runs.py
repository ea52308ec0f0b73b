"""A run from the files of a model of images and text exports all of that model, and so does one from its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_jobs import run_job, train, write_rows, write_task
from wrapped_models import write_wrapped


@pytest.mark.timeout(300)
def test_exports_have_every_part_and_file_of_the_model(tmp_path: Path) -> None:
    write_task(tmp_path)
    model = tmp_path / "model"
    write_wrapped("smolvlm", model)
    for file in (tmp_path / "tokenizer").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "LICENSE").write_text("as the base model's\n")
    write_rows(tmp_path / "pairs.jsonl", ({"prompt": f"{a}+1=", "response": str(a + 1)} for a in range(8)))
    data = [f"data.train={tmp_path / 'pairs.jsonl'}", "data.max_length=16", "algorithm.batch_size=8", "loop.max_steps=1"]
    for run, start in (("first", model), ("second", tmp_path / "first" / "checkpoints" / "policy")):
        said = run_job(train("sft"), tmp_path / run, [*data, f"model.path={start}", "logging.tensorboard=false"])
        assert ("are of images: not trained, and unchanged in exports" in said) is (start == model)
        export = tmp_path / run / "export"
        before, after = (load_file(path / "model.safetensors") for path in (model, export))
        same = {name for name in before if torch.equal(before[name], after[name])}
        assert before.keys() == after.keys() and same == {name for name in before if "vision" in name or "connector" in name}
        assert json.loads((export / "config.json").read_text())["model_type"] == "smolvlm"
        assert all((export / name).read_bytes() == (model / name).read_bytes() for name in ("preprocessor_config.json", "LICENSE"))
