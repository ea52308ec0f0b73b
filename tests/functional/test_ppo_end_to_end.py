"""PPO with a critic server and a reward server in processes of their own: it learns. What deaths do is in test_resume_ppo.py."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from training_jobs import (
    SAYS_77,
    Job,
    checkpoint_steps,
    launcher,
    metrics_of,
    ppo_settings,
    run_aligner,
    series,
    write_task,
)

from aligner import cli
from aligner.commands.report import step_of
from aligner.telemetry.recording import read_spans
from aligner.telemetry.spans import Span

pytestmark = pytest.mark.timeout(600)
NUM_STEPS = 40


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[int, str]]:
    """Run directory, output and left-over processes of a run that is rewarded for one fixed string."""
    folder = tmp_path_factory.mktemp("ppo")
    write_task(folder)
    settings = [*ppo_settings(folder), *SAYS_77, f"loop.max_steps={NUM_STEPS}", "loop.save_every=15"]
    with Job(launcher("ppo"), folder / "run", settings) as job:
        output = job.finish()
        left = job.processes()
    return folder / "run", output, left


def test_it_learns_the_fixed_string(finished) -> None:
    """The sanity run of the field: chance gives 2 % (8 places for 2 of 18 tokens); learned within 50 steps."""
    rewards = series(finished[0], "rollout/reward")
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.9


def test_its_metrics_are_sane(finished) -> None:
    lines = metrics_of(finished[0])
    assert [line.step for line in lines] == list(range(1, NUM_STEPS + 1))
    for line in lines:
        # Where all returns are equal there is no variance to explain.
        assert all(math.isfinite(value) for name, value in line.values.items() if name != "critic/explained_variance")
        assert line.values["rollout/logprob_gap"] < 1e-4  # the sampler's log-probs are the trainer's
        assert 1 <= line.values["rollout/response_length"] <= 8
    assert lines[0].values["policy/kl"] == pytest.approx(0, abs=1e-6)  # the policy is the reference still
    assert lines[-1].values["policy/kl"] > 0.1
    # The critic trains beside the policy: its numbers come with the next step. Two updates of 64 rows a step; it learns what to expect.
    assert "critic/loss" not in lines[0].values
    assert lines[-1].values["critic/loss"] < 0.3 * lines[1].values["critic/loss"]


def test_checkpoints_of_policy_and_critic_are_pairs_and_nothing_is_left_running(finished) -> None:
    directory, output, left = finished
    assert left == {} and not list((directory / "services").glob("*.json")) and "FAILED" not in output
    checkpoints = directory / "checkpoints"
    assert checkpoint_steps(checkpoints / "policy") == checkpoint_steps(checkpoints / "critic") == [15, 30, 40]
    for name in ("policy", "critic"):
        assert (checkpoints / name / "latest").read_text().strip() == "step_000040"
    assert json.loads((checkpoints / "critic" / "step_000040" / "aligner.json").read_text())["kind"] == "scalar"


def test_its_trace_is_on_one_clock(finished) -> None:
    """Every request that a server answered lies in the call of a client, and its computation in the request."""
    spans, damaged = read_spans(finished[0] / "trace")
    assert damaged == 0 and {span.component for span in spans} == {"actor", "critic", "reward"}
    own = [span for span in spans if span.component == "actor" and span.lane == "rank 0"]
    assert sorted(step_of(span) for span in own if step_of(span)) == list(range(1, NUM_STEPS + 1))
    for name in ("generate", "train", "save checkpoint", "refit", "report"):
        assert sum(span.name == name for span in own) >= 4, name
    responses = [span for span in spans if span.lane == "replica 0"]
    assert len(responses) == 128 * NUM_STEPS and all(1 <= span.arguments["tokens"] <= 8 for span in responses)
    sampling = [span for span in own if span.name == "generate"]
    assert all(any(_holds(one, span) for one in sampling) for span in responses)
    calls = [span for span in spans if span.lane.startswith("rank 0 calls to ")]
    assert {span.name for span in calls} >= {"critic_infer", "critic_train", "critic_save", "reward_model"}
    requests = [span for span in spans if span.lane == "requests"]
    computed = [span for span in spans if (span.component, span.lane, span.name) == ("critic", "rank 0", "critic_infer")]
    assert requests and all(any(one.name == span.name and _holds(one, span) for one in calls) for span in requests)
    assert len(computed) == sum(span.name == "critic_infer" for span in requests)
    assert all(any(_holds(one, span) for one in requests) for span in computed)


def _holds(outer: Span, inner: Span, tolerance: float = 0.005) -> bool:
    return outer.start - tolerance <= inner.start and inner.end <= outer.end + tolerance


def test_its_trace_and_its_plan_are_written(finished, tmp_path: Path, capsys) -> None:
    assert cli.main(["trace", str(finished[0]), "--steps", "3", "--output", str(tmp_path / "trace.json")]) == 0
    assert f"training steps {NUM_STEPS - 2} to {NUM_STEPS}" in capsys.readouterr().out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"actor", "critic", "reward"}
    command = ["plan", "--against", finished[0], "--html", tmp_path / "plan.html"]
    code, shown = run_aligner(*command)
    assert code == 0, shown
    lines = [line.split() for line in shown[shown.index("plan against run") :].splitlines()]
    for row in (["actor", "generate"], ["actor", "train"], ["critic", "values"], ["critic", "train"], ["job", "step"]):
        (found,) = (line for line in lines if line[:2] == row)
        assert found[3] in ("ms", "s") and found[5] in ("ms", "s") and float(found[6]) > 0  # planned, measured, their ratio
    assert "peak memory of a rank: planned" in shown and "</html>" in (tmp_path / "plan.html").read_text()


def test_the_export_loads_in_transformers_and_says_the_string(finished) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(finished[0] / "export")
    model = AutoModelForCausalLM.from_pretrained(finished[0] / "export")
    prompt = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode("3+4=", add_special_tokens=False)]])
    response = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
    assert set(tokenizer.decode(response, skip_special_tokens=True)) <= {"7", "-"}  # what is rewarded at each place


def test_components_that_are_started_one_by_one_end_with_the_run(tmp_path: Path) -> None:
    write_task(tmp_path)
    settings = [*ppo_settings(tmp_path), *SAYS_77, "loop.max_steps=2", "run.export_hf=false", "run.server_tls=true"]
    command, run = launcher("ppo")[:-3], tmp_path / "run"
    critic, reward = ((*command, "serve", name, "ppo") for name in ("critic", "reward"))
    with (
        Job(critic, run, settings) as values,
        Job(reward, run, settings) as scores,
        Job((*command, "train", "ppo"), run, settings) as actor,
    ):
        actor.finish()
        assert "server: critic at https://127.0.0.1:" in values.output() and "server: reward at https://127.0.0.1:" in scores.output()
        assert "server: critic ends: the run is done (done.json)\n" in values.finish()
        assert "server: reward ends: the run is done (done.json)\n" in scores.finish()
    with Job(critic, run, [*settings, "critic.server.idle_timeout_seconds=2"]) as values:  # for a run that nobody goes on with
        output = values.finish()
    assert "server: critic ends: for 2 s there was no request and no actor in the run (server.idle_timeout_seconds)\n" in output
    assert not list((run / "services").glob("*.json"))
