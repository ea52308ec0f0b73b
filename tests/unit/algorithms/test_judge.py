"""The policy as a judge: what it is asked, how its words become scores, and what is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aligner.algorithms.judge import TEMPLATE, Judge, Judgement, Rubric, judged, judgement_metrics, read_template, score_pattern
from aligner.algorithms.self_rewarding import SelfRewardingConfig
from aligner.errors import ConfigError
from aligner.online.collect import ScoredRollouts
from aligner.types import SamplingConfig


def rubric(pattern: str = SelfRewardingConfig().score_pattern, template: str = TEMPLATE) -> Rubric:
    return Rubric(template=template, pattern=score_pattern(pattern), lowest=0.0, highest=5.0)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Good and short. Score: 4", 4.0),
        ("SCORE:3.5", 3.5),
        ("Score: 1 would be harsh.\nScore: 5", 5.0),  # it concludes with it
        ("Score: 0", 0.0),
        ("Score: 6", None),
        ("Score: <total points>", None),
        ("I like it", None),
        ("", None),
    ],
)
def test_a_score_in_words(text: str, score: float | None) -> None:
    assert rubric().score(text) == score


def test_a_pattern_that_finds_no_number() -> None:
    assert rubric(r"Score: (\w+)").score("Score: four") is None and rubric(r"Score: (\S+)").score("Score: nan") is None
    for pattern, text in ((r"Score: \d", "has 0 groups; needs one"), (r"(a)(b)", "has 2 groups"), (r"(", "not a regular expression")):
        with pytest.raises(ConfigError, match="algorithm.score_pattern=") as caught:
            score_pattern(pattern)
        assert text in str(caught.value)


def test_what_is_judged_is_not_read_as_a_template() -> None:
    assert rubric(template='{"q": {prompt}} {response}!').ask("{response}?", "{prompt} {x}") == '{"q": {response}?} {prompt} {x}!'


def test_templates(tmp_path: Path) -> None:
    path = tmp_path / "template.txt"
    path.write_text(TEMPLATE)
    assert read_template(str(path)) == read_template("") == TEMPLATE
    for content, text in (
        ("{prompt}", "has no {response}, which stands for what is judged"),
        ("{prompt}\n{response}\n{answer}", "line 3 has {answer}; allowed: {prompt}, {response}"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=f"algorithm.judge_template={path}") as caught:
            read_template(str(path))
        assert text in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_template(str(tmp_path / "none.txt"))


@pytest.mark.usefixtures("topology")
def test_judgements(fakes) -> None:
    """The judge of this test repeats what it is asked: a mean over two judgements of each of three responses, one of which is too long."""

    class Engine(fakes.FakeEngine):
        def generate(self, prompts, seeds, sampling=None):
            self.asked.append((prompts, list(seeds)))
            self.sampling.append(sampling)
            yield [fakes.rollout(p, p.tokens[-1], seed % 10, fakes.EOS, seed=seed) for p, seed in zip(prompts, seeds, strict=True)][::-1]

    log: list[str] = []
    engine, sampling = Engine(log), SamplingConfig(max_response_length=3)
    judge = Judge(
        rubric(),
        engine,
        ask=lambda prompt, response: [*prompt.tokens, *response],
        read=lambda tokens: f"{tokens[0]}. Score: {tokens[1]}",
        sampling=sampling,
        num_judgements=2,
        longest=3,
    )
    prompts = [fakes.prompt(number) for number in range(3)]
    found = judge.judge(prompts, [(7,), (7, 7, 7), (8,)], [1, 2, 3, 4, 5, 6])
    assert found == [
        Judgement(scores=(1.0, 2.0), texts=("7. Score: 1", "7. Score: 2")),
        Judgement(scores=(), texts=()),
        Judgement(scores=(5.0, None), texts=("8. Score: 5", "8. Score: 6")),
    ]
    assert [one.score for one in found] == [1.5, None, 5.0]
    assert engine.sampling == [sampling] and engine.asked[0][1] == [1, 2, 5, 6] and log == ["engine wakes", "engine sleeps"]
    assert judgement_metrics(found) == {
        "judge/judgements": 4.0,
        "judge/unparsed": 1.0,
        "judge/invalid": 1.0,
        "judge/too_long": 1.0,
        "judge/disagreement": 0.5,
    }
    rollouts = ScoredRollouts(rollouts=[fakes.rollout(p, 7) for p in prompts], rewards=torch.ones(3))
    scored = judged(rollouts, found)
    assert scored.rewards.tolist() == [1.5, 0.0, 5.0] and scored.valid.tolist() == [True, False, True]
    assert judge.judge(prompts[:1], [(7, 7, 7)], [1, 2]) == [Judgement(scores=(), texts=())] and len(engine.asked) == 1
