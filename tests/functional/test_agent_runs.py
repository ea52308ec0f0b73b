"""Runs on the episodes of a program of 30 lines that asks the policy over HTTP, as a user has it: it learns; it samples what the same
environment samples in process; and runs go on after a kill."""

from __future__ import annotations

import base64
import sys
from pathlib import Path

import pytest
from tiers import cases
from training_jobs import (
    PLAIN_SERVERS,
    Job,
    grpo_settings,
    kill,
    launcher,
    metrics_of,
    ppo_settings,
    run_job,
    series,
    tiny_settings,
    train,
    without_times,
    write_rows,
)
from vision_models import write_seeing
from vision_rows import encoded

pytestmark = pytest.mark.timeout(900)
AGENT = """
import json, os, sys, urllib.request

def post(path, **body):
    request = urllib.request.Request(os.environ["ALIGNER_BASE_URL"] + path, json.dumps(body).encode())
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    return json.load(urllib.request.urlopen(request))

def tokens(text, begins=False):
    return post("/tokenize", prompt=text, add_special_tokens=begins)["tokens"]

task = json.load(sys.stdin)
start = ids = tokens(task["prompt"], begins=True)
reward, turns = 0.0, 0
while turns < 3:
    room = ROOM - (len(ids) - len(start))
    asked = {"max_tokens": room, "stop": ["="], "temperature": 0.7, "return_token_ids": True}
    choice = post("/v1/completions", model=os.environ["OPENAI_MODEL"], prompt=ids, **asked)["choices"][0]
    turns += 1
    reward += choice["text"].count("7") / 4
    heard = tokens(str(choice["text"].count("7")) + " ")
    ids = ids + choice["token_ids"] + heard
    if choice["stop_reason"] != "=" or len(ids) - len(start) >= ROOM:  # it has ended, or reached its limit
        break
print("ended after", turns)
print(json.dumps({"reward": reward, "counts": {"sevens": reward * 4}}))
"""
IN_PROCESS = """
from aligner.environments.environment import Observation


class Sevens:
    def reset(self, prompt):
        return None

    def step(self, state, turn):
        sevens, done = turn.text.count("7"), not turn.text.endswith("=") or turn.number == 3
        return Observation(text=str(sevens), done=done, reward=sevens / 4, counts={"sevens": float(sevens)})
"""
ROOM = 14


def settings_of(folder: Path, *more: str) -> list[str]:
    """4 prompts with 4 sessions each, one update a step."""
    sizes = ("algorithm.prompts_per_step=4", "algorithm.group_size=4", "algorithm.mini_batch_size=16", "algorithm.kl_coef=0")
    lengths = (f"rollout.sampling.max_response_length={ROOM}", "loop.table_every=0", "run.export_hf=false")
    return [*grpo_settings(folder), *sizes, *lengths, *more]


def agent(folder: Path, text: str = AGENT, name: str = "agent.py") -> list[str]:
    path = folder / name
    path.write_text(text.replace("ROOM", str(ROOM)))
    return ["environment.kind=command", f"environment.command=[{sys.executable},-S,{path}]", "environment.num_workers=4"]


def test_a_program_learns_what_its_environment_in_process_learns(task: Path) -> None:
    """The same tokens, log-probs, rewards and updates, step by step; from whatever temperature the program asks for."""
    (task / "sevens.py").write_text(IN_PROCESS)
    inside = [f"environment.path={task / 'sevens.py'}:Sevens", "environment.form=plain", 'environment.suffix=" "']
    inside += ["environment.max_turns=3", 'rollout.sampling.stop_strings=["="]']
    validated = [f"data.validation={task / 'prompts.jsonl'}", "data.num_validation_prompts=4", "loop.validate_every=3", "loop.max_steps=3"]
    run_job(train("grpo"), task / "inside", settings_of(task, *inside, *validated))
    output = run_job(train("grpo"), task / "outside", settings_of(task, *agent(task), *validated))
    assert "the policy answers at http://127.0.0.1:" in output
    found, wanted = without_times(task / "outside"), without_times(task / "inside")
    for mine, other in zip(found, wanted, strict=True):
        for name in ("truncated_fraction", "reward_ended", "reward_truncated"):  # an agent may end where an environment is cut
            mine.pop(f"rollout/{name}", None), other.pop(f"rollout/{name}", None)
        assert {name: mine[name] for name in other} == pytest.approx(other, rel=1e-3, abs=1e-5, nan_ok=True)
        assert {name.removeprefix("rollout/") for name in mine.keys() - other.keys()} == {
            *("sessions_branches", "sessions_calls", "sessions_failed", "sessions_late", "sessions_retries", "sessions_tokens_changed")
        }
    assert series(task / "outside", "rollout/sessions_calls") == series(task / "outside", "rollout/turns")
    assert max(series(task / "outside", "rollout/turns")) > 1.05 and "validation/reward" in found[-1]
    assert max(series(task / "outside", "rollout/logprob_gap")) < 1e-4


SLOW = AGENT.replace("while turns", "import time\nwhile turns").replace("    turns += 1", "    turns += 1; time.sleep(0.5)")
BRANCHING = AGENT.replace('+ choice["token_ids"] +', '+ choice["token_ids"][1:] +')


def test_branches_failures_and_functions(task: Path) -> None:
    """Its history lacks a token of each turn; sessions of some tasks fail; the reward is a function's."""
    text = BRANCHING.replace(
        "task = json.load(sys.stdin)", 'task = json.load(sys.stdin)\nif int(task["answer"]) % 2: sys.exit("it is odd")'
    )
    text = text.replace('"reward": reward,', '"reward": None,')
    (task / "mine.py").write_text("def long(prompts, responses, answers):\n    return [len(one) / 8 for one in responses]\n")
    function = f"reward.function.path={task / 'mine.py'}:long"
    output = run_job(train("grpo"), task / "branches", settings_of(task, *agent(task, text, "branching.py"), function, "loop.max_steps=3"))
    run = task / "branches"
    assert "sessions failed" in output and "it wrote to standard error: it is odd" in output
    shares, invalid = series(run, "rollout/sessions_failed"), series(run, "rollout/rewards_invalid")
    assert [share * 16 for share in shares] == invalid and 0 < max(shares) < 1
    assert max(series(run, "rollout/sessions_branches")) > 1 - min(shares)
    assert max(series(run, "rollout/sessions_tokens_changed")) > 0
    assert min(series(run, "rollout/reward")) > 0


@pytest.mark.parametrize("kind", cases(("server", "model"), fast=("server",)))
def test_ppo_and_its_critic_learn_from_sessions_of_several_rows(task: Path, kind: str) -> None:
    """The critic's mini-batches, as the policy's, are of 16 sessions with up to three rows each."""
    run = task / f"ppo_{kind}"
    sizes = [
        f"critic.kind={kind}",
        "algorithm.rollouts_per_step=32",
        "algorithm.mini_batch_size=16",
        "critic.mini_batch_size=16",
        "reward.serve=false",
        *(PLAIN_SERVERS if kind == "server" else ()),
    ]
    lengths = [f"rollout.sampling.max_response_length={ROOM}", "loop.table_every=0", "run.export_hf=false", "loop.max_steps=8"]
    run_job(launcher("ppo"), run, [*ppo_settings(task), *agent(task, BRANCHING, "branching.py"), *sizes, *lengths])
    assert max(series(run, "rollout/sessions_branches")) > 1.5 and series(run, "rollout/sessions_failed") == [0.0] * 8
    assert series(run, "optim/updates") == [2.0] * 8
    learnt = [step.values for step in metrics_of(run)[1:]]  # the critic's part of a step comes with the next one
    assert [step["critic/optim_updates"] for step in learnt] == [2.0] * 7
    assert max(series(run, "rollout/logprob_gap")) < 1e-4
    rewards, losses = series(run, "rollout/reward"), [step["critic/loss"] for step in learnt]
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3]), rewards
    assert sum(losses[-3:]) < sum(losses[:3]), losses


def test_the_best_sessions_are_imitated_with_all_their_rows(task: Path) -> None:
    sizes = ["algorithm.prompts_per_step=4", "algorithm.group_size=4", "algorithm.mini_batch_size=4", "algorithm.drop_truncated=false"]
    lengths = [f"rollout.sampling.max_response_length={ROOM}", "loop.table_every=0", "run.export_hf=false", "loop.max_steps=8"]
    run_job(train("rejection_sampling"), task / "best", [*tiny_settings(task), *agent(task, BRANCHING, "branching.py"), *sizes, *lengths])
    run = task / "best"
    assert series(run, "kept/fraction") == [0.25] * 8 and series(run, "rollout/sessions_failed") == [0.0] * 8
    assert max(series(run, "learnt/samples")) > 4  # rows of 4 sessions
    assert max(series(run, "rollout/logprob_gap")) < 1e-4
    rewards = series(run, "rollout/reward")
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3]), rewards


LOOKS = """
import json, os, sys, urllib.request

task = json.load(sys.stdin)
parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + one}} for one in task["record"]["shown"]]
messages, text = [], ""
for part in parts:
    messages.append({"role": "user", "content": [part, {"type": "text", "text": "what?"}]})
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 6}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    messages.append({"role": "assistant", "content": text})
    if task["id"] % 2:
        messages[0]["content"][0] = parts[-1]  # the history has another picture
print(json.dumps({"reward": len(set(text)) / 6}))
"""


def test_images_that_a_program_shows(tmp_path: Path) -> None:
    """A picture in each of two turns: rows are trained on with the log-probs that they were sampled with, of a policy that saw them."""
    write_seeing("qwen3_vl", tmp_path / "model", num_hidden_layers=3)
    shown = [base64.b64encode(encoded("a", seed)).decode() for seed in (1, 2, 3)]
    rows = [{"prompt": "look", "shown": [shown[number % 3], shown[(number + 1) % 3]]} for number in range(4)]
    data = write_rows(tmp_path / "prompts.jsonl", rows)
    model = [
        f"model.path={tmp_path / 'model'}",
        "model.images=true",
        "model.dtype=float32",
        "optimizer.lr=1e-2",
    ]
    sizes = ["algorithm.prompts_per_step=4", "algorithm.group_size=2", "algorithm.mini_batch_size=8", "algorithm.kl_coef=0"]
    lengths = ["data.max_prompt_length=200", "rollout.sampling.max_response_length=56", "loop.table_every=0", "loop.max_steps=3"]
    lengths += ["run.export_hf=false", "logging.tensorboard=false", "checkpoint.asynchronous=false", f"data.train={data}"]
    run_job(train("grpo"), tmp_path / "run", [*model, *agent(tmp_path, LOOKS), *sizes, *lengths])
    run = tmp_path / "run"
    assert series(run, "rollout/sessions_calls") == [2.0] * 3 and series(run, "rollout/sessions_failed") == [0.0] * 3
    assert all(1.5 <= branches < 2 for branches in series(run, "rollout/sessions_branches"))  # those with another picture in their history
    assert max(series(run, "rollout/logprob_gap")) < 1e-4
    assert len(list((run / "images").iterdir())) == 3
    assert max(series(run, "learnt/samples")) > 8  # rows of 8 sessions


def test_a_killed_run_goes_on_as_if_it_had_not_been(task: Path) -> None:
    """Sessions of the round that was under way are played again, with their seeds."""
    more = ["loop.max_steps=4", "loop.save_every=1"]
    run_job(train("grpo"), task / "whole", settings_of(task, *agent(task), *more))
    command = agent(task, SLOW, "killed.py")
    with Job(train("grpo"), task / "killed", settings_of(task, *command, *more)) as job:
        job.reached(2)
        kill(job.process.pid)
        job.wait()
    run_job(train("grpo"), task / "killed", settings_of(task, *command, *more))
    found, wanted = without_times(task / "killed"), without_times(task / "whole")
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    for mine, other in zip(found, wanted, strict=True):
        assert mine["rollout/reward"] == pytest.approx(other["rollout/reward"])
        assert mine["rollout/entropy"] == pytest.approx(other["rollout/entropy"], rel=1e-5)


def test_weights_that_change_in_the_middle_of_sessions(task: Path) -> None:
    """Rounds are sampled ahead; a session goes on with the new weights."""
    more = ["rollout.asynchronous.max_staleness=1", "algorithm.correction.kind=tis", "loop.max_steps=4", "environment.num_workers=16"]
    more += ["rollout.sampling.max_response_length=24", "algorithm.num_epochs=32"]  # training takes longer than an agent's start
    run_job(train("grpo"), task / "ahead", settings_of(task, *agent(task, SLOW.replace("ROOM", "24"), "ahead.py"), *more))
    assert max(series(task / "ahead", "rollout/staleness_max")) == 1 and max(series(task / "ahead", "rollout/versions")) > 1
    assert series(task / "ahead", "rollout/sessions_failed") == [0.0] * 4
