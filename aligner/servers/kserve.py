"""The KServe v2 HTTP encoding with Triton's binary tensors: a JSON header followed by the tensors' bytes.

The first part is for clients and answers. The second part parses requests, whoever sent them. It checks all of a request's form before any
byte is passed on: sizes, JSON, names, dtypes, shapes and their numbers of bytes. Triton, if used, gets a new request, written from the
parsed one. What the numbers mean is checked later, on whole arrays: see `Endpoint.payload`.

Written by hand because it is short: it needs neither gevent nor grpc in the trainer, whose threads then keep plain socket deadlines.
Specification: the Open Inference Protocol and Triton's "binary tensor data" extension.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from aligner.servers.config import RequestLimits
from aligner.servers.wire import Arrays, Endpoint, TensorSpec, check_structure

HEADER_LENGTH = "Inference-Header-Content-Length"
DATATYPES = {"int64": "INT64", "float32": "FP32", "bytes": "BYTES"}
_ERROR_START = "<<aligner: "
_LENGTH_PREFIX = 4  # bytes before each text of a binary BYTES tensor
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
    return decode_failure(body)[1]


def _to_bytes(array: np.ndarray) -> tuple[str, bytes]:
    """The tensor's KServe data type and its bytes. Texts are length-prefixed, 4 bytes little-endian each."""
    if array.dtype.kind in "OS":
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


def _described(name: str, shape: Sequence[int], datatype: str, size: int) -> dict[str, object]:
    return {"name": name, "shape": list(shape), "datatype": datatype, "parameters": {"binary_data_size": size}}


def encode_request(inputs: Arrays, outputs: tuple[str, ...]) -> tuple[dict[str, str], bytes]:
    """HTTP headers and body that send `inputs` (int64, float32, or object arrays of bytes) and ask for binary `outputs`."""
    described, blobs = [], []
    for name, array in inputs.items():
        datatype, data = _to_bytes(array)
        described.append(_described(name, array.shape, datatype, len(data)))
        blobs.append(data)
    headers, header = _request({"inputs": described}, [(name, True) for name in outputs])
    return headers, b"".join([header, *blobs])


def _request(document: dict[str, object], outputs: Sequence[tuple[str, bool]]) -> tuple[dict[str, str], bytes]:
    """HTTP headers, and the JSON header, of a request for these outputs: name, and whether binary."""
    wanted = [{"name": name, "parameters": {"binary_data": binary}} for name, binary in outputs]
    header = json.dumps(document | {"outputs": wanted}).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Accept-Encoding": "identity",  # Triton compresses otherwise, which is ten times slower
        HEADER_LENGTH: str(len(header)),
    }
    return headers, header


def encode_response(arrays: Arrays, outputs: Sequence[tuple[str, bool]], **named: str) -> tuple[dict[str, str], bytes]:
    """HTTP headers and body of Triton's 200 answer. `outputs`: name, and whether binary (else JSON); `named` comes first in the header."""
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
    """The output tensors of a 200 answer. Raises ValueError: the answer does not follow the protocol."""
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


MAX_HEADER_BYTES = 64 * 1024  # of the JSON before binary tensors
MAX_JSON_BYTES = 4 * 1024 * 1024  # of a request that is all JSON
MAX_DEPTH = 12
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)
_DTYPES = {datatype: dtype for dtype, datatype in DATATYPES.items()}
_PRINTABLE = re.compile(r"[ -~]{0,128}")


@dataclass(frozen=True, kw_only=True, slots=True)
class InboundTensor:
    """One input, its bytes in the form of Triton's binary extension."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, kw_only=True, slots=True)
class Inbound:
    """A request in the right form. `outputs`: name, and whether it is wanted as binary data (else as JSON)."""

    request_id: str
    inputs: tuple[InboundTensor, ...]
    outputs: tuple[tuple[str, bool], ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.inputs)

    def arrays(self) -> dict[str, np.ndarray]:
        """The tensors, as copies; texts as object arrays of bytes."""
        return {tensor.name: from_bytes(tensor.datatype, tensor.shape, tensor.data) for tensor in self.inputs}


def body_limit(endpoint: Endpoint, limits: RequestLimits) -> int:
    """The bytes of the largest request that the endpoint could accept; a JSON one has more for each number, but is limited anyway."""
    largest = {"B": limits.max_rows, "S": limits.max_sequence_length}
    total = MAX_HEADER_BYTES
    for spec in endpoint.inputs:
        elements = math.prod(size if isinstance(size, int) else largest[size] for size in spec.shape)
        total += elements * (_LENGTH_PREFIX + limits.max_text_bytes if spec.dtype == "bytes" else np.dtype(spec.dtype).itemsize)
    return max(total, MAX_JSON_BYTES)


def read_request(endpoint: Endpoint, limits: RequestLimits, header_length: str | None, body: bytes | bytearray) -> Inbound:
    """Parse a body. `header_length`: that header's value, None if all is JSON. Raises ValueError, naming the tensor."""
    end = _json_length(header_length, len(body))
    document = _object(_parse(bytes(body[:end])), "the request", allowed=("id", "parameters", "inputs", "outputs"))
    request_id = document.get("id", "")
    if not isinstance(request_id, str) or not _PRINTABLE.fullmatch(request_id):
        raise ValueError("id: allowed are up to 128 printable ASCII characters")
    parameters = _object(document.get("parameters", {}), "parameters", allowed=("binary_data_output",))
    outputs = _outputs(endpoint, document.get("outputs", []), _flag(parameters, "binary_data_output", default=False))
    described = _inputs(endpoint, document.get("inputs"), limits)
    tensors, position = [], end
    for spec, entry in described:
        parameters = _object(entry.get("parameters", {}), f"{spec.name}: parameters", allowed=("binary_data_size",))
        shape = tuple(entry["shape"])
        if ("data" in entry) == ("binary_data_size" in parameters):
            raise ValueError(f"{spec.name}: give its numbers either as `data` or as binary data with `binary_data_size`")
        if "data" in entry:
            data = _from_json(spec, shape, entry["data"], limits)
        else:
            size = parameters["binary_data_size"]
            data = _from_binary(spec, shape, size, memoryview(body)[position:], limits)
            position += size
        tensors.append(InboundTensor(name=spec.name, datatype=DATATYPES[spec.dtype], shape=shape, data=memoryview(data)))
    if position != len(body):
        raise ValueError(f"the body has {len(body)} bytes, its header describes {position}")
    return Inbound(request_id=request_id, inputs=tuple(tensors), outputs=outputs)


def outbound(request: Inbound) -> tuple[dict[str, str], bytes, list[memoryview]]:
    """HTTP headers, JSON header and binary tensors of the request that Triton gets."""
    inputs = [_described(tensor.name, tensor.shape, tensor.datatype, tensor.data.nbytes) for tensor in request.inputs]
    named = {"id": request.request_id} if request.request_id else {}
    return *_request({**named, "inputs": inputs}, request.outputs), [tensor.data for tensor in request.inputs]


def _json_length(header_length: str | None, size: int) -> int:
    if header_length is None:
        if size > MAX_JSON_BYTES:
            raise ValueError(f"{size} bytes of JSON; at most {MAX_JSON_BYTES} are allowed, send larger tensors as binary data")
        return size
    if not re.fullmatch(r"[0-9]{1,9}", header_length):
        raise ValueError(f"Inference-Header-Content-Length: {header_length[:40]!r} is not a number of bytes")
    length = int(header_length)
    if not 0 < length <= min(size, MAX_HEADER_BYTES):
        raise ValueError(
            f"Inference-Header-Content-Length: {length}; allowed are 1 to {min(size, MAX_HEADER_BYTES)}, the body has {size} bytes"
        )
    return length


def _parse(text: bytes) -> object:
    """JSON that is UTF-8, not too deep, without repeated keys and without NaN or infinities."""
    depth = 0
    for bracket in _BRACKETS.finditer(text):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(bracket[0], 0)
        if depth > MAX_DEPTH:
            raise ValueError(f"JSON: nested deeper than {MAX_DEPTH}")
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_without_repetition, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"JSON: {str(error)[:200]}") from error


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice in one object")
    return found


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number; all must be finite")


def _shown(value: object) -> str:
    """For error messages: short, whatever was sent."""
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _object(value: object, what: str, *, allowed: Sequence[str]) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{what}: {_shown(value)} is not a JSON object")
    for key in value:
        if key not in allowed:
            raise ValueError(f"{what}: {_shown(key)} is not known; allowed are {', '.join(allowed)}")
    return value


def _flag(parameters: dict[str, object], name: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name}: {_shown(value)}; allowed are true and false")
    return value


def _entries(value: object, what: str, most: int) -> list[object]:
    if not isinstance(value, list) or len(value) > most:
        found = f"{len(value)} entries" if isinstance(value, list) else _shown(value)
        raise ValueError(f"{what}: {found}; expected a list of at most {most}")
    return value


def _outputs(endpoint: Endpoint, value: object, binary: bool) -> tuple[tuple[str, bool], ...]:
    """The outputs that are asked for; all of them if none is named."""
    names = endpoint.output_names
    wanted: dict[str, bool] = {}
    for entry in _entries(value, "outputs", len(names)):
        described = _object(entry, "outputs", allowed=("name", "parameters"))
        name = described.get("name")
        if not isinstance(name, str) or name not in names:
            raise ValueError(f"outputs: {_shown(name)} is not one of {', '.join(names)}")
        if name in wanted:
            raise ValueError(f"outputs: {name} is asked for twice")
        parameters = _object(described.get("parameters", {}), f"{name}: parameters", allowed=("binary_data",))
        wanted[name] = _flag(parameters, "binary_data", default=binary)
    return tuple(wanted.items()) or tuple((name, binary) for name in names)


def _inputs(endpoint: Endpoint, value: object, limits: RequestLimits) -> list[tuple[TensorSpec, dict[str, object]]]:
    """The input entries in the order sent, with names, dtypes and shapes known to be right."""
    specs = {spec.name: spec for spec in endpoint.inputs}
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    found = []
    for entry in _entries(value, "inputs", len(specs)):
        tensor = _object(entry, "inputs", allowed=("name", "shape", "datatype", "parameters", "data"))
        name = tensor.get("name")
        if not isinstance(name, str) or name not in specs:
            raise ValueError(f"inputs: {_shown(name)}: no such tensor; allowed are {', '.join(specs)}")
        if name in described:
            raise ValueError(f"{name}: given twice")
        datatype, shape = tensor.get("datatype"), tensor.get("shape")
        if not isinstance(datatype, str) or datatype not in _DTYPES:
            raise ValueError(f"{name}: datatype {_shown(datatype)}; expected {DATATYPES[specs[name].dtype]}")
        if not isinstance(shape, list) or len(shape) > 8 or not all(type(size) is int and 0 <= size < 1 << 40 for size in shape):
            raise ValueError(f"{name}: shape {_shown(shape)} is not a list of sizes")
        described[name] = _DTYPES[datatype], tuple(shape)
        found.append((specs[name], tensor))
    check_structure(endpoint.inputs, described, limits)
    return found


def _from_binary(spec: TensorSpec, shape: tuple[int, ...], size: object, rest: memoryview, limits: RequestLimits) -> memoryview:
    """The tensor's bytes, the first `size` of `rest`."""
    if type(size) is not int or not 0 <= size <= len(rest):
        raise ValueError(f"{spec.name}: binary_data_size {_shown(size)}; {len(rest)} bytes are left in the body")
    if spec.dtype == "bytes":
        _check_texts(spec.name, rest[:size], math.prod(shape), limits)
    elif size != (expected := math.prod(shape) * np.dtype(spec.dtype).itemsize):
        raise ValueError(f"{spec.name}: {size} bytes for shape {list(shape)} of {DATATYPES[spec.dtype]}; it must be {expected}")
    return rest[:size]


def _check_texts(name: str, data: memoryview, count: int, limits: RequestLimits) -> None:
    """Raise ValueError unless `data` is exactly `count` texts, each after its length."""
    position, found = 0, 0
    while position < len(data) and found < count:
        length = int.from_bytes(data[position : position + _LENGTH_PREFIX], "little")
        if length > limits.max_text_bytes:
            raise ValueError(f"{name}: text {found} has {length} bytes; at most {limits.max_text_bytes} are allowed")
        position += _LENGTH_PREFIX + length
        found += 1
    if position != len(data) or found != count:
        raise ValueError(f"{name}: its {len(data)} bytes are not {count} texts with their lengths")


def _from_json(spec: TensorSpec, shape: tuple[int, ...], data: object, limits: RequestLimits) -> bytes:
    """The bytes of a tensor that was sent as numbers or texts, flat or nested like its shape."""
    values = list(_flat(spec.name, data, shape))
    if len(values) != math.prod(shape):
        raise ValueError(f"{spec.name}: {len(values)} values for shape {list(shape)}; it must be {math.prod(shape)}")
    if spec.dtype == "bytes":
        return b"".join(_prefixed(spec.name, value, limits) for value in values)
    allowed = (int,) if spec.dtype == "int64" else (int, float)
    for value in values:
        if type(value) not in allowed:
            raise ValueError(f"{spec.name}: {_shown(value)} is not {'a whole number' if spec.dtype == 'int64' else 'a number'}")
    try:
        with np.errstate(over="ignore"):  # seen on the next lines
            array = np.array(values, dtype=NUMPY_TYPES[DATATYPES[spec.dtype]])
    except OverflowError as error:
        raise ValueError(f"{spec.name}: a number is too large for {DATATYPES[spec.dtype]}") from error
    if spec.dtype == "float32" and not np.isfinite(array).all():
        raise ValueError(f"{spec.name}: a number is too large for FP32; all must be finite")
    return array.tobytes()


def _flat(name: str, data: object, shape: tuple[int, ...]) -> Iterator[object]:
    """The elements in order. Raises ValueError unless the lists are nested like `shape`, or one flat list."""
    if not isinstance(data, list):
        raise ValueError(f"{name}: data {_shown(data)} is not a list")
    if not any(isinstance(element, list) for element in data):
        yield from data
        return
    if len(shape) < 2 or len(data) != shape[0]:
        raise ValueError(f"{name}: data is not nested like shape {list(shape)}")
    for row in data:
        if not isinstance(row, list) or len(row) != math.prod(shape[1:]):
            raise ValueError(f"{name}: data is not nested like shape {list(shape)}")
        yield from _flat(name, row, shape[1:])


def _prefixed(name: str, value: object, limits: RequestLimits) -> bytes:
    if not isinstance(value, str):
        raise ValueError(f"{name}: {_shown(value)} is not a text")
    try:
        raw = value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: a text holds half of a surrogate pair") from error
    if len(raw) > limits.max_text_bytes:
        raise ValueError(f"{name}: a text has {len(raw)} bytes; at most {limits.max_text_bytes} are allowed")
    return len(raw).to_bytes(_LENGTH_PREFIX, "little") + raw
