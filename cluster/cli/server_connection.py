"""A connection of a command to a server over HTTP, with the standard library."""

from __future__ import annotations

import http.client
import ssl
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from cluster.cli.client_flags import with_key_hint
from cluster.serving.listener import url_host
from pagedray.errors import EngineError, InvalidRequestError, StartupError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["ForbiddenError", "RemoteModel", "ServerConnection", "printable"]

_MAX_ANSWER_BYTES = 64 * 2**20
_MAX_LINE_BYTES = 8 * 2**20
_TIMEOUT_S = 5.0
_GENERATION_TIMEOUT_S = 3600.0
_SHOWN_ERROR_LENGTH = 400
_NO_SUCH_PATH = (404, 405, 501)
_Body = TypeVar("_Body")

DEFAULT_URL = "http://127.0.0.1:8000"


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


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Message(msgspec.Struct):
    message: str


class _Answer(msgspec.Struct):
    """A completion, or a chunk of a stream."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Message | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class RemoteModel:
    """Generates text on a server with an OpenAI-compatible API."""

    def __init__(
        self,
        url: str | None,
        name: str | None,
        given: Mapping[str, Any],  # Any: values of several fields
        *,
        key: str | None,
        ca_file: Path | None,
    ) -> None:
        """Connect to `url`, or to the server on this machine; `name` is by default its first model.

        `given` are the sampling parameters that the user sets. Raises PagedRayError.
        """
        self._server = ServerConnection(
            url or DEFAULT_URL, key=key, ca_file=ca_file, kind="an OpenAI-compatible server"
        )
        try:
            models = self._server.get("/v1/models", _Models).data
        except UnreachableError as error:
            if url is not None:
                raise
            raise EngineError(
                f"No server is running at {DEFAULT_URL}. Start one with `pagedray serve MODEL`, "
                "name another one with --url, or name a model to load."
            ) from error
        if not models and name is None:
            raise EngineError(f"{self._server.url} serves no model.")
        self.name = name or models[0].id
        self.url = self._server.url
        self.num_tokens = 0
        """Number of tokens that the last stream has generated."""
        self.is_cut = False
        """Whether `max_tokens` ended the last stream."""
        self._fields: dict[str, Any] = {"model": self.name, **given}

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can chat; a server rejects messages if it cannot."""
        return True

    def stream(
        self, prompt: str | Sequence[Mapping[str, str]]
    ) -> Generator[tuple[str, bool], None, None]:
        """Yield the parts of a completion or an answer, and whether each is reasoning.

        Raises EngineError, and InvalidRequestError if the server rejects the prompt.
        """
        self.num_tokens, self.is_cut = 0, False
        is_text = isinstance(prompt, str)
        path = "/v1/completions" if is_text else "/v1/chat/completions"
        body = self._fields | {
            "prompt" if is_text else "messages": prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for data in self._server.stream(path, body):
            try:
                chunk = msgspec.json.decode(data, type=_Answer)
            except msgspec.MsgspecError as error:
                raise EngineError(f"The server sent an invalid event: {error}.") from error
            if chunk.error is not None:
                raise EngineError(chunk.error.message)
            if chunk.usage is not None:
                self.num_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                delta = choice.delta or _Delta()
                reasoning, text = delta.reasoning_content or delta.reasoning, delta.content
                self.is_cut = self.is_cut or choice.finish_reason == "length"
                text = text or choice.text
                # An answer that is stopped has no usage.
                self.num_tokens += chunk.usage is None and bool(text or reasoning)
                if reasoning:
                    yield reasoning, True
                if text:
                    yield text, False

    def complete(self, text: str) -> dict[str, Any]:  # Any: JSON values
        """Return the completion of a text as the object that `--json` prints, without times."""
        body = self._fields | {"prompt": text, "return_token_ids": True}
        answer = self._server.post("/v1/completions", body, _Answer)
        choice, usage = answer.choices[0], answer.usage or _Usage()
        return {
            "prompt": text,
            "text": choice.text or "",
            "token_ids": choice.token_ids or [],
            "finish_reason": choice.finish_reason,
            "num_prompt_tokens": usage.prompt_tokens,
            "num_generated_tokens": usage.completion_tokens,
        }

    def close(self) -> None:
        """Close the connection."""
        self._server.close()
