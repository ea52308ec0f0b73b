"""Payloads that no stage knows travel from a data record to the batch, the loss, an engine, an episode, a server, its journal, a cache and
a checkpoint: one class registers each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aligner.data.collate import PreferencePair, preference_batch, rollout_batch, supervised_batch, token_batch
from aligner.data.config import PromptDataConfig, SFTDataConfig
from aligner.data.prompts import load_prompts
from aligner.data.supervised import answered, load_supervised
from aligner.errors import DataError
from aligner.types import FinishReason, LogprobKind, Prompt, Rollout, Routes, RowTensor, SamplingConfig, ValueBatch
from aligner.types.extras import KINDS, continued, from_json, to_json
from aligner.types.rows import take_rows, to_device, trim_columns

TONES = [(1.0, -2.0), (0.5, 3.0), (0.25, 0.125)]


@pytest.fixture(autouse=True)
def kinds() -> Iterator[tuple[type[RowTensor], type[RowTensor]]]:
    """`tone`, two numbers for each row from field "tone" of its record, and `doubt`, an integer for each token."""

    class Tone(RowTensor):
        name, field, shape = "tone", "tone", (2,)

    class Doubt(RowTensor):
        name, field, dtypes, per_token = "doubt", "doubt", (torch.int16,), True

        @classmethod
        def fill(cls, dtype: torch.dtype) -> float:
            return -1

    yield Tone, Doubt
    for name in ("tone", "doubt"):
        KINDS.pop(name)


def prompt(number: int = 0) -> Prompt:
    return Prompt(id=number, tokens=(3, 4), source=f"f:{number}", extras={"tone": torch.tensor(TONES[number])})


def rollout(number: int, response: tuple[int, ...]) -> Rollout:
    doubt = torch.arange(2 + len(response), dtype=torch.int16) + 10 * number
    common = {"finish_reason": FinishReason.stop, "policy_version": 0, "seed": number, "extras": {"doubt": doubt}}
    return Rollout(prompt=prompt(number), response=response, logprobs=(-1.0,) * len(response), **common)


def batch():
    return rollout_batch([rollout(0, (5,)), rollout(1, (6, 7, 8)), rollout(2, (9, 2))], pad_id=0)


@pytest.fixture
def records(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    lines = [{"prompt": f"p{i}", "response": "r", "tone": tone} for i, tone in enumerate(TONES)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("cached", [False, True])
def test_from_a_record_to_a_batch(records: Path, tmp_path: Path, chars, cached: bool) -> None:
    cache = {"cache": str(tmp_path / "cache"), "num_workers": 1} if cached else {}
    for load, kind in ((load_prompts, PromptDataConfig), (load_supervised, SFTDataConfig)):
        rows, _ = load(str(records), kind(train=str(records), **cache), chars)
        assert [tuple(row.extras["tone"].tolist()) for row in rows] == TONES
        assert rows[0].extras["tone"].dtype == torch.float32
    assert supervised_batch(rows, 0).extras["tone"].data.tolist() == [list(tone) for tone in TONES]
    assert preference_batch([PreferencePair(chosen=rows[0], rejected=rows[1], margin=0.0)], 0).extras["tone"].data.shape == (2, 2)
    assert answered(prompt(1), (7,)).extras["tone"].tolist() == list(TONES[1])


def test_a_record_whose_payload_does_not_fit(tmp_path: Path, chars) -> None:
    path = tmp_path / "data.jsonl"
    for field, value in (("tone", [1.0]), ("tone", "loud"), ("doubt", [1])):
        path.write_text(json.dumps({"prompt": "two words", field: value}) + "\n")
        with pytest.raises(DataError, match=f"data.jsonl:1.*field '{field}' is"):
            load_prompts(str(path), PromptDataConfig(train=str(path)), chars)


def test_padding_selection_and_trimming() -> None:
    whole = batch()
    assert whole.extras["tone"].data.tolist() == [list(tone) for tone in TONES]
    assert whole.extras["doubt"].data.tolist() == [[0, 1, 2, -1, -1], [10, 11, 12, 13, 14], [20, 21, 22, 23, -1]]
    taken = take_rows(whole, torch.tensor([2, 0]))
    assert taken.extras["doubt"].data[:, 0].tolist() == [20, 0] and taken.extras["tone"].data.tolist() == [list(TONES[2]), list(TONES[0])]
    assert take_rows(whole, slice(1, 2)).extras["doubt"].data.tolist() == [[10, 11, 12, 13, 14]]
    assert trim_columns(whole, 3).extras["doubt"].data.tolist() == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    wide = trim_columns(whole, 6).extras
    assert wide["doubt"].data[0].tolist() == [0, 1, 2, -1, -1, -1] and wide["tone"].data.shape == (3, 2)
    assert to_device(whole, torch.device("meta")).extras["doubt"].data.device.type == "meta"
    assert rollout_batch([rollout(0, (5,)), replace(rollout(1, (6,)), extras={})], 0).extras.keys() == {"tone"}  # not of every row


def test_what_does_not_fit_is_refused(kinds) -> None:
    tone, doubt = kinds
    with pytest.raises(ValueError, match=r"extras\['doubt'\] of a row of 3 tokens is torch.int16 \(2,\)"):
        replace(rollout(0, (5,)), extras={"doubt": torch.zeros(2, dtype=torch.int16)})
    with pytest.raises(ValueError, match=r"'tone'\] of a row of 1 tokens is torch.int64 \(2,\), expected torch.float32"):
        Prompt(id=0, tokens=(1,), source="", extras={"tone": torch.tensor([1, 2])})
    with pytest.raises(ValueError, match=r"'tune'\]: no such kind; registered: doubt, images, routes, tone"):
        replace(rollout(0, (5,)), extras={"tune": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"extras\['doubt'\] is torch.int16 \(3, 4\), expected torch.int16 \(3, 5\)"):
        replace(batch(), extras={"doubt": doubt(torch.zeros(3, 4, dtype=torch.int16))})
    with pytest.raises(ValueError, match="the name 'tone' belongs to"):
        type("Other", (RowTensor,), {"name": "tone"})
    with pytest.raises(ValueError, match="is_sent: needs fixed sizes"):
        type("Ragged", (RowTensor,), {"name": "ragged", "shape": None})
    with pytest.raises(ValueError, match=r"of a row of 4 tokens is torch.uint8 \(4, 1, 1\)"):  # nothing is computed after the last token
        Routes.check_row(torch.zeros(4, 1, 1, dtype=torch.uint8), 4)


def test_rows_with_other_payloads_do_not_share_a_prompt(kinds) -> None:
    from aligner.models.training.trainable import families

    same = rollout_batch([rollout(0, (5,)), rollout(0, (6, 7))], pad_id=0)
    assert len(families(same, unit=1, capacity=100)) == 1
    for name, place in (("tone", (1, 0)), ("doubt", (1, 1))):
        data = same.extras[name].data.clone()
        data[place] += 1
        other = replace(same, extras={**same.extras, name: KINDS[name](data)})
        assert len(families(other, unit=1, capacity=100)) == 2
    data = same.extras["doubt"].data.clone()
    data[1, 3] += 1  # behind the prompt
    assert len(families(replace(same, extras={"doubt": KINDS["doubt"](data)}), unit=1, capacity=100)) == 1


def test_the_loss_is_given_them(make_model) -> None:
    from aligner.losses.sft import sft_loss
    from aligner.models.training.optimizer import OptimizerConfig
    from aligner.types import LabeledBatch

    model = make_model("policy", optimizer=OptimizerConfig(distributed=False), training={"micro_batch_size": 2})
    found = batch()
    examples = LabeledBatch(tokens=found.tokens, lengths=found.lengths, loss_mask=found.loss_mask, extras=found.extras)
    seen = {}

    def loss(outputs, part):
        for row in range(len(part.tokens) if part.loss_mask.any() else 0):
            seen[part.tokens[row, 2].item()] = (part.extras["tone"].data[row].tolist(), part.extras["doubt"].data[row].tolist())
        return sft_loss(outputs, part)

    model.train_step(examples, loss)
    assert {token: tuple(tone) for token, (tone, _) in seen.items()} == {5: TONES[0], 6: TONES[1], 9: TONES[2]}
    assert seen[6][1] == [10, 11, 12, 13, 14] and seen[5][1][:3] == [0, 1, 2] and set(seen[5][1][3:]) <= {-1}


def test_the_engine_is_asked_with_them_and_episodes_join_what_it_recorded(topology) -> None:
    from aligner.protocols import Replica, Reply
    from aligner.rollout.engine import Capabilities, GenRequest, GenResult
    from aligner.rollout.engine.episodes import Episodes
    from aligner.rollout.engine.lifecycle import PhasedEngine
    from aligner.rollout.engine.work import WorkSharing

    asked: list[GenRequest] = []

    def answer(request: GenRequest) -> GenResult:
        asked.append(request)
        count = len(request.tokens) + 2
        doubt = torch.full((count,), len(asked), dtype=torch.int16)
        common = {"kind": LogprobKind.sampled, "finish_reason": FinishReason.stop, "weight_version": 0}
        return GenResult(index=request.index, tokens=(7, 2), logprobs=(-1.0, -1.0), extras={"doubt": doubt}, **common)

    class Engine:
        replica, max_sequence_length = Replica(), 64
        capabilities = Capabilities(name="fake", logprobs=LogprobKind.sampled)

        def refit(self, version):
            return 0

        def generate(self, work, sampling):
            while taken := work.take(4):
                yield [answer(request) for request in taken]

    engine = PhasedEngine(Engine(), SamplingConfig(), WorkSharing(Replica(), None), offload=False)
    engine.version = 0
    (found,) = [one for part in engine.generate([prompt(1)], [8]) for one in part]
    assert asked[0].extras["tone"].tolist() == list(TONES[1])
    assert found.all_extras.keys() == {"tone", "doubt"} and found.extras["doubt"].tolist() == [1, 1, 1, 1]

    class Exchange:
        def say(self, *arguments, **options): ...

        def hear(self, wait_seconds):
            return [(0, Reply(tokens=(9,), done=len(asked) == 3))]

    first = GenRequest(index=0, tokens=(3, 4), seed=1, extras=prompt(1).extras)
    episodes = Episodes(Exchange(), [prompt(1)], [first], [32], max_turns=2)
    episodes.began([first])
    episodes.record([answer(first)])
    episodes.hear(0)
    following = episodes.follow_ups.popleft()
    assert following.tokens == (3, 4, 7, 2, 9) and following.extras["tone"].tolist() == list(TONES[1])
    episodes.began([following])
    episodes.record([answer(following)])
    episodes.hear(0)
    (whole,) = episodes.take_ended()
    assert whole.extras["doubt"].tolist() == [2, 2, 2, 2, 3, 3, 3]  # each token's of the turn that it was first part of
    assert continued([{"tone": torch.tensor(TONES[0])}, {"tone": torch.tensor(TONES[1])}])["tone"].tolist() == list(TONES[1])


def test_servers_and_their_journal(tmp_path: Path) -> None:
    from aligner.servers import wire
    from aligner.servers.config import RequestLimits
    from aligner.servers.ledger import Journal
    from aligner.servers.payloads import START, TrainIdentity, ValuesRequest, digest_of

    limits = RequestLimits(vocab_size=16, max_sequence_length=8)
    rollouts = [rollout(0, (5,)), rollout(1, (6, 7, 8))]
    routed = {"routes": Routes(torch.zeros(2, 5, 1, 1, dtype=torch.uint8))}
    asked = token_batch([one.tokens for one in rollouts], 0, extras=[one.all_extras for one in rollouts])
    asked = replace(asked, extras={**asked.extras, **routed})  # which only the policy's own routers can use
    for endpoint, arrays in (
        (wire.CRITIC_INFER, wire.encode_values_request(ValuesRequest(batch=asked))),
        (wire.REWARD_MODEL, wire.encode_reward(wire.RewardRequest(batch=asked))),
    ):
        got = endpoint.payload(arrays, limits).batch
        assert got.extras.keys() == {"tone", "doubt"} and got.extras["doubt"].data.dtype == torch.int16
        assert all(torch.equal(got.extras[name].data, asked.extras[name].data) for name in got.extras)
    with pytest.raises(ValueError, match=r"extras.tone: got float32 \[2, 3\], expected|extras.tone: got shape \[2, 3\]"):
        wire.CRITIC_INFER.payload(arrays | {"extras.tone": arrays["extras.tone"][:, [0, 1, 1]]}, limits)

    numbers = torch.ones(asked.tokens.shape)
    mask = rollout_batch(rollouts, 0).loss_mask
    values = ValueBatch(
        tokens=asked.tokens, lengths=asked.lengths, loss_mask=mask, old_values=numbers, returns=numbers, extras=asked.extras
    )
    arrays = wire.encode_value_batch(values)
    assert digest_of(arrays) != digest_of(wire.encode_value_batch(replace(values, extras={})))
    identity = TrainIdentity(run="r1", step=1, part=0, digest=digest_of(arrays), previous=START)
    journal = Journal(tmp_path / "journal")
    journal.append(identity, arrays)
    request = wire.CRITIC_TRAIN.payload(Journal(tmp_path / "journal").read(identity) | wire.encode_fields(identity), limits)
    assert torch.equal(request.batch.extras["doubt"].data, asked.extras["doubt"].data)
    with pytest.raises(ValueError, match="digest"):
        wire.CRITIC_TRAIN.payload(arrays | {"extras.tone": arrays["extras.tone"] + 1} | wire.encode_fields(identity), limits)


def test_the_state_in_a_checkpoint(make_model, tmp_path: Path) -> None:
    from aligner.models.checkpoint import checkpoint

    extras = rollout(1, (6, 7)).all_extras | {"routes": torch.zeros(3, 0, 2, dtype=torch.uint8)}
    request = checkpoint.SaveRequest(step=1, state={"waiting": to_json(extras)})
    saved = checkpoint.read_state(checkpoint.save(tmp_path, make_model("policy").model, request))["loop"]
    again = from_json(saved["waiting"])
    assert all(torch.equal(again[name], row) and again[name].dtype == row.dtype for name, row in extras.items())


def test_saved_extras_are_verified() -> None:
    saved = to_json({"routes": torch.zeros(2, 1, 1, dtype=torch.uint8)})
    assert from_json(saved)["routes"].shape == (2, 1, 1)
    with pytest.raises(ValueError, match=r"extras\['routes'\] is saved as float32, expected uint8 or int16"):
        from_json({"routes": ["float32", *saved["routes"][1:]]})
    with pytest.raises(ValueError, match=r"extras\['other'\]: no such kind; registered: .*routes"):
        from_json({"other": saved["routes"]})
