"""A model with several end tokens and rows that are no token: through a run, its checkpoint, its export and a conversion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from training_jobs import Job, grpo_settings, read_rows, run_aligner, run_job, series, train, write_task
from transformers import LlamaConfig, LlamaForCausalLM

from aligner.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.timeout(300)

ROWS, ENDS, OF_CONFIG = 32, [2, 7, 9], [7, 2, 11]
GENERATION = '{"eos_token_id": [2, 7, 9],\n "temperature": 0.6, "do_sample": true}'  # as somebody wrote it
REWARD = """
import json
from aligner.rewards.forms import OnSamples


@OnSamples
def look(samples):
    with open({path!r}, "a") as file:
        for sample in samples:
            ended = sample.rollout.finish_reason.value == "stop"
            file.write(json.dumps([sample.rollout.response, ended, sample.response]) + "\\n")
    return [float(len(sample.response)) for sample in samples]
"""


def write_model(folder: Path, *, with_tokenizer: bool = True) -> Path:
    """A random model; its files are those of a published one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=ROWS, max_position_embeddings=32, **sizes)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": OF_CONFIG, "pad_token_id": 14, "bos_token_id": 1}))
    (folder / "generation_config.json").write_text(GENERATION)
    if with_tokenizer:
        shutil.copytree(folder.parent / "tokenizer", folder, dirs_exist_ok=True)
    return folder


def settings_of(folder: Path, model: Path, tokenizer: str, seen: Path) -> list[str]:
    (folder / "look.py").write_text(REWARD.format(path=str(seen)))
    own = [setting for setting in grpo_settings(folder) if not setting.startswith(("model.architecture", "model.tokenizer"))]
    reward = f"reward.function.path={folder / 'look.py'}:look"
    more = ["loop.max_steps=1", "loop.save_every=1", "optimizer.lr=1e-6"]
    return [*own, f"model.path={model}", f"model.tokenizer={tokenizer}", reward, *more]


def check(seen: Path) -> None:
    rows = read_rows(seen)
    every = {token for response, *_ in rows for token in response}
    assert every <= set(range(18)) and len(every) > 15  # 18 tokens
    stops = {2, 7, 9, 11}
    assert {response[-1] for response, ended, _ in rows if ended} == stops
    assert all((response[-1] in stops) == ended and not set(response[:-1]) & stops for response, ended, _ in rows)


@pytest.mark.parametrize("beside", [True, False], ids=["one-directory", "tokenizer-elsewhere"])
def test_all_ends_from_stage_to_stage(tmp_path, beside):
    write_task(tmp_path)
    model = write_model(tmp_path / "model", with_tokenizer=beside)
    tokenizer = "" if beside else str(tmp_path / "tokenizer")
    run = tmp_path / "run"
    run_job(train("grpo"), run, settings_of(tmp_path, model, tokenizer, tmp_path / "seen1"))
    check(tmp_path / "seen1")
    assert series(run, "rollout/logprob_gap_max")[0] < 1e-4  # though ids that stand for no token had a part of the probability
    converted = tmp_path / "converted"
    code, output = run_aligner("convert", "--from-megatron", run / "checkpoints" / "policy", "--to-hf", converted)
    assert code == 0, output
    for folder in (run / "export", converted):
        assert (folder / "generation_config.json").read_text() == GENERATION
        config = json.loads((folder / "config.json").read_text())
        assert (config["eos_token_id"], config["pad_token_id"], config["bos_token_id"]) == (OF_CONFIG, 14, 1)
        assert load_tokenizer(folder).end_ids == (2, 7, 9, 11)
    run_job(train("grpo"), tmp_path / "next", settings_of(tmp_path, run / "checkpoints" / "policy", "", tmp_path / "seen2"))
    check(tmp_path / "seen2")


def test_an_end_that_is_no_id_of_the_model_is_refused(tmp_path):
    write_task(tmp_path)
    model = write_model(tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 32]}')
    with Job(train("grpo"), tmp_path / "run", settings_of(tmp_path, model, "", tmp_path / "seen")) as job:
        output = job.finish(expected=2)
    assert "generation_config.json: eos_token_id is [2, 32], allowed: an id below 32 (vocab_size of config.json), a list of ids" in output


def test_a_job_that_writes_responses_leaves_every_end_out(tmp_path):
    """The end tokens 7, 9 and 11 of this model are the characters 3, 5 and 7."""
    write_task(tmp_path)
    model = write_model(tmp_path / "model")
    where = [f"model.path={model}", f"data.train={tmp_path / 'prompts.jsonl'}", "data.max_prompt_length=8"]
    run_job(train("generate"), tmp_path / "run", [*where, "rollout.sampling.max_response_length=8", "algorithm.num_samples=8"])
    records = read_rows(tmp_path / "run" / "written" / "records.jsonl")
    assert len(records) == 512 and {one["finish_reason"] for one in records} == {"stop", "length"}
    assert not any(set(one["response"]) & set("357") for one in records)
