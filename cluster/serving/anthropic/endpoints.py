"""The endpoints of Anthropic's Messages API."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, cast

import msgspec
from pydantic_core import from_json

from cluster.serving.anthropic.conversation_body import CountBody, MessagesBody, ModelSupport
from cluster.serving.http.endpoint import Endpoint, ErrorFormat, Json, json_response, rejection_body
from cluster.serving.json_body import renamed
from cluster.serving.openai.event_stream import EventResponse, answer_call
from cluster.serving.tools.turn_reader import TextDelta
from cluster.serving.tools.turns import Turns
from pagedray.errors import (
    ContextLengthError,
    InvalidRequestError,
    OutputLengthError,
    PromptLengthError,
)
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from starlette.responses import Response

    from cluster.serving.http.http_call import HttpCall
    from cluster.serving.inputs import GenerationInput, TokenizeInput
    from cluster.serving.servicer import GenerationCall, GenerationOutput, Servicer, Usage
    from cluster.serving.text.text_stream import SequenceOutput
    from cluster.serving.tools.tool_choice import ToolUse
    from cluster.serving.tools.turn_reader import TurnDelta
    from pagedray.errors import PagedRayError

__all__ = ["MessagesResponse", "anthropic_endpoints", "anthropic_error"]

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_NAMES = {
    "stop": "stop_sequences",
    "text": "messages",
    "thinking_token_budget": "thinking.budget_tokens",
}
_ERROR_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NO_THREADS: Json = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Makes the tool runner of Anthropic's library send all messages in each request."""

_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.ABORT: "pause_turn",
}
_encode = msgspec.json.Encoder().encode
_Kind = Literal["text", "thinking", "tool_use"]
_KINDS: dict[str, _Kind] = {"reasoning": "thinking", "content": "text"}


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
                given, tenant=call.tenant.name, origin=call.origin, continuation=call.continuation
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
            self._servicer, call, generation, response, is_stream=is_stream, waiting_event=_PING
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


def anthropic_error(body: Json, status: int, request_id: str | None = None) -> Json:
    """Return an error that is given in the format of OpenAI, with its status."""
    given = cast("Json", body["error"])
    kind = _ERROR_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: Json = {"type": kind, "message": given["message"]}
    if given["param"] == "thread":
        error["details"] = _NO_THREADS
    return {"type": "error", "error": error, "request_id": request_id}


ANTHROPIC_ERRORS = ErrorFormat(write=anthropic_error, id_header="request-id")


@contextmanager
def rewording_length_errors() -> Iterator[None]:
    """Give a ContextLengthError the message that Anthropic's API has for it.

    Claude Code and other agents find the numbers in it: they reduce `max_tokens`, or shorten the
    conversation.
    """
    try:
        yield
    except ContextLengthError as error:
        reworded = copy.copy(error)
        reworded.args = (_words_of(error),)
        raise reworded from error


def _words_of(error: ContextLengthError) -> str:
    if isinstance(error, OutputLengthError):
        return (
            "input length and `max_tokens` exceed context limit: "
            f"{error.num_prompt_tokens} + {error.max_tokens} > {error.context}, "
            "decrease input length or `max_tokens` and try again"
        )
    if isinstance(error, PromptLengthError):
        return f"prompt is too long: {error.num_tokens} tokens > {error.context - 1} maximum"
    return f"prompt is too long: {error}"


@dataclass(slots=True)
class _Block:
    """A block of the message: text, thoughts, or a tool call with its arguments."""

    kind: _Kind
    id: str | None = None
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    def as_json(self) -> Json:
        text = "".join(self.pieces)
        if self.kind == "text":
            return {"type": "text", "text": text, "citations": None}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": ""}
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": _input(text)}

    def begun(self) -> Json:
        """Return the block as a stream begins it."""
        if self.kind == "text":
            return {"type": "text", "text": ""}
        return self.as_json()


def _input(text: str) -> object:
    """Return the arguments of a call; of an incomplete call, the complete arguments.

    A client that reads the stream with Anthropic's library gets the same.
    """
    given: object = from_json(text or "{}", allow_partial=True)
    return given


class MessagesResponse(EventResponse):
    """The response to one call."""

    def __init__(self, generation: GenerationCall, turns: Turns, *, model: str) -> None:
        super().__init__(generation, turns)
        self._model = model
        self._is_new = True
        self._blocks: list[_Block] = []
        """The blocks of a complete response."""
        self._index = -1
        """The index of the block that is being written."""
        self._open: _Kind | None = None
        """The kind of that block, until it ends."""
        self._piece_begin = b""
        """The start of an event with text of the open block."""

    def _collect(self, delta: TurnDelta) -> None:
        for part in delta.parts:
            if isinstance(part, TextDelta):
                kind = _KINDS[part.kind]
                if not self._blocks or self._blocks[-1].kind != kind:
                    self._blocks.append(_Block(kind))
                self._blocks[-1].pieces.append(part.text)
                continue
            if part.name is not None:
                self._blocks.append(_Block("tool_use", part.id, part.name))
            self._blocks[-1].pieces.append(part.arguments)

    def _encode_response(self, last: SequenceOutput, usage: Usage) -> tuple[bytes]:
        message = self._message([block.as_json() for block in self._blocks], usage)
        return (_encode(message | self._end(last)),)

    def _encode_events(self, output: GenerationOutput) -> bytes:
        events: list[bytes] = []
        if self._is_new:
            self._is_new = False
            started = self._message([], output.usage)
            started["usage"] = _usage(output.usage) | {"output_tokens": 0}
            events.append(_event("message_start", {"message": started}))
        for sequence in output.sequences:
            is_plain = self._turn is None or self._turn.is_plain
            if is_plain and self._open == "text" and sequence.finish_reason is None:
                # The fast path of most tokens.
                if sequence.text:
                    events.append(self._piece(sequence.text))
                continue
            if sequence.failure is not None:
                continue
            self._write_delta(self._delta(sequence), events)
            if sequence.finish_reason is not None:
                self._close_block(events)
                ended = self._end(sequence)
                changed: Json = {"delta": ended, "usage": _usage(output.usage)}
                events.append(_event("message_delta", changed))
                events.append(_event("message_stop", {}))
        return b"".join(events)

    def _write_delta(self, delta: TurnDelta, events: list[bytes]) -> None:
        for part in delta.parts:
            if isinstance(part, TextDelta):
                kind = _KINDS[part.kind]
                if self._open != kind:
                    self._open_block(_Block(kind), events)
                events.append(self._piece(part.text))
                continue
            if part.name is not None:
                self._open_block(_Block("tool_use", part.id, part.name), events)
            if part.arguments:
                events.append(self._piece(part.arguments))

    def _piece(self, text: str) -> bytes:
        return self._piece_begin + _encode(text) + b"}}\n\n"

    def _open_block(self, block: _Block, events: list[bytes]) -> None:
        self._close_block(events)
        self._index += 1
        self._open = block.kind
        delta_type, key = _DELTAS[block.kind]
        self._piece_begin = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b","%b":' % (self._index, delta_type, key)
        )
        fields = {"index": self._index, "content_block": block.begun()}
        events.append(_event("content_block_start", fields))

    def _close_block(self, events: list[bytes]) -> None:
        if self._open == "thinking":
            # Anthropic's clients expect a signature, which nothing checks here.
            signature = {"type": "signature_delta", "signature": ""}
            fields = {"index": self._index, "delta": signature}
            events.append(_event("content_block_delta", fields))
        if self._open is not None:
            events.append(_event("content_block_stop", {"index": self._index}))
        self._open = None

    def _end(self, sequence: SequenceOutput) -> Json:
        assert sequence.finish_reason is not None
        reason = _REASONS[sequence.finish_reason]
        stop = sequence.stop_reason if isinstance(sequence.stop_reason, str) else None
        if stop is not None:
            reason = "stop_sequence"
        elif reason == "end_turn" and self._turn is not None and self._turn.has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _message(self, content: list[Json], usage: Usage) -> Json:
        return {
            "id": f"msg_{self._generation.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _error_event(self, error: PagedRayError) -> bytes:
        error_json = anthropic_error(rejection_body(error), error.http_status, self._generation.id)
        written = _encode(error_json)
        return b"event: error\ndata: " + written + b"\n\n"


_DELTAS: dict[_Kind, tuple[bytes, bytes]] = {
    "text": (b"text_delta", b"text"),
    "thinking": (b"thinking_delta", b"thinking"),
    "tool_use": (b"input_json_delta", b"partial_json"),
}


def _event(kind: str, fields: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def _usage(usage: Usage) -> Json:
    """Return the usage, in which cached tokens are counted apart."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_generated_tokens,
    }
