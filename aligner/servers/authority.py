"""A run's own certificate authority (`run.server_tls`): servers and clients of one run show each other certificates that it has signed.

`<run>/tls` holds the authority's certificate and key, and the certificate of the run's clients: files of the run's owner alone, because
whoever can read them is the run. Each server makes a certificate for itself at every start, for the host that it registers under, and
keeps it in its memory alone. Nobody checks names of clients: the authority signs for nobody else.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import ssl
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path

from aligner.errors import ConfigError, describe_os_error

FOLDER = "tls"
_AUTHORITY, _KEY, _CLIENT = "authority.pem", "authority.key", "client.pem"
_VALID = timedelta(days=3650)  # longer than a run is gone on with
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
    """The folder, made by whoever comes first; everybody gets the same. Raises ConfigError, also if others have any right to it."""
    folder = run / FOLDER
    try:
        if not folder.exists():
            _create(folder)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"run.server_tls=true: {describe_os_error(error, folder)}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{folder}: user {status.st_uid}, mode {status.st_mode & 0o777:o}: the run's keys must be its owner's alone (700). "
            "End the run, remove the folder (the next start makes new ones), and look who has read it"
        )
    return folder


def _create(folder: Path) -> None:
    """Write everything beside it, and rename that: nobody ever sees half of it."""
    own = Path(tempfile.mkdtemp(prefix=f".{FOLDER}.", dir=folder.parent))  # mode 0700
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
    """Replace a file as a whole; only its owner may read it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:  # mode 0600
        file.write(content)
    os.replace(file.name, path)


class _Signed:
    """A new key (ECDSA on P-256) and its certificate, in PEM: an authority's if `folder` is None, else signed by the one there.

    One with `hosts` is a server's, one without a client's: neither can be used as the other.
    """

    def __init__(self, name: str, folder: Path | None, hosts: tuple[str, ...] = ()) -> None:
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
            from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
        except ImportError as error:
            raise ConfigError(f"run.server_tls=true needs the package cryptography here ({error}): pip install cryptography") from error
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
        """As `ssl.SSLContext.load_cert_chain` takes them from one file."""
        return self.key + self.certificate


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
