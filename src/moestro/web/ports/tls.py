"""TLS of a port: its certificate, the authorities of clients, and files that are read again when they change."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from moestro.errors import ConfigError
from moestro.web.settings import CertificateFiles, TlsSettings

# Files that are read again when they change: certificates, keys, lists of engines.

Stamp = tuple[tuple[int, int, int], ...]

_SETTLED_S = 1.0  # Age from which a change counts as complete.
_LOOK_S = 5.0  # between two looks at the files of connections to engines
_REFRESH_S = 5.0  # between two looks at the files of a port
_MAX_LOOKS = 10  # A file that changes at every look is read nevertheless.


class WatchedFiles:
    """Notices that one of some files has changed, in place or by another file of its name, once they are complete.

    A file that is written in place is short for a while. So a change counts once it is a second old, or once two looks
    find the same.

    Args:
        paths: The files. One may be missing, and may appear later.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._read = self._seen = self._stamp()
        self._num_looks = 0  # Since the first change that has not been read.

    def are_to_be_read(self) -> bool:
        """Return whether the files have to be read again. That one has vanished is such a change too."""
        stamp = self._stamp()
        is_same, self._seen = stamp == self._seen, stamp
        if stamp == self._read:
            self._num_looks = 0
            return False
        self._num_looks += 1
        newest_ns = max((changed_ns for changed_ns, _, _ in stamp), default=0)
        is_settled = time.time_ns() - newest_ns >= _SETTLED_S * 1e9
        if not is_settled and not (is_same and self._num_looks > 1) and self._num_looks < _MAX_LOOKS:
            return False
        self._read, self._num_looks = stamp, 0
        return True

    def _stamp(self) -> Stamp:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_ino, found.st_size


T = TypeVar("T")

logger = logging.getLogger(__name__)


class ServerTls:
    """TLS of one port.

    Args:
        files: Files of the port's certificate.
        read: Makes the context from the files; ConfigError if they cannot be used.
        refresh_s: Seconds between two looks at the files; None means that they are read once.

    Attributes:
        context: Context of new connections.
        refresh_s: Seconds between two calls of `renew`; None means that it is not to be called.

    Raises:
        ConfigError: A file cannot be used; the text says which and why.
    """

    def __init__(
        self, files: CertificateFiles, read: Callable[[], ssl.SSLContext], refresh_s: float | None = None
    ) -> None:
        self._files = files
        self._read = read
        self._watched = WatchedFiles(files.paths)
        self.context = read()
        self.refresh_s = refresh_s

    @classmethod
    def of(cls, settings: TlsSettings) -> ServerTls | None:
        """Return the TLS of a port with `settings`; None means plain HTTP."""
        if settings.ssl_certfile is None:
            return None
        refresh_s = _REFRESH_S if settings.enable_ssl_refresh else None
        return cls(settings.files, lambda: _context(settings), refresh_s)

    @classmethod
    def for_http2(cls, files: CertificateFiles) -> ServerTls:
        """Return the TLS of a port for HTTP/2 alone. Renewed files count for new connections within two seconds."""
        return cls(files, lambda: _http2_context(files), _SETTLED_S - 0.1)

    @property
    def needs_certificates(self) -> bool:
        """Whether each client needs a certificate."""
        return self.context.verify_mode is ssl.CERT_REQUIRED

    def renew(self) -> None:
        """Read the files again if they have changed. Files that cannot be used leave the old certificate in place."""
        self.context = renewal(self._watched, self._files.certfile, self._read) or self.context


def renewal(watched: WatchedFiles, name: Path | None, read: Callable[[], T]) -> T | None:
    """Return what `read` makes of changed files, and log it; None where they are the same, or cannot be used.

    Args:
        watched: Watches the files.
        name: File of the certificate, for the log.
        read: Reads the files; ConfigError if they cannot be used.
    """
    if not watched.are_to_be_read():
        return None
    try:
        made = read()
    except ConfigError as error:
        logger.warning("the certificate stays as it is: %s", error)
        return None
    logger.info("new connections get the renewed certificate of %s", name)
    return made


class MutualTls(ServerTls):
    """TLS between equals: each end shows a certificate of the same authorities, whichever of them connects.

    Names in certificates are not compared, because an address of a name may be any of the equals. Renewed files count
    for new connections within two seconds, and an authority that they have no more counts no more.

    Args:
        files: Files with a certificate and authorities.

    Attributes:
        client: Context of connections that this end makes; `context` is that of connections that others make.

    Raises:
        ConfigError: A file cannot be used; the text says which and why.
    """

    def __init__(self, files: CertificateFiles) -> None:
        super().__init__(files, lambda: _mutual_context(files, ssl.PROTOCOL_TLS_SERVER), _SETTLED_S - 0.1)
        self.client = _mutual_context(files, ssl.PROTOCOL_TLS_CLIENT)

    def renew(self) -> None:
        """Read the files again if they have changed. Files that cannot be used leave the old certificate in place."""
        renewed = renewal(self._watched, self._files.certfile, self._contexts)
        self.context, self.client = renewed or (self.context, self.client)

    def _contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        return self._read(), _mutual_context(self._files, ssl.PROTOCOL_TLS_CLIENT)


def _mutual_context(files: CertificateFiles, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    _load_files(context, files)
    return context


def _load_files(context: ssl.SSLContext, files: CertificateFiles) -> None:
    assert files.certfile is not None, "without it there is no TLS"
    _load_chain(context, f"{files.prefix}-certfile", files.certfile, f"{files.prefix}-keyfile", files.keyfile)
    if files.ca_certs is None:
        return
    try:
        context.load_verify_locations(files.ca_certs)
    except OSError as error:
        text = f"{files.prefix}-ca-certs {files.ca_certs}: {_cause(error)}; give a file in PEM form"
        raise ConfigError(text) from error


class EngineTls:
    """TLS of the connections to engines, whose files are read again when they change.

    Args:
        ca_certs: File with the authorities of engines; None means those of the system.
        certificate: File with the router's own certificate; None means that it has none.
        key: File with the private key of `certificate`; None means that the certificate's file has it.
        now_s: Clock, seconds.

    Raises:
        ConfigError: A file cannot be used; the text says which and why.
    """

    def __init__(
        self,
        ca_certs: Path | None,
        certificate: Path | None,
        key: Path | None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ca_certs, self._certificate, self._key = ca_certs, certificate, key
        self._watched = WatchedFiles(file for file in (ca_certs, certificate, key) if file is not None)
        self._now_s, self._look_s = now_s, now_s() + _LOOK_S
        self._context = self._read()

    @property
    def context(self) -> ssl.SSLContext:
        """Context of a new connection. Files that cannot be used leave the old certificates in place."""
        if self._now_s() >= self._look_s:
            self._look_s = self._now_s() + _LOOK_S
            name = self._certificate or self._ca_certs
            self._context = renewal(self._watched, name, self._read) or self._context
        return self._context

    def _read(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self._ca_certs)
        except OSError as error:
            text = f"--engine-ca-certs {self._ca_certs}: {_cause(error)}; give a file in PEM form"
            raise ConfigError(text) from error
        if self._certificate is not None:
            _load_chain(context, "--engine-certfile", self._certificate, "--engine-keyfile", self._key)
        return context


def _http2_context(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    _load_files(context, files)
    if files.ca_certs is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _context(settings: TlsSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    _load_files(context, settings.files)
    if settings.ssl_ca_certs is not None:
        requirement = 2 if settings.ssl_cert_reqs is None else settings.ssl_cert_reqs
        context.verify_mode = ssl.VerifyMode(requirement)
    if settings.ssl_ciphers is not None:
        try:
            context.set_ciphers(settings.ssl_ciphers)
        except ssl.SSLError as error:
            text = f"--ssl-ciphers {settings.ssl_ciphers}: OpenSSL knows no such cipher of TLS 1.2"
            raise ConfigError(f"{text}; those of TLS 1.3 are always on") from error
    return context


def _load_chain(context: ssl.SSLContext, flag: str, certificate: Path, key_flag: str, key: Path | None) -> None:
    try:
        # Without a function for the password, OpenSSL would read one from the terminal.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except OSError as error:
        keys = f" with {key_flag} {key}" if key is not None else ""
        raise ConfigError(
            f"{flag} {certificate}{keys}: {_cause(error)}; give a certificate and its own key in PEM form, the key"
            " without a password"
        ) from error


def _cause(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not in PEM form").replace("_", " ").lower()
    return error.strerror or str(error)
