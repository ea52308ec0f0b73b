"""What a user gets wrong ends with exit code 2 and one line that names it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch.distributed as dist
from training_jobs import SAYS_77, Job, grpo_settings, launcher, ppo_settings, run_aligner

from aligner import cli
from aligner.parallel.mcore import parallel_state

pytestmark = pytest.mark.timeout(300)
GRPO, CRITIC, REWARD, SFT = ("train", "grpo"), ("serve", "critic", "ppo"), ("serve", "reward", "ppo"), ("train", "sft")
SMALL_VOCABULARY = "model.architecture.vocab_size=17"  # the tokenizer has 18
# One of every kind; unit tests have the others. Name: (command, settings on top of a good run's, what the line must say); {} is the folder
REFUSED: dict[str, tuple[tuple[str, ...], list[str], list[str]]] = {
    "no model directory": (GRPO, ["model.path={}/nothing"], ["model.path={}/nothing: no such directory"]),
    "neither model nor tokenizer": (GRPO, ["model.tokenizer="], ["model.tokenizer=''", "or give model.path"]),
    "vocabulary": (GRPO, [SMALL_VOCABULARY], ["ids up to 17", "18 tokens", "model.vocab_size is 17", "at least 18"]),
    "bad line": (GRPO, ["data.train={}/bad.jsonl"], ["bad.jsonl:2"]),
    "no data file": (GRPO, ["data.train={}/nothing.jsonl"], ["{}/nothing.jsonl"]),
    "prompts all too long": (GRPO, ["data.max_prompt_length=2"], ["prompts.jsonl"]),
    "no such reward": (GRPO, ["reward.function.path=aligner.rewards.builtin:fixed_strin"], ["did you mean 'fixed_string'"]),
    "critic's model": (CRITIC, ["critic.model.path={}/nothing"], ["{}/nothing: no such directory"]),
    "a cache without room": (GRPO, ["rollout.kv_cache_tokens=3"], ["rollout.kv_cache_tokens=3: the longest prompt has", "at least 16"]),
    "an answer that no record has": (
        GRPO,
        ["data.answer_field=answr"],
        ["data.answer_field='answr': none of the 64 records of ", "did you mean 'answer'"],
    ),
    "sft data of another kind": (SFT, ["data.train={}/prompts.jsonl", "data.max_length=16"], ["prompts.jsonl:1"]),
}


@pytest.fixture(scope="module")
def task(task: Path) -> Path:
    (task / "bad.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="\n{"prompt": "3+3="}\n')
    return task


def good(task: Path, command: tuple[str, ...]) -> list[str]:
    if command == GRPO:
        return [*grpo_settings(task), *SAYS_77]
    if command == SFT:
        drop = ("rollout.", "data.")
        return [setting for setting in grpo_settings(task) if not setting.startswith((*drop, "algorithm."))]
    return [*ppo_settings(task), "reward.function.path=aligner.rewards.builtin:length"]


def refused(jobs: list[list[str]]) -> list[tuple[object, str]]:
    """Exit code and stderr of `aligner` commands, one after another in one process (importing Megatron-Core takes seconds)."""
    found = []
    for arguments in jobs:
        stderr = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(stderr):
            try:
                code: object = cli.main(arguments)
            except SystemExit as end:
                code = end.code
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        found.append((code, stderr.getvalue()))
    return found


@pytest.fixture(scope="module")
def refusals(task: Path, on_ranks) -> dict[str, tuple[object, str]]:
    jobs = []
    for index, (command, settings, _) in enumerate(REFUSED.values()):
        given = [setting.format(task) for setting in settings]
        jobs.append([*command, *good(task, command), f"run.directory={task / f'run{index}'}", *given])
    return dict(zip(REFUSED, on_ranks(refused, 1, jobs)[0], strict=True))


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_one_line(case: str, refusals, task: Path) -> None:
    code, stderr = refusals[case]
    assert code == 2, stderr
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
