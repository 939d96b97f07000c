"""The endpoints of OpenAI's API."""

from __future__ import annotations

import asyncio
import base64
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from cluster.serving.http.body import JSON_TYPE
from cluster.serving.http.endpoint import Endpoint, HttpCall, json_response
from cluster.serving.http.schema import renamed
from cluster.serving.openai.chat_body import ChatBody
from cluster.serving.openai.chat_response import ChatCompletionResponse
from cluster.serving.openai.completion_body import CompletionBody
from cluster.serving.openai.completion_response import CompletionResponse
from cluster.serving.openai.embedding_body import EmbeddingBody
from cluster.serving.openai.event_stream import EventStream, unless_disconnected
from cluster.serving.openai.generation_response import GenerationResponse, ResponseOptions
from cluster.serving.openai.resuming import StreamHandlers, format_of
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from cluster.serving.http.errors import Json
    from cluster.serving.inputs import GenerationInput
    from cluster.serving.openai.generation_body import GenerationBody
    from cluster.serving.servicer import EmbeddingOutput, GenerationCall, Servicer

__all__ = ["openai_endpoints"]

_MAX_ENCODED_NUMBERS = 2**14
"""Numbers encoded between two turns of the event loop."""

_encode = msgspec.json.Encoder().encode


def openai_endpoints(servicer: Servicer) -> tuple[Endpoint, ...]:
    """Return the endpoints of OpenAI's API."""
    handlers = _OpenAIHandlers(servicer)
    return (
        Endpoint(method="GET", path="/v1/streams/{request_id}", handler=handlers.streams.resume),
        Endpoint(method="DELETE", path="/v1/streams/{request_id}", handler=handlers.streams.end),
        Endpoint(method="GET", path="/v1/models", handler=handlers.models),
        Endpoint(method="GET", path="/v1/models/{model}", handler=handlers.model),
        Endpoint(
            method="POST",
            path="/v1/completions",
            handler=handlers.completion,
            operation="text_completion",
        ),
        Endpoint(
            method="POST", path="/v1/chat/completions", handler=handlers.chat, operation="chat"
        ),
        Endpoint(
            method="POST", path="/v1/embeddings", handler=handlers.embedding, operation="embeddings"
        ),
    )


class _OpenAIHandlers:
    def __init__(self, servicer: Servicer) -> None:
        self.streams = StreamHandlers(servicer)
        self._servicer = servicer
        self._model = servicer.config.model.name
        self._created_s = int(time.time())

    async def models(self, call: HttpCall) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, call: HttpCall) -> Response:
        self._servicer.validator.check_model(call.rest)
        return json_response(self._card())

    async def completion(self, call: HttpCall) -> Response:
        body, raw = await call.body_and_bytes(CompletionBody)
        resumed = self._resumed(call, body, raw)
        if resumed is not None:
            return resumed
        with call.metrics.counting_refusals("http"):
            given = body.to_input(call.client_id)
            param = body.requested_structure().param
        generation = await self._start(call, given, param)
        token_bytes = self._servicer.tokenizer.token_bytes
        response = CompletionResponse(generation, token_bytes, self._options(body, call))
        if body.is_resumable:
            return self.streams.keep(generation, response, format_of(call, raw))
        return await _respond(call, body, generation, response)

    async def chat(self, call: HttpCall) -> Response:
        body, raw = await call.body_and_bytes(ChatBody)
        resumed = self._resumed(call, body, raw)
        if resumed is not None:
            return resumed
        with call.metrics.counting_refusals("http"):
            tools = body.tool_use(self._servicer.tool_format)
            given = body.to_input(call.client_id, tools)
            param = "tools" if tools.is_forced else body.requested_structure().param
        generation = await self._start(call, given, param)
        token_bytes = self._servicer.tokenizer.token_bytes
        response = ChatCompletionResponse(generation, token_bytes, self._options(body, call), tools)
        if body.is_resumable:
            return self.streams.keep(generation, response, format_of(call, raw))
        return await _respond(call, body, generation, response)

    async def embedding(self, call: HttpCall) -> Response:
        body = await call.body(EmbeddingBody)
        with call.metrics.counting_refusals("http"):
            given = replace(body.to_input(), tenant=call.tenant.name, origin=call.origin)
        work = self._servicer.embed(given)
        output = await unless_disconnected(call.request.receive, work)
        encoded = await _encoded(output, as_base64=body.encoding_format == "base64")
        usage = {
            "prompt_tokens": output.num_prompt_tokens,
            "total_tokens": output.num_prompt_tokens,
        }
        content = b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (
            encoded,
            _encode(self._model),
            _encode(usage),
        )
        return Response(content, media_type=JSON_TYPE)

    def _resumed(self, call: HttpCall, body: GenerationBody, raw: bytes) -> Response | None:
        """Return the response to a request that resumes its stream; None if it does not."""
        if not body.is_resumable:
            return None
        with call.metrics.counting_refusals("http"):
            number = call.last_event_number
        if number is None:
            return None
        return self.streams.resume_post(call, number, format_of(call, raw))

    async def _start(
        self, call: HttpCall, given: GenerationInput, param: str | None
    ) -> GenerationCall:
        try:
            return await self._servicer.start_generation(
                replace(
                    given,
                    tenant=call.tenant.name,
                    origin=call.origin,
                    continuation=call.continuation,
                )
            )
        except InvalidRequestError as error:
            raise renamed(error, {} if param is None else {"structure": param}) from error

    def _options(self, body: GenerationBody, call: HttpCall) -> ResponseOptions:
        continuation = call.continuation
        return ResponseOptions(
            model=self._model,
            created_s=int(time.time()) if continuation is None else continuation.created_s,
            num_per_prompt=body.n,
            has_logprobs=body.num_logprobs is not None,
            includes_usage=body.includes_usage,
        )

    def _card(self) -> Json:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created_s,
            "owned_by": "pagedray",
            "max_model_len": self._servicer.config.max_model_len,
        }


async def _respond(
    call: HttpCall, body: GenerationBody, generation: GenerationCall, response: GenerationResponse
) -> Response:
    if body.stream:
        return EventStream(
            generation.id,
            response.events(),
            close=generation.close,
            take_progress=None if call.continuation is None else generation.take_progress,
        )
    try:
        content = await unless_disconnected(call.request.receive, response.complete())
    finally:
        generation.close()
    return Response(content, media_type=JSON_TYPE, headers={"x-request-id": generation.id})


async def _encoded(output: EmbeddingOutput, *, as_base64: bool) -> bytes:
    """Return the vectors as JSON entries, separated by commas."""
    entries: list[bytes] = []
    num_numbers = 0
    for index, vector in enumerate(output.vectors):
        numbers = (
            base64.b64encode(vector.astype("<f4").tobytes()).decode()
            if as_base64
            else vector.tolist()
        )
        entries.append(_encode({"object": "embedding", "index": index, "embedding": numbers}))
        num_numbers += len(vector)
        if num_numbers >= _MAX_ENCODED_NUMBERS:
            num_numbers = 0
            await asyncio.sleep(0)
    return b",".join(entries)
