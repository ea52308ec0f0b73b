"""Rules over metrics: for each a course that it is about and one that it is not; and recorded runs that learn, in which all are silent."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from aligner import cli
from aligner.cluster.run_directory import RunDirectory
from aligner.reporting.config import LoggingConfig
from aligner.reporting.diagnosis import REPEAT_EVERY, Diagnosis, Watch, diagnose
from aligner.reporting.diagnosis_rules import RULES
from aligner.reporting.jsonl import StepMetrics, read_metrics
from aligner.reporting.reporter import Reporter

Course = Callable[[int], Mapping[str, float]]  # the metrics of a step
RULE = {rule.name: rule for rule in RULES}
STEPS = 60


def ramp(step: int, first: float, last: float) -> float:
    """From the one to the other over STEPS steps."""
    return first + (last - first) * (step - 1) / (STEPS - 1)


def wave(step: int, size: float) -> float:
    """Noise, the same in every test."""
    return size * math.sin(37.0 * step)


def records(course: Course, steps: int = STEPS) -> list[StepMetrics]:
    return [StepMetrics(step=step, time=float(step), values=dict(course(step))) for step in range(1, steps + 1)]


def judged(course: Course, steps: int = STEPS) -> Diagnosis:
    return diagnose(records(course, steps), RULES)


def at(every: int, step: int, values: Mapping[str, float]) -> Mapping[str, float]:
    """Of a validation."""
    return {} if step % every else values


CUT = {"rollout/truncated_fraction": 0.2, "rollout/empty_fraction": 0.01, "rollout/reward_std": 0.5}
EMPTY_REWARDED = CUT | {"rollout/reward_ended": 0.2, "rollout/reward_empty": 0.9, "rollout/reward_truncated": 0.0}
CLIP, MOVED, REWARD = "policy/clip_fraction", "policy/approx_kl", "rollout/reward"
# Rule, a course that shows the failure, words of the evidence, and one that looks like it and is none.
CASES: list[tuple[str, Course, str, Course]] = [
    (
        "entropy_collapse",
        lambda step: {"policy/entropy": 1.5 * 0.9**step},
        r"policy/entropy went from 0.841 \(steps 1-10\) to 0.00434 nats per token \(steps 51-60\)",
        lambda step: {"policy/entropy": ramp(step, 0.5, 0.1) + wave(step, 0.05)},
    ),
    (
        "entropy_collapse",
        lambda step: {"rollout/entropy": 1.5 * 0.9**step},  # of a recipe whose loss reports none
        "rollout/entropy went",
        lambda step: {"rollout/entropy": ramp(step, 0.5, 0.1)},
    ),
    (
        "mode_collapse",
        lambda step: {"rollout/same_response": ramp(step, 0.1, 1.0)},
        r"93% of the prompts",
        lambda step: {"rollout/same_response": 0.5 + wave(step, 0.2)},  # yes or no
    ),
    (
        "validation_falls",
        lambda step: {REWARD: ramp(step, 0, 2)} | at(5, step, {"validation/accuracy": 0.6 - abs(step - 20) / 100}),
        r"validation/accuracy fell from 0.55 \(about step 15\) to 0.25 \(steps 50-60\), while rollout/reward rose from 0.322 to 1.85",
        lambda step: {REWARD: ramp(step, 0, 2)} | at(5, step, {"validation/accuracy": 0.6 + wave(step, 0.1)}),
    ),
    (
        "validation_falls",
        lambda step: {REWARD: ramp(step, 0, 2)} | at(5, step, {"validation/reward": -ramp(step, 1, 9)}),
        "validation/reward fell",
        lambda step: {REWARD: ramp(step, 2, 0)} | at(5, step, {"validation/reward": -ramp(step, 1, 9)}),  # both fall: seen without help
    ),
    (
        "length_grows",
        lambda step: {"rollout/truncated_fraction": ramp(step, 0.1, 0.9), "rollout/response_length": ramp(step, 100, 250)},
        r"rollout/response_length went from 111 \(steps 1-10\) to 239 tokens .* 84% of the responses are cut, 16% at the start",
        lambda step: {"rollout/truncated_fraction": ramp(step, 0.1, 0.2), "rollout/response_length": ramp(step, 100, 250)},
    ),
    (
        "length_shrinks",
        lambda step: {"rollout/response_length": ramp(step, 100, 1), "rollout/empty_fraction": 0.0},
        "to 8.55 tokens",
        lambda step: {"rollout/response_length": ramp(step, 100, 40), "rollout/empty_fraction": 0.01},
    ),
    (
        "length_shrinks",
        lambda step: {"rollout/response_length": ramp(step, 3, 1), "rollout/empty_fraction": ramp(step, 0, 0.9)},
        "83% of the responses are empty",
        lambda step: {"rollout/response_length": ramp(step, 3, 2), "rollout/empty_fraction": 0.1},
    ),
    (
        "no_signal",
        lambda step: {"rollout/groups_without_signal": 0.9, REWARD: 0.02 + wave(step, 0.01)},
        "90% of the groups have equal rewards",
        lambda step: {"rollout/groups_without_signal": ramp(step, 0.5, 0.9), REWARD: ramp(step, 0.2, 0.8)},  # solved, ever more of them
    ),
    (
        "constant_reward",
        lambda step: {REWARD: 0.25, "rollout/reward_std": 0.0},
        r"every response got the reward 0.25 \(steps 51-60\)",
        lambda step: {REWARD: step % 2, "rollout/reward_std": 0.0},  # one response a step
    ),
    (
        "constant_reward",
        lambda step: {REWARD: 0.25, "rollout/reward_std": 1e-9},
        "every response got the reward 0.25",
        lambda step: {REWARD: 0.25, "rollout/reward_std": 0.4},  # only their mean stays
    ),
    (
        "clip_fraction",
        lambda step: {CLIP: 0.5, MOVED: 0.1, REWARD: 0.5},
        "50% of the tokens are clipped",
        lambda step: {CLIP: ramp(step, 0.06, 0.001), MOVED: 1e-5, REWARD: ramp(step, 0, 1)},  # small steps that teach
    ),
    (
        "clip_fraction",
        lambda step: {CLIP: 0.0, MOVED: 1e-6, REWARD: 0.5 + wave(step, 0.1)},
        "0.00% of the tokens are clipped, policy/approx_kl is 1.0e-06",
        lambda step: {CLIP: 0.001, MOVED: 0.01, REWARD: 0.5 + wave(step, 0.1)},  # it moves: something else is wrong
    ),
    (
        "kl_explodes",
        lambda step: {"policy/ref_kl": ramp(step, 0, 5)},
        r"policy/ref_kl went from 0.381 \(steps 1-10\) to 4.62 nats",
        lambda step: {"policy/ref_kl": ramp(step, 0, 0.9) + (50.0 if step % 7 == 0 else 0)},  # single tokens of great weight
    ),
    (
        "kl_explodes",
        lambda step: {"policy/kl": 8e-5 * 1.19**step},
        "policy/kl went",
        lambda step: {"policy/kl": 0.02 if step < 15 else 0.5 + wave(step, 0.1)},  # how a run that learns begins
    ),
    (
        "kl_negative",
        lambda step: {"policy/kl": -0.02 + wave(step, 0.01)},
        "below 0 in each of the last 20 steps",
        lambda step: {"policy/kl": wave(step, 0.02)},  # an estimate of a small number
    ),
    (
        "critic_explains_little",
        lambda step: {"critic/explained_variance": wave(step, 0.05), "rollout/reward_std": 1.0},
        "at best it was 0.0",
        lambda step: {"critic/explained_variance": ramp(step, -0.2, 0.8), "rollout/reward_std": 1.0},
    ),
    (
        "critic_explains_little",
        lambda step: {"critic/explained_variance": ramp(step, 0.9, 0.3), "rollout/reward_std": 1.0},
        r"is 0.35 \(steps 51-60\); at best it was 0.85",
        lambda step: {"critic/explained_variance": ramp(step, 0.9, 0.6), "rollout/reward_std": 1.0},
    ),
    (
        "value_loss_grows",
        lambda step: {"critic/loss": 0.1 + (step / 20) ** 4},
        r"critic/loss is 59.4 \(steps 51-60\), 560.6 times",
        lambda step: {"critic/loss": ramp(step, 9, 1) + wave(step, 0.5)},
    ),
    (
        "gap_grows",
        lambda step: {"rollout/logprob_gap": ramp(step, 1e-3, 0.1)},
        "rollout/logprob_gap went",
        lambda step: {"rollout/logprob_gap": ramp(step, 1e-7, 1e-3)},
    ),
    (
        "gap_grows",
        lambda step: {"rollout/logprob_gap": ramp(step, 1e-3, 0.5), "rollout/staleness": 1.0},
        "to 0.462 nats",
        lambda step: {"rollout/logprob_gap": ramp(step, 1e-3, 0.15), "rollout/staleness": 1.0},  # the rollouts' age
    ),
    (
        "unfinished_rewarded",
        lambda step: {"rollout/reward_ended": 0.2, "rollout/reward_truncated": 0.9} | CUT,
        r"truncated responses \(20%\) got 0.9 on average, those that ended 0.2",
        lambda step: {"rollout/reward_ended": 0.6, "rollout/reward_truncated": 0.1 + wave(step, 0.1)} | CUT,
    ),
    (
        "unfinished_rewarded",
        lambda step: (
            {"rollout/reward_ended": 0.2, "rollout/reward_empty": 0.9, "rollout/reward_truncated": 0.0}
            | CUT
            | {"rollout/empty_fraction": 0.1}
        ),
        r"empty responses \(10%\) got 0.9",
        lambda step: EMPTY_REWARDED,  # one in a hundred
    ),
    (
        "part_never_varies",
        lambda step: {"reward/form": 0.0, "reward_std/form": 0.0, "reward/maths": 0.5, "reward_std/maths": 0.5},
        r"^reward/form was 0 for every response of steps 1-60$",
        lambda step: {"reward/form": min(1.0, step / 9), "reward_std/form": 0.4 if step < 9 else 0.0},  # learnt
    ),
    (
        "repetition",
        lambda step: {"rollout/repeated_ngrams": ramp(step, 0.05, 0.9)},
        "84% of a response's 8-token sequences",
        lambda step: {"rollout/repeated_ngrams": 0.2 + wave(step, 0.1)},
    ),
    (
        "never_ends",
        lambda step: {"rollout/truncated_fraction": 0.98},
        "98% of the responses were cut at the length limit from the start",
        lambda step: {"rollout/truncated_fraction": 0.7},
    ),
    (
        "never_ends",
        lambda step: {"rollout/truncated_fraction": 1.0},
        "100% of the responses were cut at the length limit from the start",
        lambda step: {"rollout/truncated_fraction": ramp(step, 0.1, 1.0)},  # they came to be cut
    ),
]


@pytest.mark.parametrize(("name", "sick", "evidence", "healthy"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_rule_finds_its_failure_and_not_what_resembles_it(name: str, sick: Course, evidence: str, healthy: Course) -> None:
    found = {finding.rule.name: finding for finding in judged(sick).findings}
    assert re.search(evidence, found[name].evidence), found[name].evidence
    assert found[name].steps[-1] == STEPS
    silent = judged(healthy)
    assert name not in {finding.rule.name for finding in silent.findings} and name not in silent.not_judged


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(RULE) and len(RULE) == len(RULES) == 17


def test_the_metrics_of_runs_that_learn_are_silent() -> None:
    """PPO of `make demo`, RLOO and GSPO of `make learn`, two digits: between them they have the metrics of all rules but two."""
    runs = json.loads(Path(__file__).with_name("healthy_runs.json").read_text())
    unjudged = []
    for columns in runs.values():
        steps = columns.pop("steps")
        rows = [
            StepMetrics(step=step, time=0.0, values={name: x[row] for name, x in columns.items() if x[row] is not None})
            for row, step in enumerate(steps)
        ]
        diagnosis = diagnose(rows, RULES)
        assert len(rows) >= 80 and not diagnosis.findings, diagnosis.text()
        unjudged.append(set(diagnosis.not_judged))
    assert set.intersection(*unjudged) == {"part_never_varies", "repetition"}


def test_what_cannot_be_judged_is_said_with_its_reason() -> None:
    few = judged(lambda step: {"policy/entropy": 1.0, CLIP: 0.0, MOVED: 0.0, REWARD: float("nan")}, steps=12)
    assert not few.findings and few.not_judged["entropy_collapse"] == "policy/entropy has 12 of the required 20 values"
    assert few.not_judged["clip_fraction"].startswith("every batch has one update")  # its ratios are 1 by construction
    assert few.not_judged["constant_reward"] == "the run has no rollout/reward"  # numbers that are not finite are none
    assert few.text().splitlines()[0] == "nothing found in 12 steps"
    assert "not judged: never_ends: the run has no rollout/truncated_fraction" in few.text()
    solved = judged(lambda step: {"critic/explained_variance": 0.0, "rollout/reward_std": 0.5 if step < 20 else 0.01})
    assert solved.not_judged["critic_explains_little"].startswith("rewards hardly differ")


def test_a_finding_is_said_once_and_again_much_later_also_across_a_restart() -> None:
    course = records(CASES[2][1], steps=STEPS + 2 * REPEAT_EVERY)
    watch, said = Watch(RULES), []
    for record in course:
        findings = watch.step(record.step, record.values)
        if findings:
            record.values["diagnosis/mode_collapse"] = 1.0
        said += [record.step] * len(watch.to_say(findings))
    assert said == [52, 152, 252]
    again = Watch(RULES)
    again.follow(course[:200])
    assert [again.to_say(again.step(record.step, record.values)) for record in course[200:251]] == [[]] * 51
    assert again.to_say(again.step(252, course[251].values))


def test_the_reporter_records_and_says_findings(tmp_path: Path) -> None:
    def log(directory: Path, first: int, last: int, **settings: bool) -> str:
        run, stream = RunDirectory(directory).create(), io.StringIO()
        config = LoggingConfig(tensorboard=False, **settings)
        with Reporter(config, run_directory=run, columns=(), total_steps=60, start_step=first - 1, stream=stream) as reporter:
            for step in range(first, last + 1):
                reporter.log(step, {"rollout/truncated_fraction": 1.0})
        return stream.getvalue()

    said = log(tmp_path / "run", 1, 20)
    assert said.count("warning: responses never end by themselves: 100% of the responses") == 1 and "Remedy: check data.apply" in said
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line.step for line in lines if "diagnosis/never_ends" in line.values] == list(range(10, 21))
    assert "warning" not in log(tmp_path / "run", 16, 30)  # resumed after step 15
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line.values.get("diagnosis/never_ends") for line in lines] == [None] * 9 + [1.0] * 21
    assert "warning" not in log(tmp_path / "off", 1, 20, diagnose=False)
    assert not any("diagnosis/never_ends" in line.values for line in read_metrics(tmp_path / "off" / "metrics.jsonl"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Sick from step 10 on, mended at 31; steps 5-8 are there twice, as after a restart that cut nothing."""
    rows = [(step, 1.0 if step <= 30 else 0.1) for step in [*range(1, 9), *range(5, 41)]]
    lines = [json.dumps({"step": step, "time": 1.0, "rollout/truncated_fraction": cut}) for step, cut in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_the_command_prints_findings(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", str(run)]) == 1
    shown = capsys.readouterr().out
    assert "never_ends: responses never end by themselves\n  steps     10-34 (25 of 40, not at the end)\n  evidence  100% of" in shown
    assert f"  cause     {RULE['never_ends'].cause}\n  remedy    {RULE['never_ends'].remedy}\n" in shown
    assert cli.main(["diagnose", str(run), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["num_steps"] == 40 and len(record["not_judged"]) == 16
    (finding,) = record["findings"]
    assert (finding["rule"], finding["first_step"], finding["last_step"], finding["num_steps"]) == ("never_ends", 10, 34, 25)
    assert cli.main(["report", str(run)]) == 0
    assert "\nresponses never end by themselves: 100%" in capsys.readouterr().out
    page = (run / "report.html").read_text()
    assert "<h2>Diagnosis</h2>" in page and "<td>10-34 (25 of 40, not at the end)</td>" in page and "apply_chat_template" in page


def test_the_command_on_a_healthy_run_and_on_none(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "rollout/truncated_fraction": 0.0}\n')
    assert cli.main(["diagnose", str(run)]) == 0
    assert capsys.readouterr().out.startswith("nothing found in 1 steps\nnot judged: ")
    assert cli.main(["report", str(run)]) == 0 and "<p>nothing found in 1 steps</p>" in (run / "report.html").read_text()
    assert cli.main(["diagnose", str(tmp_path / "no")]) == 2
    assert "no: has no metrics.jsonl" in capsys.readouterr().err


def test_the_page_says_what_the_rules_say() -> None:
    page = (Path(__file__).parents[3] / "docs" / "diagnosis.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if re.match(r"\| `\w+` \|.*\|.*\|.*\|.*\|", line)
    ]
    assert [(name.strip("`"), title, cause, remedy) for name, title, _, cause, remedy in rows] == [
        (rule.name, rule.title, rule.cause, rule.remedy) for rule in RULES
    ]
