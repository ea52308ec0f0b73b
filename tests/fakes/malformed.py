"""A seeded generator of requests that a server must refuse, and a raw HTTP client that sends them byte by byte as they are."""

from __future__ import annotations

import json
import random
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from aligner.servers import wire
from aligner.servers.kserve import HEADER_LENGTH, encode_request
from aligner.servers.payloads import START, TrainIdentity, digest_of
from aligner.types import TokenBatch, ValueBatch

NUMBERS = (-1, 0, 2**31, 2**32, 2**62, 2**63, 2**64, 10**30, -(2**63), 1.5, -0.0, 1e308, True, None, "3", "", [], [1], {}, {"a": 1})
TEXTS = (
    "",
    "x",
    "tokens ",
    "TOKENS",
    "\x00",
    "a" * 5000,
    "../../etc/passwd",
    "FP64",
    "INT32",
    "BOOL",
    "BYTES",
    "FP32",
    "INT64",
    "üñ",
    "%s%n",
)


@dataclass
class Case:
    """What is sent. `status`: the answers that are right."""

    label: str
    path: str
    headers: dict[str, str]
    body: bytes
    method: str = "POST"
    status: frozenset[int] = field(default_factory=lambda: frozenset({400}))


def train_arrays() -> dict:
    """Two rows of three tokens, in every respect right."""
    batch = ValueBatch(
        tokens=torch.tensor([[1, 2, 3], [4, 5, 6]]),
        lengths=torch.tensor([3, 2]),
        loss_mask=torch.tensor([[False, True, True], [False, True, False]]),
        old_values=torch.zeros(2, 3),
        returns=torch.ones(2, 3),
    )
    arrays = wire.encode_value_batch(batch)
    return arrays | wire.encode_fields(TrainIdentity(run="r", step=1, part=0, digest=digest_of(arrays), previous=START))


def right_requests() -> list[tuple[wire.Endpoint, dict]]:
    tokens = TokenBatch(tokens=torch.tensor([[1, 2, 3], [4, 5, 6]]), lengths=torch.tensor([3, 2]))
    texts = wire.RewardTexts(prompts=["a", "b"], responses=["cc", "ddd"], answers=["cc", None])
    return [
        (wire.CRITIC_INFER, wire.encode_tokens(tokens)),
        (wire.CRITIC_TRAIN, train_arrays()),
        (wire.REWARD_MODEL, wire.encode_reward(wire.RewardRequest(texts=texts))),
    ]


def malformed(
    seed: int, count: int, secret: str, *, endpoints: Sequence[str] = ("critic_infer", "critic_train", "reward_model")
) -> Iterator[Case]:
    """`count` different requests to a server of `endpoints`, none of which may be carried out."""
    random_ = random.Random(seed)
    right = [(endpoint, arrays) for endpoint, arrays in right_requests() if endpoint.name in endpoints]
    for number in range(count):
        endpoint, arrays = random_.choice(right)
        headers, body = encode_request(arrays, endpoint.output_names)
        headers = {**headers, "Authorization": f"Bearer {secret}"}
        length = int(headers[HEADER_LENGTH])
        case = Case("", f"/v2/models/{endpoint.name}/infer", headers, body)
        mutate = random_.choice(MUTATIONS)
        mutate(case, random_, json.loads(body[:length]), body[length:])
        case.label = f"{number}: {mutate.__name__} {endpoint.name} {case.label}"
        yield case


def rewrite(case: Case, header: object, tail: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    case.body = text + tail
    case.headers[HEADER_LENGTH] = str(len(text))


def wrong_shape(case: Case, random_: random.Random, header: dict, tail: bytes) -> None:
    tensor = random_.choice(header["inputs"])
    old = list(tensor["shape"])
    choice = random_.randrange(6)
    if choice == 0:
        tensor["shape"][random_.randrange(len(old))] = random_.choice([n for n in NUMBERS if n not in (1, 2, 3)])
    elif choice == 1:
        tensor["shape"] = random_.choice(NUMBERS + TEXTS)
    elif choice == 2:
        tensor["shape"] = [2**32, 2**32]  # their product is 0 in 64 bits
    elif choice == 3:
        tensor["shape"] = [2**61, 8]
    elif choice == 4:
        tensor["shape"] = old + [1]
    else:
        tensor["shape"] = [1] * random_.choice((0, 5, 1000))
    if tensor["shape"] == old:
        tensor["shape"] = "x"
    case.label = f"{tensor['name']} {str(tensor['shape'])[:60]}"
    rewrite(case, header, tail)


def wrong_entry(case: Case, random_: random.Random, header: dict, tail: bytes) -> None:
    tensor, field_ = random_.choice(header["inputs"]), random_.choice(("datatype", "name", "size"))
    if field_ == "size":
        size = tensor["parameters"]["binary_data_size"]
        tensor["parameters"]["binary_data_size"] = random_.choice([size + 1, size - 1, size * 2 + 8, *NUMBERS[:8], "8", None, []])
    else:
        tensor[field_] = random_.choice([value for value in TEXTS + NUMBERS if value != tensor[field_]])
    case.label = field_
    rewrite(case, header, tail)


def repeated_tensors(case: Case, random_: random.Random, header: dict, tail: bytes) -> None:
    if random_.random() < 0.5:
        header["inputs"].insert(random_.randrange(len(header["inputs"])), dict(random_.choice(header["inputs"])))
    else:
        header["inputs"] *= random_.choice((10, 100))
    rewrite(case, header, tail)


def missing_tensor(case: Case, random_: random.Random, header: dict, tail: bytes) -> None:
    del header["inputs"][random_.randrange(len(header["inputs"])) :]
    rewrite(case, header, b"" if not header["inputs"] else tail)


def wrong_outputs(case: Case, random_: random.Random, header: dict, tail: bytes) -> None:
    header["outputs"] = random_.choice(
        [[{"name": "x"}], header["outputs"] * 2, [{}], "values", 5, [5], [{"name": "values", "parameters": {"classification": 5}}]]
    )
    rewrite(case, header, tail)


def unknown_key(case: Case, random_: random.Random, header: dict, tail: bytes) -> None:
    target = random_.choice([header, header["inputs"][0], header["inputs"][0]["parameters"]])
    target[random_.choice(["shared_memory_region", "path", "sequence_id", "a" * 4000, ""])] = random_.choice(NUMBERS)
    rewrite(case, header, tail)


def wrong_end(case: Case, random_: random.Random, header: dict, tail: bytes) -> None:
    if random_.random() < 0.5:
        case.body = case.body[: random_.randrange(len(case.body))]
    else:
        case.body += random_.randbytes(random_.randrange(1, 50))


def wrong_header_length(case: Case, random_: random.Random, header: dict, tail: bytes) -> None:
    right = int(case.headers.pop(HEADER_LENGTH))
    near = [str(right - 1), str(right + 1), str(len(case.body) + 1), f"{right}.0"]
    said = random_.choice([None, "-1", "0", "", "x", "1e3", "99999999999999999999", "0x10", *near])
    if said is not None:
        case.headers[HEADER_LENGTH] = said


def deep_json(case: Case, random_: random.Random, header: dict, tail: bytes) -> None:
    depth, (left, right) = random_.choice((20, 1000, 30000)), random_.choice((("[", "]"), ('{"a":', "}")))
    nested = left * depth + "1" + right * random_.choice((depth, 0))
    rewrite(case, ('{"inputs": ' + nested + "}").encode()[:60000], b"")
    if random_.random() < 0.5:
        del case.headers[HEADER_LENGTH]


def not_json(case: Case, random_: random.Random, header: dict, tail: bytes) -> None:
    text = random_.choice(
        [
            b"",
            b"{",
            b"null",
            b"[]",
            b'"',
            b"\xff\xfe",
            b"{}",
            b"NaN",
            b'{"inputs": [',
            b"1" * 6000,
            random_.randbytes(40),
            b'{"id": 1, "id": 2}',
        ]
    )
    rewrite(case, text, tail)


def flipped_byte(case: Case, random_: random.Random, header: dict, tail: bytes) -> None:
    """In the structure, where every change matters."""
    text = bytearray(json.dumps(header).encode())
    text[random_.choice([place for place, byte in enumerate(text) if byte in b'{}[]:,"'])] ^= 1 << random_.randrange(7)
    rewrite(case, bytes(text), tail)


def bad_float(case: Case, random_: random.Random, header: dict, tail: bytes) -> None:
    """NaN or an infinity in one place of one float tensor; for the other requests an impossible token or text."""
    tail_ = bytearray(tail)
    position = 0
    for tensor in header["inputs"]:
        size = tensor["parameters"]["binary_data_size"]
        if tensor["datatype"] == "FP32" and random_.random() < 0.5 or tensor["name"] == "mask":
            place = position + 4 * random_.randrange(size // 4)
            tail_[place : place + 4] = struct.pack("<f", random_.choice((float("nan"), float("inf"), float("-inf"))))
            break
        if tensor["name"] == "tokens" and not any(entry["name"] == "mask" for entry in header["inputs"]):
            place = position + 8 * random_.randrange(size // 8)
            tail_[place : place + 8] = struct.pack("<q", random_.choice((-1, 100, 2**40, -(2**63))))
            break
        if tensor["name"] == "responses":
            tail_[position + 4] = 0xFF  # no UTF-8
            break
        position += size
    rewrite(case, header, bytes(tail_))


def json_numbers(case: Case, random_: random.Random, header: dict, tail: bytes) -> None:
    """Plain JSON with something that is no token id, or no text."""
    del case.headers[HEADER_LENGTH]
    odd = random_.choice(["NaN", "Infinity", "1e999", "9" * 5000, "9" * 25, "-1", "1.5", "true", "null", '"1"', "[1]", "{}", '"\\ud800"'])
    name = "tokens" if header["inputs"][0]["name"] == "tokens" else "returns"
    case.body = (
        json.dumps(
            {
                "inputs": [
                    {"name": name, "shape": [1, 2], "datatype": "INT64" if name == "tokens" else "FP32", "data": [[1, "odd"]]},
                    {"name": "sequence_lengths", "shape": [1, 1], "datatype": "INT64", "data": [2]},
                ]
            }
        )
        .encode()
        .replace(b'"odd"', odd.encode())
    )
    case.path = "/v2/models/critic_infer/infer"


def no_secret(case: Case, random_: random.Random, header: dict, tail: bytes) -> None:
    right = case.headers.pop("Authorization")
    wrong = random_.choice(
        [None, "", "Bearer", "Bearer ", right[:-1], right + "0", right.upper(), right.replace("Bearer", "Basic"), "ü", "x" * 3000]
    )
    if wrong is not None:
        case.headers["Authorization"] = wrong
    case.method = random_.choice(("POST", "GET", "DELETE"))
    case.path = random_.choice((case.path, "/v2", "/v2/health/ready", "/", "/v2/repository/index", "/v2/models/x/infer"))
    case.status = frozenset({401})


def wrong_route(case: Case, random_: random.Random, header: dict, tail: bytes) -> None:
    case.path = random_.choice(
        [
            "/",
            "/v2/models/x/infer",
            "/v2/repository/index",
            "/v2/systemsharedmemory/status",
            "/v2/logging",
            "/v2/trace/setting",
            "/v2//models",
        ]
        + [
            case.path + "/",
            case.path.replace("/infer", "/generate"),
            "/v2/models/../models/critic_save/infer",
            "/v2/models/critic_save%2finfer",
        ]
    )
    case.status = frozenset({404})


def wrong_method(case: Case, random_: random.Random, header: dict, tail: bytes) -> None:
    case.method = random_.choice(("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW"))
    case.status = frozenset({400, 405})  # the HTTP library itself refuses methods that nobody knows


def wrong_length_header(case: Case, random_: random.Random, header: dict, tail: bytes) -> None:
    choice = random_.randrange(4)
    if choice == 0:
        case.headers["Content-Length"], case.status = str(10**12), frozenset({413})
    elif choice == 1:
        case.headers["Content-Length"] = random_.choice(("-5", "x", "1, 2", "+3", " "))
    elif choice == 2:
        case.headers["Transfer-Encoding"], case.status = "chunked", frozenset({400, 411})
    else:
        case.headers["Content-Encoding"], case.status = random_.choice(("gzip", "deflate", "br")), frozenset({415})


MUTATIONS: tuple[Callable[[Case, random.Random, dict, bytes], None], ...] = (
    wrong_shape,
    wrong_shape,
    wrong_entry,
    wrong_entry,
    repeated_tensors,
    missing_tensor,
    wrong_outputs,
    unknown_key,
    wrong_end,
    wrong_header_length,
    deep_json,
    not_json,
    flipped_byte,
    bad_float,
    json_numbers,
    no_secret,
    wrong_route,
    wrong_method,
    wrong_length_header,
)


def send(port: int, case: Case, timeout_seconds: float = 10.0) -> tuple[int, bytes]:
    """Status and body of the answer."""
    headers = {"Host": "x", "Connection": "close", "Content-Length": str(len(case.body)), **case.headers}
    if headers.get("Transfer-Encoding"):
        del headers["Content-Length"]
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(case.body), case.body)
    else:
        body = case.body
    lines = [f"{case.method} {case.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_seconds) as connection:
        try:
            connection.sendall("\r\n".join(lines).encode() + body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it refused before it had read everything; its answer is there
        with connection.makefile("rb") as stream:
            status = int(stream.readline().split()[1])
            length = 0
            while line := stream.readline().strip():
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            return status, stream.read(0 if case.method == "HEAD" else length)


def hold(port: int, count: int, first: bytes = b"") -> list[socket.socket]:
    """Connections that stay open, after these bytes."""
    held = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(count)]
    for connection in held:
        connection.sendall(first)
    return held


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.0)
    try:
        return connection.recv(1 << 16, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
