"""What a judge is asked, and how its answer is read: by a strict grammar, never by guessing.

The last line that is not empty is `Score: N`, or `Better: A`, `B` or `tie`; or the answer ends with a JSON object that has the rubric's
items and nothing else; or the last match of a regular expression counts. What a judge thinks between marks before its answer is not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aligner.errors import ConfigError
from aligner.rewards.config import Compare, RewardJudgeConfig, RubricItem
from aligner.rewards.reasoning import split_reasoning

_QUESTION = """\
[Question]
{% for turn in messages %}{{ turn.role }}: {{ turn.content }}
{% else %}{{ prompt }}
{% endfor %}
{% if answer is not none and not compares_with_answer %}[Reference answer]
{{ answer }}

{% endif %}"""
_SCORED = f"""\
You judge the response of an AI assistant.

{_QUESTION}[Response]
{{{{ answer_text }}}}

[Your task]
{{% if rubric %}}Answer each of these about the response:
{{% for name, item in rubric.items() %}}- {{{{ name }}}}: {{{{ item.text }}}} \
({{{{ "true or false" if item.highest == 1 else "an integer from 0 to %d" % item.highest }}}})
{{% endfor %}}
Give your reasons briefly, then end with a JSON object of the values alone, such as {{{{ example }}}}.
{{% else %}}Give your reasons briefly, then end with a last line "Score: N", N from {{{{ lowest }}}} (worst) to {{{{ highest }}}} (best).
{{% endif %}}"""
_COMPARED = f"""\
You compare two responses of AI assistants to the same question. Their order and length mean nothing.

{_QUESTION}[Response A]
{{{{ response_a }}}}

[Response B]
{{{{ response_b }}}}

[Your task]
Give your reasons briefly, then end with a last line "Better: A", "Better: B" or "Better: tie".
"""
_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
_SCORE = re.compile(r"Score: *(-?\d+(?:\.\d+)?)")
_BETTER = re.compile(r"Better: *(A|B|tie)", re.IGNORECASE)
_FENCE = re.compile(r"```(?:json)?\s*(\{.*\})\s*```", re.DOTALL)
_OUTCOMES = {"a": 1.0, "b": 0.0, "tie": 0.5}
_WORDS = {"yes": 1, "no": 0, "true": 1, "false": 0}
_ALWAYS = {"prompt", "messages", "answer", "columns", "rubric", "lowest", "highest", "example", "compares_with_answer"}
_ALONE, _PAIRED = ("response", "reasoning", "answer_text"), ("response_a", "response_b")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an answer says: the score (of a pair: 1 if A is better), and of a rubric each item's part of its points."""

    value: float
    items: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """A judge's question as a template, and the grammar of its answers."""

    config: RewardJudgeConfig
    template: Template

    @classmethod
    def of(cls, config: RewardJudgeConfig, setting: str) -> Questions:
        """Raises ConfigError, naming `setting`, for a template that cannot be read or used."""
        pairs = config.compare is not Compare.nothing
        if not config.template:
            return cls(config=config, template=_ENVIRONMENT.from_string(_COMPARED if pairs else _SCORED))
        key, own = f"{setting}.template={config.template}", _PAIRED if pairs else _ALONE
        try:
            text = Path(config.template).expanduser().read_text()
            names = meta.find_undeclared_variables(_ENVIRONMENT.parse(text))
            template = _ENVIRONMENT.from_string(text)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{key}: cannot be read ({error})") from error
        except TemplateSyntaxError as error:
            raise ConfigError(f"{key}: line {error.lineno}: {error.message}") from error
        if unknown := sorted(names - _ALWAYS - {*own}):
            raise ConfigError(f"{key}: has {unknown[0]}; allowed: {', '.join(sorted({*_ALWAYS, *own}))}")
        missing = [name for name in own if name not in names] if pairs else [own[0]] * names.isdisjoint(own)
        if missing:
            raise ConfigError(f"{key}: has no {missing[0]}, which is what is judged")
        return cls(config=config, template=template)

    def ask(self, texts: Mapping[str, Any]) -> list[dict[str, str]]:
        """The messages of a request. Raises ConfigError for a template that fails with these texts."""
        config = self.config
        first = {name: True if item.highest == 1 else item.highest for name, item in config.rubric.items()}
        given = {"rubric": config.rubric, "lowest": f"{config.lowest:g}", "highest": f"{config.highest:g}", "example": json.dumps(first)}
        try:
            asked = self.template.render(given | {"compares_with_answer": config.compare is Compare.answer} | dict(texts))
        except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"judge.template={config.template or 'built in'}: {error}") from error
        return [*([{"role": "system", "content": config.system}] if config.system else []), {"role": "user", "content": asked}]

    def read(self, text: str) -> Verdict | None:
        """What the answer says; None if it does not parse."""
        config, said = self.config, split_reasoning(text)[1]
        if config.rubric:
            return _by_rubric(said, config.rubric)
        compares = config.compare is not Compare.nothing
        if config.pattern:
            found = re.findall(config.pattern, said)[-1:]
        else:
            last = said.splitlines()[-1].strip("*_ \t") if said else ""
            match = (_BETTER if compares else _SCORE).fullmatch(last.replace("**", ""))
            found = [match[1]] if match else []
        if not found:
            return None
        if compares:
            outcome = _OUTCOMES.get(found[0].strip().lower())
            return None if outcome is None else Verdict(outcome)
        try:
            score = float(found[0])
        except ValueError:
            return None
        return Verdict(score) if config.lowest <= score <= config.highest else None


def _by_rubric(said: str, rubric: Mapping[str, RubricItem]) -> Verdict | None:
    """The weighted mean of the items' parts; None unless the answer ends with an object of exactly these items."""
    fenced = _FENCE.findall(said) if said.endswith("```") else []
    text = fenced[-1] if fenced else said
    for start in (found.start() for found in re.finditer(r"\{", text)):
        try:
            pairs = json.loads(text[start:], object_pairs_hook=list)
            break
        except ValueError:
            continue
    else:
        return None
    points = {name: _points(value, rubric[name].highest) for name, value in pairs if name in rubric}
    if len(pairs) != len(rubric) or points.keys() != rubric.keys():
        return None
    items = {name: value / rubric[name].highest for name, value in points.items() if value is not None}
    if len(items) < len(rubric):
        return None
    total = sum(item.weight for item in rubric.values())
    return Verdict(sum(rubric[name].weight * value for name, value in items.items()) / total, items)


def _points(value: object, highest: int) -> int | None:
    """The points that a value of the object stands for; None if it is none of the allowed ones."""
    if highest == 1 and isinstance(value, str):
        return _WORDS.get(value.strip().lower())
    if isinstance(value, bool) and highest > 1 or not isinstance(value, int):
        return None
    return int(value) if 0 <= value <= highest else None


def excerpt(text: str, characters: int = 160) -> str:
    """The end of an answer, where its verdict should be."""
    return repr(text if len(text) <= characters else "..." + text[-characters:])


def turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages with their contents as text."""
    return [
        turn
        if isinstance(content := turn.get("content"), str)
        else {**turn, "content": "".join(str(part.get("text", "")) for part in content or () if isinstance(part, Mapping))}
        for turn in messages
    ]
