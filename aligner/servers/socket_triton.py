"""PyTriton's Triton on a Unix socket instead of a TCP port. Imports pytriton: only for `frontend`, and only when a server starts.

Every user of a machine can reach its loopback ports, and nobody else must reach the bundled Triton: a malformed request kills it, and the
token of its administration API stands in its command line. Triton's HTTP library accepts `unix:<path>` for an address; PyTriton's own HTTP
client does not, so models are loaded from files at Triton's start, and the two waits that use that client are ours.
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable
from pathlib import Path

from pytriton.server.triton_server_config import TritonServerConfig
from pytriton.triton import Triton, TritonConfig, TritonLifecyclePolicy

from aligner.errors import ServerError, TritonDied

POLL_SECONDS = 0.05
ANSWER_SECONDS = 10.0
MAX_PATH_BYTES = 100  # the kernel's limit is 107


class SocketTriton(Triton):
    """`note` gets the output of Triton and its stubs. `run` raises ServerError once not `still_wanted()`, TritonDied at its end."""

    def __init__(
        self, config: TritonConfig, workspace: Path, path: Path, still_wanted: Callable[[], bool], note: Callable[[str], None]
    ) -> None:
        if len(str(path).encode()) > MAX_PATH_BYTES:
            raise ServerError(f"{path}: too long for a socket's path (at most {MAX_PATH_BYTES} bytes); set TMPDIR to a shorter one")
        policy = TritonLifecyclePolicy(launch_triton_on_startup=False, local_model_store=True)
        super().__init__(config=config, workspace=workspace, triton_lifecycle_policy=policy)
        arguments = _Arguments()
        arguments.update_config(self._triton_server_config.server_args())
        arguments["http_address"] = f"unix:{path}"
        arguments["pinned_memory_pool_byte_size"] = 0
        self._triton_server_config = arguments
        self._path = path
        self._still_wanted = still_wanted
        self._note = note

    def _initialize_server(self) -> None:
        super()._initialize_server()
        self._triton_server._record_logs = self._note  # PyTriton's own prints it all, and keeps all of it in memory
        # CUDA_VISIBLE_DEVICES="": tensors stay on the host, and a context on each GPU of the node would be memory that no plan counts.
        self._triton_server._gpus = ("",)

    def _wait_for_server(self) -> None:
        self._wait_for("/v2/health/ready")

    def _wait_for_models(self) -> None:
        for model in self._model_manager.models:
            self._wait_for(f"/v2/models/{model.model_name}/ready")

    def _wait_for(self, target: str) -> None:
        while not answers(self._path, target):
            if not self._is_alive_impl():
                raise TritonDied("tritonserver died while starting")
            if not self._still_wanted():
                raise ServerError(f"Triton was not waited for any longer; {target} had not answered")
            time.sleep(POLL_SECONDS)


class _Arguments(TritonServerConfig):
    """With a flag that PyTriton knows but cannot pass on, since it has no value.

    The models' configurations are complete. To look for something to add, Triton would run a stub of each before the one that stays.
    """

    def to_args_list(self) -> list[str]:
        return [*super().to_args_list(), "--disable-auto-complete-config"]


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=ANSWER_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def answers(path: Path, target: str) -> bool:
    """Whether a GET of `target` through the socket is answered with 200; False too if nobody listens yet."""
    connection = _SocketConnection(path)
    try:
        connection.request("GET", target)
        return connection.getresponse().status == 200
    except (FileNotFoundError, ConnectionError, TimeoutError, http.client.HTTPException):
        return False
    finally:
        connection.close()
