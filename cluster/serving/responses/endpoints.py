"""The endpoints of OpenAI's Responses API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.responses import Response

from cluster.serving.http.endpoint import Endpoint, json_response
from cluster.serving.http.http_call import JSON_TYPE
from cluster.serving.inputs import GenerationInput, TokenizeInput
from cluster.serving.json_body import renamed
from cluster.serving.openai.event_stream import answer_call
from cluster.serving.responses.items import (
    FunctionName,
    FunctionTools,
    ItemsQuery,
    check_whole,
    items_page,
    read_items,
    size_of_items,
)
from cluster.serving.responses.response import ResponsesResponse
from cluster.serving.responses.responses_body import Echo, InputTokensBody, ResponsesBody
from cluster.serving.responses.stored_responses import StoredTurn
from cluster.serving.text.template_arguments import ChatMessage, ChatPrompt
from cluster.serving.tools.tool_choice import ToolUse
from cluster.serving.tools.turns import Turns
from pagedray.errors import InvalidRequestError, invalid_field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.serving.http.endpoint import Json
    from cluster.serving.http.http_call import HttpCall
    from cluster.serving.responses.input_body import InputBody
    from cluster.serving.responses.stored_responses import ResponseStore
    from cluster.serving.servicer import Servicer

__all__ = ["responses_endpoints"]

_COUNT_NAMES = {"messages": "input"}


@dataclass(slots=True)
class _ParsedCall:
    """The parsed body of a request."""

    given: GenerationInput
    tools: ToolUse
    names: Mapping[str, FunctionName]
    """Names of functions in namespaces, by the names that the model knows."""
    params: Mapping[str, str]
    """The client's names for parameters of the engine."""
    echo: Echo
    is_stream: bool
    is_stored: bool
    previous: StoredTurn | None
    messages: tuple[ChatMessage, ...]
    """The input without instructions and earlier messages."""


def responses_endpoints(servicer: Servicer, store: ResponseStore) -> tuple[Endpoint, ...]:
    """Return the endpoints, which keep responses in `store`."""
    handlers = _Handlers(servicer, store)
    base = "/v1/responses"
    path = f"{base}/{{response_id}}"
    return (
        Endpoint(method="POST", path=base, handler=handlers.create, operation="chat"),
        Endpoint(
            method="POST",
            path=f"{base}/input_tokens",
            handler=handlers.count_tokens,
            is_counted=True,
        ),
        Endpoint(method="GET", path=path, handler=handlers.retrieve),
        Endpoint(method="DELETE", path=path, handler=handlers.delete),
        Endpoint(method="GET", path=f"{path}/input_items", handler=handlers.list_input),
        Endpoint(method="POST", path=f"{path}/cancel", handler=handlers.cancel),
    )


class _Handlers:
    def __init__(self, servicer: Servicer, store: ResponseStore) -> None:
        self._servicer = servicer
        self._store = store

    async def create(self, call: HttpCall) -> Response:
        parsed = await call.body_with(
            ResponsesBody,
            lambda body: self._previous(call.tenant.name, body),
            lambda body, previous: self._parsed(call, body, previous),
        )
        continuation = call.continuation
        given = replace(
            parsed.given, tenant=call.tenant.name, origin=call.origin, continuation=continuation
        )
        kept = self._servicer.buffers.open_buffer(call.tenant.name)
        kept.collect(len(parsed.echo.large))
        try:
            generation = await self._servicer.start_generation(given, call.entered)
        except BaseException as error:
            kept.clear()
            if isinstance(error, InvalidRequestError):
                raise renamed(error, parsed.params) from error
            raise
        generation.keep_until_closed(kept)
        # Clients may choose the ids of calls, but not of stored responses.
        response_id = (
            self._store.new_id(continuation) if parsed.is_stored else f"resp_{generation.id}"
        )

        def keep(items: Sequence[Json], body: bytes) -> None:
            self._keep(call.tenant.name, response_id, parsed, items, body)

        response = ResponsesResponse(
            generation,
            Turns(parsed.tools, generation.reasoning, self._servicer.tokenizer.token_bytes),
            model=self._servicer.config.model.name,
            created_s=int(time.time()) if continuation is None else continuation.created_s,
            echo=parsed.echo,
            response_id=response_id,
            names=parsed.names,
            keep=keep if parsed.is_stored and self._store.keeps(continuation) else None,
        )
        return await answer_call(
            self._servicer, call, generation, response, is_stream=parsed.is_stream
        )

    async def count_tokens(self, call: HttpCall) -> Response:
        def read(body: InputTokensBody, previous: StoredTurn | None) -> TokenizeInput:
            functions = FunctionTools()
            tools = body.tool_use(functions, self._servicer.tool_format)
            return body.to_input(
                tools,
                known_variables=self._known_variables(tools),
                note_ignored=call.ignored.note,
                earlier=() if previous is None else previous.conversation(),
            )

        given = await call.body_with(
            InputTokensBody, lambda body: self._previous(call.tenant.name, body), read
        )
        with call.metrics.counting_rejections("http"):
            try:
                token_ids = await self._servicer.tokenize(replace(given, tenant=call.tenant.name))
            except InvalidRequestError as error:
                raise renamed(error, _COUNT_NAMES) from error
        return json_response({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    async def list_input(self, call: HttpCall) -> Response:
        query = ItemsQuery.from_params(call.request.query_params)
        response_id = _response_id(call)
        messages = await self._store.messages_given(call.tenant.name, response_id)
        body = await call.intake.parse(
            size_of_items(messages), lambda: items_page(messages, response_id, query)
        )
        return Response(body, media_type=JSON_TYPE)

    async def cancel(self, call: HttpCall) -> Response:
        await self._store.read(call.tenant.name, _response_id(call))
        raise InvalidRequestError(
            "Only background responses can be cancelled, and they are not supported; to "
            "stop a response that is being generated, close its stream or connection."
        )

    async def retrieve(self, call: HttpCall) -> Response:
        check_whole(call.request.query_params)
        body = await self._store.read(call.tenant.name, _response_id(call))
        return Response(body, media_type=JSON_TYPE)

    async def delete(self, call: HttpCall) -> Response:
        await self._store.delete(call.tenant.name, _response_id(call))
        return json_response({"id": call.path_value, "object": "response", "deleted": True})

    def _parsed(
        self, call: HttpCall, body: ResponsesBody, previous: StoredTurn | None
    ) -> _ParsedCall:
        earlier = () if previous is None else previous.conversation()
        is_stored = self._store.is_enabled and body.store is not False
        if body.store and not is_stored:
            call.ignored.note("store")
        functions = FunctionTools()
        tools = body.tool_use(functions, self._servicer.tool_format)
        given = body.to_input(
            call.client_id,
            tools,
            known_variables=self._known_variables(tools),
            note_ignored=call.ignored.note,
            earlier=earlier,
        )
        echo = body.echoed(is_stored=is_stored)
        (prompt,) = given.prompts
        assert isinstance(prompt, ChatPrompt)
        return _ParsedCall(
            given=given,
            tools=tools,
            names=functions.names,
            params=body.names(tools),
            echo=echo,
            is_stream=body.stream,
            is_stored=is_stored,
            previous=previous,
            messages=prompt.messages[len(earlier) + bool(body.instructions) :],
        )

    async def _previous(self, tenant: str, body: InputBody) -> StoredTurn | None:
        given = body.previous_response_id
        if given is None:
            return None
        if not self._store.is_enabled:
            raise invalid_field(
                "previous_response_id",
                "is not supported, because responses are not stored; send the earlier items as "
                "input.",
            )
        return await self._store.find_previous(tenant, given)

    def _keep(
        self, tenant: str, response_id: str, parsed: _ParsedCall, items: Sequence[Json], body: bytes
    ) -> None:
        """Store a complete response with the output `items`, and the messages that it adds."""
        problem = ""
        messages = parsed.messages
        try:
            messages += read_items(items)
        except InvalidRequestError as error:
            problem = str(error)
        num_given = len(parsed.messages)
        turn = StoredTurn(body, messages, parsed.previous, num_given=num_given, problem=problem)
        self._store.keep(tenant, response_id, turn)

    def _known_variables(self, tools: ToolUse) -> frozenset[str]:
        return self._servicer.tokenizer.template_variables(has_tools=tools.is_read)


def _response_id(call: HttpCall) -> str:
    """Return the id in the path of a call, which ends with it."""
    if "/" in call.path_value:
        raise HTTPException(404, "Not found: no such endpoint.")
    return call.path_value
