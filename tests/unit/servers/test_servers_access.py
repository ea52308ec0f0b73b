"""The run's secret, TLS, and the address that a server advertises."""

from __future__ import annotations

import http.client
import os
import select
import shutil
import socket
import stat
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fake_triton import served

from aligner.errors import ConfigError, ServerUnreachable
from aligner.servers.access import Access, advertised_host, run_secret
from aligner.servers.config import ClientConfig, ServerConfig
from aligner.servers.kserve import encode_request


def test_whoever_comes_first_chooses_the_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    start = threading.Barrier(8)
    with ThreadPoolExecutor(8) as threads:
        secrets = set(threads.map(lambda _: start.wait() is not None and run_secret(path), range(8)))
    assert len(secrets) == 1 and len(secrets.pop()) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]  # nothing else of it lies about
    other = tmp_path / "other"
    assert run_secret(other) != run_secret(path)


def test_a_secret_that_others_can_reach_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    run_secret(path)
    for mode in (0o640, 0o604, 0o620, 0o601):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"mode {mode:o} lets others read the run's secret; allowed is 600"):
            run_secret(path)
    path.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="cannot read the run's secret"):
        run_secret(link)
    path.write_text("password")
    with pytest.raises(ConfigError, match="not a secret of 64 hexadecimal digits"):
        run_secret(path)
    with pytest.raises(ConfigError, match="cannot write the run's secret: No such file or directory"):
        run_secret(tmp_path / "absent" / "secret")


def test_only_the_whole_header_is_admitted(tmp_path: Path) -> None:
    secret = run_secret(tmp_path / "secret")
    access = Access.for_server(tmp_path / "secret", ServerConfig())
    assert access.admits(Access.for_client(tmp_path / "secret", ClientConfig()).headers()["Authorization"])
    for header in (None, "", secret, f"bearer {secret}", f"Bearer {secret[:-1]}", f"Bearer {secret} ", "Bearer \udcff", "Bearer ü"):
        assert not access.admits(header)
    assert secret not in repr(access) and secret not in str(access)


def certificate(folder: Path) -> tuple[str, str]:
    """A certificate for localhost that vouches for itself, and its key."""
    key, chain = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, "-keyout", key, "-out", chain, *subject], check=True, capture_output=True, timeout=60)
    return str(chain), str(key)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls(tmp_path: Path) -> None:
    """A client polls its socket for the answer, so the gateway is silent until then: a session ticket would look like one."""
    chain, key = certificate(tmp_path)
    config = ServerConfig(tls_certificate=chain, tls_key=key)
    server = Access.for_server(tmp_path / "secret", config)
    client = Access.for_client(tmp_path / "secret", ClientConfig(tls_ca=chain))
    plain = Access.for_client(tmp_path / "secret", ClientConfig())
    assert (server.scheme, client.scheme, plain.scheme) == ("https", "https", "http")
    arrived, release = threading.Event(), threading.Event()
    with served(tmp_path, server, config=config) as (gateway, fake, _):
        fake.interrupt = lambda handler: arrived.set() or not release.wait(20)
        connection = client.connection(f"https://localhost:{gateway.port}", 20)
        headers, body = encode_request({"step": np.array([1])}, ("path",))
        connection.request("POST", "/v2/models/critic_save/infer", body=body, headers={**headers, **client.headers()})
        assert arrived.wait(20)
        assert select.select([connection.sock], [], [], 0.3)[0] == []
        release.set()
        assert connection.getresponse().status == 200
        connection.close()
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):  # it is localhost's certificate, not this address's
            client.connection(f"https://127.0.0.1:{gateway.port}", 10).request("GET", "/")
    with pytest.raises(ServerUnreachable, match="this client is set up for http; set run.server_tls=true or server_client.tls_ca"):
        plain.connection("https://localhost:1", 10)
    with pytest.raises(ServerUnreachable, match="for https; set run.server_tls=true, or the server's tls_certificate"):
        client.connection("http://localhost:1", 10)
    assert isinstance(plain.connection("http://localhost:1", 10), http.client.HTTPConnection)


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    with pytest.raises(ConfigError, match=r"server.tls_certificate=.*junk.pem.*cannot be used"):
        Access.for_server(tmp_path / "secret", ServerConfig(tls_certificate=str(junk), tls_key=str(junk)))
    with pytest.raises(ConfigError, match=r"server_client.tls_ca=.*junk.pem: cannot read certificates"):
        Access.for_client(tmp_path / "secret", ClientConfig(tls_ca=str(junk)))
    with pytest.raises(ConfigError, match="tls_certificate='x', tls_key='': give both for TLS, or none"):
        ServerConfig(tls_certificate="x")


def test_the_advertised_address_is_one_of_this_machine() -> None:
    assert advertised_host(ServerConfig(), {}) == "127.0.0.1"
    assert advertised_host(ServerConfig(host="0.0.0.0", advertised_host="node7"), {}) == "node7"
    assert advertised_host(ServerConfig(host="::1"), {}) == "[::1]"
    found = advertised_host(ServerConfig(host="0.0.0.0"), {"SLURMD_NODENAME": "no-such-node.invalid"})
    with socket.create_server((found, 0)):
        pass  # it can be bound here
    assert os.environ.get("SLURMD_NODENAME", "") != "no-such-node.invalid"
