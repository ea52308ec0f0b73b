"""A run's own certificate authority: who is let in by a gateway, and who is not, whatever else they have."""

from __future__ import annotations

import http.client
import ssl
import stat
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from fake_triton import served

from aligner.errors import ConfigError, ServerUnreachable
from aligner.servers import access
from aligner.servers.access import Access
from aligner.servers.config import ClientConfig, ServerConfig
from aligner.servers.gateway import Gateway


def client(run: Path) -> Access:
    run.mkdir(exist_ok=True)
    return Access.for_client(run / "secret", ClientConfig(), own_tls=True)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    """Of the server `critic` of the run in tmp_path/run."""
    (tmp_path / "run").mkdir()
    access = Access.for_server(tmp_path / "run" / "secret", ServerConfig(), name="critic", own_tls=True)
    with served(tmp_path, access) as (gateway, _, _):
        yield gateway


def ask(access: Access, gateway: Gateway, host: str = "127.0.0.1") -> int:
    """The status of a request with this client's credentials."""
    connection = access.connection(f"https://{host}:{gateway.port}", 10)
    try:
        connection.request("GET", "/v2", headers=access.headers())
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_client_of_the_run_is_let_in_by_every_name_of_the_server(tmp_path: Path, gateway: Gateway) -> None:
    own = client(tmp_path / "run")
    assert ask(own, gateway) == ask(own, gateway, "localhost") == 200
    assert own.tls.minimum_version is ssl.TLSVersion.TLSv1_3


def test_another_runs_client_and_one_without_a_certificate_are_not(tmp_path: Path, gateway: Gateway) -> None:
    own, other = client(tmp_path / "run"), client(tmp_path / "other")
    server = tmp_path / "server.pem"
    server.write_bytes(access._Signed("critic", tmp_path / "run" / "tls", hosts=("127.0.0.1",)).both)
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):  # nor does it believe that server
        ask(other, gateway)
    for held in (None, tmp_path / "other" / "tls" / "client.pem", server):  # of nobody, not of this run, no client's
        own.tls = ssl.create_default_context(cafile=tmp_path / "run" / "tls" / "authority.pem")
        if held:
            own.tls.load_cert_chain(held)
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(own, gateway)


def test_nobody_speaks_plainly(tmp_path: Path, gateway: Gateway) -> None:
    plain = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=10)
    with pytest.raises((OSError, http.client.HTTPException)):
        plain.request("GET", "/v2/health/live")
        plain.getresponse()
    with pytest.raises(ServerUnreachable, match="this client is set up for https; set run.server_tls=true, or the server's"):
        client(tmp_path / "run").connection(f"http://127.0.0.1:{gateway.port}", 10)


def test_a_clients_certificate_is_no_servers(tmp_path: Path) -> None:
    """Whoever takes a server's port needs more than what every component of the run holds."""
    own = client(tmp_path / "run")
    access = Access.for_server(tmp_path / "run" / "secret", ServerConfig(), name="critic", own_tls=True)
    access.tls.load_cert_chain(tmp_path / "run" / "tls" / "client.pem")
    with served(tmp_path, access) as (gateway, _, _), pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        ask(own, gateway)


def test_whoever_comes_first_makes_the_authority(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: access.client_context(tmp_path), range(4)))
    folder = tmp_path / "tls"
    assert list(tmp_path.iterdir()) == [folder] and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == dict.fromkeys(
        ("authority.pem", "authority.key", "client.pem"), 0o600
    )


def test_keys_that_others_can_reach_are_refused(tmp_path: Path) -> None:
    access.client_context(tmp_path)
    (tmp_path / "tls").chmod(0o750)
    with pytest.raises(ConfigError, match=r"tls: user \d+, mode 750: the run's keys must be its owner's alone \(700\)"):
        access.client_context(tmp_path)


def test_settings_that_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run.server_tls=true, critic.server.tls_certificate=x: give one of them"):
        Access.for_server(tmp_path / "secret", ServerConfig(tls_certificate="x", tls_key="y"), name="critic", own_tls=True)
    with pytest.raises(ConfigError, match="run.server_tls=true, server_client.tls_ca=x: give one of them"):
        Access.for_client(tmp_path / "secret", ClientConfig(tls_ca="x"), own_tls=True)


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"run.server_tls=true: requires the package cryptography .*: pip install cryptography"):
        access.client_context(tmp_path)


def test_a_server_loads_the_certificate_that_it_has_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preflight on another node may make one of the same name, for its own host, before this one is loaded."""
    loaded, make = [], access._context

    def interrupted(protocol: int, folder: Path, certificate: Path) -> ssl.SSLContext:
        if not loaded:
            loaded.append("node2")
            access.server_context(tmp_path, "critic", "node2")
        names = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions.get_extension_for_class(x509.SubjectAlternativeName)
        loaded.append(names.value.get_values_for_type(x509.DNSName)[0])
        return make(protocol, folder, certificate)

    monkeypatch.setattr(access, "_context", interrupted)
    access.server_context(tmp_path, "critic", "node1")
    assert loaded == ["node2", "node2", "node1"]
    assert sorted(path.name for path in (tmp_path / "tls").iterdir()) == ["authority.key", "authority.pem", "client.pem"]
