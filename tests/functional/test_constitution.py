"""Constitutional AI on a tiny model with a judge of its own, killed with SIGKILL on the way: every file is the same in the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import load_module
from training_jobs import Job, eventually, kill, run_job, train

pytestmark = pytest.mark.timeout(600)
PRINCIPLES = [{"name": name, "critique_request": f"{name}?", "revision_request": "Mend.", "question": "Better?"} for name in ("one", "two")]


def write_tokenizer(folder: Path) -> None:
    """One token per printable character, as the unit tests have it."""
    module = load_module(Path(__file__).parents[1] / "unit" / "data" / "conftest.py", "character_tokenizer")
    module.write_tokenizer(folder, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def model_settings(folder: Path) -> list[str]:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 64}
    return [
        *(f"model.architecture.{name}={size}" for name, size in (sizes | {"max_position_embeddings": 340}).items()),
        *(f"model.tokenizer={folder / 'tokenizer'}", "model.make_vocab_divisible_by=1", "model.micro_batch_size=16"),
        *("logging.tensorboard=false", "logging.progress=plain"),
    ]


def write_judge(folder: Path) -> None:
    """A model of the same shape with other weights, in folder/judge/export."""
    (folder / "sft.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    one = ["run.seed=3", "loop.max_steps=1", "algorithm.batch_size=1", "data.max_length=40", f"data.train={folder / 'sft.jsonl'}"]
    run_job(train("sft"), folder / "judge", [*model_settings(folder), *one])


def job_settings(folder: Path) -> list[str]:
    """Random weights write random letters, of which a quarter ends a response."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"q {letter}"}) + "\n" for letter in "abcdefghijkl"))
    (folder / "constitution.json").write_text(json.dumps({"principles": PRINCIPLES}))
    stops = ",".join(map(str, range(30, 55)))
    return [
        *(*model_settings(folder), f"judge.path={folder / 'judge' / 'export'}"),
        *(f"data.train={folder / 'prompts.jsonl'}", f"data.constitution={folder / 'constitution.json'}"),
        *("data.max_prompt_length=40", "data.max_history_length=300", "rollout.sampling.max_response_length=30"),
        *(f"rollout.sampling.stop_token_ids=[{stops}]", "algorithm.pairs=sampled", "algorithm.part_size=3"),
    ]


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted((run / "written").rglob("*.json*"))}


def test_killed_on_the_way(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    write_judge(tmp_path)
    whole, killed, common = tmp_path / "whole", tmp_path / "killed", job_settings(tmp_path)
    command = train("constitution")
    output = run_job(command, whole, common)
    with Job(command, killed, common) as job:
        second = killed / "written" / "parts" / "part_000001.jsonl"
        assert eventually(lambda: second.exists() or job.process.poll() is not None, 120), job.output()
        for pid in job.processes():
            kill(pid)
        job.process.wait()
    assert not (killed / "written" / "records.jsonl").exists()
    assert "resumed after step" in run_job(command, killed, common)
    assert written(killed) == written(whole)

    supervised, pairs = (records(whole / "written" / name) for name in ("records.jsonl", "preferences.jsonl"))
    report = json.loads((whole / "written" / "report.json").read_text())
    assert report["records"] == {"traces.jsonl": 12, "records.jsonl": len(supervised), "preferences.jsonl": len(pairs)}
    assert 0 < len(supervised) < 12 and 0 < len(pairs) < 12 and f"{len(pairs)} preferences.jsonl" in output
    assert sum(count for name, count in report["not used"].items() if "comparison" not in name) == 12 - len(supervised)
    assert {name for record in supervised for name in record["principles"]} == {"one", "two"}
    assert all(0.5 < record["probability"] < 1 and record["chosen"] != record["rejected"] for record in pairs)
