"""What is made of a plan: spans of a step, a page, what a step is made of, a comparison with a run; and plans of runs that have begun."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from browser import chromium
from rich.console import Console
from selenium.webdriver import ActionChains
from selenium.webdriver.support.ui import WebDriverWait

sys.path.insert(0, str(Path(__file__).parent))

from planned import SPANS, planned_ppo

from aligner.commands import against
from aligner.commands.parts import PlanOptions
from aligner.commands.plan import command as plan, outputs
from aligner.commands.plan.outputs import config_and_overrides, report_html, write_outputs
from aligner.errors import ConfigError, DataError
from aligner.planner.memory import PhaseMemory
from aligner.planner.report import JobPlan
from aligner.planner.workload import GIB, ResponseLengths
from aligner.settings.compose import to_yaml


def test_the_page_of_a_plan():
    job = planned_ppo(problems=("actor: too much <b>",))
    text = report_html(job, job.run.spans)
    assert "<h1>ppo &lt;8b&gt;</h1>" in text and "does not fit: actor: too much &lt;b&gt;" in text  # shown, not run
    options = json.loads(re.search(r'id="options">(.*?)</script>', text)[1])
    assert len(options) == 4 and text.count('class="chart"') == 4
    timeline, actor, *_ = options
    lines = {
        line["name"]: [point for point in line["data"] if isinstance(point, list) and point[0] is not None] for line in timeline["series"]
    }
    ends = {
        (name, lane, begin, end) for name, own in lines.items() for (begin, lane, *_), (end, *_) in zip(own[::2], own[1::2], strict=True)
    }
    assert ends == {(span.name, f"{span.component} {span.lane}", span.start, span.end) for span in SPANS}
    assert timeline["yAxis"]["data"] == ["actor rank 0", "critic rank 0", "reward rank 0"]
    held = {one["name"]: one["data"] for one in actor["series"] if one["data"]}
    assert held == {"weights": [1, 1, 2, 2, 3, 3, 4, 4], "engine": [0, 1] * 4} and actor["yAxis"]["data"][-1] == "train, stage 1"
    assert actor["series"][-1]["markLine"]["data"] == [{"xAxis": 8.0}]
    assert text.count("<tr>") == 1 + 7 and ">62%</td>" in text  # 5 of 8 GiB


@pytest.mark.browser
def test_its_charts_are_drawn(tmp_path: Path):
    page = tmp_path / "plan.html"
    page.write_text(report_html(planned_ppo(), (replace(SPANS[0], arguments={"tokens": 9}), *SPANS[1:])))
    with chromium(height=2000) as browser:
        browser.get(page.as_uri())
        WebDriverWait(browser, 20).until(lambda driver: len(driver.find_elements("css selector", ".chart canvas")) == 4)
        x, y = browser.execute_script("return drawn.get(0).convertToPixel({seriesIndex: 1}, [4.8, 'actor rank 0'])")
        timeline = browser.find_element("css selector", ".chart")
        x, y = round(x - timeline.rect["width"] / 2), round(y - timeline.rect["height"] / 2)
        ActionChains(browser).move_to_element_with_offset(timeline, x, y).perform()
        told = WebDriverWait(browser, 20).until(lambda driver: driver.execute_script("return document.querySelector('.chart').innerText"))
        assert told.split("\n") == ["generate", "actor rank 0", "seconds", "10", "of", "tokens 9"] and not browser.get_log("browser")


def write_run(folder: Path, *, steps: int = 4, with_trace: bool = True) -> Path:
    """A run of PPO: the first step is ten times as slow, the others 20 s; the critic serves from second 1 of each step."""
    folder.mkdir(parents=True)
    times = {"generate": 8.0, "logprobs": 1.0, "ref_logprobs": 1.0, "train": 8.0, "critic_wait": 1.0, "step": 20.0}
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            slow = 10.0 if step == 1 else 1.0
            values = {f"time/{name}": slow * value for name, value in times.items()} | {"rollout/response_length": 100.0 + step}
            file.write(json.dumps({"step": step, "time": 1.7e9 + step, **values}) + "\n")
    if with_trace:
        (folder / "trace").mkdir()
        for component in ("actor", "critic"):
            lines = []
            for step in range(1, steps + 1):
                start = 1.7e9 + (0 if step == 1 else 200 + 20 * (step - 2))
                if component == "actor":
                    peak = {"step": step, "peak_bytes": (step + 1) * GIB}
                    lines.append({"name": "step", "start": start, "seconds": 19.0, "lane": "rank 0", "arguments": peak})
                    lines.append({"name": "refit", "start": start + 19.2, "seconds": 0.25, "lane": "rank 0"})
                else:
                    lines += [{"name": "critic_infer", "start": start + 1 + part, "seconds": 1.5, "lane": "rank 0"} for part in range(2)]
                    lines.append({"name": "critic_infer", "start": start + 1, "seconds": 9.0, "lane": "requests"})
                    lines.append({"name": "critic_train", "start": start + 9, "seconds": 10.0, "lane": "rank 0"})
            (folder / "trace" / f"{component}.0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_plan_beside_a_run(tmp_path: Path):
    found = against.compare(planned_ppo(), write_run(tmp_path / "run"))
    rows = {(row.component, row.phase): (row.planned, row.measured) for row in found.rows}
    assert rows == {
        ("actor", "generate"): (11.0, 8.0),  # with the wait for scores
        ("actor", "logprobs"): (1.0, 1.0),
        ("actor", "ref_logprobs"): (2.0, 1.0),
        ("actor", "train"): (4.0, 8.0),
        ("actor", "refit"): (0.5, 0.25),
        ("actor", "critic_wait"): (1.0, 1.0),
        ("actor", "everything else"): (0.5, 0.75),
        ("critic", "values"): (6.0, 3.0),
        ("critic", "train"): (5.0, 10.0),
        ("reward", "scores"): (12.0, None),  # it was not recorded
        ("job", "step"): (20.0, 20.0),  # without validation and checkpoints
    }
    assert {row.phase: row.ratio for row in found.rows if row.component == "actor"}["train"] == 0.5
    assert found.num_steps == 3 and found.planned_peak == 5 * GIB and found.measured_peak == 5 * GIB and found.has_trace
    out = Console(width=140, record=True, highlight=False)
    against.show(found, out)
    text = out.export_text()
    assert "medians of 3 steps" in text and "planned 5.00 GiB, measured 5.00 GiB (1.00)" in text
    assert any(line.split() == ["critic", "values", "6.0", "s", "3.0", "s", "2.00"] for line in text.splitlines())


def test_a_critic_in_the_actors_processes_has_phases_of_the_actor(tmp_path: Path):
    """Its times are among the actor's in both; the memory is that of the fuller of the two."""
    job = planned_ppo()
    actor, critic, reward = job.components
    fuller = tuple(PhaseMemory(phase=one.phase, stage=one.stage, parts={"weights": 7 * GIB}) for one in critic.memory)
    critic = replace(critic, component=replace(critic.component, within="actor"), memory=fuller)
    job = replace(job, components=(actor, critic, reward), run=replace(job.run, phases={"values": 6.0, "critic": 5.0, "train": 4.0}))
    found = against.compare(job, write_run(tmp_path / "run", with_trace=False))
    rows = {(row.component, row.phase): row.planned for row in found.rows}
    assert rows["actor", "values"] == 6.0 and rows["actor", "critic"] == 5.0
    assert "critic" not in {component for component, _ in rows} and ("reward", "scores") in rows
    assert found.planned_peak == 7 * GIB


def test_runs_without_a_trace_and_without_steps(tmp_path: Path):
    found = against.compare(planned_ppo(), write_run(tmp_path / "run", with_trace=False))
    rows = {(row.component, row.phase): row.measured for row in found.rows}
    assert rows["actor", "train"] == 8.0 and rows["critic", "values"] is None and ("actor", "refit") in rows
    out = Console(width=140, record=True, highlight=False)
    against.show(found, out)
    assert "peak memory: not recorded" in (text := out.export_text()) and "servers and refits: the run has no trace" in text
    with pytest.raises(DataError, match="has 1 timed steps; expected at least 2"):
        against.compare(planned_ppo(), write_run(tmp_path / "short", steps=1))
    with pytest.raises(DataError, match="has no metrics.jsonl"):
        against.lengths(tmp_path)


def test_files_are_written_and_lengths_are_the_runs(tmp_path: Path, capsys):
    run = write_run(tmp_path / "run")
    write_outputs(planned_ppo(), PlanOptions(html=tmp_path / "plan.html", trace=tmp_path / "plan.json", against=run))
    assert "plan against run" in capsys.readouterr().out
    events = json.loads((tmp_path / "plan.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 7 and (tmp_path / "plan.html").read_text().startswith("<!doctype html>")


def test_how_long_a_run_s_sequences_were(tmp_path: Path):
    run = write_run(tmp_path / "run")
    assert against.lengths(run) == ["plan.response_length=103"]
    request = {"name": "response", "start": 1.7e9, "seconds": 1.0, "lane": "replica 0"}
    lines = [json.dumps(request | {"arguments": {"prompt": prompt, "tokens": 9}}) + "\n" for prompt in (10, 20)]
    (run / "trace" / "actor.1.jsonl").write_text("".join(lines))
    assert against.lengths(run) == ["plan.response_length=103", "plan.prompt_length=15"]
    # 2000 tokens a second in 3 s, for 40 examples.
    sft = tmp_path / "sft"
    sft.mkdir()
    values = {"time/train": 3.0, "time/step": 4.0, "data/tokens_per_second": 2000.0, "learnt/samples_seen": 40.0}
    (sft / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "time": 1.7e9 + step, **values}) + "\n" for step in (1, 2, 3)))
    assert against.lengths(sft) == ["plan.example_length=150"] and against.phases(against.timed_steps(sft)) == {"train": 3.0, "step": 4.0}


def test_how_much_the_lengths_of_a_run_s_sequences_differed(tmp_path: Path):
    def spread(prefix: str, **values: float) -> float:
        run = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        run.mkdir()
        all_of = {f"{prefix}/{name}": value for name, value in values.items()} | {"learnt/samples_seen": 512.0, "time/step": 4.0}
        own = {"time/train": 3.0, "data/tokens_per_second": 2000.0} if prefix == "data" else {}
        (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "time": 1.0, **all_of, **own}) + "\n" for step in (1, 2)))
        return float(against.lengths(run)[-1].removeprefix("plan.response_spread="))

    for true in (0.3, 0.7, 1.1):
        lengths = ResponseLengths(mean=800, spread=true).drawn(512, 10**6)
        assert spread("data", length=mean(lengths), length_max=max(lengths)) == pytest.approx(true, abs=0.02)
        cut = [min(length, 1500) for length in lengths]
        part = cut.count(1500) / 512
        sampled = spread("rollout", response_length=mean(cut), response_length_max=max(cut), truncated_fraction=part)
        assert sampled == pytest.approx(true, abs=0.05)
    assert spread("data", length=9, length_max=9) == 0
    assert spread("rollout", response_length=64, response_length_max=64, truncated_fraction=1.0) == 0


def test_which_config_is_planned(tmp_path: Path):
    run, length = write_run(tmp_path / "run"), "plan.response_length=103"
    assert config_and_overrides("ppo", ("a=1",), None) == ("ppo", ("a=1",))
    assert config_and_overrides("ppo", (), run) == ("ppo", (length,))
    assert config_and_overrides("a=1", ("b=2",), run) == (str(run), (length, "a=1", "b=2"))
    assert config_and_overrides("", ("plan.response_length=9",), run) == (str(run), ("plan.response_length=9",))
    with pytest.raises(ConfigError, match="name a config, such as ppo_70b, or the directory of a run"):
        config_and_overrides("", (), None)


def test_the_config_of_a_run(tmp_path: Path, settings):
    """Its settings are the recorded ones, the vocabulary is the tokenizer's; `cluster=` takes another machine, and nothing else changes."""
    config = settings("ppo", {"algorithm.rollouts_per_step": 256})
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(config))
    loaded = plan.load(str(run), [])
    assert loaded == config
    actor, *_ = plan.components(loaded)
    assert actor.architecture.vocab_size == 41 and actor.work.rows == 256
    moved = plan.load(str(run), ["cluster=dgx_h100", "cluster.achievable_flops=0.25", "algorithm.rollouts_per_step=384"])
    assert (moved.cluster.bf16_tflops, moved.cluster.achievable_flops, moved.algorithm.rollouts_per_step) == (989.5, 0.25, 384)
    assert moved.model == config.model and loaded.cluster.gpus_per_node == 1
    with pytest.raises(ConfigError, match="algorithm.rollouts_per_stepp"):
        plan.load(str(run), ["algorithm.rollouts_per_stepp=48"])


def test_causes_add_up_to_a_step():
    job = planned_ppo()
    found = outputs.causes(job)
    assert sum(found.values()) == pytest.approx(job.step_seconds) and list(found.values()) == sorted(found.values(), reverse=True)
    # Half of log-probs, reference and training is in layers.
    assert found["layers"] == pytest.approx((1 + 2 + 4) / 2) and found["generate"] == 9.5 and found["waiting for scores"] == 1.5


def test_settings_that_shorten_a_step():
    job = planned_ppo()
    tried: list[tuple[str, ...]] = []

    def planned(settings: Sequence[str]) -> JobPlan:
        tried.append(tuple(settings))
        if settings[0].startswith("rollout.max_batch_size"):
            return replace(job, run=replace(job.run, phases={"generate": 15.0}))
        if settings[0].startswith("num_processes"):
            return replace(job, run=replace(job.run, phases={"generate": 10.0}))
        if settings[0].startswith("critic."):
            return replace(job, run=replace(job.run, phases={"generate": 5.0}), problems=("does not fit",))
        if settings[0].startswith("reward."):
            raise ConfigError("refused")
        return job

    found = outputs.changes(job, planned)
    assert [change.step_seconds for change in found] == [10.0, 15.0]
    assert {name.partition("=")[0] for settings in tried for name in settings} >= {"critic.num_processes", "reward.num_processes"}
    out = Console(width=140, record=True, highlight=False)
    outputs.show_explained(job, found, out)
    lines = out.export_text().splitlines()
    assert any(line.startswith("what a step is made of: generate 38%, layers 14%") for line in lines)
    assert any("num_processes=" in line and "10 s, 60% less" in line for line in lines)
    out = Console(width=140, record=True, highlight=False)
    outputs.show_explained(job, [], out)
    assert "no single setting that was tried" in out.export_text()
