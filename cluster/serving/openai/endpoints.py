"""The endpoints of OpenAI's API, and of scores as clients of Jina, Cohere and vLLM read them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from cluster.serving.http.endpoint import Endpoint, json_response
from cluster.serving.http.http_call import JSON_TYPE
from cluster.serving.inputs import EmbeddingInput, GenerationInput, served_names
from cluster.serving.json_body import renamed
from cluster.serving.openai.bodies.chat_body import ChatBody
from cluster.serving.openai.bodies.completion_body import CompletionBody
from cluster.serving.openai.bodies.score_body import EmbeddingBody, RerankBody, ScoreBody
from cluster.serving.openai.chat_format import ChatFormat, CompletionFormat
from cluster.serving.openai.event_stream import EventStream, answer_call, unless_disconnected
from cluster.serving.openai.generation_response import GenerationResponse
from cluster.serving.openai.response_choice import DONE_EVENT, ResponseOptions, error_event
from cluster.serving.resume import StreamFormat
from cluster.serving.tools.tool_choice import ToolUse
from cluster.serving.tools.turns import Turns
from pagedray.errors import InvalidRequestError, PagedRayError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from cluster.serving.http.endpoint import Json
    from cluster.serving.http.http_call import HttpCall
    from cluster.serving.inputs import ScoreInput
    from cluster.serving.openai.bodies.generation_body import GenerationBody
    from cluster.serving.openai.chat_format import ChoiceFormat
    from cluster.serving.resume import StreamReader
    from cluster.serving.servicer import EmbeddingOutput, GenerationCall, Servicer

__all__ = ["openai_endpoints", "score_endpoints"]

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
        Endpoint(method="POST", path="/pooling", handler=handlers.pooling, operation="embeddings"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParsedCall:
    """The parsed request; the body itself is dropped while the call runs."""

    options: ResponseOptions
    is_stream: bool
    format: StreamFormat | None
    """The format of the stream if it can be resumed."""
    given: GenerationInput | None
    """None if the client resumes the stream."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The client's names for parameters that differ from the engine's."""
    tools: ToolUse | None = None
    shows_reasoning: bool = True
    has_functions: bool = False
    """Whether a call is written as `function_call`."""


class _OpenAIHandlers:
    def __init__(self, servicer: Servicer) -> None:
        self.streams = StreamHandlers(servicer)
        self._servicer = servicer
        self._names = served_names(servicer.config.model)
        self._model = self._names[0]
        self._created_s = int(time.time())

    async def models(self, call: HttpCall) -> Response:
        return json_response({"object": "list", "data": [self._card(name) for name in self._names]})

    async def model(self, call: HttpCall) -> Response:
        self._servicer.validator.check_model(call.path_value)
        return json_response(self._card(call.path_value))

    async def completion(self, call: HttpCall) -> Response:
        def read(body: CompletionBody, raw: bytes) -> tuple[_ParsedCall, bool]:
            options = replace(
                self._options(body, call),
                num_echoed_logprobs=body.logprobs if body.echo else None,
                hides_output=body.hides_output,
            )
            parsed = _ParsedCall(
                options=options,
                is_stream=body.stream,
                format=_stream_format(call, body, raw),
                given=None if _resumes(call, body) else body.to_input(call.client_id),
                names=body.structure_names() | {"max_tokens": body.limit_name},
            )
            return parsed, body.echo

        parsed, echoes = await call.body(CompletionBody, read)
        if parsed.given is None:
            return self._resumed(call, parsed)
        generation = await self._start(call, parsed.given, parsed.names)
        options = parsed.options
        if echoes:
            texts = await self._texts_of(generation, parsed.given)
            options = replace(options, echoed_texts=texts)
        format = CompletionFormat(generation, self._servicer.tokenizer.token_bytes, options)
        return await self._respond(call, parsed, format)

    async def chat(self, call: HttpCall) -> Response:
        def read(body: ChatBody, raw: bytes) -> _ParsedCall:
            tools = body.tool_use(self._servicer.tool_format)
            variables = self._servicer.tokenizer.template_variables(has_tools=tools.is_read)
            if body.prediction is not None and self._servicer.config.speculation is None:
                call.ignored.note("prediction")
            return _ParsedCall(
                options=self._options(body, call),
                is_stream=body.stream,
                format=_stream_format(call, body, raw),
                given=None
                if _resumes(call, body)
                else body.to_input(
                    call.client_id, tools, known_variables=variables, note_ignored=call.ignored.note
                ),
                names=body.names(tools),
                tools=tools,
                shows_reasoning=body.include_reasoning,
                has_functions=body.has_functions,
            )

        parsed = await call.body(ChatBody, read)
        if parsed.given is None:
            return self._resumed(call, parsed)
        assert parsed.tools is not None
        generation = await self._start(call, parsed.given, parsed.names)
        token_bytes = self._servicer.tokenizer.token_bytes
        turns = Turns(
            parsed.tools, generation.reasoning, token_bytes, shows_reasoning=parsed.shows_reasoning
        )
        format = ChatFormat(
            generation, token_bytes, parsed.options, turns, has_functions=parsed.has_functions
        )
        return await self._respond(call, parsed, format)

    async def embedding(self, call: HttpCall) -> Response:
        return await self._embedded(call, kind="embedding", field="embedding")

    async def pooling(self, call: HttpCall) -> Response:
        """Answer as vLLM does; its entries have other names."""
        return await self._embedded(call, kind="pooling", field="data")

    async def _embedded(self, call: HttpCall, *, kind: str, field: str) -> Response:
        """Return the vectors of texts, each in a `field` of an object of a `kind`."""

        def read(body: EmbeddingBody, _: bytes) -> tuple[EmbeddingInput, bool]:
            given = body.to_input()
            return given, body.encoding_format == "base64"

        given, as_base64 = await call.body(EmbeddingBody, read)
        given = replace(given, tenant=call.tenant.name, origin=call.origin)
        work = self._servicer.embed(given, call.entered)
        output = await unless_disconnected(call.request.receive, work)
        encoded = await call.intake.parse(
            output.vectors.nbytes,
            lambda: _encoded(output, kind=kind, field=field, as_base64=as_base64),
        )
        usage = {
            "prompt_tokens": output.num_prompt_tokens,
            "total_tokens": output.num_prompt_tokens,
        }
        content = b'{"object":"list","data":%b,"model":%b,"usage":%b}' % (
            encoded,
            _encode(self._model),
            _encode(usage),
        )
        return Response(content, media_type=JSON_TYPE)

    def _resumed(self, call: HttpCall, parsed: _ParsedCall) -> Response:
        """Return the response to a request that resumes its stream."""
        number = call.last_event_number
        assert number is not None
        assert parsed.format is not None
        return self.streams.resume_post(call, number, parsed.format)

    async def _start(
        self, call: HttpCall, given: GenerationInput, names: Mapping[str, str]
    ) -> GenerationCall:
        try:
            return await self._servicer.start_generation(
                replace(
                    given,
                    tenant=call.tenant.name,
                    origin=call.origin,
                    continuation=call.continuation,
                ),
                call.entered,
            )
        except InvalidRequestError as error:
            raise renamed(error, names) from error

    async def _texts_of(
        self, generation: GenerationCall, given: GenerationInput
    ) -> tuple[str, ...]:
        """Return the texts of a call's prompts; the call is closed if that fails."""
        texts: list[str] = []
        try:
            for prompt, token_ids in zip(given.prompts, generation.prompts, strict=True):
                if isinstance(prompt, str) and given.max_prompt_tokens is None:
                    texts.append(prompt)
                    continue
                # All of them at once would hold the event loop.
                await asyncio.sleep(0)
                text = await self._servicer.detokenize(
                    token_ids, tenant=given.tenant, skip_special_tokens=given.skips_special_tokens
                )
                texts.append(text)
            return tuple(texts)
        except BaseException:
            generation.close()
            raise

    def _options(self, body: GenerationBody, call: HttpCall) -> ResponseOptions:
        continuation = call.continuation
        return ResponseOptions(
            model=self._model,
            created_s=int(time.time()) if continuation is None else continuation.created_s,
            num_per_prompt=body.num_generated,
            num_returned=body.n,
            has_logprobs=body.num_logprobs is not None,
            includes_usage=body.includes_usage,
            has_continuous_usage=body.has_continuous_usage,
            has_token_ids=body.return_token_ids,
            names_tokens_by_id=body.return_tokens_as_token_ids,
            num_prompt_logprobs=body.prompt_logprobs,
            skips_special_tokens=body.skip_special_tokens,
        )

    async def _respond(self, call: HttpCall, parsed: _ParsedCall, format: ChoiceFormat) -> Response:
        response = GenerationResponse(format)
        if parsed.format is not None:
            return self.streams.keep(format.generation, response, parsed.format)
        return await answer_call(
            self._servicer, call, format.generation, response, is_stream=parsed.is_stream
        )

    def _card(self, name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "pagedray",
            "max_model_len": self._servicer.config.max_model_len,
        }


def _encoded(output: EmbeddingOutput, *, kind: str, field: str, as_base64: bool) -> bytes:
    """Return the vectors as JSON entries."""
    vectors = (
        [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in output.vectors]
        if as_base64
        else output.vectors.tolist()
    )
    return _encode(
        [{"object": kind, "index": index, field: one} for index, one in enumerate(vectors)]
    )


def _resumes(call: HttpCall, body: GenerationBody) -> bool:
    """Return whether a client resumes its stream by sending the request again."""
    return body.is_resumable and call.last_event_number is not None


def _stream_format(call: HttpCall, body: GenerationBody, raw: bytes) -> StreamFormat | None:
    """Return the format of a stream that can be resumed, given the bytes of its body."""
    if not body.is_resumable:
        return None
    path = call.request.scope["path"]
    return StreamFormat("http", path, hashlib.sha256(raw).digest())


class StreamHandlers:
    """Keeps streams, and answers the requests that resume or end them."""

    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer

    def keep(
        self, generation: GenerationCall, response: GenerationResponse, form: StreamFormat
    ) -> EventStream:
        """Return the response to a call with a resumable stream."""
        events = response.numbered_events()
        reader = self._servicer.resumables.open_stream(generation, events, form)
        return _event_stream(generation.id, reader)

    def resume_post(self, call: HttpCall, number: int, form: StreamFormat) -> Response:
        """Return the response to a request that was sent again. Raises PagedRayError."""
        with call.metrics.counting_rejections("http"):
            if call.client_id is None:
                raise InvalidRequestError(
                    "Last-Event-ID requires the X-Request-Id of the stream.", param="X-Request-Id"
                )
            return self._resume(call, call.client_id, number, form)

    async def resume(self, call: HttpCall) -> Response:
        """Answer GET with the rest of a stream."""
        with call.metrics.counting_rejections("http"):
            return self._resume(call, call.path_value, call.last_event_number or 0, None)

    async def end(self, call: HttpCall) -> Response:
        """Answer DELETE: abort a call and forget its stream, if any."""
        self._servicer.abort_call(call.tenant.name, call.path_value)
        return json_response({"id": call.path_value, "object": "stream", "deleted": True})

    def _resume(
        self, call: HttpCall, client_id: str, number: int, form: StreamFormat | None
    ) -> Response:
        reader = self._servicer.resumables.resume_stream(
            call.tenant.name, client_id, number, protocol="http", form=form
        )
        call.metrics.count_resume("http")
        if reader is None:
            # An EventSource asks again until it gets this status.
            return Response(status_code=204)
        return _event_stream(client_id, reader)


def _event_stream(request_id: str, reader: StreamReader) -> EventStream:
    return EventStream(request_id, _events(reader), close=reader.close)


async def _events(reader: StreamReader) -> AsyncGenerator[bytes]:
    try:
        async for events in reader:
            yield b"".join(events)
    except PagedRayError as error:
        yield error_event(error)
        yield DONE_EVENT


def score_endpoints(servicer: Servicer) -> tuple[Endpoint, ...]:
    """Return the endpoints, each under the names that it has elsewhere."""
    handlers = _ScoreHandlers(servicer)
    return tuple(
        Endpoint(method="POST", path=path, handler=handler, operation="score")
        for handler, paths in (
            (handlers.rerank, ("/rerank", "/v1/rerank", "/v2/rerank")),
            (handlers.score, ("/score", "/v1/score")),
        )
        for path in paths
    )


class _ScoreHandlers:
    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer
        self._model = servicer.config.model.name

    async def rerank(self, call: HttpCall) -> Response:
        def read(body: RerankBody, _: bytes) -> tuple[ScoreInput, int | None, bool]:
            given = body.to_input()
            return given, body.top_n or None, body.return_documents

        given, top_n, has_documents = await call.body(RerankBody, read)
        output = await self._scored(call, given)
        scores: list[float] = output.vectors[:, 0].tolist()
        # The first of equals stays first.
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
        results: list[Json] = []
        for index in order:
            result: Json = {"index": index, "relevance_score": scores[index]}
            if has_documents:
                result["document"] = {"text": given.pairs[index][1]}
            results.append(result)
        return _response(
            {
                "id": f"rerank-{uuid.uuid4().hex}",
                "model": self._model,
                "usage": {"total_tokens": output.num_prompt_tokens},
            },
            "results",
            results,
        )

    async def score(self, call: HttpCall) -> Response:
        def read(body: ScoreBody, _: bytes) -> ScoreInput:
            return body.to_input()

        output = await self._scored(call, await call.body(ScoreBody, read))
        return _response(
            {
                "id": f"score-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": self._model,
                "usage": {
                    "prompt_tokens": output.num_prompt_tokens,
                    "total_tokens": output.num_prompt_tokens,
                },
            },
            "data",
            [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(output.vectors[:, 0].tolist())
            ],
        )

    async def _scored(self, call: HttpCall, given: ScoreInput) -> EmbeddingOutput:
        given = replace(given, tenant=call.tenant.name, origin=call.origin)
        work = self._servicer.score(given, call.entered)
        return await unless_disconnected(call.request.receive, work)


def _response(head: Json, name: str, entries: Sequence[Json]) -> Response:
    """Return a response with entries in its field `name`."""
    return Response(msgspec.json.encode({**head, name: entries}), media_type=JSON_TYPE)
