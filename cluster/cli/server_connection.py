"""A connection of a command to a server over HTTP, with the standard library."""

from __future__ import annotations

import http.client
import ssl
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import msgspec

from cluster.cli.client_flags import with_key_hint
from cluster.serving.listener import url_host
from pagedray.errors import EngineError, InvalidRequestError, StartupError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

__all__ = ["ForbiddenError", "ServerConnection", "UnreachableError", "printable"]

_MAX_ANSWER_BYTES = 64 * 2**20
_MAX_LINE_BYTES = 8 * 2**20
_TIMEOUT_S = 5.0
_GENERATION_TIMEOUT_S = 3600.0
_SHOWN_ERROR_LENGTH = 400
_NO_SUCH_PATH = (404, 405, 501)
_Body = TypeVar("_Body")


class ForbiddenError(EngineError):
    """The key may not do this."""


class UnreachableError(EngineError):
    """Nothing listens at the address."""


class _ErrorText(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _ErrorText


class ServerConnection:
    """Sends the requests of a command to one server.

    Requests raise EngineError, and InvalidRequestError if the server rejects their content.
    """

    def __init__(
        self, url: str, *, key: str | None = None, ca_file: Path | None = None, kind: str
    ) -> None:
        """`kind` names the expected server in errors; a URL without a scheme is HTTP.

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
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        if not self._prefix.isprintable() or " " in self._prefix:
            raise StartupError(f"{url!r:.200} is not a URL: spaces are written as %20.")
        self._kind = kind
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.url = f"{parts.scheme}://{parts.netloc}{self._prefix}"
        """The URL below which the API is."""

    def get(self, path: str, kind: type[_Body]) -> _Body:
        """Return the content of a resource."""
        with self._failures():
            self._connection.request("GET", self._prefix + path, headers=self._headers)
            return self._read(self._connection.getresponse(), f"GET {path}", kind)

    def post(self, path: str, body: object, kind: type[_Body]) -> _Body:
        """Return the response to a body."""
        with self._failures(), closing(self):
            return self._read(self._sent(path, body), f"POST {path}", kind)

    def stream(self, path: str, body: object) -> Iterator[bytes]:
        """Yield the data of each event of a response before `[DONE]`.

        Closing the iterator closes the connection, which aborts the request.
        """
        with self._failures(), closing(self):
            answer = self._sent(path, body)
            if answer.status != http.client.OK:
                self._read(answer, f"POST {path}", msgspec.Raw)
            while line := answer.readline(_MAX_LINE_BYTES):
                if line.startswith(b"data:"):
                    if (data := line[5:].strip()) == b"[DONE]":
                        return
                    yield data
        raise EngineError("The connection to the server was lost; the answer is incomplete.")

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        self._connection.close()

    def _sent(self, path: str, body: object) -> http.client.HTTPResponse:
        headers = self._headers | {"content-type": "application/json"}
        try:
            data = msgspec.json.encode(body)
        except UnicodeEncodeError as error:
            raise InvalidRequestError("The text is not UTF-8.") from error
        self.close()
        self._connection.connect()
        self._connection.sock.settimeout(_GENERATION_TIMEOUT_S)
        self._connection.request("POST", self._prefix + path, body=data, headers=headers)
        return self._connection.getresponse()

    def _read(self, answer: http.client.HTTPResponse, what: str, kind: type[_Body]) -> _Body:
        body = answer.read(_MAX_ANSWER_BYTES)
        if answer.status != http.client.OK:
            self.close()
            raise self._rejection(what, answer.status, body)
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            self.close()
            raise EngineError(
                f"{self.url} is not {self._kind} of this version: {what} returned an unexpected "
                f"response: {error}."
            ) from error

    def _rejection(self, what: str, status: int, body: bytes) -> EngineError | InvalidRequestError:
        try:
            text = printable(msgspec.json.decode(body, type=_ErrorBody).error.message)
        except msgspec.MsgspecError:
            text = ""
        if status in _NO_SUCH_PATH and (not text or what.startswith("GET")):
            return EngineError(f"{self.url} is not {self._kind}: {what} returned {status}.")
        shown = f"The server responded with status {status}"
        shown += f": {text[:_SHOWN_ERROR_LENGTH]}" if text else "."
        if status == http.client.UNAUTHORIZED:
            return EngineError(with_key_hint(shown, variables="PAGEDRAY_API_KEY"))
        if status == http.client.FORBIDDEN:
            return ForbiddenError(shown)
        is_mistake = text and what.startswith("POST") and status in (400, 404, 422)
        return InvalidRequestError(text) if is_mistake else EngineError(shown)

    @contextmanager
    def _failures(self) -> Generator[None]:
        """Raise EngineError for failures of the connection, and close it."""
        try:
            yield
        except (OSError, UnicodeError) as error:
            self.close()
            place = f"{url_host(self._connection.host)}:{self._connection.port}"
            reason = getattr(error, "strerror", None) or error or type(error).__name__
            kind = UnreachableError if isinstance(error, ConnectionRefusedError) else EngineError
            raise kind(f"Cannot reach the server at {place}: {reason}.") from error
        except http.client.HTTPException as error:
            # Its message is from the other end.
            self.close()
            raise EngineError(
                "The server does not respond in HTTP; the URL must have its HTTP port, not that of "
                "gRPC."
            ) from error


def _tls(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise StartupError(f"Cannot read --tls-ca {ca_file}: {error}.") from error


def printable(text: str) -> str:
    """Return a text without control characters, which could move the cursor."""
    return "".join(char if char.isprintable() else "?" for char in text)
