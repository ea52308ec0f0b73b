"""Rewards from a model that judges, asked over HTTP: a server of the test's own answers, refuses, stalls and talks nonsense."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from judge_server import JudgeServer, Refusal, asked, judge_server

from aligner.errors import ConfigError
from aligner.rewards import chat_client
from aligner.rewards.compose import composed_reward
from aligner.rewards.config import Compare, NamedRewardConfig, OnError, RewardJudgeConfig, RubricItem, check_parts
from aligner.rewards.local import RewardError
from aligner.rewards.verdicts import Questions
from aligner.types import FinishReason, Prompt, Rollout, Scores

TEXTS = {1: "good", 2: "bad", 3: "fine", 4: "odd", 5: "good again"}


def decode(ids: Sequence[int]) -> str:
    return " ".join(TEXTS.get(token, str(token)) for token in ids)


def rollouts(*responses: int, prompts: Sequence[int] = (), answer: str | None = None, messages: Any = ()) -> list[Rollout]:
    """Responses of one token; `prompts`: the number of each one's prompt."""
    numbers = prompts or range(len(responses))
    return [
        Rollout(
            prompt=Prompt(
                id=n, tokens=(9,), source=f"f:{n + 1}", text=f"question {n}", answer=answer, columns={"level": n}, messages=messages
            ),
            response=(token,),
            logprobs=(0.0,),
            finish_reason=FinishReason.stop,
            policy_version=1,
            seed=seed,
        )
        for seed, (token, n) in enumerate(zip(responses, numbers, strict=True))
    ]


def settings(server: JudgeServer, *, on_error: OnError = OnError.stop, timeout: float = 5.0, variable: str = "", **judge: Any) -> Any:
    return NamedRewardConfig(
        url=server.url, judge=RewardJudgeConfig(model="m", **judge), on_error=on_error, timeout_seconds=timeout, token_variable=variable
    )


def scored(config: NamedRewardConfig, rows: list[Rollout], answers: Path | None = None) -> Scores:
    reward = composed_reward({"q": config}, decode, answers=answers)
    try:
        found = reward.score(rows).result(timeout=60)
        return found if reward.compare is None else reward.compare(rows, found).result(timeout=60)
    finally:
        reward.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_client, "FIRST_PAUSE_SECONDS", 0.01)


def by_response(table: dict[str, str]) -> Any:
    """Answers by the text under [Response]."""

    def reply(body: dict[str, Any]) -> str:
        return table[asked(body).split("[Response]\n")[1].split("\n")[0]]

    return reply


def better(body: dict[str, Any]) -> str:
    """Prefers the longer response; on a tie the first, as judges do."""
    text = asked(body)
    one, two = (text.split(f"[Response {name}]\n")[1].split("\n")[0] for name in "AB")
    return f"Because.\nBetter: {'A' if len(one) >= len(two) else 'B'}"


def test_a_score_is_the_last_line_and_an_unparsable_answer_is_no_score(capsys: pytest.CaptureFixture[str]) -> None:
    said = {
        "good": "It is good.\n\n**Score: 8.5**\n",
        "bad": "Score: 1\nor so",
        "fine": "Score: 11",
        "odd": "<think>Score: 2</think>Score: 3",
    }
    with judge_server(by_response(said)) as server:
        found = scored(settings(server, prompt_price=2.0, completion_price=10.0), rollouts(1, 2, 3, 4))
    assert found.valid.tolist() == [True, False, False, True]
    assert found.rewards[found.valid].tolist() == [8.5, 3.0] and found.rewards[1].isnan()
    assert found.parts["q_tokens"].tolist() == [110.0] * 4
    assert found.parts["q_cost"].tolist() == pytest.approx([100 * 2e-6 + 10 * 10e-6] * 4)
    out = capsys.readouterr().out
    assert (
        "2 of 4 judgements count for nothing: unparsable answer 'Score: 1\\nor so'; for sample 1 of 4 (prompt f:2, response 'bad')" in out
    )
    assert "judge q: 4 judgements, 2 unparsable or failed, 400 tokens asked, 40 tokens answered, cost 0.0012" in out
    assert "[Question]\nquestion 0\n\n[Response]\ngood" in asked(server.requests[0]) or len({asked(one) for one in server.requests}) == 4


def test_a_rubric_is_the_weighted_mean_of_its_items() -> None:
    rubric = {
        "correct": RubricItem(text="Is it correct?", weight=3.0),
        "style": RubricItem(text="How good is the style?", weight=1.0, highest=4),
    }
    said = {
        "good": 'Well. {"x": 1}\n```json\n{"correct": true, "style": 3}\n```',  # (3 * 1 + 1 * 3/4) / 4
        "bad": '{"correct": "no", "style": 2}',  # (3 * 0 + 1 * 2/4) / 4
        "fine": '{"correct": true, "style": 5}',  # beyond the highest
        "odd": '{"correct": true, "style": 3, "more": 1}',  # an item that the rubric does not have
    }
    with judge_server(by_response(said)) as server:
        found = scored(settings(server, rubric=rubric), rollouts(1, 2, 3, 4))
        question = next(asked(one) for one in server.requests if "\ngood\n" in asked(one))
    assert found.valid.tolist() == [True, True, False, False]
    assert found.rewards[:2].tolist() == pytest.approx([0.9375, 0.125])
    assert found.parts["q_correct"][:2].tolist() == [1.0, 0.0] and found.parts["q_style"][:2].tolist() == [0.75, 0.5]
    assert "- style: How good is the style? (an integer from 0 to 4)" in question and '{"correct": true, "style": 4}' in question


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ('{"a": true, "b": true}', 1.0),
        ('{"a": 1, "b": 0}', 0.5),
        ('{"a": "Yes", "b": "no"}', 0.5),
        ('so: {"a": true, "b": false}', 0.5),
        ('{"a": true, "b": false} I think', None),
        ('{"a": true, "a": false, "b": true}', None),  # twice: which one?
        ('{"a": true}', None),
        ('{"a": 2, "b": 0}', None),
        ('{"a": 0.5, "b": 0}', None),
        ('{"a": null, "b": 0}', None),
        ('["a", "b"]', None),
        ("", None),
    ],
)
def test_the_grammar_of_rubrics(answer: str, value: float | None) -> None:
    rubric = {name: RubricItem(text="?") for name in "ab"}
    found = Questions.of(RewardJudgeConfig(model="m", rubric=rubric), "judge").read(answer)
    assert (None if found is None else found.value) == value


@pytest.mark.parametrize(
    ("answer", "value"),
    [("Score: 4", 4.0), ("Score:-1", None), ("Score: 4/10", None), ("score: 4", None), ("My Score: 4", None), ("Score: 1e3", None)],
)
def test_the_grammar_of_scores(answer: str, value: float | None) -> None:
    found = Questions.of(RewardJudgeConfig(model="m"), "judge").read(answer)
    assert (None if found is None else found.value) == value


def test_a_pattern_replaces_the_grammar() -> None:
    questions = Questions.of(RewardJudgeConfig(model="m", pattern=r"\[\[(\w+)\]\]"), "judge")
    assert [questions.read(text) and questions.read(text).value for text in ("[[3]] or [[7]].", "7", "[[x]]")] == [7.0, None, None]  # type: ignore[union-attr]


def test_against_the_reference_answer_both_orders_count() -> None:
    with judge_server(better) as server:
        found = scored(settings(server, compare=Compare.answer), rollouts(1, 2, 5, answer="good"))
        # of the same length the first is preferred, so both orders together are a tie; shorter loses both; longer wins both
        assert found.rewards.tolist() == [0.5, 0.0, 1.0] and len(server.requests) == 5  # "good" with itself is one question
        one = scored(settings(server, compare=Compare.answer, swap=False), rollouts(1, answer="good"))
    assert one.rewards.tolist() == [1.0] and found.parts["q_tokens"].tolist() == [110.0, 220.0, 220.0]
    with judge_server(better) as server, pytest.raises(RewardError, match="f:1 has no reference answer; judge.compare=answer"):
        scored(settings(server, compare=Compare.answer), rollouts(1))


def test_a_group_is_a_tournament() -> None:
    rows = rollouts(1, 2, 5, 3, 4, prompts=(0, 0, 0, 1, 2))  # good, bad, good again; fine alone; odd alone
    with judge_server(better) as server:
        found = scored(settings(server, compare=Compare.group), rows)
        assert len(server.requests) == 2 * 3
        # "good" beats "bad" and loses to "good again": 1/2; "bad" loses both; "good again" wins both
        assert found.rewards[:3].tolist() == [0.5, 0.0, 1.0]
        assert found.valid.tolist() == [True] * 3 + [False] * 2 and found.silent.tolist() == [False] * 3 + [True] * 2  # type: ignore[union-attr]
        four = rollouts(1, 2, 5, 3, prompts=(0,) * 4)
        ring = scored(settings(server, compare=Compare.group, opponents=1), four)
        # good > bad, bad < good again, good again > fine, fine = good (the first of equal length wins in both orders)
    assert ring.rewards.tolist() == [0.75, 0.0, 1.0, 0.25]


def test_a_group_part_is_added_to_the_others(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_text("def one(prompts, responses, answers):\n    return [1.0 for _ in responses]\n")
    rows = rollouts(1, 2, 4, prompts=(0, 0, 1))
    with judge_server(better) as server:
        configs = {"one": NamedRewardConfig(path=f"{file}:one"), "q": settings(server, compare=Compare.group)}
        configs["q"].weight = 2.0
        reward = composed_reward(configs, decode)
        first = reward.score(rows).result(10)
        assert first.rewards.tolist() == [1.0] * 3 and list(first.parts) == ["one"]
        found = reward.compare(rows, first).result(10)  # type: ignore[misc]
        reward.close()
    assert found.rewards.tolist() == [3.0, 1.0, 1.0] and list(found.parts) == ["one", "q", "q_tokens"]  # alone in a group: no opinion


def test_a_flood_of_429_is_waited_out() -> None:
    refusals = iter([Refusal(429, headers={"Retry-After": "0.3"})] * 3 + [Refusal(503)] * 2)

    def reply(body: dict[str, Any]) -> str | Refusal:
        return next(refusals, "Score: 5")

    with judge_server(reply) as server:
        found = scored(settings(server, concurrency=3), rollouts(1, 2, 3))
    assert found.rewards.tolist() == [5.0] * 3 and len(server.requests) == 8
    assert server.most_at_once <= 3 and server.times[3] - server.times[0] > 0.28  # the pause held all of them back


def test_what_the_endpoint_refuses_for_good_ends_the_run_or_costs_the_sample(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-key")

    def reply(body: dict[str, Any]) -> str | Refusal:
        return Refusal(401, "bad key secret-key") if "\nbad\n" in asked(body) else "Score: 5"

    with judge_server(reply) as server:
        with pytest.raises(RewardError, match=r"reward q: .* answered status 401: 'bad key \*\*\*'; for sample 1 of 2 \(prompt f:2"):
            scored(settings(server, variable="JUDGE_KEY"), rollouts(1, 2))
        assert server.keys[0] == "Bearer secret-key"
        found = scored(settings(server, variable="JUDGE_KEY", on_error=OnError.invalid), rollouts(1, 2))
    assert found.valid.tolist() == [True, False] and "secret-key" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (Refusal(200, "<html>busy</html>"), "no chat completion: '<html>busy</html>'"),
        (Refusal(200, '{"choices": [{"message": {"content": null}}]}'), "no chat completion"),
        (Refusal(200, "x", seconds=3.0), "nothing within timeout_seconds=0.2"),
        (Refusal(429, "slow", {"Retry-After": "3600"}), "asks for a pause of 3600 s, more than judge.longest_wait_seconds=120"),
        (Refusal(302, "", {"Location": "http://elsewhere"}), "status 302"),
    ],
)
def test_nonsense_and_stalls_are_errors_that_say_so(refusal: Refusal, said: str) -> None:
    with judge_server(lambda body: refusal) as server, pytest.raises(RewardError) as failed:
        scored(settings(server, timeout=0.2, retries=1), rollouts(1))
    assert said in str(failed.value)


def test_an_endpoint_that_is_not_there() -> None:
    config = NamedRewardConfig(url="http://127.0.0.1:9/v1", judge=RewardJudgeConfig(model="m", retries=1))
    with pytest.raises(RewardError, match="gave no answer in 2 attempts"):
        scored(config, rollouts(1))


def test_a_rate_of_requests() -> None:
    with judge_server(lambda body: "Score: 5") as server:
        scored(settings(server, requests_per_minute=600), rollouts(1, 2, 3, 4))
    gaps = [after - before for before, after in zip(server.times, server.times[1:], strict=False)]
    assert min(gaps) > 0.05, gaps


def test_the_same_question_is_paid_once_also_after_a_kill(tmp_path: Path) -> None:
    mine = tmp_path / "judges" / "0"
    rows = rollouts(1, 1, 2, prompts=(0, 0, 1))
    with judge_server(lambda body: "Score: 5") as server:
        first = scored(settings(server), rows, mine)
        assert len(server.requests) == 2 and sorted(first.parts["q_tokens"].tolist()) == [0.0, 110.0, 110.0]
        kept = mine / "q.jsonl"
        kept.write_bytes(kept.read_bytes() + b'{"question": "half')  # killed while it wrote
        again = scored(settings(server), [*rows, *rollouts(3)], mine)
        assert len(server.requests) == 3 and again.rewards.tolist() == [5.0] * 4 and again.parts["q_tokens"][:3].tolist() == [0.0] * 3
        scored(settings(server), rollouts(3), tmp_path / "judges" / "1")  # another rank's answers
        assert len(server.requests) == 3
        scored(settings(server, cache=False), rollouts(3), mine)
        assert len(server.requests) == 4
    assert all("text" in json.loads(line) for line in kept.read_bytes().splitlines() if b"half" not in line)
    assert (tmp_path / "judges").stat().st_mode & 0o77 == 0


def test_several_judgements_are_averaged() -> None:
    with judge_server(lambda body: f"Score: {2 * body['seed']}" if body["seed"] < 3 else "none") as server:
        found = scored(settings(server, samples=4, temperature=0.7, body={"top_p": 0.9}), rollouts(1))
    assert found.rewards.tolist() == [2.0]  # of 0, 2, 4 and one that does not parse
    assert {one["top_p"] for one in server.requests} == {0.9} and {one["temperature"] for one in server.requests} == {0.7}


def test_a_template_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ columns.level }}|{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}|{{ answer }}|{{ response }}")
    messages = ({"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image"}]},)
    with judge_server(lambda body: "Score: 1") as server:
        scored(settings(server, template=str(file), system="Be strict."), rollouts(1, answer="ref", messages=messages))
    assert server.requests[0]["messages"] == [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": "0|user=hi;|ref|good"},
    ]
    for text, said in (
        ("{{ response", "line 1"),
        ("{{ respons }} {{ response }}", "has respons; allowed: answer, answer_text"),
        ("{{ prompt }}", "has no response"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match="reward.functions.q.judge.template=") as refused:
            composed_reward({"q": NamedRewardConfig(url="http://a", judge=RewardJudgeConfig(model="m", template=str(file)))}, decode)
        assert said in str(refused.value)
    file.write_text("{{ columns.nothing }} {{ response }}")
    with judge_server(lambda body: "Score: 1") as server, pytest.raises(RewardError, match="judge.template=.*nothing"):
        scored(settings(server, template=str(file)), rollouts(1))


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        ({"model": ""}, "judge.model=''"),
        ({"lowest": 5.0, "highest": 5.0}, "judge.lowest=5.0, judge.highest=5.0"),
        ({"samples": 2}, "judge.samples=2"),
        ({"opponents": 1}, "judge.opponents=1: only applies with judge.compare=group"),
        ({"pattern": "x"}, "judge.pattern=x: has 0 groups"),
        ({"pattern": "("}, "judge.pattern=(: not a regular expression"),
        ({"concurrency": 0}, "judge.concurrency=0"),
        ({"rubric": {"a": RubricItem()}}, "judge.rubric.a.text=''"),
        ({"rubric": {"a": RubricItem(text="?", weight=0.0)}}, "judge.rubric.a.weight=0.0"),
        ({"rubric": {"a b": RubricItem(text="?")}}, "judge.rubric.a b"),
        ({"rubric": {"a": RubricItem(text="?")}, "compare": Compare.group}, "judge.rubric and judge.compare=group"),
        ({"token_file": "x"}, "judge.token_file=x and token_variable=T"),
    ],
)
def test_settings_that_cannot_work(judge: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        asks: dict[str, Any] = {"model": "m", "system": "s"} | judge
        NamedRewardConfig(url="http://a", token_variable="T", judge=RewardJudgeConfig(**asks))
    assert said in str(refused.value)


def test_where_tokens_come_from(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(ConfigError, match="judge.token_file=.*cannot be read"):
        composed_reward({"q": NamedRewardConfig(url="http://a", judge=RewardJudgeConfig(model="m", token_file=str(file)))}, decode)
    file.write_text(" from-a-file\n")
    with judge_server(lambda body: "Score: 1") as server:
        scored(settings(server, token_file=str(file)), rollouts(1))
    assert server.keys == ["Bearer from-a-file"]
    with pytest.raises(ConfigError, match="q.token_variable=NOT_SET_HERE: this environment variable is not set"):
        composed_reward({"q": NamedRewardConfig(url="http://a", token_variable="NOT_SET_HERE", judge=RewardJudgeConfig(model="m"))}, decode)


def test_a_name_that_is_a_metric_of_a_judge() -> None:
    judge = NamedRewardConfig(url="http://a", judge=RewardJudgeConfig(model="m"))
    with pytest.raises(ConfigError, match="reward.functions.q_tokens: is a metric of the judge q"):
        check_parts({"q": judge, "q_tokens": NamedRewardConfig(path="a:b")})


def test_closing_drops_what_is_under_way() -> None:
    with judge_server(lambda body: Refusal(200, seconds=30.0)) as server:
        reward = composed_reward({"q": settings(server, timeout=60.0)}, decode)
        reward.score(rollouts(1))
        begun = time.monotonic()
        while not server.requests and time.monotonic() - begun < 10:
            time.sleep(0.01)
        reward.close()
    assert server.requests and not math.isnan(begun)
