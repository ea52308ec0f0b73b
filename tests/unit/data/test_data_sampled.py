"""Sampled responses for SteerLM 2: what is scored of them, the attribute model's probabilities by hand, and what is written."""

from __future__ import annotations

import json
import math

import pytest

from aligner.algorithms.generate import GenerateConfig
from aligner.algorithms.proposals import ProposalsConfig, beta_mass
from aligner.data.config import AnnotateDataConfig, BadLines, Overlong, ProposalDataConfig, RequestDataConfig, SampledDataConfig
from aligner.data.labelled import MISSING, load_requests, load_unlabelled
from aligner.data.proposals import LabelQuery, Quantity, load_proposals, load_sampled
from aligner.errors import ConfigError, DataError

PROMPT = [
    {"from": "User", "value": "hi"},
    {"from": "Assistant", "value": "yo", "label": "joy:1"},
    {"from": "User", "value": "why"},
]
RECORD = {
    "system": "s",
    "prompt_turns": PROMPT,
    "label": "joy:4",
    "responses": [
        {"from": "Assistant", "value": "so", "finish_reason": "stop", "logprob": -1.0},
        {"from": "Assistant", "value": "an", "finish_reason": "length"},
        {"from": "Assistant", "value": "", "finish_reason": "stop"},
    ],
}
HEAD = "<bos><extra_id_0>System\ns\n<extra_id_1>User\nhi\n<extra_id_1>Assistant\n"
LABELLED = f"{HEAD}<extra_id_2>joy:1\nyo\n<extra_id_1>User\nwhy\n<extra_id_1>Assistant\n<extra_id_2>joy:4\n"
PLAIN = f"{HEAD}yo\n<extra_id_1>User\nwhy\n<extra_id_1>Assistant\n"
END = "\n<extra_id_1><eos>"


def load(path: str, chars, quantity: Quantity, attributes=("joy",), **settings):
    query = LabelQuery(quantity=quantity, attributes=attributes, lowest=0, highest=4)
    return load_sampled(path, SampledDataConfig(train=path, **settings), chars, query)


def learnt(chars, row) -> tuple[str, str]:
    """What precedes the part in the mask, and that part."""
    start = row.loss_mask.index(True)
    assert all(row.loss_mask[start:])
    return chars.decode(row.tokens[:start], skip_special=False), chars.decode(row.tokens[start:], skip_special=False)


def test_what_each_log_prob_is_of(jsonl, chars) -> None:
    """A response that was cut off has no end; an empty one is its end. Without labels: the whole prompt has none."""
    path = jsonl(RECORD)
    for quantity, head in ((Quantity.proposal, LABELLED), (Quantity.response, PLAIN)):
        ((group,), _) = load(path, chars, quantity)
        assert [learnt(chars, row) for row in group.rows] == [(head, f"so{END}"), (head, "an"), (head, END)]
    ((judged,), _) = load(path, chars, Quantity.attributes)
    texts = [chars.decode(row.tokens, skip_special=False) for row in judged.rows]
    assert texts == [f"{PLAIN}{one}\n<extra_id_2>" for one in ("so", "an", "")]
    assert judged.levels == (4.0,)
    labelled = {"conversations": [*PROMPT, {"from": "Assistant", "value": "so"}], "system": "s", "type": "VALUE_TO_TEXT"}
    (whole,), _ = load_unlabelled(jsonl(labelled, name="u.jsonl"), AnnotateDataConfig(), chars)
    assert whole.rows[-1] == judged.rows[0].tokens  # as `annotate` scores it


def test_a_chat_template_of_its_own(jsonl, chars) -> None:
    whole = RECORD | {"system": "", "responses": [RECORD["responses"][0]] * 2}
    ((group,), _) = load(jsonl(whole), chars, Quantity.response, apply_chat_template=True)
    assert learnt(chars, group.rows[0]) == ("<bos><u>hi<a>yo<eos>\n<u>why<a>", "so<eos>")
    with pytest.raises(DataError, match=r"d.jsonl:1: field 'responses\[1\]' was cut off"):
        load(jsonl(RECORD | {"system": ""}), chars, Quantity.response, apply_chat_template=True)


def test_the_trainer_reads_what_was_written(jsonl, chars) -> None:
    """The rows that a log-prob was taken of are the ones that are trained on, token for token; what else a record has is kept."""
    record, scored = RECORD, load(jsonl(RECORD), chars, Quantity.proposal)[0][0].rows
    for quantity, base in ((Quantity.proposal, -3.0), (Quantity.response, -2.0), (Quantity.attributes, -1.0)):
        ((group,), _) = load(jsonl(record), chars, quantity)
        record = group.with_log_probs(quantity, [base, base - 1, base - 2])
    assert record["responses"][0]["logprob"] == -1.0 and record["prompt_turns"] == PROMPT
    ((found,), _) = load_proposals(path := jsonl(record), ProposalDataConfig(train=path), chars)
    assert found.rows == scored
    assert found.targets == (-3.0, -5.0, -7.0) and found.proposals == (-3.0, -4.0, -5.0)
    with pytest.raises(DataError, match=r"d.jsonl:1: field 'responses\[0\]': 'log\(P\(a\|x,y\)\)' is None, .*the recipe proposals"):
        load_proposals(path := jsonl(RECORD), ProposalDataConfig(train=path), chars)


@pytest.mark.parametrize(
    ("changed", "settings", "text"),
    [
        ({"label": "joy:5"}, {}, "field 'label' is 'joy:5': joy is 5, expected a whole number from 0 to 4"),
        ({"label": "joy:1.5"}, {}, "joy is 1.5, expected a whole number"),
        ({"label": "wit:2"}, {}, "field 'label' has 'wit', allowed: joy"),
        ({"responses": RECORD["responses"][:1]}, {}, "field 'responses' has 1 responses, expected at least 2"),
        ({}, {"num_responses": 4}, "field 'responses' has 3 responses, expected at least 4"),
        ({}, {"max_length": 20, "overlong": Overlong.refuse}, "tokens, allowed: at most data.max_length=20"),
    ],
)
def test_bad_records(jsonl, chars, changed: dict, settings: dict, text: str) -> None:
    with pytest.raises(DataError) as caught:
        load(path := jsonl(RECORD | changed), chars, Quantity.attributes, **settings)
    assert f"{path}:1: " in str(caught.value) and text in str(caught.value)


def test_settings_and_left_out(jsonl, chars) -> None:
    path = jsonl(RECORD, RECORD | {"label": "joy:x"})
    (kept,), report = load(path, chars, Quantity.attributes, bad_lines=BadLines.skip, num_responses=2)
    assert len(kept.rows) == 2 == len(kept.with_log_probs(Quantity.attributes, [-1, -2])["responses"]) and report.num_bad == 1
    for make, text in (
        (lambda: SampledDataConfig(overlong=Overlong.truncate), "data.overlong=truncate: log-probs belong to complete responses"),
        (lambda: ProposalsConfig(concentration=0), "algorithm.concentration=0: must be above 0"),
        (lambda: ProposalsConfig(served_by="runs/x"), "algorithm.served_by=runs/x: a server gives scores"),
        (lambda: GenerateConfig(grouped=True), "algorithm.num_samples=1: responses are compared"),
    ):
        with pytest.raises(ConfigError, match=text):
            make()


def test_generate_writes_what_is_read(jsonl, chars) -> None:
    turns = [*PROMPT, {"from": "Assistant", "value": "x", "label": "joy:4"}]
    asked = jsonl({"conversations": turns, "system": "s", "type": "VALUE_TO_TEXT"})
    (request,), _ = load_requests(asked, RequestDataConfig(train=asked), chars)
    record = request.proposed([{"value": "so", "finish_reason": "stop"}, {"value": "an", "finish_reason": "length"}])
    assert record["prompt_turns"] == PROMPT and record["label"] == "joy:4" and record["source"] == f"{asked}:1"
    ((group,), _) = load(jsonl(json.loads(json.dumps(record)), name="g.jsonl"), chars, Quantity.proposal)
    assert group.rows[0].tokens[: len(request.prompt.tokens)] == request.prompt.tokens
    (plain,), _ = load_requests(path := jsonl({"prompt": "a"}, name="p.jsonl"), RequestDataConfig(train=path), chars)
    with pytest.raises(DataError, match="p.jsonl:1: requests no attributes"):
        plain.proposed([])


def test_groups_of_one_size(jsonl, chars) -> None:
    scored = [one | {"log(P(a|x,y))": -1.0, "log(P(y|x))": -2.0} for one in RECORD["responses"]]
    path = jsonl(RECORD | {"responses": scored[:2]}, RECORD | {"responses": scored})
    with pytest.raises(DataError, match=r"records have \[2, 3\] responses, expected the same number in all"):
        load_proposals(path, ProposalDataConfig(train=path), chars)
    assert [len(one.rows) for one in load_proposals(path, ProposalDataConfig(train=path, num_responses=2), chars)[0]] == [2, 2]


def test_beta_by_hand() -> None:
    """Beta(2, 3) has the distribution function 6 x^2 - 8 x^3 + 3 x^4; near an end, without loss of digits."""

    def below(x: float) -> float:
        return 6 * x**2 - 8 * x**3 + 3 * x**4

    for low, high in ((0.0, 0.125), (0.125, 0.375), (0.375, 0.625), (0.625, 0.875), (0.875, 1.0)):
        assert beta_mass(low, high, 2, 3) == pytest.approx(below(high) - below(low), rel=1e-12)
        assert beta_mass(1 - high, 1 - low, 3, 2) == pytest.approx(below(high) - below(low), rel=1e-12)
    assert beta_mass(0.0, 1e-9, 20, 1) == pytest.approx(1e-180, rel=1e-9)
    assert beta_mass(1 - 2.0**-30, 1.0, 1, 8) == pytest.approx(2.0**-240, rel=1e-9)


def test_levels_by_hand() -> None:
    """c = 4 and a score in the middle: Beta(2, 2), 3 x^2 - 2 x^3; level 2 is [3/8, 5/8], level 4 [7/8, 1]."""
    config = ProposalsConfig(attributes=["joy", "wit"], concentration=4.0)
    end = 3 / 64 - 2 / 512
    middle = 1 - 2 * (3 * (3 / 8) ** 2 - 2 * (3 / 8) ** 3)
    assert math.exp(config.log_prob([2.0, 9.0], [2, MISSING])) == pytest.approx(middle)
    assert config.log_prob([2.0, 2.0], [2, 4]) == pytest.approx(math.log(middle) + math.log(end))
    levels = [math.exp(ProposalsConfig(attributes=["joy"]).log_prob([2.3], [level])) for level in range(5)]
    assert sum(levels) == pytest.approx(1) and max(levels) == levels[2]
    sure = ProposalsConfig(attributes=["joy"], concentration=1e4)
    assert -800 < sure.log_prob([0.0], [4]) < -700 and sure.log_prob([7.0], [4]) == pytest.approx(0, abs=1e-6)
