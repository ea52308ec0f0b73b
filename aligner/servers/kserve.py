"""The KServe v2 HTTP encoding with Triton's binary tensors: a JSON header followed by the tensors' bytes. And checks of the structure of a
request's tensors, independent of their meaning.

Written by hand because it is a page long: it needs neither gevent nor grpc in the trainer, whose threads then keep plain socket deadlines.
Specification: the Open Inference Protocol and Triton's "binary tensor data" extension.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aligner.servers.config import RequestLimits

Arrays = Mapping[str, np.ndarray]
HEADER_LENGTH = "Inference-Header-Content-Length"
DATATYPES = {"int64": "INT64", "float32": "FP32", "bytes": "BYTES"}
_ERROR_START = "<<aligner: "
NUMPY_TYPES = {"INT64": np.dtype("<i8"), "FP32": np.dtype("<f4")}


class AnswerError(Exception):
    """An error answer with its HTTP status; its text carries marks, because Triton wraps it in tracebacks."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(f"{_ERROR_START}{json.dumps([status, message])}")
        self.message = message
        self.status = status


def decode_failure(body: bytes) -> tuple[int | None, str]:
    """The content of an answer other than 200: our status and message, or None and Triton's text."""
    text = body.decode(errors="replace")
    try:
        text = str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return None, text[:2000]  # not Triton's own error format: show what came
    _, _, rest = text.partition(_ERROR_START)
    try:
        status, message = json.JSONDecoder().raw_decode(rest)[0]
    except (ValueError, TypeError):
        return None, text[:2000]  # not one of ours
    return status, message


def decode_error(body: bytes) -> str:
    """The message alone."""
    return decode_failure(body)[1]


def _is_text(array: np.ndarray) -> bool:
    return array.dtype.kind in "OS"


def _to_bytes(array: np.ndarray) -> tuple[str, bytes]:
    """The tensor's KServe data type and its bytes. Texts are length-prefixed, 4 bytes little-endian each."""
    if _is_text(array):
        parts = []
        for text in array.reshape(-1).tolist():
            parts += [len(text).to_bytes(4, "little"), text]
        return "BYTES", b"".join(parts)
    datatype = DATATYPES[array.dtype.name]
    return datatype, np.ascontiguousarray(array, dtype=NUMPY_TYPES[datatype]).tobytes()


def from_bytes(datatype: str, shape: Sequence[int], data: memoryview) -> np.ndarray:
    """A tensor of its own from what `_to_bytes` makes of it."""
    if datatype != "BYTES":
        return np.frombuffer(data, dtype=NUMPY_TYPES[datatype]).reshape(shape).copy()
    texts, position = [], 0
    while position < len(data):
        length = int.from_bytes(data[position : position + 4], "little")
        texts.append(bytes(data[position + 4 : position + 4 + length]))
        position += 4 + length
    array = np.empty(len(texts), dtype=object)
    array[:] = texts
    return array.reshape(shape)


def encode_request(inputs: Arrays, outputs: tuple[str, ...]) -> tuple[dict[str, str], bytes]:
    """HTTP headers and body that send `inputs` (int64, float32, or object arrays of bytes) and ask for binary `outputs`."""
    described, blobs = [], []
    for name, array in inputs.items():
        datatype, data = _to_bytes(array)
        described.append({"name": name, "shape": list(array.shape), "datatype": datatype, "parameters": {"binary_data_size": len(data)}})
        blobs.append(data)
    wanted = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    header = json.dumps({"inputs": described, "outputs": wanted}).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Accept-Encoding": "identity",  # Triton compresses otherwise, which is ten times slower
        HEADER_LENGTH: str(len(header)),
    }
    return headers, b"".join([header, *blobs])


def encode_response(arrays: Arrays, outputs: Sequence[tuple[str, bool]], **named: str) -> tuple[dict[str, str], bytes]:
    """HTTP headers and body of a 200 answer as Triton writes it. `outputs`: name, and whether as binary data (else as JSON); `named` comes
    first in the header.
    """
    described: list[dict[str, object]] = []
    blobs = []
    for name, binary in outputs:
        datatype, data = _to_bytes(arrays[name])
        entry: dict[str, object] = {"name": name, "datatype": datatype, "shape": list(arrays[name].shape)}
        if binary:
            entry["parameters"] = {"binary_data_size": len(data)}
            blobs.append(data)
        else:
            values = arrays[name].reshape(-1).tolist()
            entry["data"] = [text.decode() for text in values] if datatype == "BYTES" else values
        described.append(entry)
    header = json.dumps({**named, "outputs": described}).encode()
    if not blobs:
        return {"Content-Type": "application/json"}, header
    return {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))}, b"".join([header, *blobs])


def decode_response(header_length: str | None, body: bytes) -> dict[str, np.ndarray]:
    """The output tensors of a 200 answer.

    Raises:
        ValueError: the answer does not follow the protocol.
    """
    end = len(body) if header_length is None else int(header_length)
    header = json.loads(body[:end])
    arrays, position = {}, end
    for output in header["outputs"]:
        if "binary_data_size" not in output.get("parameters", {}):
            raise ValueError(f"output {output['name']!r} was not sent as binary data")
        size = output["parameters"]["binary_data_size"]
        arrays[output["name"]] = from_bytes(output["datatype"], output["shape"], memoryview(body)[position : position + size])
        position += size
    if position != len(body):
        raise ValueError(f"the answer has {len(body)} bytes, its header describes {position}")
    return arrays


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One named tensor: dtype is "int64", "float32" or "bytes" (UTF-8 text)."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    optional: bool = False


def check_tensors(specs: tuple[TensorSpec, ...], arrays: Arrays, limits: RequestLimits) -> None:
    """Raise ValueError unless `arrays` has the stated tensors with the stated dtypes, agreeing shapes, allowed sizes and finite numbers."""
    described = {name: ("bytes" if array.dtype.kind in "OS" else array.dtype.name, array.shape) for name, array in arrays.items()}
    check_structure(specs, described, limits)
    for name, (dtype, _) in described.items():
        if dtype == "float32" and not np.isfinite(arrays[name]).all():
            bad = int((~np.isfinite(arrays[name])).sum())
            raise ValueError(f"{name}: {bad} of {arrays[name].size} values are NaN or infinite; all must be finite")


def check_structure(specs: tuple[TensorSpec, ...], described: Mapping[str, tuple[str, tuple[int, ...]]], limits: RequestLimits) -> None:
    """Raise ValueError unless the names, dtypes and shapes in `described` are what `specs` and `limits` allow."""
    largest = {"B": limits.max_rows, "S": limits.max_sequence_length}
    sizes: dict[str, tuple[int, str]] = {}
    names = [spec.name for spec in specs]
    for name in described:
        if name not in names:
            raise ValueError(f"{name}: no such tensor; allowed are {', '.join(names)}")
    for spec in specs:
        if spec.name not in described:
            if spec.optional:
                continue
            raise ValueError(f"{spec.name}: missing; expected {spec.dtype} {_shape_text(spec.shape)}")
        dtype, shape = described[spec.name]
        if dtype != spec.dtype or len(shape) != len(spec.shape):
            raise ValueError(f"{spec.name}: got {dtype} {list(shape)}, expected {spec.dtype} {_shape_text(spec.shape)}")
        for expected, size in zip(spec.shape, shape, strict=True):
            if isinstance(expected, int):
                if size != expected:
                    raise ValueError(f"{spec.name}: got shape {list(shape)}, expected {_shape_text(spec.shape)}")
                continue
            if not 1 <= size <= largest[expected]:
                raise ValueError(f"{spec.name}: got shape {list(shape)}; {expected} may be 1 to {largest[expected]}")
            known, owner = sizes.setdefault(expected, (size, spec.name))
            if known != size:
                raise ValueError(f"{spec.name}: got shape {list(shape)}, but {owner} has {expected} = {known}")


def _shape_text(shape: tuple[str | int, ...]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"
