"""What a user gets wrong ends with exit code 2 and one line that names it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from preloaded import preloaded
from safetensors.torch import save
from training_jobs import ROOT, SAYS_77, Job, grpo_settings, launcher, ppo_settings, run_aligner

from aligner.models.config import Architecture
from aligner.models.families import architecture_to_hf, weight_names
from aligner.models.families.mapping import EMBEDDING

pytestmark = pytest.mark.timeout(300)
GRPO, CRITIC, REWARD, SFT = ("train", "grpo"), ("serve", "critic", "ppo"), ("serve", "reward", "ppo"), ("train", "sft")
SMALL_VOCABULARY = "model.architecture.vocab_size=17"  # the tokenizer has 18
# name: (command, settings on top of a good run's, what the line must say); {} is the task's folder
REFUSED: dict[str, tuple[tuple[str, ...], list[str], list[str]]] = {
    "no model directory": (GRPO, ["model.path={}/nothing"], ["model.path={}/nothing: no such directory"]),
    "a directory that holds no model": (GRPO, ["model.path={}"], ["model.path={}: neither a Hugging Face model", "nor a checkpoint"]),
    "neither model nor tokenizer": (GRPO, ["model.tokenizer="], ["model.tokenizer=''", "or give model.path"]),
    "vocabulary": (GRPO, [SMALL_VOCABULARY], ["ids up to 17", "18 tokens", "model.vocab_size is 17", "at least 18"]),
    "bad line": (GRPO, ["data.train={}/bad.jsonl"], ["bad.jsonl:2"]),
    "not a number": (GRPO, ["algorithm.kl_coef=nan"], ["algorithm.kl_coef=nan: must be a finite number"]),
    "a learning rate without bound": (GRPO, ["optimizer.lr=inf"], ["optimizer.lr=inf: must be a finite number"]),
    "a seed of 70 bits": (GRPO, [f"run.seed={2**70}"], [f"run.seed={2**70}: must be a number of 64 bits"]),
    "no data file": (GRPO, ["data.train={}/nothing.jsonl"], ["{}/nothing.jsonl"]),
    "prompts all too long": (GRPO, ["data.max_prompt_length=2"], ["prompts.jsonl"]),
    "longer than the context": (
        GRPO,
        ["rollout.sampling.max_response_length=25"],
        ["data.max_prompt_length=8 + rollout.sampling.max_response_length=25: longer than the model's context of 32 tokens"],
    ),
    "ranks": (GRPO, ["parallel.tp=2"], ["parallel.tp=2 does not divide the 1 ranks of this component"]),
    "no reward": (GRPO, ["reward.function.path=", "~reward.function.arguments.target"], ["reward.function.path=''"]),
    "no such reward": (GRPO, ["reward.function.path=aligner.rewards.builtin:fixed_strin"], ["did you mean 'fixed_string'"]),
    "critic's context": (
        CRITIC,
        ["rollout.sampling.max_response_length=25"],
        ["max_response_length=25: longer than the model's context of 32"],
    ),
    "critic's model": (CRITIC, ["critic.model.path={}/nothing"], ["{}/nothing: no such directory"]),
    "no reward model": (REWARD, ["reward.function.path="], ["reward.model.path=''"]),
    "a cache without room": (GRPO, ["rollout.kv_cache_tokens=3"], ["rollout.kv_cache_tokens=3: the longest prompt has", "at least 16"]),
    "replay without experts": (
        GRPO,
        ["rollout.routing_replay=replay"],
        ["rollout.routing_replay=replay: the model has no experts; allowed: none"],
    ),
    "a Git LFS pointer": (GRPO, ["model.path={}/pointer", "model.seq_length=32"], ["{}/pointer/model.safetensors is a Git LFS pointer"]),
    "a missing tensor": (GRPO, ["model.path={}/small", "model.seq_length=32"], ["{}/small: no tensor named model.layers.0."]),
    "an unknown scaling of positions": (GRPO, ["model.path={}/ntk"], ['{}/ntk/config.json: rope_scaling.rope_type="ntk" is not supported']),
    "a run directory below a file": (GRPO, ["run.directory={}/bad.jsonl/run"], ["{}/bad.jsonl exists and is not a directory"]),
    "a weight of nothing": (
        SFT,
        ["data.train=[{{path: {}/prompts.jsonl, weight: 0}}]", "data.max_length=16"],
        ["data.train[0].weight is 0, allowed: a number above 0"],
    ),
    "more steps than the sources last": (
        GRPO,
        ["data.train=[{{path: {}/prompts.jsonl, max_epochs: 0.5}}]", "loop.max_steps=3"],
        ["data.train: every source reaches its max_epochs after 32 examples, that is 2 steps of 16"],
    ),
    "a validation of nothing": (
        SFT,
        ["data.train={}/prompts.jsonl", "loop.validate_every=2"],
        ["loop.validate_every=2: there is nothing to validate on; allowed: data."],
    ),
    "a validation of no prompts": (GRPO, ["data.validation=''", "loop.validate_every=2"], ["loop.validate_every=2: there is nothing to"]),
    "an answer that no record has": (
        GRPO,
        ["data.answer_field=answr"],
        ["data.answer_field='answr': none of the 64 records of ", "did you mean 'answer'"],
    ),
    "sft data of another kind": (SFT, ["data.train={}/prompts.jsonl", "data.max_length=16"], ["prompts.jsonl:1"]),
}


@pytest.fixture(scope="module")
def task(task: Path) -> Path:
    plain = Architecture(num_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, ffn_hidden_size=64, vocab_size=18)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    small = save({name: torch.zeros(18, 32) for name in weight_names(plain).find(EMBEDDING).hf_names})
    ntk = {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}
    for name, weights, change in (("pointer", pointer, {}), ("small", small, {}), ("ntk", small, ntk)):
        shutil.copytree(task / "tokenizer", task / name)
        (task / name / "config.json").write_text(json.dumps(architecture_to_hf(plain) | change))
        (task / name / "model.safetensors").write_bytes(weights)
    (task / "bad.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="\n{"prompt": "3+3="}\n')
    return task


def good(task: Path, command: tuple[str, ...]) -> list[str]:
    """Settings with which the command would run."""
    if command == GRPO:
        return [*grpo_settings(task), *SAYS_77]
    if command == SFT:
        drop = ("rollout.", "data.")
        return [setting for setting in grpo_settings(task) if not setting.startswith((*drop, "algorithm."))]
    return [*ppo_settings(task), "reward.function.path=aligner.rewards.builtin:length"]


@pytest.fixture(scope="module")
def refusals(task: Path) -> dict[str, dict[str, object]]:
    """Exit code and stderr of every case."""
    jobs = []
    for index, (command, settings, _) in enumerate(REFUSED.values()):
        given = [setting.format(task) for setting in settings]
        removed = [setting.removeprefix("~") for setting in given if setting.startswith("~")]
        base = [setting for setting in good(task, command) if not any(setting.lstrip("+").startswith(key) for key in removed)]
        given = [setting for setting in given if not setting.startswith("~")]
        jobs.append([*command, *base, f"run.directory={task / f'run{index}'}", *given])
    (task / "jobs.json").write_text(json.dumps(jobs))
    program = [str(Path(__file__).parent / "refused_jobs.py"), str(task / "jobs.json"), str(task / "results.json")]
    code, output = preloaded().run(program, {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, ROOT, timeout=250)
    assert code == 0, output[-3000:]
    return dict(zip(REFUSED, json.loads((task / "results.json").read_text()), strict=True))


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_one_line(case: str, refusals, task: Path) -> None:
    stderr = refusals[case]["stderr"]
    assert refusals[case]["code"] == 2, stderr
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, stderr
    for text in REFUSED[case][2]:
        assert text.format(task) in stderr  # a bad data file has a line for each bad record


def test_a_misspelt_key_as_a_user_types_it() -> None:
    refused = "error: unknown setting algorithm.group_sise in '++algorithm.group_sise=4': did you mean algorithm.group_size?\n"
    assert run_aligner(*GRPO, "++algorithm.group_sise=4") == (2, refused)


def test_three_way_tensor_parallelism_of_two_ranks(task: Path) -> None:
    given = [*good(task, GRPO), "parallel.tp=3", "num_processes=2", f"run.directory={task / 'tp3'}"]
    refused = "error: parallel.tp=3 does not divide the 2 ranks of this component; allowed: 1, 2\n"
    assert run_aligner("launch", "local", "grpo", *given) == (2, refused)
    assert not (task / "tp3").exists()  # nothing was started


def test_heads_that_cannot_be_split_end_every_rank(task: Path) -> None:
    sizes = ("num_attention_heads=3", "num_key_value_heads=3", "hidden_size=48")
    odd = [f"model.architecture.{size}" for size in sizes]
    with Job(launcher("grpo"), task / "heads", [*good(task, GRPO), *odd, "parallel.tp=2", "num_processes=2"]) as job:
        output = job.finish(2)
    assert "error: parallel.tp=2: does not divide the model's num_attention_heads=3" in output
    assert "FAILED: component actor" in output
