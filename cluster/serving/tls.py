"""The TLS certificates of the frontends, and their reload while they serve.

The files are checked when a client connects, so that renewing a certificate requires no signal.
If the files do not match or cannot be used, the certificate in use is kept.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

from pagedray.errors import StartupError

__all__ = ["CertificateStore", "Certificates", "TlsFiles", "certificate_store"]

logger = logging.getLogger(__name__)

_MAX_READS = 5
_Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The paths of a server's certificates, in PEM."""

    certificate: Path
    """The server's certificate, followed by its chain."""
    key: Path
    """The private key of the certificate, without a passphrase."""
    client_ca: Path | None = None
    """The certificate authorities of clients; if set, clients must present a certificate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """The content of the files, verified to be usable."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext
    """A context made from the same files."""
    expires: str
    """When the certificate expires, as OpenSSL writes it."""


class CertificateStore:
    """The certificates in use; thread-safe."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises StartupError, naming the file, if the certificates cannot be used."""
        self._files = files
        self._lock = threading.Lock()
        self._stamp = _stamp_of(files)
        self._current = _read_settled(files)
        self._context = self._current.context
        self._context.sni_callback = self._choose

    @property
    def needs_client_certificate(self) -> bool:
        """Whether clients must present a certificate."""
        return self._files.client_ca is not None

    @property
    def server_context(self) -> ssl.SSLContext:
        """A context that uses the current certificates for handshakes."""
        return self._context

    def current(self) -> Certificates:
        """Return the certificates, reloaded if the files have changed."""
        with self._lock:
            stamp = _stamp_of(self._files)
            if stamp != self._stamp:
                self._stamp = stamp
                self._reload()
            return self._current

    def _reload(self) -> None:
        try:
            self._current = _read_settled(self._files)
        except StartupError as error:
            logger.error("Keeping the TLS certificate in use: %s", error)
        else:
            logger.info("Reloaded the TLS certificate, which expires %s.", self._current.expires)

    def _choose(self, handshake: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
        # Called in every handshake, even if the client sends no server name.
        handshake.context = self.current().context


def certificate_store(
    certificate: Path | None, key: Path | None, client_ca: Path | None
) -> CertificateStore | None:
    """Return the store of the given files, or None if none are given. Raises StartupError."""
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        missing = "--tls-cert" if certificate is None else "--tls-key"
        raise StartupError(f"TLS requires {missing} as well.")
    return CertificateStore(TlsFiles(certificate=certificate, key=key, client_ca=client_ca))


def _read_settled(files: TlsFiles) -> Certificates:
    """Return a consistent read of the files. Raises StartupError."""
    for _ in range(_MAX_READS):
        stamp = _stamp_of(files)
        certificates = _read(files)
        if _stamp_of(files) == stamp:
            return certificates
    raise StartupError(f"The TLS certificate {files.certificate} keeps changing while it is read.")


def _read(files: TlsFiles) -> Certificates:
    certificate = _content(files.certificate, "certificate")
    key = _content(files.key, "key")
    client_ca = None if files.client_ca is None else _content(files.client_ca, "client CA")
    context = _context(files)
    return Certificates(
        certificate=certificate,
        key=key,
        client_ca=client_ca,
        context=_with_client_ca(context, files.client_ca),
        expires=_expiry(files),
    )


def _content(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"The TLS {what} {path} cannot be read: {error.strerror}.") from error


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A resumed session would not check the client's certificate again.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without a password, OpenSSL would prompt for it on the terminal.
        context.load_cert_chain(files.certificate, files.key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise StartupError(
            f"The TLS certificate {files.certificate} with the key {files.key} cannot be used: "
            f"{_reason(error)}."
        ) from error
    return context


def _with_client_ca(context: ssl.SSLContext, client_ca: Path | None) -> ssl.SSLContext:
    if client_ca is None:
        return context
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(client_ca)
    except ssl.SSLError as error:
        raise StartupError(
            f"The TLS client CA {client_ca} cannot be used: {_reason(error)}."
        ) from error
    if not context.get_ca_certs():
        raise StartupError(f"The TLS client CA {client_ca} contains no certificate authority.")
    return context


def _expiry(files: TlsFiles) -> str:
    """Return when the certificate expires, after a test handshake. Raises StartupError."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    # The certificate is trusted as its own authority: only its dates and key usage are checked.
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        trusting.load_verify_locations(files.certificate)
        return _handshake(_context(files), trusting)
    except ssl.SSLError as error:
        raise StartupError(
            f"The TLS certificate {files.certificate} cannot be used: {_reason(error)}."
        ) from error


def _handshake(server_side: ssl.SSLContext, client_side: ssl.SSLContext) -> str:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_side.wrap_bio(to_server, to_client, server_side=True)
    client = client_side.wrap_bio(to_client, to_server)
    # The client is done once it has verified the server's first flight.
    for _ in range(_MAX_READS):
        try:
            client.do_handshake()
        except ssl.SSLWantReadError:
            pass
        else:
            break
        with contextlib.suppress(ssl.SSLWantReadError):
            server.do_handshake()
    shown = client.getpeercert()
    return str(shown["notAfter"]) if shown else ""


def _stamp_of(files: TlsFiles) -> _Stamp:
    paths = [files.certificate, files.key]
    if files.client_ca is not None:
        paths.append(files.client_ca)
    return tuple(map(_stamp_of_file, paths))


def _stamp_of_file(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return str(error) or "it is not PEM"
