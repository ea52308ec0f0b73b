"""Requests and replies through the encoding, and what is rejected: always named by tensor, value and what is allowed."""

import json

import numpy as np
import pytest
import torch

from aligner.servers import wire
from aligner.servers.config import RequestLimits
from aligner.servers.kserve import HEADER_LENGTH, AnswerError, decode_error, decode_response, encode_request
from aligner.servers.payloads import CriticStatus, TrainIdentity, digest_of
from aligner.types import TokenBatch, ValueBatch

LIMITS = RequestLimits(vocab_size=10, max_sequence_length=4, max_rows=3)


def value_batch() -> ValueBatch:
    """Two rows of three and two tokens."""
    return ValueBatch(
        tokens=torch.tensor([[1, 2, 3], [4, 5, 0]]),
        lengths=torch.tensor([3, 2]),
        loss_mask=torch.tensor([[False, True, True], [False, True, False]]),
        old_values=torch.tensor([[0.0, 0.5, 1.5], [0.0, 2.5, 0.0]]),
        returns=torch.tensor([[0.0, 1.0, 2.0], [0.0, 3.0, 0.0]]),
    )


def train_arrays() -> dict[str, np.ndarray]:
    arrays = wire.encode_value_batch(value_batch())
    return arrays | wire.encode_fields(TrainIdentity(run="r1", step=4, part=0, digest=digest_of(arrays), previous="start"))


def test_train_request_round_trip() -> None:
    arrays = train_arrays()
    request = wire.CRITIC_TRAIN.payload(arrays, LIMITS)
    expected = value_batch()
    digest = arrays["digest"][0].decode()
    assert request.identity == TrainIdentity(run="r1", step=4, part=0, digest=digest, previous="start")
    for name in ("tokens", "lengths", "loss_mask", "old_values", "returns"):
        found, wanted = getattr(request.batch, name), getattr(expected, name)
        assert found.dtype == wanted.dtype and torch.equal(found, wanted), name


def test_the_wire_has_the_published_names_and_dtypes() -> None:
    described = {spec.name: (spec.dtype, spec.shape) for spec in wire.CRITIC_TRAIN.inputs}
    assert described == {
        "tokens": ("int64", ("B", "S")),
        "sequence_lengths": ("int64", ("B", 1)),
        "returns": ("float32", ("B", "S")),
        "prev_values": ("float32", ("B", "S")),
        "mask": ("float32", ("B", "S")),
        "episodes": ("int64", ("B", 1)),
        "step": ("int64", (1,)),
        "part": ("int64", (1,)),
        "run": ("bytes", (1,)),
        "digest": ("bytes", (1,)),
        "previous": ("bytes", (1,)),
        "extras.images": ("int64", ("B", 16, 4)),
    }
    optional = [
        {spec.name for spec in endpoint.inputs if spec.optional}
        for endpoint in (wire.CRITIC_TRAIN, wire.CRITIC_INFER, wire.CRITIC_SAVE, wire.CRITIC_STATUS)
    ]
    assert optional == [{"episodes", "extras.images"}, {"after", "extras.images"}, {"after", "wait"}, {"adopt"}]
    assert wire.CRITIC_INFER.output_names == ("values",)
    assert wire.REWARD_MODEL.output_names == ("rewards",)


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("tokens", None, r"tokens: missing; expected int64 \[B, S\]"),
        ("tokens", np.zeros((2, 3), np.float32), r"tokens: got float32 \[2, 3\], expected int64 \[B, S\]"),
        ("tokens", np.zeros((2, 5), np.int64), r"tokens: got shape \[2, 5\]; S may be 1 to 4"),
        ("tokens", np.zeros((4, 3), np.int64), r"tokens: got shape \[4, 3\]; B may be 1 to 3"),
        ("tokens", np.zeros((0, 3), np.int64), r"tokens: got shape \[0, 3\]; B may be 1 to 3"),
        ("tokens", np.array([[1, 2, 10], [1, 1, 1]]), r"tokens: ids from 1 to 10; allowed are 0 to 9"),
        ("tokens", np.array([[-1, 2, 3], [1, 1, 1]]), r"tokens: ids from -1 to 3; allowed are 0 to 9"),
        ("sequence_lengths", np.array([[3], [4]]), r"sequence_lengths: from 3 to 4; allowed are 1 to 3"),
        ("sequence_lengths", np.array([[3], [0]]), r"sequence_lengths: from 0 to 3; allowed are 1 to 3"),
        ("sequence_lengths", np.array([[3, 2], [2, 2]]), r"sequence_lengths: got shape \[2, 2\], expected \[B, 1\]"),
        ("sequence_lengths", np.array([[3]]), r"sequence_lengths: got shape \[1, 1\], but tokens has B = 2"),
        ("returns", np.zeros((2, 2), np.float32), r"returns: got shape \[2, 2\], but tokens has S = 3"),
        ("returns", np.array([[0, np.nan, 1], [0, np.inf, 0]], np.float32), r"returns: 2 of 6 values are NaN or infinite"),
        ("mask", np.full((2, 3), 0.5, np.float32), r"mask: values from 0.5 to 0.5; allowed are 0 and 1"),
        ("mask", np.array([[0, 1, 1], [1, 1, 0]], np.float32), r"mask: 1 at position 0 of row 1"),
        (
            "mask",
            np.array([[0, 1, 1], [0, 1, 1]], np.float32),
            r"mask: 1 in the padding of row 1; it must be 0 from sequence_lengths \(2\) on",
        ),
        ("mask", np.zeros((2, 3), np.float32), r"mask: 0 everywhere; at least one token must be trained on"),
        ("episodes", np.array([0, 1]), r"episodes: got int64 \[2\], expected int64 \[B, 1\]"),
        ("episodes", np.array([[0], [2]]), r"episodes: \[0, 2\]; it must begin at 0 and stay or grow by 1 from row to row"),
        ("episodes", np.array([[1], [1]]), r"episodes: \[1, 1\]; it must begin at 0"),
        ("episodes", np.array([[0], [0]]), r"digest: [0-9a-f]{64}, but that of the tensors is [0-9a-f]{64}"),
        ("step", np.array([-1]), r"step: -1; it must be 0 or more"),
        ("part", np.array([-1]), r"part: -1; it must be 0 or more"),
        ("returns", np.ones((2, 3), np.float32), r"digest: [0-9a-f]{64}, but that of the tensors is [0-9a-f]{64}"),
        ("digest", np.array([b"0123"], dtype=object), r"digest: '0123'; it must be the 64 hexadecimal digits of a SHA-256"),
        (
            "previous",
            np.array([b"before"], dtype=object),
            r"previous: 'before'; allowed are 'start' and <step>.<part>.<64 hexadecimal digits>",
        ),
        ("previous", np.array([f"4.0.{'0' * 64}".encode()], dtype=object), r"previous: step 4 part 0 .*; it must be before step 4 part 0"),
        ("run", np.array([b"../run"], dtype=object), r"run: '../run'; allowed are up to 64 letters"),
        ("extra", np.zeros(1, np.float32), r"extra: no such tensor; allowed are tokens, sequence_lengths"),
    ],
)
def test_a_bad_train_request_is_named(name: str, replacement: np.ndarray | None, message: str) -> None:
    arrays = train_arrays()
    if replacement is None:
        del arrays[name]
    else:
        arrays[name] = replacement
    with pytest.raises(ValueError, match=message):
        wire.CRITIC_TRAIN.payload(arrays, LIMITS)


def test_reward_request_round_trip() -> None:
    texts = wire.RewardTexts(prompts=["2+2=", "ä"], responses=["4", ""], answers=["4", None])
    batch = TokenBatch(tokens=torch.tensor([[1, 2], [3, 0]]), lengths=torch.tensor([2, 1]))
    for request in (wire.RewardRequest(batch=batch), wire.RewardRequest(texts=texts), wire.RewardRequest(batch=batch, texts=texts)):
        found = wire.REWARD_MODEL.payload(wire.encode_reward(request), LIMITS)
        assert found.texts == request.texts
        assert (found.batch is None) == (request.batch is None)
        assert found.num_rows == 2


def column(*texts: bytes) -> np.ndarray:
    array = np.empty((len(texts), 1), dtype=object)
    array[:, 0] = texts
    return array


def test_sentences_are_responses_without_a_prompt() -> None:
    request = wire.REWARD_MODEL.payload({"sentences": column(b"a b")}, LIMITS)
    assert request.texts == wire.RewardTexts(prompts=[""], responses=["a b"], answers=[None])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "send `tokens` with `sequence_lengths`, or `sentences`"),
        ({"tokens": np.ones((1, 2), np.int64)}, "tokens: sent without sequence_lengths; send both or none"),
        ({"prompts": column(b"a")}, "prompts: sent without responses; send both or none"),
        ({"prompts": column(b"a"), "responses": column(b"\xff")}, "responses: row 0 is not UTF-8"),
        ({"prompts": column(b"a"), "responses": column(b"b"), "sentences": column(b"c")}, "sentences: sent together with responses"),
    ],
)
def test_a_bad_reward_request_is_named(arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wire.REWARD_MODEL.payload(arrays, LIMITS)


def test_what_else_is_asked_of_a_critic() -> None:
    batch, mark = TokenBatch(tokens=torch.tensor([[1, 2]]), lengths=torch.tensor([2])), f"3.1.{'ab' * 32}"
    for after in (None, "start", mark):
        found = wire.CRITIC_INFER.payload(wire.encode_values_request(wire.ValuesRequest(batch=batch, after=after)), LIMITS)
        assert found.after == after and torch.equal(found.batch.tokens, batch.tokens)
        for wait in (True, False):
            request = wire.SaveRequest(step=3, after=after, wait=wait)
            assert wire.CRITIC_SAVE.payload(wire.encode_fields(request), LIMITS) == request
    assert wire.CRITIC_SAVE.payload({"step": np.array([3])}, LIMITS) == wire.SaveRequest(step=3, after=None, wait=True)
    with pytest.raises(ValueError, match="after: '3'; allowed are 'start'"):
        wire.CRITIC_SAVE.payload({"step": np.array([3]), "after": np.array([b"3"], dtype=object)}, LIMITS)
    with pytest.raises(ValueError, match="wait: 2; allowed are 0 and 1"):
        wire.CRITIC_SAVE.payload({"step": np.array([3]), "wait": np.array([2])}, LIMITS)
    for asked in (wire.StatusRequest(run="r1"), wire.StatusRequest(run="r1", adopt=mark)):
        assert wire.CRITIC_STATUS.payload(wire.encode_fields(asked), LIMITS) == asked
    status = CriticStatus(run="r1", mark=mark, count=7, checkpoint_step=2, accepts_gap=False)
    assert CriticStatus(**json.loads(wire.CRITIC_STATUS.encode(asked, status)["status"][0])) == status


def test_a_result_of_another_shape_or_with_nan_is_refused() -> None:
    batch = TokenBatch(tokens=torch.ones(2, 3, dtype=torch.int64), lengths=torch.tensor([3, 3]))
    request = wire.ValuesRequest(batch=batch)
    assert wire.encode_values(request, torch.ones(2, 3, dtype=torch.bfloat16))["values"].dtype == np.float32
    with pytest.raises(ValueError, match=r"values: the handler returned shape \[2, 2\] for tokens \[2, 3\]"):
        wire.encode_values(request, torch.ones(2, 2))
    with pytest.raises(ValueError, match="values: 1 of 6 results are NaN or infinite"):
        wire.encode_values(request, torch.tensor([[1.0, 2.0, 3.0], [float("nan"), 1.0, 1.0]]))
    with pytest.raises(ValueError, match=r"rewards: the handler returned shape \[2\] for 2 rows"):
        wire.encode_scores(wire.RewardRequest(batch=batch), torch.ones(2))


def test_kserve_bytes() -> None:
    headers, body = encode_request({"t": np.array([[1, 2]]), "s": column("ä".encode(), b"")}, ("out",))
    length = int(headers[HEADER_LENGTH])
    assert headers["Accept-Encoding"] == "identity"
    # two little-endian int64, then each text with its length: 2 bytes of UTF-8, 0 bytes
    assert body[length:] == b"\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0" + b"\2\0\0\0\xc3\xa4" + b"\0\0\0\0"


def test_kserve_answers() -> None:
    header = b'{"outputs":[{"name":"a","datatype":"FP32","shape":[1,1],"parameters":{"binary_data_size":4}},'
    header += b'{"name":"b","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":6}}]}'
    arrays = decode_response(str(len(header)), header + b"\0\0\xc0\x3f" + b"\2\0\0\0hi")
    assert arrays["a"].tolist() == [[1.5]]
    assert arrays["b"].tolist() == [b"hi"]
    with pytest.raises(ValueError, match="the answer has"):
        decode_response(str(len(header)), header + b"\0\0\xc0\x3f" + b"\2\0\0\0hi" + b"more")
    with pytest.raises(ValueError, match="'a' was not sent as binary data"):
        decode_response(None, b'{"outputs":[{"name":"a","datatype":"FP32","shape":[1],"data":[1.5]}]}')


def test_error_answers_are_cut_out_of_tritons_traceback() -> None:
    inner = str(AnswerError('mask: "x"\nline two'))
    body = '{"error":' + json.dumps(f"Failed: Traceback ...\n{inner}\n\nAt:\n model.py(5)") + "}"
    assert decode_error(body.encode()) == 'mask: "x"\nline two'
    assert decode_error(b'{"error":"unexpected datatype"}') == "unexpected datatype"
    assert decode_error(b"<html>") == "<html>"
