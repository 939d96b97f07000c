"""The response of /v1/responses, complete or as a stream of events."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from cluster.serving.tools.turn_reader import TurnDelta
from pagedray.errors import InternalError, PagedRayError
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from cluster.serving.http.errors import Json
    from cluster.serving.memory.output_buffer import OutputBuffer
    from cluster.serving.servicer import GenerationCall, GenerationOutput, Usage
    from cluster.serving.text.text_stream import SequenceOutput
    from cluster.serving.tools.tool_choice import ToolUse

__all__ = ["ResponsesResponse"]

logger = logging.getLogger(__name__)

_OUTPUT_BYTES = 128
"""Memory of an output beside its content."""

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Item:
    """An item of the output: a message, or a tool call with its arguments."""

    id: str
    call_id: str | None = None
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def as_json(self, status: str) -> Json:
        if self.call_id is not None:
            return {
                "id": self.id,
                "type": "function_call",
                "status": status,
                "call_id": self.call_id,
                "name": self.name,
                "arguments": self.text,
            }
        content = [] if status == "in_progress" else [_part(self.text)]
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }


class ResponsesResponse:
    """The response to one call."""

    def __init__(
        self,
        generation: GenerationCall,
        tools: ToolUse,
        *,
        model: str,
        created_s: int,
        echoed: Mapping[str, object],
    ) -> None:
        """`echoed` are the parameters that it repeats."""
        self._generation = generation
        self._reader = tools.reader() if tools.is_read else None
        self._head: Json = {
            "id": f"resp_{generation.id}",
            "object": "response",
            "created_at": created_s,
            "model": model,
            "error": None,
            **echoed,
        }
        self._items: list[_Item] = []
        self._number = 0
        self._is_open = False
        """Whether the last item is being streamed."""

    async def complete(self, buffer: OutputBuffer) -> list[bytes]:
        """Return the response once it is complete. Raises PagedRayError.

        Its parts are counted in `buffer` while they are collected.
        """
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
                self._add(self._delta(last), None)
        assert usage is not None
        assert last is not None
        await asyncio.sleep(0)
        self._end_items(_status(last), None)
        return [_encode(self._whole(last, usage))]

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
        if not self._number:
            started = self._head | {"status": "in_progress", "output": [], "usage": None}
            self._write("response.created", {"response": started}, events)
            self._write("response.in_progress", {"response": started}, events)
        for sequence in output.sequences:
            if sequence.failure is not None:
                continue
            self._add(self._delta(sequence), events)
            if sequence.finish_reason is not None:
                self._end_items(_status(sequence), events)
                ended = self._whole(sequence, output.usage)
                self._write(f"response.{ended['status']}", {"response": ended}, events)
        return b"".join(events)

    def _add(self, delta: TurnDelta, events: list[bytes] | None) -> None:
        """Add what the turn gained to the items, and its events."""
        if delta.content:
            if not self._is_open or self._items[-1].call_id is not None:
                self._begin_item(_Item(self._id_of("msg")), events)
            self._items[-1].pieces.append(delta.content)
            fields = {**self._place_of_text(), "delta": delta.content, "logprobs": []}
            self._write("response.output_text.delta", fields, events)
        for call in delta.calls:
            if call.name is not None:
                self._begin_item(_Item(self._id_of("fc"), call.id, call.name), events)
            if call.arguments:
                self._items[-1].pieces.append(call.arguments)
                fields = {**self._place(), "delta": call.arguments}
                self._write("response.function_call_arguments.delta", fields, events)

    def _begin_item(self, item: _Item, events: list[bytes] | None) -> None:
        self._end_item("completed", events)
        self._items.append(item)
        self._is_open = True
        fields: Json = {"output_index": len(self._items) - 1, "item": item.as_json("in_progress")}
        self._write("response.output_item.added", fields, events)
        if item.call_id is None:
            fields = {**self._place_of_text(), "part": _part("")}
            self._write("response.content_part.added", fields, events)

    def _end_item(self, status: str, events: list[bytes] | None) -> None:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        if item.call_id is None:
            fields = {**self._place_of_text(), "text": item.text, "logprobs": []}
            self._write("response.output_text.done", fields, events)
            fields = {**self._place_of_text(), "part": _part(item.text)}
            self._write("response.content_part.done", fields, events)
        else:
            fields = {**self._place(), "name": item.name, "arguments": item.text}
            self._write("response.function_call_arguments.done", fields, events)
        fields = {"output_index": len(self._items) - 1, "item": item.as_json(status)}
        self._write("response.output_item.done", fields, events)

    def _end_items(self, status: str, events: list[bytes] | None) -> None:
        """End the output, which has an item even if it is empty."""
        if not self._items:
            self._begin_item(_Item(self._id_of("msg")), events)
        self._end_item(status, events)

    def _place(self) -> Json:
        return {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}

    def _place_of_text(self) -> Json:
        return {**self._place(), "content_index": 0}

    def _id_of(self, prefix: str) -> str:
        return f"{prefix}_{self._generation.id}_{len(self._items)}"

    def _write(self, kind: str, fields: Json, events: list[bytes] | None) -> None:
        """Add an event to those of a stream; a response that is not streamed has none."""
        if events is None:
            return
        written = _encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), written))

    def _delta(self, sequence: SequenceOutput) -> TurnDelta:
        if self._reader is None:
            return TurnDelta(content=sequence.text)
        read = self._reader.read_piece(sequence.text)
        if sequence.finish_reason is None:
            return read
        rest = self._reader.flush()
        return TurnDelta(content=read.content + rest.content, calls=[*read.calls, *rest.calls])

    def _whole(self, last: SequenceOutput, usage: Usage) -> Json:
        status = _status(last)
        items = [item.as_json("completed") for item in self._items[:-1]]
        items.append(self._items[-1].as_json(status))
        is_cut = last.finish_reason is FinishReason.LENGTH
        return self._head | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items,
            "usage": _usage(usage),
        }

    def _error(self, error: Exception) -> bytes:
        """End the call, and return the event for its client, who sees no details of a defect."""
        if not isinstance(error, PagedRayError):
            logger.error("Call %s failed.", self._generation.id, exc_info=error)
            error = InternalError()
        self._generation.close(error)
        events: list[bytes] = []
        fields: Json = {
            "code": error.openai_code or error.openai_type,
            "message": str(error),
            "param": getattr(error, "param", None),
        }
        self._write("error", fields, events)
        return events[0]


def _status(last: SequenceOutput) -> str:
    return "completed" if last.finish_reason is FinishReason.STOP else "incomplete"


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.num_generated_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
    }
