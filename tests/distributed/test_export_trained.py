"""What a model that was trained by TP2 x PP2 says, and what transformers and PEFT make of its export: the same, to 1e-4 in float32."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

JOB = Path(__file__).with_name("export_job.py")
LAYOUT = {"tp": 2, "sequence_parallel": True, "pp": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture
def trained(folder: Path, run_distributed) -> Path:
    """The job's folder; it runs once."""
    if not (folder / "tokens.pt").exists():
        torch.save(torch.randint(3, 61, (3, 16), generator=torch.Generator().manual_seed(3)), folder / "tokens.pt")
        run_distributed(JOB, 4, json.dumps(LAYOUT), folder, timeout=300)
    return folder


def same_logprobs(model, folder: Path, name: str) -> None:
    """Of all tokens of the vocabulary, behind every position."""
    expected = torch.load(folder / f"{name}.pt")
    with torch.no_grad():
        logits = model.eval()(torch.load(folder / "tokens.pt")).logits[:, :-1]
    found = logits[..., : expected.shape[-1]].log_softmax(-1)
    assert expected.std() > 0.5 and (found - expected).abs().max() < 1e-4


def loaded(path: Path, kind: str):
    import transformers

    model, report = getattr(transformers, kind).from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model


def test_a_policy(trained: Path) -> None:
    same_logprobs(loaded(trained / "policy" / "export", "AutoModelForCausalLM"), trained, "policy")


def test_a_reward_model(trained: Path) -> None:
    """Row by row: its config names no padding token."""
    model = loaded(trained / "reward" / "export", "AutoModelForSequenceClassification").eval()
    with torch.no_grad():
        logits = torch.cat([model(row[None]).logits for row in torch.load(trained / "tokens.pt")])
    scores = torch.load(trained / "reward.pt")
    assert scores.std() > 0.1 and (logits - scores).abs().max() < 1e-4


def test_merged_adapters(trained: Path) -> None:
    same_logprobs(loaded(trained / "lora" / "export", "AutoModelForCausalLM"), trained, "lora")


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_adapters_in_peft(trained: Path) -> None:
    from peft import PeftModel

    base = loaded(trained / "lora" / "base", "AutoModelForCausalLM")
    same_logprobs(PeftModel.from_pretrained(base, trained / "lora" / "adapter"), trained, "lora")
