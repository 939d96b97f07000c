"""A load test's client of any OpenAI-compatible server."""

from __future__ import annotations

import re
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeVar

import aiohttp
import msgspec

from cluster.cli.bench.client import (
    KEY_VARIABLES,
    BenchClient,
    BenchError,
    BenchRequest,
    DraftCounts,
    Timing,
)
from cluster.cli.client_flags import with_key_hint
from cluster.serving.listener import url_host
from pagedray.errors import PagedRayError, StartupError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cluster.cli.bench.client import Target

__all__ = ["HttpClient"]

_MAX_ERROR_BYTES = 2**16
_MAX_EVENT_BYTES = 2**23
_MAX_ANSWER_BYTES = 2**26
_CONNECT_S = 30.0
_DRAFT_METRICS = (
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
)
_NO_SUCH_PATH = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)

Answer = TypeVar("Answer")


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: object = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    def has_text(self) -> bool:
        delta = self.delta or _Delta()
        return bool(
            self.text
            or delta.content
            or delta.reasoning_content
            or delta.reasoning
            or delta.tool_calls
        )


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


class _Message(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    """An error response in the format of OpenAI, or in that of FastAPI."""

    error: _Message | str | None = None
    message: str | None = None
    detail: str | None = None

    def text(self) -> str | None:
        if isinstance(self.error, _Message):
            return self.error.message
        return self.error or self.message or self.detail


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Prompt(msgspec.Struct):
    prompt: str


class HttpClient(BenchClient):
    """Streams completions or chat completions."""

    def __init__(self, target: Target) -> None:
        """Raises StartupError for CA certificates that cannot be read."""
        self._target = target
        self._model = ""
        self._session: aiohttp.ClientSession | None = None
        self._tls = target.tls() if target.is_encrypted else None
        self._decode_chunk = msgspec.json.Decoder(_Chunk).decode

    async def open(self, model: str | None) -> str:
        target = self._target
        headers = dict(target.headers)
        if target.key is not None:
            headers["authorization"] = f"Bearer {target.key}"
        # No limit of connections: how many requests are in flight is the test's to decide.
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls or True)
        timeout = aiohttp.ClientTimeout(total=target.timeout_s, sock_connect=_CONNECT_S)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=timeout, auto_decompress=True
        )
        if model is None:
            models = await self._read("GET", "/v1/models", None, _Models)
            if not models.data:
                raise BenchError("The server lists no model; use --model.")
            model = models.data[0].id
        self._model = model
        return model

    async def stream(self, request: BenchRequest) -> Timing:
        target = self._target
        body: dict[str, object] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": target.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if target.is_chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        if target.ignore_eos:
            body["ignore_eos"] = True
        written = msgspec.json.encode(body | dict(target.extra_body))
        arrivals: list[float] = []
        usage: _Usage | None = None
        started_s = time.perf_counter()
        async for data in self._events(written):
            chunk = self._chunk(data)
            if any(choice.has_text() for choice in chunk.choices):
                arrivals.append(time.perf_counter())
            usage = chunk.usage or usage
        return Timing(
            started_s=started_s,
            arrivals_s=tuple(arrivals),
            ended_s=time.perf_counter(),
            num_prompt_tokens=0 if usage is None else usage.prompt_tokens,
            num_generated_tokens=len(arrivals) if usage is None else usage.completion_tokens,
        )

    async def encode(self, text: str) -> list[int]:
        body = {"model": self._model, "prompt": text}
        return (await self._read("POST", "/tokenize", body, _Tokens)).tokens

    async def decode(self, token_ids: list[int]) -> str:
        body = {"model": self._model, "tokens": token_ids}
        return (await self._read("POST", "/detokenize", body, _Prompt)).prompt

    async def count_drafts(self) -> DraftCounts:
        assert self._session is not None
        try:
            async with self._session.get(f"{self._target.root}/metrics") as answer:
                text = await answer.text() if answer.status == HTTPStatus.OK else ""
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError):
            text = ""
        return DraftCounts(*(_metric(text, name) for name in _DRAFT_METRICS))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _events(self, body: bytes) -> AsyncIterator[bytes]:
        """Yield the data of each event before `[DONE]`. Raises BenchError."""
        assert self._session is not None
        headers = {"content-type": "application/json"}
        try:
            async with self._session.post(self._target.url, data=body, headers=headers) as answer:
                await self._check_status(answer)
                kept = b""
                async for part in answer.content.iter_any():
                    *lines, kept = (kept + part).split(b"\n")
                    for line in lines:
                        if not line.startswith(b"data:"):
                            continue
                        data = line[5:].strip()
                        if data == b"[DONE]":
                            return
                        yield data
                    if len(kept) > _MAX_EVENT_BYTES:
                        raise BenchError("The server sent an event of more than 8 MiB.")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _failure(error) from error
        raise BenchError("The server ended a stream before its last event, [DONE].")

    def _chunk(self, data: bytes) -> _Chunk:
        try:
            chunk = self._decode_chunk(data)
        except msgspec.MsgspecError as error:
            raise BenchError(f"The server sent an invalid event: {error}.") from error
        if chunk.error is not None:
            raise BenchError(f"The server sent an error in the stream: {_reason(data)}")
        return chunk

    async def _read(self, method: str, path: str, body: object, kind: type[Answer]) -> Answer:
        assert self._session is not None
        try:
            async with self._session.request(method, self._target.root + path, json=body) as answer:
                await self._check_status(answer)
                data = await answer.content.read(_MAX_ANSWER_BYTES)
                while not answer.content.at_eof() and len(data) < _MAX_ANSWER_BYTES:
                    data += await answer.content.read(_MAX_ANSWER_BYTES - len(data))
            return msgspec.json.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise BenchError(
                f"{self._target.root} is not an OpenAI-compatible server: {method} {path} returned "
                f"an unexpected response: {error}."
            ) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _failure(error) from error

    async def _check_status(self, answer: aiohttp.ClientResponse) -> None:
        if answer.status == HTTPStatus.OK:
            return
        reason = _reason(await answer.content.read(_MAX_ERROR_BYTES))
        path = answer.url.path
        if reason is None and answer.status in _NO_SUCH_PATH and not path.endswith("tokenize"):
            raise BenchError(
                f"{self._target.root} is not an OpenAI-compatible server: {answer.method} {path} "
                f"returned {answer.status}."
            )
        message = f"Status {answer.status}: {reason or answer.reason}"
        if answer.status == HTTPStatus.UNAUTHORIZED:
            message = with_key_hint(message, variables=KEY_VARIABLES)
        raise BenchError(message)


def _metric(text: str, name: str) -> int:
    """Return the sum of a metric over its labels, in the text format of Prometheus."""
    values = re.findall(rf"^{name}(?:{{.*}})? ([0-9.eE+]+)$", text, re.MULTILINE)
    return int(sum(map(float, values)))


def _reason(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=_Error).text()
    except msgspec.MsgspecError:
        return None


def _failure(error: Exception) -> PagedRayError:
    if isinstance(error, aiohttp.InvalidURL):
        return StartupError(f"--base-url is not a URL: {error}.")
    if isinstance(error, TimeoutError):
        return BenchError("The server did not respond in time.")
    # aiohttp raises it for other protocols than HTTP, such as frames of gRPC.
    if isinstance(error, aiohttp.ClientResponseError):
        return BenchError(
            "The server did not respond in HTTP; PagedRay's gRPC port requires --backend grpc."
        )
    if isinstance(error, aiohttp.ClientConnectorError):
        place = f"{url_host(error.host)}:{error.port}"
        cause = error.os_error
        # asyncio's text repeats the address.
        is_refused = isinstance(cause, ConnectionRefusedError)
        reason = "Connection refused" if is_refused else cause.strerror or cause
        return BenchError(f"Cannot reach the server at {place}: {reason}.")
    return BenchError(f"Cannot reach the server: {error or type(error).__name__}.")
