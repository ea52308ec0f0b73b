"""The serving loop of all ranks of a component.

Requests arrive at the gateway on rank 0, which checks their sender and their form. They are passed on straight or through PyTriton's Triton
(`server.transport`); then their contents are checked, and they are queued. The main thread of rank 0 takes one at a time and broadcasts it;
every rank runs the same handler (which may use the model's collectives); rank 0 answers. Without requests, a no-op is broadcast, so that no
process group times out, a dead rank is noticed, and any rank's SIGTERM stops the server.

A bad request is rejected and the server continues. A handler that raises, on any rank, ends the server with an exception on every rank:
its weights may no longer agree. The client learns which rank failed and why.

Rank 0 leads the other ranks through a `ControlGroup`: commands go out, reports come back, and a failure on one rank reaches all of them.
Every rank constructs these objects at the same point. All traffic is on CPU tensors in a separate gloo group, so that it neither mixes
with the model's collectives nor needs a GPU. A server of one process needs no process group at all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store  # no public way to the store that every process group already has

from aligner.errors import ServerError, TritonDied
from aligner.parallel.collectives import broadcast_object, gather_objects
from aligner.parallel.progress import IDLE, Progress
from aligner.servers.access import Access, advertised_host
from aligner.servers.config import RequestLimits, ServerConfig, Transport
from aligner.servers.frontend import Frontend
from aligner.servers.gateway import Gateway
from aligner.servers.health import Health, Pulse, Purpose, Supervisor
from aligner.servers.intake import Answer, Intake, Operation, Straight, ThroughTriton
from aligner.servers.kserve import AnswerError
from aligner.servers.ledger import Refused
from aligner.servers.processes import recorded_signals
from aligner.servers.registry import Publication, make_registration
from aligner.servers.turns import LINGER_SECONDS, Residence
from aligner.servers.wire import Endpoint, Payload

FAILURE_KEY = "aligner/servers/failure"


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """The next command for all ranks: run `operation` on `payload`; nothing if it is None (the idle no-op).

    Their models are on the device for it if `here`. They end after this if `stop`, and with an exception if rank 0 gives a `failure`.
    """

    operation: str | None = None
    payload: Payload | None = None
    here: bool = True
    stop: bool = False
    failure: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One rank's report after a command: its error, and whether a signal asked it to stop."""

    error: str | None = None
    stop_requested: bool = False


class ControlGroup:
    """Broadcast of commands and gathering of reports. Collective, except for the two methods on failures."""

    def __init__(self, timeout_seconds: float) -> None:
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._group: dist.ProcessGroup | None = None
        self._store: dist.Store | None = None
        if self.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
            self._store = _get_default_store().clone()  # a connection of its own: the first may be held by a rank that waits in it

    def broadcast(self, command: Command | None) -> Command:
        """Rank 0's command, on every rank."""
        return command if self._group is None else broadcast_object(command, src=0, group=self._group)

    def gather(self, report: Report) -> list[Report]:
        """Every rank's report in rank order, on every rank."""
        return [report] if self._group is None else gather_objects(report, group=self._group)

    def announce_failure(self, message: str) -> None:
        """Let ranks that are stuck in a collective of the failed operation know (the first announcement stands)."""
        if self._store is not None and not self._store.check([FAILURE_KEY]):
            self._store.set(FAILURE_KEY, message)

    def announced_failure(self) -> str | None:
        """A failure that some rank announced, or None. Called from a thread."""
        if self._store is None or not self._store.check([FAILURE_KEY]):
            return None
        return self._store.get(FAILURE_KEY).decode()

    def close(self) -> None:
        """Free the group's threads. Collective."""
        if self._group is not None:
            dist.destroy_process_group(self._group)


DRAIN_SECONDS = 1.0  # an error answer needs a moment to leave
FOLLOWER_SECONDS = 3.0  # added to the grace of ranks other than 0, so that rank 0 can still answer its client


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """One server: `name` is what clients look for in `services_dir`. Every rank constructs it alike."""

    name: str
    operations: Sequence[Operation]
    config: ServerConfig
    limits: RequestLimits
    services_dir: Path
    secret: Path  # the file with the run's secret, which every request carries; made if it does not exist
    publication: Publication | None = None  # rank 0's, of a component that registered early as loading; None: one is made
    progress: Progress = field(default_factory=Progress)  # records what this rank does
    residence: Residence = field(default_factory=Residence)  # the models, away already if they share their devices
    purpose: Purpose | None = None  # the server ends by itself when that is over
    own_tls: bool = False  # server and clients show each other certificates of the run's own authority

    @property
    def endpoints(self) -> list[Endpoint]:
        return [operation.endpoint for operation in self.operations]


def serve(service: Service) -> None:
    """Serve until a signal on any rank (the running operation is finished first) or a failure. Every rank calls it, from its main thread.

    Raises ServerError: an operation failed on some rank, Triton or its stub died, the port is taken, the name is served already. A rank
    that hangs in a collective exits with status 1 instead, after `config.failure_grace_seconds`.
    """
    service.progress.enter_phase(IDLE)
    control = ControlGroup(service.config.control_timeout_seconds)
    with recorded_signals((signal.SIGTERM, signal.SIGINT)) as stop:
        try:
            if control.rank == 0:
                _lead(service, control, stop)
            else:
                _follow(service, control, stop)
        except RuntimeError as error:  # what torch.distributed raises
            raise ServerError(f"{service.name}: rank {control.rank} lost contact with the other ranks: {error}") from error
    control.close()


_Stop = list[int]  # the signals that asked for the end: the loop looks at them between operations


class _OperationFailed(ServerError):
    """A handler raised, and every rank knows."""


def _lead(service: Service, control: ControlGroup, stop: _Stop) -> None:
    """Rank 0: gateway, front end, registration and loop; all taken down again whatever happens, and the other ranks informed."""
    intake = Intake({one.endpoint.name: one for one in service.operations}, service.limits)
    with contextlib.ExitStack() as cleanup:
        try:
            gateway, frontend, publication, health = _open(service, control, intake, stop, cleanup)
        except Exception as error:
            control.broadcast(Command(failure=f"rank 0: {error}"))
            raise
        supervisor = Supervisor(
            # A signal to the whole process group ends Triton too: then its death is part of the stop.
            [
                lambda: None if stop or frontend is None else frontend.failure(),
                gateway.failure,
                publication.failure,
                control.announced_failure,
            ],
            grace_seconds=service.config.failure_grace_seconds,
            last_words=lambda message: _give_up(intake, publication, message),
        )
        cleanup.callback(supervisor.close)
        health.failure = lambda: "it is ending (signal)" if stop else supervisor.failure()
        try:
            _lead_loop(service, control, intake, supervisor, stop, health.pulse)
        except _OperationFailed as error:
            intake.close(AnswerError(str(error), status=503))
            raise
        except Exception as error:
            cause = control.announced_failure() or str(error)  # a rank that failed and left explains a broken connection
            supervisor.report(cause)  # from here on the time is limited, should the broadcast hang
            intake.close(AnswerError(cause, status=503))
            with contextlib.suppress(RuntimeError):  # a rank that cannot be reached sees the closed connection
                control.broadcast(Command(failure=f"rank 0: {cause}"))
            raise ServerError(f"{service.name}: {cause}") from error
        intake.close(AnswerError(f"server {service.name} is ending (signal)", status=503))


def _give_up(intake: Intake, publication: Publication, message: str) -> None:
    """What the supervisor still does on rank 0 before it ends the process."""
    intake.close(AnswerError(message, status=503))
    time.sleep(DRAIN_SECONDS)
    publication.withdraw()


def _open(
    service: Service, control: ControlGroup, intake: Intake, stop: _Stop, cleanup: contextlib.ExitStack
) -> tuple[Gateway, Frontend | None, Publication, Health]:
    """Start gateway and Triton, if it is used, and publish the service. At the end answers leave first, then the registration goes."""
    config, transport = service.config, service.config.chosen_transport()
    publication = service.publication
    if publication is None:
        registration = make_registration(name=service.name, role=service.name, num_ranks=control.size)
        publication = Publication(service.services_dir, registration, config.heartbeat_seconds)
    cleanup.callback(publication.withdraw)
    incarnation = publication.registration.incarnation
    access = Access.for_server(service.secret, config, name=service.name, own_tls=service.own_tls)
    health = Health(service.name, incarnation, publication.registration.attempt, control.size, config=config)
    gateway = Gateway(config, access, service.endpoints, service.limits, health)
    cleanup.callback(gateway.stop)
    gateway.start()
    frontend = None
    if transport is Transport.pytriton:
        frontend = _start_frontend(service, incarnation, intake, stop, cleanup)
    gateway.connect(Straight(intake.submit) if frontend is None else ThroughTriton(frontend.socket))
    # The first to end: Triton waits for open connections until its time is up, and then leaves without unloading its models.
    cleanup.callback(gateway.stop)
    health.pulse.begin(None)
    first = Command(here=not service.residence.takes_turns)
    control.broadcast(first)  # a first round, so that a server is ready when it reports it
    _take_part(service, control, first, stop)
    health.pulse.round_done()
    url = f"{access.scheme}://{advertised_host(config, os.environ)}:{gateway.port}"
    registration = publication.ready(url)
    absent = "; nvidia-pytriton is not installed" if (config.transport, transport) == (Transport.auto, Transport.http) else ""
    print(f"server: {registration.describe()} is ready, {control.size} rank(s), transport {transport.value}{absent}", flush=True)
    return gateway, frontend, publication, health


def _start_frontend(service: Service, incarnation: str, intake: Intake, stop: _Stop, cleanup: contextlib.ExitStack) -> Frontend:
    """Start Triton; a second time if it dies on the way, as its Python backend sometimes does on a busy machine
    (boost::interprocess::lock_exception, triton-inference-server/server issue 8882). Raises TritonDied the second time.
    """
    log = service.services_dir / f"{service.name}.triton.log"
    for may_die in (True, False):
        frontend = Frontend(service.config, incarnation, log, service.endpoints, intake.submit)
        cleanup.callback(frontend.stop)
        try:
            frontend.start(lambda: bool(stop))
            break
        except TritonDied as error:
            if not may_die:
                raise
            print(f"warning: {service.name}: {error}; starting it once more", file=sys.stderr, flush=True)
            frontend.stop()
    return frontend


def _lead_loop(service: Service, control: ControlGroup, intake: Intake, supervisor: Supervisor, stop: _Stop, pulse: Pulse) -> None:
    """One command after the other until a stop command. A request that must wait for the devices is kept, while no-ops are sent around."""
    residence, kept = service.residence, None
    while True:
        lingers = residence.takes_turns and residence.is_here
        ticket, kept = kept, None
        if ticket is None and not stop:
            ticket = intake.take(LINGER_SECONDS if lingers else service.config.idle_seconds)
        if supervisor.failure() is not None:
            raise ServerError(supervisor.failure())
        if ticket is not None and ticket.operation.computes and not residence.try_take(service.config.idle_seconds):
            ticket, kept = None, None if stop else ticket
        if ticket is None:
            if service.purpose and not stop and (reason := service.purpose.over(pulse.read()[1])):
                print(f"server: {service.name} ends: {reason}", flush=True)
                stop.append(signal.SIGTERM)
            command = Command(stop=bool(stop), here=not residence.takes_turns)
        else:
            here = ticket.operation.computes or residence.is_here
            command = Command(operation=ticket.operation.endpoint.name, payload=ticket.payload, here=here)
        pulse.begin(command.operation)
        control.broadcast(command)
        answer = _take_part(service, control, command, stop)
        pulse.round_done()
        if not command.here:
            residence.release()
        if ticket is not None and answer is not None:
            intake.answer(ticket, answer)
        if command.stop:
            return


def _follow(service: Service, control: ControlGroup, stop: _Stop) -> None:
    """The other ranks: follow rank 0's commands until it stops."""
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


def _take_part(service: Service, control: ControlGroup, command: Command, stop: _Stop) -> Answer | AnswerError | None:
    """Run a command together with all ranks; the encoded answer, or a refusal, on rank 0. Raises _OperationFailed on all ranks."""
    with service.progress.phase(command.operation or IDLE):
        answer, error = _run(service, command, control)
    reports = control.gather(Report(error=error, stop_requested=bool(stop)))
    for report in reports:
        if report.error is not None:
            raise _OperationFailed(report.error)
    if any(report.stop_requested for report in reports):  # a signal that has come since then stays for the next report
        stop.append(signal.SIGTERM)
    return answer


def _run(service: Service, command: Command, control: ControlGroup) -> tuple[Answer | AnswerError | None, str | None]:
    """The answer (on rank 0), or what went wrong on this rank. A refusal is an answer."""
    try:
        service.residence.move(command.here)
        if command.operation is None:
            return None, None
        operation = next(one for one in service.operations if one.endpoint.name == command.operation)
        result = operation.handler(command.payload)
        return (operation.endpoint.encode(command.payload, result) if control.rank == 0 else None), None
    except Refused as refusal:  # every rank has refused, before anything was changed
        return AnswerError(str(refusal), status=409), None
    except Exception as error:  # whatever it is, every rank must hear of it
        traceback.print_exc(file=sys.stderr)
        message = f"operation {command.operation or 'idle'} failed on rank {control.rank}: {type(error).__name__}: {error}"
        control.announce_failure(message)
        return None, message
