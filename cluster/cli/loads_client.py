"""Reads the loads of a server over HTTP, with what the standard library has."""

from __future__ import annotations

import http.client
import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from cluster.serving.server_info import ServerLoads
from pagedray.errors import EngineError, StartupError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LoadsClient"]

_MAX_ANSWER_BYTES = 4 * 2**20
_TIMEOUT_S = 5.0
_SHOWN_ERROR_LENGTH = 200


class _ErrorText(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _ErrorText


class LoadsClient:
    """One server's loads, on a connection that is kept."""

    def __init__(self, url: str, *, key: str | None = None, ca_file: Path | None = None) -> None:
        """Raises StartupError for what is no URL, no key or no file of certificates."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise StartupError(f"--url {url!r} has no port from 0 to 65535.") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StartupError(f"--url {url!r} must look like http://HOST:PORT.")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise StartupError("The API key must be printable ASCII in one line.")
        if parts.scheme == "https":
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, port, timeout=_TIMEOUT_S, context=_tls(ca_file)
            )
        elif ca_file is not None:
            raise StartupError(f"--tls-ca needs a URL that begins with https://, not {url!r}.")
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, port, timeout=_TIMEOUT_S)
        self._path = parts.path.rstrip("/") + "/loads"
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def read_loads(self) -> ServerLoads:
        """Return the loads of this moment. Raises EngineError if the server gives none."""
        try:
            self._connection.request("GET", self._path, headers=self._headers)
            answer = self._connection.getresponse()
            body = answer.read(_MAX_ANSWER_BYTES)
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            self._connection.close()
            raise EngineError(
                f"The server is not reachable: {error or type(error).__name__}."
            ) from error
        if answer.status != http.client.OK:
            self._connection.close()
            raise EngineError(_refusal(answer.status, body))
        try:
            return msgspec.json.decode(body, type=ServerLoads)
        except msgspec.MsgspecError as error:
            self._connection.close()
            raise EngineError(
                f"What answers is no PagedRay server of this version: {error}."
            ) from error

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


def _tls(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise StartupError(f"--tls-ca {ca_file} cannot be read: {error}.") from error


def _refusal(status: int, body: bytes) -> str:
    try:
        text = msgspec.json.decode(body, type=_ErrorBody).error.message
    except msgspec.MsgspecError:
        return f"The server answered {status}."
    return f"The server answered {status}: {text[:_SHOWN_ERROR_LENGTH]}"
