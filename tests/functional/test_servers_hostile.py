"""A real server behind either transport, and what comes over its network: ordinary Triton clients with the secret, and everything else."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from malformed import Case, malformed, send
from toy_server import RUN, TRANSPORTS, ToyServer, toy_server

from aligner.servers import wire
from aligner.servers.access import Access
from aligner.servers.config import ClientConfig
from aligner.servers.frontend import MARKER
from aligner.servers.link import Server, ServiceLink
from aligner.servers.payloads import START, CriticStatus, StatusRequest
from aligner.servers.processes import processes_with_variable
from aligner.servers.registry import Registration


def state(link: ServiceLink, server: Server) -> tuple[str, int, list[list[float]]]:
    """The mark of what the critic was trained on, how often, and the values of three tokens."""
    asked = link.call(server, wire.CRITIC_STATUS, wire.encode_fields(StatusRequest(run=RUN)), 30)
    status = CriticStatus(**json.loads(asked["status"][0]))
    tokens = {"tokens": np.array([[1, 2, 3]]), "sequence_lengths": np.array([[3]])}
    return status.mark, status.count, link.call(server, wire.CRITIC_INFER, tokens, 30)["values"].tolist()


def health(registration: Registration, access: Access) -> tuple[int, dict[str, Any]]:
    connection = access.connection(registration.url, 30)
    connection.request("GET", "/v2/health/ready", headers=access.headers())
    answer = connection.getresponse()
    status, document = answer.status, json.loads(answer.read())
    connection.close()
    return status, document


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_among_strangers(transport: str, tmp_path: Path) -> None:
    with toy_server("critic", tmp_path / "services", transport=transport) as server:
        access = Access.for_client(tmp_path / "secret", ClientConfig())
        link = ServiceLink(tmp_path / "services", "critic", ClientConfig(), access=access)
        found = link.find(180)
        registration = found.registration
        processes = processes_with_variable(f"{MARKER}={registration.incarnation}")
        check_reach(server, processes, registration.port)
        if importlib.util.find_spec("tritonclient"):
            check_stock_client(registration, access)
        if transport == "pytriton":
            check_triton_is_private(server, processes)

        before = state(link, found)
        assert before == (START, 0, [[2.0, 4.0, 6.0]])
        secret = (tmp_path / "secret").read_text().strip()
        wrong = [(case.label, answer) for case, answer in sent(registration.port, secret) if answer[0] not in case.status]
        assert not wrong, f"{len(wrong)} of 100, such as {wrong[:5]}"
        assert state(link, found) == before
        status, report = health(registration, access)
        assert (status, report["ready"], report["incarnation"], report["requests_waiting"]) == (200, True, registration.incarnation, 0)
        assert processes_with_variable(f"{MARKER}={registration.incarnation}").keys() == processes.keys()  # nothing died and came again

        log = server.log()
        assert secret not in log and "Traceback" not in log
        commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in (registration.pid, *processes)]
        environments = [Path(f"/proc/{pid}/environ").read_text(errors="replace") for pid in (registration.pid, *processes)]
        assert not [text for text in commands + environments if secret in text]
        server.ranks[0].terminate()
        assert server.exit_codes() == [0]


def sent(port: int, secret: str) -> list[tuple[Case, tuple[int, bytes]]]:
    """What became of a sample of the malformed requests; all of them are tried without Triton in test_servers_gateway.py."""
    cases = malformed(seed=7, count=100, secret=secret, endpoints=("critic_infer", "critic_train"))
    return [(case, send(port, case, timeout_seconds=30)) for case in cases]


def check_reach(server: ToyServer, processes: dict[int, str], port: int) -> None:
    """The gateway is on the one port of all processes."""
    pid = server.ranks[0].pid
    everybody = {pid, *processes, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    inet = [connection for pid in everybody for connection in psutil.Process(pid).net_connections("inet")]
    assert [connection.laddr.port for connection in inet if connection.status == psutil.CONN_LISTEN] == [port]
    assert not [connection for connection in inet if connection.type == socket.SOCK_DGRAM]


def check_triton_is_private(server: ToyServer, processes: dict[int, str]) -> None:
    """Triton can be reached through a socket and memory of this user only."""
    pid = server.ranks[0].pid
    segments = list(Path("/dev/shm").glob(f"pytrtion{pid}-*"))
    assert segments and {stat.S_IMODE(segment.stat().st_mode) for segment in segments} == {0o600}
    triton = next(word for command in processes.values() for word in command.split() if word.startswith("unix:"))
    folder = Path(triton.removeprefix("unix:")).parent
    assert (stat.S_IMODE(folder.stat().st_mode), folder.stat().st_uid) == (0o700, os.getuid())


def check_stock_client(registration: Registration, access: Access) -> None:
    import tritonclient.http as triton
    from tritonclient.utils import InferenceServerException

    client = triton.InferenceServerClient(f"127.0.0.1:{registration.port}", network_timeout=30)
    assert client.is_server_live()
    assert client.is_server_ready(headers=access.headers())
    assert client.is_model_ready("critic_infer", headers=access.headers())
    for binary in (True, False):
        inputs = []
        for name, array in (("tokens", np.array([[5, 6]])), ("sequence_lengths", np.array([[2]]))):
            inputs.append(triton.InferInput(name, list(array.shape), "INT64"))
            inputs[-1].set_data_from_numpy(array, binary_data=binary)
        outputs = [triton.InferRequestedOutput("values", binary_data=binary)]
        answer = client.infer("critic_infer", inputs, outputs=outputs, request_id="41", headers=access.headers())
        assert answer.as_numpy("values").tolist() == [[10.0, 12.0]]
        assert answer.get_response()["id"] == "41"
    with pytest.raises(InferenceServerException, match="the run's secret is missing or wrong"):
        client.infer("critic_infer", inputs)
    with pytest.raises(InferenceServerException, match="'/v2/repository/index' is not served"):
        client.get_model_repository_index(headers=access.headers())
    client.close()
