"""Every setting is read: for each leaf of every recipe's schema, tests/settings has what must change with it, or why nothing does.

The schema says which settings there are, so a new one without an entry fails here. An entry is a changed value: two runs in this process
that differ in it alone must end with other weights (or with what `see` names), or, where a setting changes memory and speed only, with
the same ones. What stands elsewhere names a test that is there. The keys of an entry:

    to      the changed value; an entry that is no mapping is that value itself
    with    settings of both runs, relative to `at` (no dot) or whole
    and     further settings of the changed run, where the two need each other
    see     what must differ: weights, critic, files, read (examples and report), validation, metrics.NAME; `nothing`: all of these stay
            the same; `refusal`: the changed run is refused, the other is not (`unread`: its records, `unmade`: its settings);
            `refused_without`: the other way round
    at      where the setting lies, if not where those of its class do
    test    a file, or a test of one, that would notice
    why     why no number changes
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import json
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from settings_runs import Outcome, Runs

from aligner.algorithms.registry import recipes
from aligner.errors import AlignerError
from aligner.models.config import ModelConfig
from aligner.models.create import training
from aligner.models.training.trainable import Training
from aligner.run.settings import JobRun
from aligner.settings.schema import _named_sections, without_none

ROOT = Path(__file__).resolve().parents[2]
TABLES = sorted((ROOT / "tests" / "settings").glob("*.yaml"))
ENTRIES: dict[str, Any] = {name: entry for file in TABLES for name, entry in yaml.load(file.read_text(), yaml.CSafeLoader).items()}
PLACES: list[dict[str, Any]] = ENTRIES.pop("places")  # where a class of settings is given to something else than above
SAME = 2e-6  # what sums in another order change of weights that have moved by 1e-2
JUDGE = '''
def score(prompts, responses, answers):
    return [sum(map(ord, response)) % 7 / 4 - 0.5 for response in responses]

def by_prompt(prompts, responses, answers):
    """The same for all responses to most prompts."""
    return [score([p], [r], [a])[0] if p[0] in "03" else 0.25 for p, r, a in zip(prompts, responses, answers)]

def biased(word):
    def reward(prompts, responses, answers):
        return [len(r) % len(word) + number for number, r in zip(score(prompts, responses, answers), responses)]

    return reward

class Echo:
    def __init__(self, word="ab"):
        self.word = word

    def reset(self, prompt):
        return None

    def step(self, state, turn):
        from aligner.environments.environment import Observation

        return Observation(text=self.word, reward=len(set(turn.text)) / 10, done=turn.number > 2)
'''


def classes() -> dict[type, set[str]]:
    """Every class of settings below a recipe's config, with the names of its leaves; those of the recipes themselves are JobRun's."""
    found: dict[type, set[str]] = {}

    def walk(schema: type) -> None:
        hints, own = typing.get_type_hints(schema), found.setdefault(JobRun if issubclass(schema, JobRun) else schema, set())
        for field in dataclasses.fields(schema):
            kind = without_none(hints[field.name])
            section = kind if inspect.isclass(kind) and dataclasses.is_dataclass(kind) else None
            if section is None:
                own.add(field.name)
                section = _named_sections(kind)
            if section is not None and section not in found:
                walk(section)

    for recipe in recipes().values():
        walk(recipe.config)
    return found


CLASSES = {kind.__name__: leaves for kind, leaves in classes().items()}


def entries() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(class, setting, its entry) of all that is run here."""
    for entry in PLACES:
        yield entry["run"], f"{entry['at']}.{entry['field']}", entry
    for name, own in ENTRIES.items():
        for field, entry in fields_of(name).items():
            if "to" in entry:
                both = {"with": own.get("with", {}) | entry.get("with", {})}
                yield name, field, {"run": own["run"], "at": own["at"]} | entry | both


def fields_of(name: str) -> dict[str, dict[str, Any]]:
    """The entries of a class, with those of the class that it is like, as far as it has the settings."""
    own = ENTRIES[name]
    if isinstance(own, str):
        return {}
    like = fields_of(own["like"]) if "like" in own else {}
    given = {field: entry if isinstance(entry, dict) else {"to": entry} for field, entry in own.get("fields", {}).items()}
    return {field: entry for field, entry in like.items() if field in CLASSES.get(name, ())} | given


def test_every_setting_has_an_entry_and_every_entry_a_setting() -> None:
    assert ENTRIES.keys() - CLASSES.keys() == set()
    missing = []
    for name, leaves in CLASSES.items():
        entry = ENTRIES.get(name, {})
        if isinstance(entry, dict):
            known = fields_of(name)
            assert known.keys() <= leaves, f"{name} has no {known.keys() - leaves}"
            if not (entry.get("why") or entry.get("test")):
                missing += [f"{name}.{leaf}" for leaf in sorted(leaves - known.keys())]
    assert not missing, f"say in tests/settings what these settings change: {', '.join(missing)}"


def test_every_setting_is_read_somewhere() -> None:
    nodes = [node for file in (ROOT / "aligner").rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert [f"{name}.{leaf}" for name, leaves in CLASSES.items() for leaf in sorted(leaves - read)] == []


def test_every_test_that_an_entry_names_is_there() -> None:
    for name, own in ENTRIES.items():
        if isinstance(own, str):
            continue
        for field, entry in {"": own, **fields_of(name)}.items():
            file, _, test = entry.get("test", "").partition("::")
            assert not file or f"def {test}" in (ROOT / file).read_text(), f"{name}.{field}: {entry['test']}"
            assert not field or {"to", "test", "why"} & entry.keys(), f"{name}.{field} says nothing"


@pytest.fixture(scope="module")
def runs(topology, tmp_path_factory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("settings") / "data", topology)
    (made.folder / "judge.py").write_text(JUDGE)
    pairs = [json.loads(line) for line in (made.folder / "pairs.jsonl").read_text().splitlines()]
    given = [pair | {"chosen_score": 4.0 - number % 3, "rejected_score": 1.0} for number, pair in enumerate(pairs)]
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "<think>x</think>cd"}]
    lines: dict[str, list[Any]] = {
        "given": given,
        "mixed": [{"prompt": text, "other": text[::-1] + "!", "answer": text[0]} for text in ("ab", "abcdef", "xyz", "qrstu", "hi")],
        "texts": [{"prompt": a, "response": b, "other": b + a} for a, b in (("ab", "c"), ("x", "abcdefgh"), ("pqr", "st"), ("u", "v w"))],
        "asked": [{"messages": [*talk, talk[0]]}] * 4,
        "talks": [{"messages": [*talk, *talk]}] * 4,
        "pairs_talks": [{"prompt": [*talk, talk[0]], "chosen": [talk[1]], "rejected": [{"role": "assistant", "content": "no"}]}] * 4,
        "contrary": [{"prompt": "a", "chosen": c, "rejected": r} for c, r in [("bb", "cc")] * 5 + [("cc", "bb")] * 3],
        "told": [{"messages": talk}] * 4,
        "marked": [{"prompt": "a<eos>b", "response": "c<eos>d"}] * 4,
        "marked_pairs": [{"prompt": "a<eos>b", "chosen": "c<eos>d", "rejected": "c"}] * 4,
        "few": pairs[:4],
        "bad_pairs": [{"prompt": 7, "chosen": "a", "rejected": "b"}, *pairs],
        "bad_prompts": [{"prompt": 7, "response": "a"}, *({"prompt": text, "response": text} for text in ("ab", "cd", "ef", "gh"))],
    }
    for name, records in lines.items():
        (made.folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    asks = {"critique_request": "Worse?", "revision_request": "Mend it.", "question": "Better?"}
    (made.folder / "one_principle.json").write_text(json.dumps({"principles": [{"name": "one", **asks}]}))
    (made.folder / "other.jinja").write_text("{% for m in messages %}<u>{{ m.content }}<eos>{% endfor %}")
    for name, text in (("judge", "Marks for {response} as an answer to {prompt}: "), ("other", "{prompt} {response}")):
        (made.folder / f"{name}.txt").write_text(text)
    made.exported("sft", "sft")
    made.exported("other", "sft", {"run.seed": 2})
    return made


@pytest.mark.cpu  # bfloat16 on a GPU: other last digits in every order of sums
@pytest.mark.parametrize(("name", "field", "entry"), [pytest.param(*one, id=f"{one[0]}.{one[1]}") for one in entries()])
def test_a_setting_is_read(name: str, field: str, entry: Mapping[str, Any], runs: Runs) -> None:
    at, case = entry["at"], entry["run"]
    values = filled({key if "." in key else f"{at}.{key}": value for key, value in entry.get("with", {}).items()}, runs)
    new = {entry.get("field", field): entry["to"]} | entry.get("and", {})
    change = filled({f"{at}.{key}": value for key, value in new.items()}, runs)
    see = entry.get("see", "weights")
    assert runs.config(case, values) != runs.config(case, values | change) or see == "refusal"
    if see in ("refusal", "refused_without"):
        with pytest.raises(AlignerError) if see == "refused_without" else contextlib.nullcontext():
            runs.of(case, values)
        with pytest.raises(AlignerError) if see == "refusal" else contextlib.nullcontext():
            runs.of(case, values | change)
        return
    if see in ("read", "unread", "unmade"):
        ours = read(runs, case, values)
        if see == "read":
            assert ours != read(runs, case, values | change), f"{name}.{field}: {change} is read as what is read without"
        else:
            with pytest.raises(AlignerError):
                read(runs, case, values | change)
        return
    before, after = runs.of(case, values), runs.of(case, values | change)
    if see == "nothing":
        assert distance(before, after) < SAME
        return
    if not differs(before, after, see):
        pytest.fail(f"{name}.{field}: a run with {change} gives what it gives without", pytrace=False)


def test_a_models_training_has_the_settings_of_its_model() -> None:
    """Those of one name: a coefficient that is lost on the way may still be read where the model is built, with another weight."""
    given = {"micro_batch_size": 7, "micro_batch_tokens": 96, "packing": True}
    shared = {field.name for field in dataclasses.fields(Training)} & {field.name for field in dataclasses.fields(ModelConfig)}
    for more in ({"share_prompts": True}, {"router_aux_loss_coef": 0.3, "router_z_loss_coef": 0.2}):
        config = ModelConfig(**given, **more)
        made = training(config, None, total_steps=5, temperature=0.7, replay_routes=True)
        assert {name: getattr(made, name) for name in shared} == {name: getattr(config, name) for name in shared}
        assert (made.total_steps, made.temperature, made.replay_routes) == (5, 0.7, True)
    assert shared == {*given, "share_prompts", "router_aux_loss_coef", "router_z_loss_coef"}


@pytest.mark.parametrize("case", ["grpo", "ppo"])
def test_the_policy_has_the_temperature_of_its_samples(case: str, runs: Runs) -> None:
    """Its log-probs are the engine's but for what the runs here add to these, 0.4 at most."""
    outcome = runs.of(case, {"rollout.sampling.temperature": 0.5})
    assert 0.3 < outcome.metrics[0]["rollout/logprob_gap_max"] < 0.4 + 1e-4


def read(runs: Runs, case: str, settings: Mapping[str, Any]) -> str:
    """The examples of a run's training data, as it reads them, and what is said of them."""
    from aligner.jobs.parts import load_model_files

    runs.needed(case)
    config = runs.config(case, settings)
    tokenizer, _ = load_model_files(config.model, config.data)
    examples, report = config.read(config.data.train, tokenizer)
    return f"{list(examples)} {report.summary()}"


def filled(value: Any, runs: Runs) -> Any:
    """`{data}` and `{runs}` of texts filled in."""
    if isinstance(value, dict):
        return {key: filled(one, runs) for key, one in value.items()}
    if isinstance(value, list):
        return [filled(one, runs) for one in value]
    return value.format(data=runs.folder, runs=runs.folder / "runs") if isinstance(value, str) and value.startswith("{") else value


def distance(one: Outcome, other: Outcome) -> float:
    """The largest difference of weights, the critic's too, and of what a validation says."""
    assert [w.shape for w in one.weights] == [w.shape for w in other.weights] and one.files == other.files
    pairs = zip([*one.weights, *one.critic], [*other.weights, *other.critic], strict=True)
    told = {name: value for name, value in one.validation.items() if name.startswith("validation/")}
    assert other.validation == pytest.approx(one.validation | told, rel=1e-4, abs=1e-5)
    return max((float((a - b).abs().max()) for a, b in pairs), default=0.0)


def differs(one: Outcome, other: Outcome, see: str) -> bool:
    """Whether `see` of two runs are not the same."""
    if see.startswith("metrics."):
        name = see.removeprefix("metrics.")
        return [step[name] for step in one.metrics] != [step[name] for step in other.metrics]
    if see == "validation":
        return one.validation != other.validation
    if not one.weights:
        return one.files != other.files
    ours, theirs = (run.critic if see == "critic" else run.weights for run in (one, other))
    assert ours
    if [w.shape for w in ours] != [w.shape for w in theirs]:
        return True
    return any(float((a - b).abs().max()) > 2 * SAME for a, b in zip(ours, theirs, strict=True))
