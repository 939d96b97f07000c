"""The response of /v1/messages: an assistant message, complete or as a stream of events."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from cluster.serving.anthropic.errors import anthropic_error
from cluster.serving.http.errors import Json, refusal_body
from cluster.serving.tools.turn_reader import TurnDelta
from pagedray.errors import InternalError, PagedRayError
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from cluster.serving.memory.output_buffer import OutputBuffer
    from cluster.serving.servicer import GenerationCall, GenerationOutput, Usage
    from cluster.serving.text.text_stream import SequenceOutput
    from cluster.serving.tools.tool_choice import ToolUse

__all__ = ["MessagesResponse"]

logger = logging.getLogger(__name__)

_OUTPUT_BYTES = 128
"""Memory of an output beside its content."""
_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.ABORT: "pause_turn",
}

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Block:
    """A block of the message: text, or a tool call with its arguments."""

    id: str | None = None
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    def as_json(self) -> Json:
        text = "".join(self.pieces)
        if self.id is None:
            return {"type": "text", "text": text, "citations": None}
        try:
            given = msgspec.json.decode(text or "{}")
        except (msgspec.DecodeError, RecursionError):
            # The output ended inside the call, which the stop reason says.
            given = {}
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": given}


class MessagesResponse:
    """The response to one call."""

    def __init__(self, generation: GenerationCall, tools: ToolUse, *, model: str) -> None:
        self._generation = generation
        self._model = model
        self._reader = tools.reader() if tools.is_read else None
        self._is_new = True
        self._index = -1
        """Of the block that is being written."""
        self._is_text_open = False
        self._is_call_open = False
        self._text_begin = b""
        """The start of an event with text of the open block."""

    async def complete(self, buffer: OutputBuffer) -> list[bytes]:
        """Return the response once it is complete. Raises PagedRayError.

        Its parts are counted in `buffer` while they are collected.
        """
        blocks: list[_Block] = []
        usage = last = None
        async with aclosing(self._generation.outputs()) as outputs:
            async for output in outputs:
                usage = output.usage
                (last,) = output.sequences
                error = last.failure
                try:
                    if error is not None:
                        raise error
                    buffer.collect(_OUTPUT_BYTES + len(last.text))
                except PagedRayError as refusal:
                    self._generation.close(refusal)
                    raise
                _add(self._delta(last), blocks)
        assert usage is not None
        assert last is not None
        await asyncio.sleep(0)
        message = self._message([block.as_json() for block in blocks], usage)
        return [_encode(message | self._end(last))]

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield server-sent events; an error becomes the last one."""
        if self._generation.replayed is not None:
            # The client has received these events.
            self._written(self._generation.replayed)
        try:
            async with aclosing(self._generation.outputs()) as outputs:
                async for output in outputs:
                    written = self._written(output)
                    if written:
                        yield written
                    for sequence in output.sequences:
                        if (error := sequence.failure) is not None:
                            raise error
        except Exception as error:
            yield self._error(error)

    def _written(self, output: GenerationOutput) -> bytes:
        events: list[bytes] = []
        if self._is_new:
            self._is_new = False
            started = self._message([], output.usage)
            started["usage"] = _usage(output.usage) | {"output_tokens": 0}
            events.append(_event("message_start", {"message": started}))
        for sequence in output.sequences:
            if self._reader is None and self._is_text_open and sequence.finish_reason is None:
                # The fast path of most tokens.
                if sequence.text:
                    events.append(self._text_begin + _encode(sequence.text) + b"}}\n\n")
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
        if delta.content:
            if not self._is_text_open:
                self._open_block({"type": "text", "text": ""}, events)
                self._is_text_open = True
            events.append(self._text_begin + _encode(delta.content) + b"}}\n\n")
        for call in delta.calls:
            if call.name is not None:
                started: Json = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                self._open_block(started, events)
                self._is_call_open = True
            if call.arguments:
                piece = {"type": "input_json_delta", "partial_json": call.arguments}
                fields = {"index": self._index, "delta": piece}
                events.append(_event("content_block_delta", fields))

    def _open_block(self, block: Json, events: list[bytes]) -> None:
        self._close_block(events)
        self._index += 1
        self._text_begin = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"text_delta","text":' % self._index
        )
        fields = {"index": self._index, "content_block": block}
        events.append(_event("content_block_start", fields))

    def _close_block(self, events: list[bytes]) -> None:
        if self._is_text_open or self._is_call_open:
            events.append(_event("content_block_stop", {"index": self._index}))
        self._is_text_open = self._is_call_open = False

    def _delta(self, sequence: SequenceOutput) -> TurnDelta:
        if self._reader is None:
            return TurnDelta(content=sequence.text)
        read = self._reader.read_piece(sequence.text)
        if sequence.finish_reason is None:
            return read
        rest = self._reader.flush()
        return TurnDelta(content=read.content + rest.content, calls=[*read.calls, *rest.calls])

    def _end(self, sequence: SequenceOutput) -> Json:
        assert sequence.finish_reason is not None
        reason = _REASONS[sequence.finish_reason]
        stop = sequence.stop_reason if isinstance(sequence.stop_reason, str) else None
        if stop is not None:
            reason = "stop_sequence"
        elif reason == "end_turn" and self._reader is not None and self._reader.num_calls:
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

    def _error(self, error: Exception) -> bytes:
        """End the call, and return the event for its client, who sees no details of a defect."""
        if not isinstance(error, PagedRayError):
            logger.error("Call %s failed.", self._generation.id, exc_info=error)
            error = InternalError()
        self._generation.close(error)
        written = _encode(anthropic_error(refusal_body(error), error.http_status))
        return b"event: error\ndata: " + written + b"\n\n"


def _add(delta: TurnDelta, blocks: list[_Block]) -> None:
    """Add what a turn gained to its blocks."""
    if delta.content:
        if not blocks or blocks[-1].id is not None:
            blocks.append(_Block())
        blocks[-1].pieces.append(delta.content)
    for call in delta.calls:
        if call.name is not None:
            blocks.append(_Block(call.id, call.name))
        blocks[-1].pieces.append(call.arguments)


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
