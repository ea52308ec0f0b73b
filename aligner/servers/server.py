"""The serving loop of all ranks of a component.

Requests arrive in PyTriton's threads on rank 0, are checked there and queued. The main thread of rank 0 takes them one at a time and
broadcasts each; every rank runs the same handler (which may use the model's collectives); rank 0 answers. While nothing arrives, a no-op
goes round, so that no process group times out, a dead rank is noticed, and any rank's SIGTERM stops the server.

A bad request is rejected and the server goes on. A handler that raises, on any rank, ends the server with an exception on every rank:
its weights may no longer agree. The client is told which rank failed and why.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aligner.errors import ServerError
from aligner.servers.config import RequestLimits, ServerConfig
from aligner.servers.control import Command, ControlGroup, Report
from aligner.servers.frontend import Frontend
from aligner.servers.intake import Answer, Intake, Operation
from aligner.servers.kserve import AnswerError
from aligner.servers.registry import Publication, make_registration, refuse_second_server
from aligner.servers.supervisor import Supervisor

DRAIN_SECONDS = 1.0  # an error answer needs a moment to leave through Triton
FOLLOWER_SECONDS = 3.0  # ranks other than 0 wait so much longer, so that rank 0 can still answer its client


def serve(
    name: str,
    operations: Sequence[Operation],
    *,
    config: ServerConfig,
    limits: RequestLimits,
    services_dir: Path,
    checkpoint: str = "",
) -> None:
    """Serve until a signal or a failure. Every rank calls it, from its main thread; `name` is what clients look for in `services_dir`.

    Returns after SIGTERM or SIGINT on any rank, when the running operation is finished and answered.

    Raises:
        ServerError: an operation failed on some rank, Triton or its stub died, the port is taken, the name is served already. On ranks that
            hang in a collective the process exits with status 1 instead, after `config.failure_grace_seconds`.
    """
    service = _Service(
        name=name,
        operations={operation.endpoint.name: operation for operation in operations},
        config=config,
        limits=limits,
        services_dir=services_dir,
        checkpoint=checkpoint,
    )
    control = ControlGroup(config.control_timeout_seconds)
    stop = _StopSignal()
    with stop.installed():
        try:
            if control.rank == 0:
                _lead(service, control, stop)
            else:
                _follow(service, control, stop)
        except RuntimeError as error:  # what torch.distributed raises
            raise ServerError(f"{name}: rank {control.rank} lost contact with the other ranks: {error}") from error
    control.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Service:
    """The arguments of `serve`."""

    name: str
    operations: Mapping[str, Operation]
    config: ServerConfig
    limits: RequestLimits
    services_dir: Path
    checkpoint: str


class _StopSignal:
    """SIGTERM and SIGINT set a flag; the loop looks at it between operations."""

    def __init__(self) -> None:
        self.requested = False

    def _request(self, number: int, frame: object) -> None:
        self.requested = True

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self._request) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class _OperationFailed(ServerError):
    """A handler raised, and every rank knows."""


def _lead(service: _Service, control: ControlGroup, stop: _StopSignal) -> None:
    """Rank 0: front end, registration and loop; all taken down again whatever happens, and the other ranks told."""
    intake = Intake(service.operations, service.limits)
    with contextlib.ExitStack() as cleanup:
        try:
            frontend, publication = _open(service, control, intake, stop, cleanup)
        except Exception as error:
            control.broadcast(Command(failure=f"rank 0: {error}"))
            raise
        supervisor = Supervisor(
            # A signal to the whole process group ends Triton too: then its death is part of the stop.
            [lambda: None if stop.requested else frontend.failure(), publication.failure, control.announced_failure],
            grace_seconds=service.config.failure_grace_seconds,
            last_words=lambda message: _give_up(intake, publication, message),
        )
        cleanup.callback(supervisor.close)
        try:
            _lead_loop(service, control, intake, supervisor, stop)
        except _OperationFailed as error:
            intake.close(AnswerError(str(error)))
            raise
        except Exception as error:
            cause = control.announced_failure() or str(error)  # a rank that failed and left explains a broken connection
            supervisor.report(cause)  # from here on the time is limited, should the broadcast hang
            intake.close(AnswerError(cause))
            with contextlib.suppress(RuntimeError):  # a rank that cannot be reached sees the closed connection
                control.broadcast(Command(failure=f"rank 0: {cause}"))
            raise ServerError(f"{service.name}: {cause}") from error
        intake.close(AnswerError(f"server {service.name} was stopped by a signal"))


def _give_up(intake: Intake, publication: Publication, message: str) -> None:
    """What the supervisor still does on rank 0 before it ends the process."""
    intake.close(AnswerError(message))
    time.sleep(DRAIN_SECONDS)
    publication.withdraw()


def _open(
    service: _Service, control: ControlGroup, intake: Intake, stop: _StopSignal, cleanup: contextlib.ExitStack
) -> tuple[Frontend, Publication]:
    """Start Triton and publish the service. At the end answers leave first, then the registration goes."""
    config = service.config
    service.services_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_second_server(service.services_dir, service.name, config.heartbeat_seconds)
    incarnation = uuid.uuid4().hex
    endpoints = [operation.endpoint for operation in service.operations.values()]
    log = service.services_dir / f"{service.name}.triton.log"
    frontend = Frontend(config, incarnation, log, endpoints, intake.submit)
    cleanup.callback(frontend.stop)
    frontend.start(lambda: stop.requested)
    registration = make_registration(
        name=service.name,
        incarnation=incarnation,
        connect_host=_connect_host(config),
        port=frontend.port,
        num_ranks=control.size,
        checkpoint=service.checkpoint,
    )
    publication = Publication(service.services_dir, registration, config.heartbeat_seconds)
    cleanup.callback(publication.withdraw)
    cleanup.callback(frontend.stop)  # before the withdrawal: clients that still wait would take it for a death
    print(f"server: {registration.describe()} is ready, {control.size} rank(s)", flush=True)
    return frontend, publication


def _connect_host(config: ServerConfig) -> str:
    if config.advertised_host:
        return config.advertised_host
    return socket.gethostname() if config.host == "0.0.0.0" else config.host


def _lead_loop(service: _Service, control: ControlGroup, intake: Intake, supervisor: Supervisor, stop: _StopSignal) -> None:
    """One command after the other until a stop command."""
    while True:
        ticket = None if stop.requested else intake.take(service.config.idle_seconds)
        if supervisor.failure() is not None:
            raise ServerError(supervisor.failure())
        if ticket is None:
            command = Command(stop=stop.requested)
        else:
            command = Command(operation=ticket.operation.endpoint.name, payload=ticket.payload)
        control.broadcast(command)
        answer = _take_part(service, control, command, stop)
        if ticket is not None and answer is not None:
            intake.answer(ticket, answer)
        if command.stop:
            return


def _follow(service: _Service, control: ControlGroup, stop: _StopSignal) -> None:
    """The other ranks: do what rank 0 says until it says stop."""
    supervisor = Supervisor(
        [control.announced_failure],
        grace_seconds=service.config.failure_grace_seconds + FOLLOWER_SECONDS,
        last_words=lambda message: None,
    )
    with contextlib.closing(supervisor):
        while True:
            command = control.broadcast(None)
            if command.failure is not None:
                raise ServerError(f"{service.name}: {command.failure}")
            _take_part(service, control, command, stop)
            if command.stop:
                return


def _take_part(service: _Service, control: ControlGroup, command: Command, stop: _StopSignal) -> Answer | None:
    """Run a command together with all ranks and agree on how it went; the encoded answer on rank 0.

    Raises:
        _OperationFailed: on every rank, where the handler raised on any of them.
    """
    answer, error = (None, None) if command.operation is None else _run(service.operations[command.operation], command, control)
    reports = control.gather(Report(error=error, stop_requested=stop.requested))
    for report in reports:
        if report.error is not None:
            raise _OperationFailed(report.error)
    stop.requested = any(report.stop_requested for report in reports)
    return answer


def _run(operation: Operation, command: Command, control: ControlGroup) -> tuple[Answer | None, str | None]:
    """The answer (on rank 0), or what went wrong on this rank."""
    try:
        result = operation.handler(command.payload)
        return (operation.endpoint.encode(command.payload, result) if control.rank == 0 else None), None
    except Exception as error:  # whatever it is, every rank must hear of it
        traceback.print_exc(file=sys.stderr)
        message = f"operation {command.operation} failed on rank {control.rank}: {type(error).__name__}: {error}"
        control.announce_failure(message)
        return None, message
