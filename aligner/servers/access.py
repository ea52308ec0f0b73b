"""Who may talk to a run's servers, and under which name: the run's secret, TLS if it is configured, and addresses.

The secret lies in a file of the run directory that only its owner can read. It travels in the `Authorization` header and is never written
anywhere else: not to arguments, environment, logs or configurations.

With `run.server_tls` a run has its own certificate authority, which signs for nobody else. `<run>/tls` holds its certificate and key, and
the certificate of the run's clients: files of the run's owner alone. Each server makes its own certificate at every start, for its host.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import ipaddress
import os
import re
import secrets
import shutil
import socket
import ssl
import stat
import tempfile
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from aligner.errors import ConfigError, ServerError, ServerUnreachable, describe_os_error
from aligner.files import publish_first
from aligner.servers.config import ClientConfig, ServerConfig

EVERYWHERE = ("0.0.0.0", "::")
BACKLOG = 4096  # connections waiting to be accepted, if the kernel allows that many (net.core.somaxconn)
SECRET_BYTES = 32
_SECRET = re.compile(rf"[0-9a-f]{{{2 * SECRET_BYTES}}}")
_SCHEME = "Bearer "


def run_secret(path: Path) -> str:
    """The secret in the file `path`, which the first caller chooses. Raises ConfigError unless it is this user's alone and whole."""
    try:
        if not os.path.lexists(path):
            publish_first(path, secrets.token_hex(SECRET_BYTES) + "\n", mode=0o600)
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the run's secret: {error.strerror}") from error
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the run's secret: {error.strerror}") from error
    with open(descriptor) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise ConfigError(f"{path}: the run's secret must be an ordinary file of user {os.getuid()}, not of user {status.st_uid}")
        if status.st_mode & 0o077:
            raise ConfigError(
                f"{path}: mode {status.st_mode & 0o777:o} lets others read the run's secret; allowed is 600. "
                "End the run, remove the file (the next start chooses a new secret), and find out who has read it"
            )
        secret = file.read(4 * SECRET_BYTES).strip()
    if not _SECRET.fullmatch(secret):
        raise ConfigError(f"{path}: not a secret of {2 * SECRET_BYTES} hexadecimal digits; end the run and remove the file")
    return secret


class Access:
    """One side's credentials. Its representation does not show the secret."""

    def __init__(self, secret: str, tls: ssl.SSLContext | None = None) -> None:
        self._expected = (_SCHEME + secret).encode()
        self.tls = tls

    @classmethod
    def for_server(cls, secret: Path, config: ServerConfig, *, name: str = "", own_tls: bool = False) -> Access:
        """For the server `name`; `own_tls`: with certificates of the run's own authority. Raises ConfigError if they cannot be used."""
        tls = None
        if own_tls:
            if config.tls_certificate:
                raise ConfigError(
                    f"run.server_tls=true, {name}.server.tls_certificate={config.tls_certificate}: give one of them; the run makes its own"
                )
            tls = server_context(secret.parent, name, advertised_host(config, os.environ))
        elif config.tls_certificate:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.minimum_version = ssl.TLSVersion.TLSv1_2
            try:
                tls.load_cert_chain(config.tls_certificate, config.tls_key, password=_no_password)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"server.tls_certificate={config.tls_certificate}, server.tls_key={config.tls_key}: cannot be used: {error}"
                ) from error
        if tls is not None:
            tls.num_tickets = 0  # a session ticket would make a waiting client's socket readable before there is an answer
        return cls(run_secret(secret), tls)

    @classmethod
    def for_client(cls, secret: Path, config: ClientConfig, *, own_tls: bool = False) -> Access:
        """For a client. Raises ConfigError for a secret or certificate that cannot be used."""
        tls = None
        if own_tls:
            if config.tls_ca:
                raise ConfigError(f"run.server_tls=true, server_client.tls_ca={config.tls_ca}: give one of them; the run makes its own")
            tls = client_context(secret.parent)
        elif config.tls_ca:
            try:
                tls = ssl.create_default_context(cafile=config.tls_ca)
            except OSError as error:
                raise ConfigError(f"server_client.tls_ca={config.tls_ca}: cannot read certificates there: {error}") from error
            tls.minimum_version = ssl.TLSVersion.TLSv1_2
        return cls(run_secret(secret), tls)

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"

    def headers(self) -> dict[str, str]:
        return {"Authorization": self._expected.decode()}

    def admits(self, authorization: str | None) -> bool:
        """Whether a request's Authorization header holds the secret; takes as long for a near miss as for any other."""
        given = (authorization or "").encode(errors="surrogateescape")
        return hmac.compare_digest(given, self._expected)

    def connection(self, url: str, timeout_seconds: float) -> http.client.HTTPConnection:
        """An unopened connection. Raises ServerUnreachable if one side alone has TLS: the secret would cross in the clear."""
        address = urlsplit(url)
        if address.scheme != self.scheme:
            wanted = (
                "set run.server_tls=true or server_client.tls_ca"
                if address.scheme == "https"
                else "set run.server_tls=true, or the server's tls_certificate and tls_key; or no server_client.tls_ca"
            )
            raise ServerUnreachable(f"{url}: this client is set up for {self.scheme}; {wanted}")
        if self.tls is None:
            return http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_seconds)
        return http.client.HTTPSConnection(address.hostname, address.port, timeout=timeout_seconds, context=self.tls)


def _no_password() -> str:
    """OpenSSL would ask at the terminal otherwise."""
    raise ValueError("the key is protected by a password, which nobody can type here")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `port`, or on a free one for 0. Raises ServerError if the port is taken, or `host` is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ServerError(
            f"cannot listen on {host}:{port}: {error.strerror}; free port {port} or set server.port to another one (0 picks a free one)"
        ) from error
    return listener


def advertised_host(config: ServerConfig, environ: Mapping[str, str]) -> str:
    """The host that clients connect to: as configured, else the bound address, else (if every address is bound) this machine's own.

    An address, so that clients need no resolver; with TLS a name, because certificates hold names. Slurm's name for the node comes first,
    then the machine's, then any interface that is up, and loopback last.
    """
    if config.advertised_host:
        return _bracketed(config.advertised_host)
    if config.host not in EVERYWHERE:
        return _bracketed(config.host)
    names = [name for name in (environ.get("SLURMD_NODENAME", ""), socket.gethostname()) if name]
    for name in names:
        with contextlib.suppress(socket.gaierror):  # the resolver may not know a node: its interfaces are used then
            for *_, (address, _port) in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM):
                if not address.startswith("127.") and _is_ours(address):
                    return name if config.tls_certificate else address
    return names[0] if config.tls_certificate else next(_interface_addresses(), "127.0.0.1")


def _is_ours(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False  # stale name service data, or another machine's name
    return True


def _interface_addresses() -> Iterator[str]:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if name in up and address.family == socket.AF_INET and not address.address.startswith("127."):
                yield address.address


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


TLS = "tls"
_AUTHORITY, _KEY, _CLIENT = "authority.pem", "authority.key", "client.pem"
_VALID = timedelta(days=3650)  # longer than any run lasts
_SKEW = timedelta(days=1)  # between the clocks of two nodes
_LOCAL = ("localhost", "127.0.0.1")


def server_context(run: Path, name: str, host: str) -> ssl.SSLContext:
    """For the server `name` of a run, which clients reach as `host`. Raises ConfigError."""
    folder = _folder(run)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}.") as own:  # mode 0600; ranks on other nodes make theirs beside it
            own.write(_Signed(name, folder, hosts=(host.strip("[]"), *_LOCAL)).both)
            own.flush()
            context = _context(ssl.PROTOCOL_TLS_SERVER, folder, Path(own.name))
    except (OSError, ValueError) as error:
        raise ConfigError(f"run.server_tls=true: {folder}: no certificate can be made for {name}: {error}") from error
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(run: Path) -> ssl.SSLContext:
    """For every client of a run. Raises ConfigError."""
    folder = _folder(run)
    return _context(ssl.PROTOCOL_TLS_CLIENT, folder, folder / _CLIENT)


def _context(protocol: int, folder: Path, certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(folder / _AUTHORITY)
        context.load_cert_chain(certificate)
    except OSError as error:
        raise ConfigError(f"run.server_tls=true: {certificate}: cannot be used: {error}; end the run and remove {folder}") from error
    return context


def _folder(run: Path) -> Path:
    """The folder; the first caller makes it. Raises ConfigError, also if others have any right to it."""
    folder = run / TLS
    try:
        if not folder.exists():
            _create_authority(folder)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"run.server_tls=true: {describe_os_error(error, folder)}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{folder}: user {status.st_uid}, mode {status.st_mode & 0o777:o}: the run's keys must be its owner's alone (700). "
            "End the run, remove the folder (the next start makes new ones), and find out who has read it"
        )
    return folder


def _create_authority(folder: Path) -> None:
    """Write everything beside it, and rename that: nobody ever sees half of it."""
    own = Path(tempfile.mkdtemp(prefix=f".{TLS}.", dir=folder.parent))  # mode 0700
    try:
        authority = _Signed("aligner run", None)
        _write(own / _KEY, authority.key)
        _write(own / _AUTHORITY, authority.certificate)
        _write(own / _CLIENT, _Signed("client", own).both)
        try:
            own.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process of the run was first
                raise
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    path.touch(0o600)
    path.write_bytes(content)


class _Signed:
    """A new key (ECDSA on P-256) and its certificate, in PEM: an authority's if `folder` is None, else signed by the authority there, for a
    server with `hosts`, for a client without: neither can be used as the other.
    """

    def __init__(self, name: str, folder: Path | None, hosts: tuple[str, ...] = ()) -> None:
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
            from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
        except ImportError as error:
            raise ConfigError(f"run.server_tls=true: requires the package cryptography ({error}): pip install cryptography") from error
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        issuer, signer = subject, key
        if folder is not None:
            issuer = x509.load_pem_x509_certificate((folder / _AUTHORITY).read_bytes()).subject
            signer = serialization.load_pem_private_key((folder / _KEY).read_bytes(), None)
        now = datetime.now(timezone.utc)
        made = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number(), now - _SKEW, now + _VALID)
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        made = made.add_extension(own, critical=False).add_extension(authority, critical=False)
        is_authority = folder is None
        usage = {name: False for name in ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")}
        usage |= {"digital_signature": not is_authority, "key_cert_sign": is_authority, "crl_sign": is_authority}
        made = made.add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), critical=True)
        made = made.add_extension(x509.KeyUsage(**usage, encipher_only=False, decipher_only=False), critical=True)
        if not is_authority:
            purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
            made = made.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        if hosts:
            names = [x509.IPAddress(address) if (address := _address(host)) else x509.DNSName(host) for host in dict.fromkeys(hosts)]
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        self.certificate = made.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        self.key = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())

    @property
    def both(self) -> bytes:
        """Both in one file, for `ssl.SSLContext.load_cert_chain`."""
        return self.key + self.certificate


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
