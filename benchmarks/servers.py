"""Latency and throughput of inference over both transports of a server, against the same requests straight to Triton, and a soak.

    python benchmarks/servers.py [--rows 16] [--length 512] [--seconds 5] [--clients 1 8 32]
    python benchmarks/servers.py --soak 600            # 32 clients; resident memory before and after, by `--transport`
    python benchmarks/servers.py --soak 600 --flood    # half of the time beside 2,100 connections of a stranger: p99
    python benchmarks/servers.py --tls                 # any of these with run.server_tls

The servers are real ones whose model costs nothing (a token's value is the token), so that what is timed is the way of a request: through
the gateway and Triton (`pytriton`), through the gateway alone (`http`), or through Triton's own socket, past authentication and validation
(`triton`). Clients are processes with a connection of their own for each request, as `ServiceLink` has. Compare the ratios, not seconds of
two machines; where other work runs, compare CPU. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from aligner.servers.access import Access
from aligner.servers.config import ClientConfig, RequestLimits, ServerConfig, Transport
from aligner.servers.frontend import MARKER
from aligner.servers.gateway import STRANGER_SECONDS
from aligner.servers.intake import Operation
from aligner.servers.kserve import encode_request
from aligner.servers.processes import processes_with_variable
from aligner.servers.registry import Registration, wait_for_service
from aligner.servers.server import Service, serve
from aligner.servers.wire import CRITIC_INFER

TARGET = f"/v2/models/{CRITIC_INFER.name}/infer"
START_SECONDS = 180.0
WARM_UP_SECONDS = 1.0
SOAK_WARM_UP_SECONDS = 10.0  # buffers grow to the size of the requests first
FLOOD, FLOOD_PER_SECOND = 2100, 1000  # connections of a stranger
SLICE_SECONDS = 10.0
MAX_PROCESSES = 4  # clients beyond share processes as threads


@dataclass(frozen=True)
class Figures:
    """One way with so many clients: requests a second, and milliseconds."""

    way: str
    clients: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float  # of all of the server's processes, for one request; other work on the machine hardly changes it
    errors: int


class Unix(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=120)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def serve_nothing(run: Path, transport: Transport) -> None:
    """The server's process."""
    operation = Operation(endpoint=CRITIC_INFER, handler=lambda request: request.batch.tokens.float())
    limits = RequestLimits(vocab_size=32_000, max_sequence_length=8192)
    own_tls = (run / "tls").is_dir()
    service = Service(
        name="critic",
        operations=[operation],
        config=ServerConfig(transport=transport),
        limits=limits,
        services_dir=run / transport.value,
        secret=run / "secret",
        own_tls=own_tls,
    )
    serve(service)


ACCESS: list[Access] = []  # of the clients; forked with them


def one_request(address: str, request: tuple[dict[str, str], bytes]) -> None:
    """Raises where the answer is not 200."""
    if address.startswith("unix:"):
        connection: http.client.HTTPConnection = Unix(address.removeprefix("unix:"))
    else:
        connection = ACCESS[0].connection(address, 120)
    try:
        connection.request("POST", TARGET, body=request[1], headers=request[0])
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {content[:500]!r}")
    finally:
        connection.close()


def client_process(
    address: str, request: tuple[dict[str, str], bytes], threads: int, begin: float, end: float, results: multiprocessing.Queue
) -> None:
    """`threads` clients that ask as fast as they are answered; sends (latencies between `begin` and `end`, errors, all requests)."""
    latencies: list[float] = []
    errors: list[str] = []
    asked: list[None] = []

    def ask() -> None:
        while (started := time.monotonic()) < end:
            asked.append(None)
            try:
                one_request(address, request)
            except (OSError, http.client.HTTPException, RuntimeError) as error:
                errors.append(f"{type(error).__name__}: {error}")
                continue
            if started >= begin:
                latencies.append(time.monotonic() - started)

    workers = [threading.Thread(target=ask) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    results.put((latencies, errors, len(asked)))


def cpu_seconds(pids: Iterable[int]) -> float:
    """What the processes have used so far."""
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Load:
    """The request, and the server's processes by name."""

    request: tuple[dict[str, str], bytes]
    pids: dict[str, int]

    def put(self, way: str, address: str, clients: int, seconds: float, warm_up: float) -> Figures:
        """Put `clients` to work for `seconds` after the warm-up."""
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        shares = [clients // MAX_PROCESSES + (index < clients % MAX_PROCESSES) for index in range(MAX_PROCESSES)]
        used = cpu_seconds(self.pids.values())
        begin = time.monotonic() + warm_up
        end = begin + seconds
        workers = [
            context.Process(target=client_process, args=(address, self.request, share, begin, end, results), daemon=True)
            for share in shares
            if share
        ]
        for worker in workers:
            worker.start()
        answers = [results.get(timeout=warm_up + seconds + 300) for _ in workers]
        for worker in workers:
            worker.join(timeout=60)
        latencies = sorted(latency for found, _, _ in answers for latency in found)
        errors = [error for _, found, _ in answers for error in found]
        for error in errors[:3]:
            print(f"{way}: {error}", file=sys.stderr)
        return Figures(
            way=way,
            clients=clients,
            requests_per_second=len(latencies) / seconds,
            p50_ms=1000 * statistics.median(latencies),
            p99_ms=1000 * latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))],
            cpu_ms=1000 * (cpu_seconds(self.pids.values()) - used) / max(1, sum(asked for _, _, asked in answers)),
            errors=len(errors),
        )


def compare(options: argparse.Namespace, ways: dict[str, tuple[Load, str]]) -> list[dict]:
    """A row for each number of clients: all ways, in turn, and the first one's figures as a ratio to each other one's."""
    rows = []
    print(f"{'clients':>7} {'way':>9} {'req/s':>8} {'p50 ms':>8} {'p99 ms':>8} {'CPU ms':>8}")
    for clients in options.clients:
        rounds = [
            {way: load.put(way, address, clients, options.seconds, WARM_UP_SECONDS) for way, (load, address) in ways.items()}
            for _ in range(options.rounds)
        ]
        middle = {way: sorted((one[way] for one in rounds), key=lambda f: f.p50_ms)[len(rounds) // 2] for way in ways}
        first = next(iter(middle.values()))
        row: dict = {"clients": clients, "ways": {way: asdict(figures) for way, figures in middle.items()}, "ratios": {}}
        for way, figures in middle.items():
            measured = f"{figures.p50_ms:>8.1f} {figures.p99_ms:>8.1f} {figures.cpu_ms:>8.1f}"
            print(f"{clients:>7} {way:>9} {figures.requests_per_second:>8.1f} {measured}", end="" if way == first.way else "  ")
            if way != first.way:
                ratios = row["ratios"][f"{first.way} / {way}"] = {
                    "requests_per_second": first.requests_per_second / figures.requests_per_second,
                    "p50": first.p50_ms / figures.p50_ms,
                    "p99": first.p99_ms / figures.p99_ms,
                    "cpu": first.cpu_ms / figures.cpu_ms,
                }
                shown = f"{first.way} / {way}: req/s {ratios['requests_per_second']:.2f}x, p50 {ratios['p50']:.2f}x"
                print(f"{shown}, p99 {ratios['p99']:.2f}x, CPU {ratios['cpu']:.2f}x", end="")
            print(flush=True)
        rows.append(row)
    return rows


def resident(pids: dict[str, int]) -> dict[str, dict[str, float]]:
    """MiB of resident memory, threads and open files of each process."""
    found = {}
    for name, pid in pids.items():
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        found[name] = {
            "mib": round(int(status["VmRSS"].split()[0]) / 1024, 1),
            "threads": int(status["Threads"]),
            "files": len(os.listdir(f"/proc/{pid}/fd")),
        }
    return found


def soak(options: argparse.Namespace, load: Load, gateway: str) -> dict:
    """32 clients through the gateway; what each process holds after a warm-up, and at the end."""
    clients = max(options.clients)
    load.put("gateway", gateway, clients, 1.0, SOAK_WARM_UP_SECONDS)
    before = resident(load.pids)
    figures = load.put("gateway", gateway, clients, options.soak, 0.0)
    time.sleep(2.0)
    after = resident(load.pids)
    print(f"soak: {clients} clients, {options.soak:g} s, {figures.requests_per_second:.1f} req/s, {figures.errors} errors")
    for name in load.pids:
        print(f"  {name}: {before[name]} -> {after[name]}")
    return {"seconds": options.soak, "figures": asdict(figures), "before": before, "after": after}


def flood_process(url: str, end: float, opened: multiprocessing.Queue) -> None:
    """Hold FLOOD connections without the secret until `end`; sends how many it took.

    They are silent, or sent half a header, a wrong secret or (TLS) half of a handshake's first message.
    """
    address = (urlsplit(url).hostname, urlsplit(url).port)
    openings = (b"", b"POST / HTTP/1.1\r\nHost: x\r\nX: ", b"GET /v2 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer 0\r\n\r\n")
    if urlsplit(url).scheme == "https":
        openings = (b"", bytes.fromhex("16030100c8010000c40303"))  # the latter begins a handshake: a ClientHello's first bytes
    held: list[socket.socket] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    count = 0
    while time.monotonic() < end:
        started = time.monotonic()
        for _ in range(FLOOD_PER_SECOND // 20):
            connection = socket.socket()
            connection.settimeout(1.0)
            with contextlib.suppress(OSError):
                connection.connect(address)
                connection.sendall(openings[count % len(openings)])
            held.append(connection)
            count += 1
        while len(held) > FLOOD:
            held.pop(0).close()
        time.sleep(max(0.0, started + 0.05 - time.monotonic()))
    opened.put(count)


def flooded_soak(options: argparse.Namespace, load: Load, gateway: str) -> dict:
    """Quiet and flooded slices in turn, so that what else the machine does hits both: the ratio of their p99 counts."""
    clients, slices = max(options.clients), max(1, round(options.soak / (2 * SLICE_SECONDS)))
    load.put("gateway", gateway, clients, 1.0, SOAK_WARM_UP_SECONDS)
    before, context, opened, rounds = resident(load.pids), multiprocessing.get_context("fork"), 0, []
    for _ in range(slices):
        quiet = load.put("quiet", gateway, clients, SLICE_SECONDS, 0.0)
        counted = context.Queue()
        attacker = context.Process(target=flood_process, args=(gateway, time.monotonic() + SLICE_SECONDS + 2.0, counted), daemon=True)
        attacker.start()
        rounds.append((quiet, load.put("flooded", gateway, clients, SLICE_SECONDS, 1.0)))
        opened += counted.get(timeout=60)
        attacker.join(timeout=60)
    time.sleep(STRANGER_SECONDS + 2.0)
    after = resident(load.pids)
    middle = [statistics.median(getattr(pair[side], name) for pair in rounds) for side in (0, 1) for name in ("p50_ms", "p99_ms")]
    errors = sum(figures.errors for pair in rounds for figures in pair)
    print(f"flood: {clients} clients, {slices} pairs of {SLICE_SECONDS:g} s, {opened} connections of a stranger, {errors} errors")
    print(f"  p50 {middle[0]:.1f} -> {middle[2]:.1f} ms ({middle[2] / middle[0]:.2f}x), p99 {middle[1]:.1f} -> {middle[3]:.1f} ms", end=" ")
    print(f"({middle[3] / middle[1]:.2f}x)")
    for name in load.pids:
        print(f"  {name}: {before[name]} -> {after[name]}")
    return {
        "rounds": [[asdict(one) for one in pair] for pair in rounds],
        "opened": opened,
        "before": before,
        "after": after,
        "errors": errors,
    }


@contextlib.contextmanager
def started_server(run: Path, transport: Transport) -> Iterator[tuple[Registration, dict[str, int], str]]:
    """A server that is ready: its registration, its processes by name, and the address of its Triton ('' without)."""
    log = run / f"{transport.value}.log"
    with log.open("w") as file:
        command = [sys.executable, __file__, "--serve", str(run), "--transport", transport.value]
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        registration = wait_for_service(run / transport.value, "critic", timeout_seconds=START_SECONDS)
        pids, address = {"gateway": server.pid}, ""
        for pid, running in processes_with_variable(f"{MARKER}={registration.incarnation}").items():
            if "tritonserver --id" in running:
                pids["tritonserver"] = pid
                address = next(word for word in running.split() if word.startswith("unix:"))
            elif "triton_python_backend_stub" in running:
                pids["stub"] = pid
        yield registration, pids, address
        server.send_signal(signal.SIGTERM)
        if server.wait(timeout=60):
            raise SystemExit(f"the server ended with {server.returncode}:\n{log.read_text()}")
    except Exception:
        print(log.read_text(), file=sys.stderr)
        raise
    finally:
        server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--transport", default="auto", choices=[one.value for one in Transport], help="of --soak; without it both are compared"
    )
    parser.add_argument("--soak", type=float, default=0.0)
    parser.add_argument("--flood", action="store_true")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    asked = ServerConfig(transport=Transport(options.transport)).chosen_transport()
    if options.serve:
        serve_nothing(options.serve, asked)
        return 0
    tokens = np.arange(options.rows * options.length).reshape(options.rows, options.length) % 32_000
    lengths = np.full((options.rows, 1), options.length)
    headers, body = encode_request({"tokens": tokens, "sequence_lengths": lengths}, CRITIC_INFER.output_names)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        access = Access.for_client(Path(folder) / "secret", ClientConfig(), own_tls=options.tls)
        ACCESS.append(access)
        ways: dict[str, tuple[Load, str]] = {}
        for transport in (asked,) if options.soak else dict.fromkeys((Transport.http, ServerConfig().chosen_transport())):
            registration, pids, address = servers.enter_context(started_server(Path(folder), transport))
            load = Load(request=({**headers, **access.headers()}, body), pids=pids)
            ways[transport.value] = load, registration.url
            if address:
                ways["triton"] = load, address
        report: dict = {"rows": options.rows, "length": options.length, "body_bytes": len(body), "cpus": os.cpu_count()}
        if options.soak and options.flood:
            report["flood"] = flooded_soak(options, *ways[asked.value])
        elif options.soak:
            report["soak"] = soak(options, *ways[asked.value])
        else:
            report["compared"] = compare(options, ways)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    failed = sum(way["errors"] for row in report.get("compared", ()) for way in row["ways"].values())
    failed += report["soak"]["figures"]["errors"] if "soak" in report else report["flood"]["errors"] if "flood" in report else 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
