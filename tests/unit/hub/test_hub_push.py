"""Exports on the Hub: one commit of a model's files and a card, whose contents are what the run recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from aligner.algorithms.registry import composed
from aligner.commands.model_card import model_card, origin_of
from aligner.errors import AlignerError, ConfigError
from aligner.hub.download import prepare, push
from aligner.settings.compose import to_yaml

COMMIT = "0123456789" * 4
FILES = {"config.json": b'{"architectures": ["LlamaForCausalLM"]}', "model.safetensors": b"w" * 900, "chat_template.jinja": b"{{ x }}"}


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """The export of a run of DPO that has been validated, with a file that is none of the model's."""
    run = tmp_path / "run"
    (run / "export").mkdir(parents=True)
    for name, data in FILES.items():
        (run / "export" / name).write_bytes(data)
    (run / "export" / "optimizer.pt").write_bytes(b"a pickle")
    given = [f"model.path=base/model@{COMMIT}", f"data.train=org/pairs@{COMMIT}:train", "data.validation=/secret/place/held_out.jsonl"]
    given += ["algorithm.beta=0.3", "model.lora.rank=4", "slurm.account=secret", f"run.directory={run}"]
    (run / "config.yaml").write_text(to_yaml(composed("dpo", given)))
    steps = [{"step": step, "time": 100.0 + step, "dpo/accuracy": 0.5 + step / 10, "validation/accuracy": 0.25 * step} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return run / "export"


def test_the_card_says_what_the_run_recorded(export):
    card = model_card("aligned", export, origin_of(export))
    _, metadata, page = card.split("---\n", 2)
    assert yaml.safe_load(metadata) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["aligner", "dpo"],
        "base_model": "base/model",
        "base_model_relation": "finetune",
        "datasets": ["org/pairs"],
    }
    assert "A language model, trained with the recipe `dpo` for 2 steps" in page
    assert f"[base/model](https://huggingface.co/base/model), revision `{COMMIT}`" in page
    assert "- training: [org/pairs](https://huggingface.co/datasets/org/pairs), revision" in page
    assert "- validation: `held_out.jsonl` (a local path)" in page
    assert "\nalgorithm.beta=0.3\n" in page and "\nmodel.lora.rank=4\n" in page
    assert "steps 1 to 2 in 1.0 s" in page and "after step 2:" in page and "| accuracy | 0.5 |" in page
    assert "secret" not in card and str(export) not in card  # hosts, accounts and directories are nobody's business


def test_the_card_of_a_checkpoint_ends_at_its_step(export):
    step = export.parent / "checkpoints" / "policy" / "step_000001"
    step.mkdir(parents=True)
    (step / "config.yaml").write_text((export.parent / "config.yaml").read_text())
    (step / "state.json").write_text('{"step": 1}')
    card = model_card("aligned", export, origin_of(step))
    assert "for 1 steps" in card and "| accuracy | 0.25 |" in card


def test_the_card_of_a_model_of_which_nothing_is_known(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    card = model_card("scorer", tmp_path, origin_of(tmp_path))
    assert "pipeline_tag: text-classification" in card and "- reward-model\n" in card and "## " not in card


def test_an_export_becomes_one_commit(hub, export, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    name = prepare("org/aligned")
    assert hub.repositories["models/org/aligned"].private
    address = push(export, name, card="# Card\n", message="Upload")
    assert hub.files("org/aligned") == {**FILES, "README.md": b"# Card\n"} and address.startswith(f"{hub.url}/org/aligned/commit/")
    assert hub.repositories["models/org/aligned"].messages == ["Upload"] and len(hub.stored) == 1  # the weights: large file storage
    (export / "README.md").write_text("# Mine\n")
    push(export, prepare("org/aligned"), card="# Card\n", message="Again")  # the repository is there by now
    assert hub.files("org/aligned")["README.md"] == b"# Mine\n"


def test_what_a_push_needs_is_said_before_the_work(hub, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "taken").mkdir(parents=True)
    for text, message in {"name": "is not a valid repository name; allowed: ORG/NAME", "org/taken": "there is a file or directory"}.items():
        with pytest.raises(ConfigError, match=f"^--push-to-hub {text}: .*{message}"):
            prepare(text)
    with pytest.raises(ConfigError, match="a push goes to the main branch"):
        prepare("org/name@v1")
    with pytest.raises(ConfigError, match="no token is set: set HF_TOKEN to one that may write"):
        prepare("org/name")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(ConfigError, match=r"^--push-to-hub org/name: .* refuses the token \(401\)"):
        prepare("org/name")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    hub.status = 500
    with pytest.raises(AlignerError, match="answered 500"):
        prepare("org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids it"):
        prepare("org/name")
