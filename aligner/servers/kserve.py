"""The KServe v2 HTTP encoding with Triton's binary tensors: a JSON header followed by the tensors' bytes.

Written by hand because it is a page long: it needs neither gevent nor grpc in the trainer, whose threads then keep plain socket deadlines.
Specification: the Open Inference Protocol and Triton's "binary tensor data" extension.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

HEADER_LENGTH = "Inference-Header-Content-Length"
DATATYPES = {"int64": "INT64", "float32": "FP32", "bytes": "BYTES"}
_ERROR_START = "<<aligner: "
NUMPY_TYPES = {"INT64": np.dtype("<i8"), "FP32": np.dtype("<f4")}


class AnswerError(Exception):
    """An error answer with its HTTP status; its text carries marks, because Triton wraps it in tracebacks."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(f"{_ERROR_START}{json.dumps([status, message])}")


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


def _from_bytes(datatype: str, shape: list[int], data: memoryview) -> np.ndarray:
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


def encode_request(inputs: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> tuple[dict[str, str], bytes]:
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
        arrays[output["name"]] = _from_bytes(output["datatype"], output["shape"], memoryview(body)[position : position + size])
        position += size
    if position != len(body):
        raise ValueError(f"the answer has {len(body)} bytes, its header describes {position}")
    return arrays
