"""The endpoints of Anthropic's Messages API."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.serving.anthropic.count_body import CountBody
from cluster.serving.anthropic.errors import ANTHROPIC_ERRORS, rewording_length_errors
from cluster.serving.anthropic.messages_body import MessagesBody
from cluster.serving.anthropic.messages_response import MessagesResponse
from cluster.serving.anthropic.model_support import ModelSupport
from cluster.serving.http.endpoint import Endpoint, json_response
from cluster.serving.openai.answer import answer_call
from cluster.serving.schema.field_errors import renamed
from cluster.serving.tools.turns import Turns
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from starlette.responses import Response

    from cluster.serving.http.http_call import HttpCall
    from cluster.serving.inputs import GenerationInput, TokenizeInput
    from cluster.serving.servicer import Servicer
    from cluster.serving.tools.tool_choice import ToolUse

__all__ = ["anthropic_endpoints"]

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_NAMES = {
    "stop": "stop_sequences",
    "text": "messages",
    "thinking_token_budget": "thinking.budget_tokens",
}


def anthropic_endpoints(servicer: Servicer) -> tuple[Endpoint, ...]:
    """Return the endpoints of Anthropic's API."""
    handlers = _MessagesHandlers(servicer)
    return (
        Endpoint(
            method="POST",
            path="/v1/messages",
            handler=handlers.create,
            operation="chat",
            errors=ANTHROPIC_ERRORS,
        ),
        Endpoint(
            method="POST",
            path="/v1/messages/count_tokens",
            handler=handlers.count_tokens,
            is_counted=True,
            errors=ANTHROPIC_ERRORS,
        ),
    )


class _MessagesHandlers:
    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer

    async def create(self, call: HttpCall) -> Response:
        def read(body: MessagesBody, _: bytes) -> tuple[GenerationInput, ToolUse, bool]:
            tools = body.tool_use(self._servicer.tool_format)
            given = body.to_input(
                call.client_id, tools, self._support(tools), note_ignored=call.ignored.note
            )
            return given, tools, body.stream

        with rewording_length_errors():
            given, tools, is_stream = await call.body(MessagesBody, read)
            given = replace(
                given,
                tenant=call.tenant.name,
                origin=call.origin,
                continuation=call.continuation,
            )
            structure = "tools" if tools.sets_structure else "output_config.format"
            names = {"structure": structure, **_NAMES}
            try:
                generation = await self._servicer.start_generation(given, call.entered)
            except InvalidRequestError as error:
                raise renamed(error, names) from error
        turns = Turns(tools, generation.reasoning, self._servicer.tokenizer.token_bytes)
        response = MessagesResponse(generation, turns, model=self._servicer.config.model.name)
        answer = await answer_call(
            self._servicer,
            call,
            generation,
            response,
            is_stream=is_stream,
            waiting_event=_PING,
        )
        # Anthropic's libraries read the id from this header.
        answer.headers["request-id"] = generation.id
        return answer

    async def count_tokens(self, call: HttpCall) -> Response:
        def read(body: CountBody, _: bytes) -> TokenizeInput:
            tools = body.tool_use(self._servicer.tool_format)
            return body.to_input(tools, self._support(tools), note_ignored=call.ignored.note)

        with rewording_length_errors():
            given = await call.body(CountBody, read)
            with call.metrics.counting_rejections("http"):
                try:
                    given = replace(given, tenant=call.tenant.name)
                    token_ids = await self._servicer.tokenize(given)
                except InvalidRequestError as error:
                    raise renamed(error, _NAMES) from error
        return json_response({"input_tokens": len(token_ids)})

    def _support(self, tools: ToolUse) -> ModelSupport:
        tokenizer = self._servicer.tokenizer
        return ModelSupport(
            known_variables=tokenizer.template_variables(has_tools=tools.is_read),
            keeps_system_messages=lambda: tokenizer.keeps_system_messages(has_tools=tools.is_read),
            can_limit_reasoning=self._servicer.validator.can_limit_reasoning,
        )
