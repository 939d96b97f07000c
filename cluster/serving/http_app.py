"""The HTTP front: the endpoints that OpenAI clients call, health and metrics.

It reads bodies and writes answers; it decides nothing about a request. Every error has
OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, TypeVar

import msgspec
from fastapi import FastAPI, Response

# FastAPI reads the annotations of endpoints when the program runs.
from fastapi import Request as HttpRequest
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cluster.serving.openai_schema import ChatBody, CompletionBody, GenerationBody, read_body
from cluster.serving.openai_stream import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    Json,
    error_body,
)
from pagedray.errors import (
    EngineError,
    OverloadedError,
    PagedRayError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Mapping

    from starlette.types import Receive, Scope, Send

    from cluster.serving.servicer import Generation, Servicer

__all__ = ["build_app"]

MAX_BODY_BYTES = 4 * 2**20
_MOST_DISCARDED_BYTES = 16 * 2**20
_PAUSE_S = 0.03
"""A client that has sent nothing for so long waits for an answer."""
_JSON_TYPE = "application/json"
# What is left of a body that is not read would be taken for the next request.
_CLOSE = {"connection": "close"}
_HTTP_TEXTS = {404: "There is no such endpoint.", 405: "The endpoint has no such method."}
_CLIENT_ERROR = "invalid_request_error"
_INTERNAL_TEXT = "The server made a mistake; its log says which."

Body = TypeVar("Body", bound=GenerationBody)
Result = TypeVar("Result")


def build_app(servicer: Servicer, *, read_timeout_s: float) -> FastAPI:
    """Return the ASGI application over a servicer; a body must arrive within `read_timeout_s`."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    created_s = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        if not servicer.is_ready:
            raise EngineError("The server is not ready.")
        return _json({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(servicer.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> Response:
        card = _model_card(servicer, created_s)
        return _json({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def model_card(name: str) -> Response:
        servicer.validator.check_model(name)
        return _json(_model_card(servicer, created_s))

    async def read(request: HttpRequest, kind: type[Body]) -> Body:
        with servicer.metrics.counting_refusals():
            try:
                return read_body(kind, await _read_raw(request, read_timeout_s))
            except HTTPException:
                servicer.metrics.count("invalid")
                raise

    @app.post("/v1/completions")
    async def completions(request: HttpRequest) -> Response:
        body = await read(request, CompletionBody)
        return await _generate(servicer, request, body, CompletionAnswer)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: HttpRequest) -> Response:
        body = await read(request, ChatBody)
        return await _generate(servicer, request, body, ChatAnswer)

    app.add_exception_handler(PagedRayError, _answer_refusal)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(Exception, _answer_defect)
    return app


async def _generate(
    servicer: Servicer,
    request: HttpRequest,
    body: GenerationBody,
    answer_kind: type[Answer],
) -> Response:
    with servicer.metrics.counting_refusals():
        given = body.to_input(request.headers.get("x-request-id"))
    generation = await servicer.start(given)
    answer = answer_kind(
        generation,
        servicer.tokenizer.token_bytes,
        model=servicer.config.model.name,
        created_s=int(time.time()),
        num_per_prompt=body.n,
        has_logprobs=body.num_logprobs is not None,
        includes_usage=body.includes_usage,
    )
    if body.stream:
        return _EventStream(generation, answer)
    try:
        whole = await _unless_disconnected(request.receive, answer.whole())
    finally:
        generation.close()
    return Response(whole, media_type=_JSON_TYPE, headers={"x-request-id": generation.id})


class _EventStream(Response):
    """A call's server-sent events. It owns the call and ends it with the connection."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: Answer) -> None:
        super().__init__(
            headers={
                "x-request-id": generation.id,
                "cache-control": "no-store",
                # Proxies that buffer would hold tokens back.
                "x-accel-buffering": "no",
            }
        )
        del self.headers["content-length"]
        self._generation = generation
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_disconnected(receive, self._write(send))
        except ClientDisconnect:
            pass
        finally:
            self._generation.close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._answer.events()) as events:
            async for written in events:
                await send({"type": "http.response.body", "body": written, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _unless_disconnected(receive: Receive, work: Coroutine[None, None, Result]) -> Result:
    """Return what `work` returns. Raises ClientDisconnect, and ends it, if the client goes."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnect
        return worker.result()
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_raw(request: HttpRequest, timeout_s: float) -> bytes:
    """Return the body. Raises HTTPException for one that is too large, too slow or encoded."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _JSON_TYPE:
        raise HTTPException(415, f"Content-Type must be {_JSON_TYPE}.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "Content-Encoding is not supported.")
    too_large = HTTPException(413, f"The body may have {MAX_BODY_BYTES} bytes.", _CLOSE)
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared[:20]) > MAX_BODY_BYTES:
        await _discard(request.stream())
        raise too_large
    # One stream for both: a request has none any more once its last part has come.
    stream = request.stream()
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in stream:
                num_bytes += len(chunk)
                if num_bytes > MAX_BODY_BYTES:
                    break
                chunks.append(chunk)
    except TimeoutError as error:
        text = f"The body did not arrive within {timeout_s:g} s."
        raise HTTPException(408, text, _CLOSE) from error
    if num_bytes > MAX_BODY_BYTES:
        await _discard(stream)
        raise too_large
    return b"".join(chunks)


async def _discard(stream: AsyncIterator[bytes]) -> None:
    """Take some of a body that is refused: a client that still sends would miss the answer.

    One that waits for the answer before it sends has it at once.
    """
    num_bytes = 0
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_PAUSE_S) as pause:
            async for chunk in stream:
                num_bytes += len(chunk)
                if num_bytes > _MOST_DISCARDED_BYTES:
                    return
                pause.reschedule(asyncio.get_running_loop().time() + _PAUSE_S)


def _model_card(servicer: Servicer, created_s: int) -> Json:
    config = servicer.config
    return {
        "id": config.model.name,
        "object": "model",
        "created": created_s,
        "owned_by": "pagedray",
        "max_model_len": config.max_model_len,
    }


async def _answer_refusal(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, PagedRayError)
    headers = {}
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    param = getattr(error, "param", None)
    body = error_body(str(error), error.openai_type, param)
    return _json(body, status=error.http_status, headers=headers)


async def _answer_http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = _HTTP_TEXTS.get(error.status_code, error.detail)
    return _json(error_body(text, _CLIENT_ERROR), status=error.status_code, headers=error.headers)


async def _answer_nobody(request: HttpRequest, error: Exception) -> Response:
    # The client has gone; what is returned reaches no one.
    return Response(status_code=400)


async def _answer_defect(request: HttpRequest, error: Exception) -> Response:
    return _json(error_body(_INTERNAL_TEXT, PagedRayError.openai_type), status=500)


def _json(
    content: Json, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(content), status_code=status, headers=headers, media_type=_JSON_TYPE
    )
