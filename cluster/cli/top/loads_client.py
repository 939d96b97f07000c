"""Reads the load of a server and its history over HTTP, with the standard library."""

from __future__ import annotations

import http.client
import ssl
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import msgspec

from cluster.cli.flags.client_flags import with_key_hint
from cluster.cli.top.cells import printable
from cluster.serving.connections.listener import url_host
from cluster.serving.server_info import ServerLoads
from cluster.serving.telemetry.load_history import LoadHistory
from pagedray.errors import EngineError, StartupError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LoadsClient"]

_MAX_ANSWER_BYTES = 4 * 2**20
_TIMEOUT_S = 5.0
_SHOWN_ERROR_LENGTH = 200
_Body = TypeVar("_Body")


class _ErrorText(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _ErrorText


class LoadsClient:
    """Reads one server's load over a persistent connection."""

    def __init__(self, url: str, *, key: str | None = None, ca_file: Path | None = None) -> None:
        """A URL without a scheme is one of HTTP.

        Raises StartupError for an invalid URL, key or CA file.
        """
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise StartupError(f"{url!r:.200} is not a URL: {error}.") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StartupError(f"The URL must look like http://HOST:PORT, not {url!r}.")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise StartupError("The API key must be a single line of printable ASCII.")
        if parts.scheme == "https":
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, port, timeout=_TIMEOUT_S, context=_tls(ca_file)
            )
        elif ca_file is not None:
            raise StartupError(f"--tls-ca requires an https:// URL, not {url!r}.")
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, port, timeout=_TIMEOUT_S)
        # The URL that OpenAI's clients take ends with the version.
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/loads"
        if not self._path.isprintable() or " " in self._path:
            raise StartupError(f"{url!r:.200} is not a URL: spaces are written as %20.")
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def read_loads(self) -> ServerLoads:
        """Return the server's current load. Raises EngineError if that fails."""
        return self._decode(*self._get(self._path), ServerLoads)

    def read_history(self) -> LoadHistory | None:
        """Return the last ten minutes, or None if the key is not an admin's.

        Raises EngineError if that fails.
        """
        status, body = self._get(self._path + "/history")
        if status == http.client.FORBIDDEN:
            return None
        return self._decode(status, body, LoadHistory)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _get(self, path: str) -> tuple[int, bytes]:
        try:
            self._connection.request("GET", path, headers=self._headers)
            answer = self._connection.getresponse()
            body = answer.read(_MAX_ANSWER_BYTES)
        except (OSError, UnicodeError) as error:
            self._connection.close()
            place = f"{url_host(self._connection.host)}:{self._connection.port}"
            reason = getattr(error, "strerror", None) or error or type(error).__name__
            raise EngineError(f"Cannot reach the server at {place}: {reason}.") from error
        except http.client.HTTPException as error:
            # Its message is what the other end sent.
            self._connection.close()
            raise EngineError(
                "The server does not respond in HTTP; the URL must have its HTTP port, not that of "
                "gRPC."
            ) from error
        return answer.status, body

    def _decode(self, status: int, body: bytes, kind: type[_Body]) -> _Body:
        if status != http.client.OK:
            self._connection.close()
            raise EngineError(_rejection(status, body))
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            self._connection.close()
            raise EngineError(
                f"The response is not that of a PagedRay server of this version: {error}."
            ) from error


def _tls(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise StartupError(f"Cannot read --tls-ca {ca_file}: {error}.") from error


def _rejection(status: int, body: bytes) -> str:
    try:
        text = msgspec.json.decode(body, type=_ErrorBody).error.message
    except msgspec.MsgspecError:
        return f"The server responded with status {status}."
    shown = f"The server responded with status {status}: {printable(text[:_SHOWN_ERROR_LENGTH])}"
    if status == http.client.UNAUTHORIZED:
        return with_key_hint(shown, variables="PAGEDRAY_API_KEY")
    return shown
