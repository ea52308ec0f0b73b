"""Constitutional AI with an engine that writes what it is told to and a judge whose odds are known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from builders import load_module

from aligner.algorithms.chains import (
    Broken,
    ConstitutionConfig,
    Judge,
    Judgement,
    Learnt,
    Pairs,
    discards_of,
    judgement_metrics,
    preference_records,
    supervised_records,
)
from aligner.algorithms.constitution import Constitutional
from aligner.data.config import ConstitutionDataConfig, PreferenceDataConfig, SFTDataConfig
from aligner.data.constitution import Constitution, Framing, Principle, load_cases
from aligner.data.supervised import load_preferences, load_supervised
from aligner.data.tokenizer import load_tokenizer
from aligner.errors import ConfigError, DataError, RunHalted
from aligner.loop.writing import Parts
from aligner.online.collect import Scorers
from aligner.protocols import Replica
from aligner.rewards.local import NoReward
from aligner.types import FinishReason, Rollout, SamplingConfig

PRINCIPLES = tuple(
    Principle(name=f"p{n}", critique_request=f"why {n}?", revision_request=f"mend {n}", question=f"which {n}?") for n in range(3)
)
UTILITY = {"draft": 0.0, "better": math.log(3), "same": 0.0}
BIAS = 0.7  # of the judge, for (A)


@pytest.fixture(scope="module")
def chars(tmp_path_factory):
    module = load_module(Path(__file__).parents[1] / "data" / "conftest.py", "character_tokenizer")
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "chat_template": module.TEMPLATE}
    return load_tokenizer(module.write_tokenizer(tmp_path_factory.mktemp("characters") / "t", **names))


class Scribe:
    """An engine that answers what `script(prompt's text, seed)` says; without `<eos>` it was cut."""

    def __init__(self, chars, script) -> None:
        self.chars, self.script, self.replica = chars, script, Replica()
        self.asked: list[tuple[str, int]] = []
        self.samplings: list[SamplingConfig] = []

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def generate(self, prompts, seeds, sampling=None):
        self.samplings.append(sampling)
        for prompt, seed in list(zip(prompts, seeds, strict=True))[::-1]:
            text = self.chars.decode(prompt.tokens)
            self.asked.append((text, seed))
            tokens = tuple(self.chars.encode(self.script(text, seed)))
            reason = FinishReason.stop if tokens[-1] == self.chars.eos_id else FinishReason.length
            yield [
                Rollout(prompt=prompt, response=tokens, logprobs=(0.0,) * len(tokens), finish_reason=reason, policy_version=0, seed=seed)
            ]


def script(text: str, seed: int) -> str:
    """A draft of `draft`, critiques that name their principle, revisions that are `better`."""
    if text.endswith("Critique:"):
        return f" {text.split('CritiqueRequest: ')[-1].split('?')[0]}<eos>"
    return " better<eos>" if text.endswith("Revision:") else " draft<eos>"


def known_odds(chars, level: float = -2.0):
    """Log-probs of (A) and (B): the response's utility, and BIAS for (A); on the first token of the answer."""

    def logprobs(batch) -> torch.Tensor:
        found = torch.zeros(batch.tokens.shape)
        for row, mask in enumerate(batch.loss_mask):
            start = int(mask.int().argmax())
            text = chars.decode(batch.tokens[row, :start].tolist()).rsplit("Options:\n(A) ", 1)[1]
            a, b = text.removesuffix("\n\nThe answer is:").split("\n\n(B) ")
            answer = chars.decode(batch.tokens[row, start : int(batch.lengths[row])].tolist())
            found[row, start] = level + (UTILITY[a] + BIAS if answer == " (A)" else UTILITY[b])
        return found

    return logprobs


def work(chars, engine=None, *, logprobs=None, max_history=1000, seed=1, batch_size=2, **settings) -> Constitutional:
    constitution = Constitution(principles=PRINCIPLES)
    framing = Framing(chars, constitution, add_bos=True)
    judge = Judge(
        logprobs=logprobs or known_odds(chars),
        framing=framing,
        chat=False,
        pad_id=chars.pad_id,
        max_length=max_history,
        batch_size=batch_size,
    )
    config = ConstitutionConfig(**settings)
    return Constitutional(
        config,
        constitution,
        framing,
        engine=engine or Scribe(chars, script),
        scorers=Scorers(reward=NoReward()),
        sampling=SamplingConfig(),
        judge=None if config.pairs is Pairs.none else judge,
        seed=seed,
        max_history=max_history,
    )


def cases_of(tmp_path: Path, chars, count: int = 3, *, given: bool = False, **fields):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{n}"} | fields) + "\n" for n in range(count)))
    return load_cases(str(path), ConstitutionDataConfig(train=str(path)), chars, given=given)[0]


def test_chains_and_what_training_reads_of_them(topology, tmp_path, chars) -> None:
    """Two rounds with different principles; a round is about the newest response alone. log 3 of log-odds are three quarters."""
    engine = Scribe(chars, script)
    traces, metrics = work(chars, engine, num_revisions=2, learnt=Learnt.every, num_questions=2).make(0, cases_of(tmp_path, chars))
    assert len(engine.asked) == 3 * 5 and len({seed for _, seed in engine.asked}) == 15
    assert all("\n\nHuman:" in sampling.stop_strings for sampling in engine.samplings)
    for trace in traces:
        names = [one["principle"] for one in trace["rounds"]]
        assert len(set(names)) == 2 and [one["critique"] for one in trace["rounds"]] == [f"why {name[1]}" for name in names]
    assert {text.count("CritiqueRequest:") for text, _ in engine.asked} == {0, 1}
    assert sum(" better\n\nCritiqueRequest" in text for text, _ in engine.asked) == 6  # the second rounds
    supervised = [record for trace in traces for record in supervised_records(trace)]
    assert [len(record["critiques"]) for record in supervised] == [1, 2] * 3 and supervised[1]["draft"] == " draft"
    preferences = [record for trace in traces for record in preference_records(trace)]
    for record in preferences:
        assert (record["chosen"], record["rejected"], record["chosen_is"]) == (" better", " draft", "revision")
        assert record["probability"] == pytest.approx(0.75) and len(record["questions"]) == 2
        assert record["chosen_reward"] - record["rejected_reward"] == pytest.approx(math.log(3))
    assert metrics["preference/position_bias"] == pytest.approx(BIAS) and metrics["preference/orders_agree"] == 1
    assert metrics["preference/entropy"] == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    mass = math.exp(-2) * (math.exp(BIAS) * 3 + 1 + math.exp(BIAS) + 3) / 2
    assert metrics["preference/mass"] == pytest.approx(mass) and metrics["preference/revision_chosen"] == 1
    assert (metrics["constitution/supervised"], metrics["preference/pairs"], metrics["constitution/unchanged"]) == (6, 3, 0)
    assert metrics["constitution/response_length"] == len(" draft") + 1 and metrics["rollout/truncated_fraction"] == 0

    sft, pairs = tmp_path / "sft.jsonl", tmp_path / "pairs.jsonl"
    sft.write_text("".join(json.dumps(record) + "\n" for record in supervised))
    pairs.write_text("".join(json.dumps(record) + "\n" for record in preferences))
    (row, *_), _ = load_supervised(str(sft), SFTDataConfig(train=str(sft)), chars)
    assert chars.decode(row.tokens, skip_special=False) == "<bos>\n\nHuman: q0\n\nAssistant: better<eos>"
    (pair, *_), _ = load_preferences(str(pairs), PreferenceDataConfig(train=str(pairs)), chars)
    assert pair.margin == pytest.approx(math.log(3))


@pytest.mark.parametrize(
    ("kind", "reply", "fault"),
    [
        ("Assistant:", " <eos>", "response_empty"),
        ("Assistant:", " cut", "response_truncated"),
        ("Critique:", "\n\nRevision: x<eos>", "critique_empty"),
        ("Critique:", " a<u>b<eos>", "critique_unreadable"),
        ("Revision:", " cut", "revision_truncated"),
    ],
)
def test_what_goes_wrong_is_named_and_not_used(kind, reply, fault, topology, tmp_path, chars) -> None:
    """In the first of three prompts; the others are as they would be without it."""

    def wrong(text: str, seed: int) -> str:
        return reply if "q0" in text and text.endswith(kind) else script(text, seed)

    cases = cases_of(tmp_path, chars)
    traces, metrics = work(chars, Scribe(chars, wrong)).make(0, cases)
    assert traces[0]["fault"] == fault and discards_of(traces[0]) == [f"left_out/{fault}"]
    assert metrics[f"left_out/{fault}"] == 1 and metrics["constitution/supervised"] == metrics["preference/pairs"] == 2
    assert supervised_records(traces[0]) == preference_records(traces[0]) == []
    assert traces[1:] == work(chars).make(0, cases)[0][1:]


def test_a_chain_may_end_with_its_last_whole_revision(topology, tmp_path, chars) -> None:
    def wrong(text: str, seed: int) -> str:
        return " cut" if " better\n\nCritiqueRequest" in text and text.endswith("Critique:") else script(text, seed)

    for broken, count in ((Broken.drop, 0), (Broken.shorten, 1)):
        (trace,), metrics = work(chars, Scribe(chars, wrong), num_revisions=2, broken=broken).make(0, cases_of(tmp_path, chars, 1))
        assert len(supervised_records(trace)) == len(preference_records(trace)) == count == metrics["constitution/supervised"]
        assert discards_of(trace) == [("left_out/", "shortened/")[count] + "critique_truncated"]


def test_no_room(topology, tmp_path, chars) -> None:
    """For a critique, for a revision, for a question: each by its name, and nothing is asked."""
    cases = cases_of(tmp_path, chars, 1)
    critique = len("<\n\nHuman: q0\n\nAssistant: draft\n\nCritiqueRequest: why 0?\n\nCritique:")
    revision = critique + len(" why 0\n\nRevisionRequest: mend 0\n\nRevision:")
    for size, fault in ((critique - 1, "critique_too_long"), (critique, "revision_too_long"), (revision, "comparison_too_long")):
        (trace,), metrics = work(chars, max_history=size).make(0, cases)
        assert discards_of(trace) == [f"left_out/{fault}"] and metrics["preference/pairs"] == 0
    assert len(supervised_records(trace)) == 1  # only the comparison had no room


def test_undecided_identical_and_not_understood(topology, tmp_path, chars) -> None:
    cases = cases_of(tmp_path, chars, 1)
    same = Scribe(chars, lambda text, seed: " same<eos>" if text.endswith("Revision:") else script(text, seed))
    copied = Scribe(chars, lambda text, seed: " draft<eos>" if text.endswith("Revision:") else script(text, seed))
    for engine, settings, reason in (
        (same, {}, "undecided"),  # a tie
        (copied, {}, "identical"),
        (None, {"min_probability": 0.8}, "undecided"),  # of 0.75
        (None, {"min_mass": 1.0}, "not_understood"),
    ):
        (trace,), metrics = work(chars, engine, **settings).make(0, cases)
        assert discards_of(trace) == [f"left_out/comparison_{reason}"] and preference_records(trace) == []
        assert metrics[f"left_out/comparison_{reason}"] == 1 and len(supervised_records(trace)) == 1
    assert work(chars, copied).make(0, cases)[1]["constitution/unchanged"] == 1


def test_two_samples_and_given_pairs(topology, tmp_path, chars) -> None:
    """The second response is another sample; given ones are compared as they are, and nothing is sampled."""
    engine = Scribe(chars, lambda text, seed: f" {('draft', 'better')[seed == second]}<eos>")
    second, cases = None, cases_of(tmp_path, chars, 1)
    work(chars, engine, num_revisions=0, pairs=Pairs.sampled).make(0, cases)
    (_, first), (_, second) = engine.asked
    assert first != second
    (trace,), _ = work(chars, engine, num_revisions=0, pairs=Pairs.sampled).make(0, cases)
    assert preference_records(trace)[0]["chosen"] == " better" and preference_records(trace)[0]["chosen_is"] == "second"
    engine.asked.clear()
    (given,) = cases_of(tmp_path, chars, 1, given=True, responses=["better", "draft"])
    (trace,), metrics = work(chars, engine, num_revisions=0, pairs=Pairs.given).make(0, [given])
    assert preference_records(trace)[0]["chosen_is"] == "first" and not engine.asked and metrics["preference/first_chosen"] == 1


def test_a_judge_that_is_broken_ends_the_run(topology, tmp_path, chars) -> None:
    with pytest.raises(RunHalted, match="prompts.jsonl:1: the judge's log-probs are not finite"):
        work(chars, logprobs=known_odds(chars, level=math.nan)).make(0, cases_of(tmp_path, chars, 1))


def test_odds_over_orders_and_questions() -> None:
    """By hand: (2 + 0 - 1 + 1) / 4; orders disagree where their sums have different signs."""
    judgement = Judgement(log_odds=((2.0, 0.0), (-1.0, 1.0)), mass=0.5)
    assert (judgement.margin, judgement.position_bias, judgement.agrees) == (0.5, 0.0, True)
    assert judgement.probability == pytest.approx(0.6224593312)
    assert not Judgement(log_odds=((2.0, -1.0),), mass=1).agrees
    assert Judgement(log_odds=((0.0, 0.0),), mass=1).entropy == pytest.approx(math.log(2))
    assert Judgement(log_odds=((-900.0, -900.0),), mass=1).entropy == 0 and judgement_metrics([]) == {}


def test_bad_settings() -> None:
    for settings, text in (
        ({"num_chains": 0}, "algorithm.num_chains=0: must be at least 1"),
        ({"min_probability": 0.4}, "algorithm.min_probability=0.4: must be from 0.5 to 1"),
        ({"num_revisions": 0}, "algorithm.num_revisions=0: with algorithm.pairs=revised there is nothing"),
        ({"pairs": Pairs.given}, "algorithm.pairs=given: nothing is sampled; allowed: num_revisions=0"),
    ):
        with pytest.raises(ConfigError, match=text):
            ConstitutionConfig(**settings)


def test_what_is_published(tmp_path) -> None:
    """Files for training, the constitution, and a report of everything that was not used; an empty file is an error."""
    from aligner.algorithms.chains import publish_feedback

    trace = {"source": "f:1", "chain": 0, "prompt": "p", "draft": "d", "fault": "", "learnt": [0]}
    rounds = [{"principle": "p0", "critique": "c", "revision": "r"}]
    broken = trace | {"rounds": [], "fault": "critique_empty", "learnt": [], "comparison": {"left_out": "critique_empty"}}
    parts = Parts(directory=tmp_path / "parts", made_of={}, num_items=2, part_size=1)
    parts.write(0, [trace | {"rounds": rounds, "comparison": {"left_out": "undecided"}}])
    parts.write(1, [broken])
    constitution, names = Constitution(principles=PRINCIPLES), ["records.jsonl", "preferences.jsonl"]
    with pytest.raises(DataError, match=r"preferences.jsonl has no record.*1 records.jsonl.*1 left_out/comparison_undecided"):
        publish_feedback(parts, tmp_path, constitution=constitution, wanted=names)
    assert json.loads((tmp_path / "records.jsonl").read_text())["response"] == "r"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["not used"] == {"left_out/comparison_undecided": 1, "left_out/critique_empty": 1}
    assert report["records"] == {"traces.jsonl": 2, "records.jsonl": 1, "preferences.jsonl": 0}
    assert "everything" not in publish_feedback(parts, tmp_path, constitution=constitution, wanted=names[:1])
