"""A teacher's files and NeMo-Aligner's records: what is written is what is read, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aligner.data.collate import SupervisedExample
from aligner.data.config import BadLines, DistillationDataConfig, Overlong
from aligner.data.distillation import (
    Manifest,
    TeacherFiles,
    begin,
    check_logprobs,
    data_digest,
    distillation_batch,
    distilled,
    load_distillation,
    num_complete,
    shard_path,
    write_shard,
)
from aligner.errors import ConfigError, DataError

K = 2


def example(number: int, prompt: int, response: int) -> SupervisedExample:
    tokens = tuple(range(10 * number, 10 * number + prompt + response))
    return SupervisedExample(tokens=tokens, loss_mask=(False,) * prompt + (True,) * response, source=f"x:{number}")


EXAMPLES = [example(1, 1, 2), example(2, 2, 1), example(3, 2, 3)]


def teach(examples: list[SupervisedExample]) -> list:
    """The teacher names the token itself and the one after it, with log-probs -token / 100 and -1."""
    width = max(len(one.tokens) for one in examples)
    tokens = torch.tensor([[*one.tokens, *[0] * (width - len(one.tokens))] for one in examples])
    mask = torch.tensor([[*one.loss_mask, *[False] * (width - len(one.tokens))] for one in examples])
    named = torch.stack([tokens, tokens + 1], dim=2)
    return distilled(examples, mask, named, torch.stack([-tokens / 100, -torch.ones(tokens.shape)], dim=2))


def manifest(tokenizer: str = "t", **changed) -> Manifest:
    common = {"top_k": K, "num_examples": 3, "shard_size": 2, "data": data_digest(EXAMPLES), "model": "m", "made_of": "it on that"}
    return Manifest(tokenizer=tokenizer, **(common | changed))


def write(directory: Path, one: Manifest) -> None:
    begin(directory, one)
    write_shard(directory, 0, teach(EXAMPLES[:2]))
    write_shard(directory, 1, teach(EXAMPLES[2:]))


def test_files_give_back_what_was_written(tmp_path: Path) -> None:
    write(tmp_path, manifest())
    files = TeacherFiles(tmp_path)
    assert len(files) == 3 and [files.length(row) for row in range(3)] == [3, 3, 5]
    for row, expected in enumerate(teach(EXAMPLES)):
        found = files[row]
        assert (found.tokens, found.loss_mask, found.source) == (expected.tokens, expected.loss_mask, expected.source)
        assert torch.equal(found.teacher_tokens, expected.teacher_tokens)
        assert torch.equal(found.teacher_logprobs, expected.teacher_logprobs)


def test_a_batch_by_hand(tmp_path: Path) -> None:
    """Rows of 3 and 5 tokens: the teacher's numbers stand where the mask is True, 0 elsewhere."""
    first, _, last = teach(EXAMPLES)
    batch = distillation_batch([first, last], pad_id=9)
    assert batch.tokens.tolist() == [[10, 11, 12, 9, 9], [30, 31, 32, 33, 34]]
    assert batch.loss_mask.tolist() == [[False, True, True, False, False], [False, False, True, True, True]]
    assert batch.teacher_tokens[0].tolist() == [[0, 0], [11, 12], [12, 13], [0, 0], [0, 0]]
    torch.testing.assert_close(batch.teacher_logprobs[1, 2:], torch.tensor([[-0.32, -1], [-0.33, -1], [-0.34, -1]]))
    assert not batch.teacher_logprobs[1, :2].any()


def test_another_job_is_refused_and_the_same_goes_on(tmp_path: Path) -> None:
    begin(tmp_path, manifest())
    assert num_complete(tmp_path, manifest()) == 0
    write_shard(tmp_path, 0, teach(EXAMPLES[:2]))
    begin(tmp_path, manifest(made_of="the same under another name"))
    assert num_complete(tmp_path, manifest()) == 1
    with pytest.raises(DataError, match=r"of another job \(it on that\): top_k, model differ"):
        begin(tmp_path, manifest(top_k=3, model="n"))
    with pytest.raises(DataError, match="has 1 of 2 shards: the job that writes them has not finished"):
        TeacherFiles(tmp_path)
    shard_path(tmp_path, 1).write_bytes(b"cut")
    with pytest.raises(DataError, match="shard_000001.safetensors is not a complete shard"):
        TeacherFiles(tmp_path)


def test_digests_tell_data_apart() -> None:
    assert data_digest(EXAMPLES) == data_digest(list(EXAMPLES))
    moved = replace(EXAMPLES[0], loss_mask=(False, False, True))
    assert len({data_digest(EXAMPLES), data_digest(EXAMPLES[::-1]), data_digest([moved, *EXAMPLES[1:]])}) == 3


def test_loading_files(tmp_path: Path, chars) -> None:
    write(tmp_path, manifest(chars.digest))
    location = str(tmp_path)
    config = DistillationDataConfig(train=location, max_length=4, overlong=Overlong.truncate)
    found, report = load_distillation(location, config, chars)
    assert [len(one.tokens) for one in found] == [3, 3, 4] and found[2].teacher_tokens.tolist() == [[32, 33], [33, 34]]
    assert report.num_truncated == 1
    dropped, report = load_distillation(location, replace(config, overlong=Overlong.drop), chars)
    assert len(dropped) == 2 and report.num_too_long == 1
    with pytest.raises(DataError, match=f"{location}:2: has 5 tokens, allowed: at most data.max_length=4"):
        load_distillation(location, replace(config, overlong=Overlong.refuse), chars)
    other = tmp_path / "other"
    write(other, manifest("another"))
    with pytest.raises(ConfigError, match="are of another vocabulary than model.path's"):
        load_distillation(str(other), config, chars)


RECORD = {
    "tokens": [5, 6, 7],
    "labels": [6, 7, 2],
    "loss_mask": [0, 1, 1],
    "topk_logits": [[0.0, 0.0], [3.5, 1.0], [2.0, -1.0]],
    "topk_token_ids": [[6, 7], [7, 8], [2, 9]],
}


def test_records_of_nemo_aligner(jsonl, chars) -> None:
    """Entry t is about token t + 1: the row has one token more, and the first two are not learnt."""
    path = jsonl(RECORD)
    (one,), _ = load_distillation(path, DistillationDataConfig(train=path), chars)
    assert one.tokens == (5, 6, 7, 2) and one.loss_mask == (False, False, True, True)
    assert one.teacher_tokens.tolist() == [[7, 8], [2, 9]] and one.teacher_logprobs.tolist() == [[3.5, 1.0], [2.0, -1.0]]


def test_a_tail_bucket_needs_log_probs(jsonl, chars, tmp_path: Path) -> None:
    """What teacher_logprobs wrote is fine, and so are records of log-probs; logits e^3.5 + e = 35.8 are not a probability."""
    write(tmp_path, manifest(chars.digest))
    check_logprobs(load_distillation(str(tmp_path), DistillationDataConfig(train=str(tmp_path)), chars)[0])
    good = RECORD | {"topk_logits": [[0.0, 0.0], [-0.5, -1.0], [-0.1, -3.0]]}
    path = jsonl(good, RECORD)
    found, _ = load_distillation(path, DistillationDataConfig(train=path), chars)
    check_logprobs(found[:1])
    with pytest.raises(DataError, match=f"{path}:2: field 'topk_logits' gives 2 tokens a probability of 35.83 together"):
        check_logprobs(found)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"labels": [6, 8, 2]}, "field 'labels' is not 'tokens' moved by one"),
        ({"loss_mask": [0, 0, 0]}, "field 'loss_mask' is [0, 0, 0]"),
        ({"topk_token_ids": [[6, 7], [7, 7], [2, 9]]}, "names a different number of tokens in some positions, or a token twice"),
        ({"topk_logits": [[0.0, 0.0], [float("nan"), 1.0], [2.0, -1.0]]}, "field 'topk_logits[1]' is [nan, 1.0]"),
        ({"tokens": [5, 6, 4000]}, "field 'tokens' is [5, 6, 4000], expected a list of token ids from 0 to 100"),
    ],
)
def test_bad_records(jsonl, chars, changed: dict, text: str) -> None:
    path = jsonl(RECORD, RECORD | changed, {"tokens": [1]})
    with pytest.raises(DataError) as caught:
        load_distillation(path, DistillationDataConfig(train=path), chars)
    assert f"{path}:2: " in str(caught.value) and text in str(caught.value)
    assert f"{path}:3: field 'labels' is missing" in str(caught.value)
    kept, report = load_distillation(path, DistillationDataConfig(train=path, bad_lines=BadLines.skip), chars)
    assert len(kept) == 1 and report.num_bad == 2
