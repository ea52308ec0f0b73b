"""`aligner eval`: intervals by hand, what is refused, and lm-eval's results."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from fake_live_engine import TEMPLATE, ScriptedEngine, tokenizer_of

from aligner.commands import evaluate
from aligner.commands.evaluate import bootstrap, lm_eval_measures, wilson
from aligner.commands.parts import EvalOptions
from aligner.errors import AlignerError, ConfigError, DataError
from aligner.jobs.serving_policy import OpenPolicy
from aligner.reporting.evaluations import Measure, markdown, read_evaluations


def test_wilsons_interval() -> None:
    """7 of 10: centre (0.7 + 1.9208 / 10) / (1 + 3.8416 / 10) = 0.64449, half 1.96 sqrt(0.021 + 0.0096) / 1.38416 = 0.24773."""
    assert wilson(7, 10) == pytest.approx((0.39678, 0.89221), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 3.8416 / 13.8416), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((10 / 13.8416, 1.0), abs=1e-4)


def test_a_bootstrap_over_prompts() -> None:
    """Of 400 prompts, half of them right, the mean has a standard error of 0.5 / 20."""
    low, high = bootstrap([0.0, 1.0] * 200)
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025), abs=0.006)
    assert bootstrap([0.0, 1.0] * 200) == (low, high) and bootstrap([0.3]) == pytest.approx((0.3, 0.3))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "nothing to measure"),
        ({"data": "d"}, "--data goes with one of --reward and --judge"),
        ({"reward": "a:b"}, "nothing to measure"),
        ({"data": "d", "reward": "a:b", "judge": "j"}, "--data goes with one of"),
        ({"data": "d", "reward": "a:b", "against": "m"}, "--against needs --judge"),
        ({"data": "d", "judge": "j", "against": "m", "samples": 2}, "one response of each model"),
        ({"data": "d", "reward": "a:b", "k": (2,)}, "--k 2: more than --samples 1"),
        ({"pairs": "p", "output": Path("x.md")}, "--output x.md: names the JSON file"),
        ({"tasks": "t", "lm_eval": "no-such-program"}, "--lm-eval no-such-program: no such program"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        evaluate.evaluate(str(tmp_path), EvalOptions(**options))


@pytest.mark.parametrize(
    ("text", "said"),
    [("url: http://a", "needs judge.model"), ("judge: {model: m}", "needs url"), ("url: http://a\njudge: {modle: m}", "modle")],
)
def test_a_file_that_describes_no_judge(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "judge.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"--judge .*judge.yaml: .*{said}"):
        evaluate._judge(EvalOptions(judge=file), lambda ids: "", evaluate.Compare.nothing)


def test_results_of_lm_eval() -> None:
    found = {
        "results": {
            "gsm8k": {
                "alias": "gsm8k",
                "exact_match,strict": 0.25,
                "exact_match_stderr,strict": 0.05,
                "ppl,none": 3.0,
                "ppl_stderr,none": "N/A",
            }
        },
        "n-samples": {"gsm8k": {"original": 1319, "effective": 80}},
    }
    exact, ppl = lm_eval_measures(found)
    assert (exact.name, exact.value, exact.count) == ("gsm8k: exact_match (strict)", 0.25, 80)
    assert (exact.low, exact.high) == pytest.approx((0.25 - 0.098, 0.25 + 0.098), abs=1e-4) and exact.interval.startswith("normal")
    assert (ppl.name, ppl.low, ppl.interval) == ("gsm8k: ppl", 3.0, "")


LM_EVAL = """\
import json, os, sys, urllib.request, yaml
config = yaml.safe_load(open(sys.argv[3]))
assert sys.argv[1:3] == ["run", "--config"] and os.environ["OPENAI_API_KEY"] == config["model_args"]["auth_token"]
if config["tasks"] == ["bad"]:
    sys.exit(3)
if config["tasks"] != ["silent"]:
    folder = config["output_path"] + "/policy"
    os.mkdir(folder)
    about = config["model_args"]
    url, key = about["base_url"].partition("/v1/")[0] + "/v1/models", {"Authorization": "Bearer " + about["auth_token"]}
    assert json.load(urllib.request.urlopen(urllib.request.Request(url, headers=key)))["data"][0]["id"] == about["model"] == "policy"
    json.dump({"results": {"t": {"acc,none": 0.5}}, "asked": config}, open(folder + "/results_1.json", "w"))
"""


def test_lm_eval_asks_the_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "lm_eval"
    program.write_text(f"#!{sys.executable}\n{LM_EVAL}")
    program.chmod(0o755)

    asked: list[Any] = []
    monkeypatch.setattr(evaluate, "lm_eval_measures", lambda found: (asked.append(found["asked"]), lm_eval_measures(found))[1])
    for template, kind, route in (("", "local-completions", "completions"), (TEMPLATE, "local-chat-completions", "chat/completions")):
        tokenizer = tokenizer_of(tmp_path / kind, template)
        live: Any = ScriptedEngine(tokenizer, lambda _: "fine", context=512)
        policy = OpenPolicy(name="policy", tokenizer=tokenizer, live=live, policy=None, seed=0)  # type: ignore[arg-type]
        monkeypatch.setattr(evaluate, "open_policy", lambda name, policy=policy, **how: nullcontext(policy))
        (one,) = evaluate._tasks("m", EvalOptions(tasks="t,u", lm_eval=str(program), limit=5))
        assert (one.name, one.value) == ("t: acc", 0.5)
        assert asked[-1]["model"] == kind and asked[-1]["model_args"]["base_url"].endswith(f"/v1/{route}")
        assert asked[-1]["tasks"] == ["t", "u"] and asked[-1]["limit"] == 5 and asked[-1]["model_args"]["max_length"] == 512
    for task, said in (("bad", "failed"), ("silent", "has written no results")):
        with pytest.raises(AlignerError, match=said):
            evaluate._tasks("m", EvalOptions(tasks=task, lm_eval=str(program)))


def test_records_and_tables(tmp_path: Path) -> None:
    measure = Measure.of("a|b", [0.0, 1.0], (0.1, 0.9), "Wilson", note="two\nlines")
    record = {"model": "m", "time": "now", "aligner": "1", "measures": [{name: getattr(measure, name) for name in measure.__slots__}]}
    assert markdown(record).splitlines()[-1] == r"| a\|b | 0.5 | 0.1 to 0.9 | 2 | Wilson | two lines |"
    (tmp_path / "1.json").write_text(json.dumps(record))
    assert read_evaluations(tmp_path)[0]["rows"] == [("a|b", "0.5", "0.1 to 0.9", "2", "Wilson", "two\nlines")]
    (tmp_path / "2.json").write_text('{"model": "m"}')
    with pytest.raises(DataError, match="2.json: not the results of aligner eval"):
        read_evaluations(tmp_path)
