"""Regression and process reward models: whole runs, resumed to the last bit, exported; and one that serves GRPO."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from resumed_runs import kill_after, same_runs
from training_jobs import Job, grpo_settings, launcher, run_job, steps_of, tiny_settings, train, without_times

pytestmark = pytest.mark.timeout(600)
ATTRIBUTES = "data.attributes=[sum,digits]"
NUM_STEPS = 14


@pytest.fixture(scope="module")
def task(task: Path) -> Path:
    sums = [(a, b) for a in range(8) for b in range(8)]
    labelled = [{"prompt": f"{a}+{b}=", "response": str(a + b), "label": [(a + b) / 7, -100 if b % 2 else a / 7]} for a, b in sums]
    stepped = [{"prompt": f"{a}+{b}=", "steps": [str(a + b), str(a)], "labels": [1, (a + b) % 2]} for a, b in sums]
    for name, records in (("regression", labelled), ("process", stepped)):
        (task / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return task


def settings(task: Path, kind: str) -> list[str]:
    drop = ("data.", "rollout.", "model.micro_batch_size=")
    data = task / f"{kind}.jsonl"
    return [
        *(setting for setting in tiny_settings(task) if not setting.startswith(drop)),
        *(f"data.train={data}", f"data.validation={data}", "data.max_length=16", "loop.validate_every=2"),
        *("algorithm.batch_size=24", "model.micro_batch_size=8"),  # of 64: step 3 straddles epochs
        *((ATTRIBUTES, "algorithm.pooling=mean") if kind == "regression" else ('data.step_separator="="',)),
    ]


@pytest.fixture(scope="module")
def runs(task: Path) -> dict[str, Path]:
    """The directories of runs of both kinds that were killed with SIGKILL and resumed, found equal to runs that were not."""
    return {kind: killed_on_the_way(task, kind) for kind in ("regression", "process")}


def killed_on_the_way(task: Path, kind: str) -> Path:
    whole, killed, program = task / f"{kind}_whole", task / f"{kind}_killed", train(f"{kind}_reward_model")
    given = [*settings(task, kind), f"loop.max_steps={NUM_STEPS}", "loop.save_every=3"]
    run_job(program, whole, given)
    with Job(program, killed, given) as job:
        kill_after(job, 4)
    output = run_job(program, killed, given)
    assert "resumed after step" in output and steps_of(killed) == list(range(1, NUM_STEPS + 1))
    assert "64 rows of" in output and "% padding" in output
    same_runs(killed, whole, NUM_STEPS, components=["reward_model"])
    return killed


def test_what_they_report_and_export(runs: dict[str, Path]) -> None:
    """transformers scores with what was exported."""
    from transformers import AutoModelForTokenClassification

    last = without_times(runs["regression"])[-1]
    assert {"validation/mse", "validation/mse_sum", "validation/correlation_digits", "reward/mse_sum"} < set(last)
    assert {"validation/accuracy", "validation/first_error_accuracy"} < set(without_times(runs["process"])[-1])
    for kind, names in (("regression", ["sum", "digits"]), ("process", ["step"])):
        model, report = AutoModelForTokenClassification.from_pretrained(runs[kind] / "export", output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert list(model.config.id2label.values()) == names and model.config.pad_token_id == 0


@torch.no_grad()
def test_a_model_of_several_attributes_serves_grpo(runs: dict[str, Path], task: Path) -> None:
    """The reward is the weighted sum of its outputs: the mean over tokens of what transformers gives for the exported model."""
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    given = [
        *grpo_settings(task),
        *("reward.serve=true", f"reward.model.path={runs['regression'] / 'checkpoints' / 'reward_model'}"),
        *("reward.attribute_weights=[2.0,-0.5]", "loop.max_steps=1", "loop.table_every=1", "run.export_hf=false"),
        "rollout.sampling.max_response_length=1",  # so that the table tells what was sampled
    ]
    run_job(launcher("grpo"), task / "grpo", given)
    model = AutoModelForTokenClassification.from_pretrained(runs["regression"] / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(runs["regression"] / "export")
    rows = [json.loads(line) for line in (task / "grpo" / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["response"] or row["finish_reason"] == "stop"]
    assert len(rows) >= 2
    for row in rows:
        tokens = tokenizer.encode(row["prompt"] + row["response"], add_special_tokens=False)
        tokens = [tokenizer.bos_token_id, *tokens, *[tokenizer.eos_token_id] * (not row["response"])]
        scores = model(torch.tensor([tokens])).logits[0].mean(dim=0)
        assert row["reward"] == pytest.approx((2.0 * scores[0] - 0.5 * scores[1]).item(), abs=1e-4)
