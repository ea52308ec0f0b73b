"""More than a thousand malformed requests through the gateway, in this process: each is refused, and none gets as far as the queue."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_triton import FakeTriton, served
from malformed import MUTATIONS, Case, malformed, right_requests, send

from aligner.servers.access import Access
from aligner.servers.gateway import Gateway
from aligner.servers.health import Health
from aligner.servers.kserve import encode_request

SECRET = "5e" * 32


@pytest.fixture(params=["pytriton", "http"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Gateway, FakeTriton, Health]]:
    with served(tmp_path, Access(SECRET), transport=request.param) as parts:
        yield parts


def test_malformed_requests_are_refused(server: tuple[Gateway, FakeTriton, Health], capsys: pytest.CaptureFixture[str]) -> None:
    gateway, fake, _ = server
    wrong, kinds = [], Counter()
    for case in malformed(seed=1, count=1200, secret=SECRET):
        status, content = send(gateway.port, case)
        kinds[case.label.split()[1]] += 1
        text = content.decode(errors="replace")
        if status not in case.status or "Traceback" in text or "File" in text or len(text) > 1500:
            wrong.append((case.label, status, text[:200]))
        elif case.method != "HEAD" and text.startswith("{"):
            assert json.loads(text)["error"]
    assert not wrong, f"{len(wrong)} of 1200, such as {wrong[:5]}"
    assert set(kinds) == {mutation.__name__ for mutation in MUTATIONS}
    assert fake.answered == []  # none was queued
    errors = capsys.readouterr().err
    assert "Traceback" not in errors and SECRET not in errors

    for endpoint, arrays in right_requests():
        headers, body = encode_request(arrays, endpoint.output_names)
        if endpoint.name != "critic_train":  # what is not in the queue is not answered by the fake either
            case = Case("", f"/v2/models/{endpoint.name}/infer", {**headers, "Authorization": f"Bearer {SECRET}"}, body)
            assert send(gateway.port, case)[0] == 200
    assert fake.answered == ["critic_infer", "reward_model"]
