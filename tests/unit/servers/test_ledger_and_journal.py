"""What a critic was trained on, on the server (ledger) and on the client's disk (journal). Expectations are worked out by hand."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from aligner.errors import CheckpointError, ServerError
from aligner.servers.ledger import NUM_RECORDS, Journal, Ledger, Reason, Refused
from aligner.servers.payloads import START, TrainIdentity, TrainReply, describe, digest_of, position


def arrays(number: int) -> dict[str, np.ndarray]:
    return {"tokens": np.full((2, 3), number, np.int64), "returns": np.full((2, 3), number / 2, np.float32)}


def identity(step: int, previous: str = START, part: int = 0, number: int = 0, run: str = "r1") -> TrainIdentity:
    return TrainIdentity(run=run, step=step, part=part, digest=digest_of(arrays(number or step)), previous=previous)


def chain(*steps: int) -> list[TrainIdentity]:
    made: list[TrainIdentity] = []
    for step in steps:
        made.append(identity(step, made[-1].mark if made else START))
    return made


def reply(number: float) -> TrainReply:
    return TrainReply(loss_mean=number, metrics={"value/loss": number})


def ledger_of(requests: list[TrainIdentity]) -> Ledger:
    ledger = Ledger("r1")
    for request in requests:
        assert ledger.find(request) is None
        ledger.record(request, reply(request.step))
    return ledger


# Identities.


def test_a_mark_names_the_request_and_all_before_it() -> None:
    first, second, third = chain(1, 2, 5)  # a step may have none
    assert (position(third.mark), position(START)) == ((5, 0), (-1, 0))
    assert third.mark == identity(5, second.mark).mark  # a pure function of what it stands for
    others = [
        identity(5, second.mark, part=1),
        identity(5, second.mark, number=9),
        identity(5, first.mark),
        identity(5, second.mark, run="r2"),
    ]
    assert len({third.mark, *(other.mark for other in others)}) == 5
    assert describe(third.mark) == f"step 5 part 0 ({third.mark.split('.')[2][:8]})" and describe(START) == "nothing of this run"


def test_a_digest_covers_names_dtypes_shapes_and_bytes() -> None:
    base = {"a": np.arange(6, dtype=np.int64).reshape(2, 3), "b": np.zeros(2, np.float32)}
    same = {"b": base["b"].copy(), "a": np.ascontiguousarray(base["a"].T).T}  # another order of tensors, and of memory
    assert digest_of(same) == digest_of(base)
    changed = [
        {"a": base["a"].reshape(3, 2), "b": base["b"]},
        {"a": base["a"].astype(np.int32), "b": base["b"]},
        {"a": base["a"], "c": base["b"]},
        {"a": base["a"], "b": np.array([0, 1e-45], np.float32)},
        {"a": base["a"], "b": np.array([0, -0.0], np.float32)},
    ]
    assert len({digest_of(base), *map(digest_of, changed)}) == 6


# The ledger.


def test_what_is_new_is_applied_once_and_answered_again() -> None:
    first, second = chain(1, 2)
    ledger = ledger_of([first])
    assert ledger.find(first) == reply(1)
    assert ledger.find(second) is None
    ledger.record(second, reply(2))
    assert (ledger.find(first), ledger.find(second)) == (reply(1), reply(2))
    assert (ledger.mark, ledger.count) == (second.mark, 2)


@pytest.mark.parametrize(
    ("make", "reason", "message"),
    [
        (lambda made: identity(4, made[2].mark, run="r2"), Reason.foreign, "this critic belongs to run r1, the request to run r2"),
        (
            lambda made: identity(3, made[1].mark, number=9),
            Reason.conflict,
            r"step 3 part 0 was applied with other tensors .*asked for now is",
        ),
        (
            lambda made: identity(3, made[0].mark),
            Reason.conflict,
            r"after step 2 part 0 .*; asked for now is step 3 part 0 .* after step 1 part 0",
        ),
        (lambda made: identity(2, made[0].mark, part=1), Reason.past, "step 2 part 1 .* comes before what was applied last, step 3 part 0"),
        (
            lambda made: identity(5, identity(4, made[2].mark).mark),
            Reason.gap,
            "step 5 part 0 follows step 4 part 0 .*trained last on step 3 part 0",
        ),
        (lambda made: identity(4), Reason.gap, "step 4 part 0 follows nothing of this run, but this critic was trained last on step 3"),
    ],
)
def test_what_does_not_fit_is_refused_and_names_both(make, reason: Reason, message: str) -> None:
    made = chain(1, 2, 3)
    ledger = ledger_of(made)
    with pytest.raises(Refused, match=rf"refused \({reason.value}\): .*{message}") as refused:
        ledger.find(make(made))
    assert refused.value.reason is reason
    assert (ledger.mark, ledger.count) == (made[2].mark, 3)  # and nothing has changed


def test_values_are_those_after_one_training() -> None:
    made = chain(1, 2, 3)
    ledger = ledger_of(made[:2])
    ledger.check_after(made[1].mark)
    for mark, reason in ((START, "ahead"), (made[0].mark, "ahead"), (made[2].mark, "behind"), (identity(2).mark, "conflict")):
        with pytest.raises(Refused, match=rf"refused \({reason}\): .*trained last on step 2 part 0 .*; asked for is"):
            ledger.check_after(mark)
    Ledger("r1").check_after(START)


def test_it_keeps_few_replies_and_survives_a_checkpoint() -> None:
    made = chain(*range(1, 21))
    ledger = ledger_of(made)
    state = json.loads(json.dumps(ledger.state()))
    assert len(state["records"]) == NUM_RECORDS
    restored = Ledger("r1")
    restored.load_state(state, checkpoint_step=20)
    for one in (ledger, restored):
        assert one.find(made[-1]) == reply(20) and one.find(made[-NUM_RECORDS]) == reply(21 - NUM_RECORDS)
        with pytest.raises(Refused, match=r"refused \(past\)"):
            one.find(made[-NUM_RECORDS - 1])
        assert one.find(identity(21, made[-1].mark)) is None
    status = restored.status()
    assert (status.mark, status.count, status.checkpoint_step, status.accepts_gap) == (made[-1].mark, 20, 20, False)
    with pytest.raises(CheckpointError, match="of step 20 belongs to run r1, this is run r2"):
        Ledger("r2").load_state(state, checkpoint_step=20)
    state["records"].pop()
    with pytest.raises(CheckpointError, match="its ledger does not end with 20.0."):
        Ledger("r1").load_state(state, checkpoint_step=20)


def test_a_gap_is_accepted_once() -> None:
    ledger = Ledger("r1", accepts_gap=True)
    joined = identity(7, identity(6).mark)
    with pytest.raises(Refused, match=r"refused \(gap\)"):  # only where somebody says so
        ledger.find(joined)
    ledger.adopt(joined.previous)
    ledger.check_after(joined.previous)
    with pytest.raises(Refused, match=r"refused \(past\)"):  # no gap, which a client would try to fill
        ledger.find(identity(6, number=9))
    state = json.loads(json.dumps(ledger.state()))  # saved before it is trained on
    restored = Ledger("r1")
    restored.load_state(state, checkpoint_step=6)
    assert (restored.mark, restored.count) == (joined.previous, 0)
    assert ledger.find(joined) is None
    ledger.record(joined, reply(7))
    with pytest.raises(Refused, match=r"refused \(gap\)"):
        ledger.find(identity(9, identity(8).mark))
    with pytest.raises(Refused, match=r"refused \(ahead\)"):
        ledger.check_after(joined.previous)
    with pytest.raises(Refused, match=r"refused \(gap\): this critic accepts no gap .*trained last on step 7 part 0"):
        ledger.adopt(START)


# The journal.


def journal_of(folder: Path, requests: list[TrainIdentity]) -> Journal:
    journal = Journal(folder)
    for request in requests:
        journal.append(request, arrays(request.step))
    return journal


def test_entries_come_back_as_they_were_sent(tmp_path: Path) -> None:
    made = chain(1, 2, 4)
    journal_of(tmp_path, made)
    again = Journal(tmp_path)
    assert again.entries == made
    for request in made:
        found = again.read(request)
        assert all(np.array_equal(found[name], array) and found[name].dtype == array.dtype for name, array in arrays(request.step).items())
    assert again.between(made[0].mark, made[2].mark) == made[1:]
    assert again.between(START, made[1].mark) == made[:2]
    assert again.between(made[2].mark, made[2].mark) == again.between("9.0." + "0" * 64, "9.0." + "0" * 64) == []
    assert again.between(made[2].mark, made[0].mark) is None  # backwards
    assert again.between(identity(3).mark, made[2].mark) is None  # not from there
    assert sorted(path.name[:12] for path in tmp_path.iterdir()) == ["00000001.000", "00000002.000", "00000004.000"]


def test_what_is_over_is_forgotten(tmp_path: Path) -> None:
    made = chain(1, 2, 3, 4)
    journal = journal_of(tmp_path, made)
    journal.trim(1)
    assert journal.entries == made[1:] and journal.between(made[0].mark, made[3].mark) == made[1:]
    assert journal.between(START, made[3].mark) is None
    journal.drop_after(made[2].mark)
    assert Journal(tmp_path).entries == made[1:3]
    # Another way on from step 2, as a run does that resumed there: what followed it is of a past that is over.
    other = identity(3, made[1].mark, number=9)
    journal.append(other, arrays(9))
    assert Journal(tmp_path).entries == [made[1], other]
    # A run that begins anew has nothing before its first request.
    anew = identity(1, number=7)
    journal.append(anew, arrays(7))
    assert Journal(tmp_path).entries == [anew]


def test_an_entry_in_the_middle_is_missing(tmp_path: Path) -> None:
    made = chain(1, 2, 3, 4)
    journal_of(tmp_path, made)
    next(tmp_path.glob("00000002.*")).unlink()
    journal = Journal(tmp_path)
    assert journal.between(START, made[3].mark) is None
    assert journal.leading_to(made[3].mark) == made[2:]


def test_a_damaged_or_half_written_entry(tmp_path: Path) -> None:
    (request,) = chain(1)
    journal_of(tmp_path, [request])
    (path,) = tmp_path.iterdir()
    (tmp_path / f".{path.name}.new").write_bytes(b"half of it")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    journal = Journal(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    with pytest.raises(ServerError, match=rf"{path}: this entry of the journal is damaged"):
        journal.read(request)
    path.write_bytes(content[:20])
    with pytest.raises(ServerError, match=rf"{path}: this entry of the journal cannot be read"):
        journal.read(request)
    with pytest.raises(ServerError, match=rf"{path} is not an entry of the journal"):
        Journal(tmp_path)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = chain(1, 2)
    journal = journal_of(tmp_path, [first])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("aligner.files.os.fsync", full)
    with pytest.raises(ServerError, match=rf"{tmp_path}/00000002.*: No space left on device; step 2 was not sent"):
        journal.append(second, arrays(2))
    assert journal.entries == [first] and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ServerError, match="cannot be opened"):
        Journal(tmp_path / next(tmp_path.iterdir()).name)
