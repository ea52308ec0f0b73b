"""`aligner serve MODEL`: the endpoint of a policy alone, for any client of OpenAI's or Anthropic's interfaces."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from aligner.commands.parts import ServeOptions
from aligner.endpoint.app import Endpoint
from aligner.errors import EngineError, ServerError
from aligner.jobs.serving_policy import open_policy
from aligner.servers.access import Access
from aligner.servers.config import ServerConfig
from aligner.types import SamplingConfig

LOOK_SECONDS = 0.5
MIB = 1 << 20


def serve(model: str, options: ServeOptions) -> int:
    """Serve until SIGTERM or SIGINT, then let running requests end. Raises ServerError for a port that is taken."""
    config = ServerConfig(
        host=options.host,
        port=options.port,
        max_requests=options.max_requests,
        max_request_bytes=64 * MIB,
        max_pending_bytes=1024 * MIB,
        tls_certificate=str(options.tls_certificate or ""),
        tls_key=str(options.tls_key or ""),
    )
    with TemporaryDirectory() as folder:
        access = Access.for_server(options.key_file or Path(folder, "key"), config)
    is_over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: is_over.set())
    sampling = SamplingConfig(temperature=0.0 if options.greedy else 1.0)
    with open_policy(model, name=options.name, **options.opening) as policy:
        about = policy.served(sampling=sampling, seed=options.seed)
        with Endpoint(about, access, config) as endpoint:
            print(f"model: {policy.name}, context of {about.context} tokens", flush=True)
            print(f"url: {endpoint.url}/v1", flush=True)
            print(f"key: {options.key_file or access.headers()['Authorization'].removeprefix('Bearer ')}", flush=True)
            while not is_over.wait(LOOK_SECONDS):
                if failure := endpoint.failure():
                    raise ServerError(failure)
                if policy.failure:
                    raise EngineError(f"the engine ended: {policy.failure}")
            print("ending: running requests are answered first", file=sys.stderr, flush=True)
    return 0
