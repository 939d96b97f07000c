"""The endpoint of OpenAI's Responses API."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.serving.http.endpoint import Endpoint, HttpCall
from cluster.serving.http.schema import renamed
from cluster.serving.openai.answer import answer_call
from cluster.serving.responses.response import ResponsesResponse
from cluster.serving.responses.responses_body import ResponsesBody
from cluster.serving.tools.turns import Turns
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from starlette.responses import Response

    from cluster.serving.inputs import GenerationInput
    from cluster.serving.intake.steps import Steps
    from cluster.serving.servicer import Servicer
    from cluster.serving.tools.tool_choice import ToolUse

__all__ = ["responses_endpoints"]

_NAMES = {"max_tokens": "max_output_tokens", "messages": "input"}

_Asked = tuple["GenerationInput", "ToolUse", dict[str, object], bool]


def responses_endpoints(servicer: Servicer) -> tuple[Endpoint, ...]:
    """Return the endpoint of OpenAI's Responses API."""

    async def create(call: HttpCall) -> Response:
        def read(body: ResponsesBody, _: bytes) -> Steps[_Asked]:
            tools = yield from body.tool_use(servicer.tool_format)
            given = yield from body.to_input(
                call.client_id,
                tools,
                known_variables=servicer.tokenizer.template_variables(has_tools=tools.is_read),
                note_ignored=call.ignored.note,
            )
            return given, tools, body.echoed(), body.stream

        given, tools, echoed, is_stream = await call.body(ResponsesBody, read)
        continuation = call.continuation
        given = replace(
            given, tenant=call.tenant.name, origin=call.origin, continuation=continuation
        )
        names = {"structure": "tools" if tools.is_forced else "text.format", **_NAMES}
        try:
            generation = await servicer.start_generation(given, call.entered)
        except InvalidRequestError as error:
            raise renamed(error, names) from error
        response = ResponsesResponse(
            generation,
            Turns(tools, generation.reasoning, servicer.tokenizer.token_bytes),
            model=servicer.config.model.name,
            created_s=int(time.time()) if continuation is None else continuation.created_s,
            echoed=echoed,
        )
        return await answer_call(servicer, call, generation, response, is_stream=is_stream)

    return (Endpoint(method="POST", path="/v1/responses", handler=create, operation="chat"),)
