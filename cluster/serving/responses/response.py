"""The response of /v1/responses, complete or as a stream of events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from cluster.serving.openai.event_stream import EventResponse
from cluster.serving.responses.items import FunctionName
from cluster.serving.tools.turn_reader import TextDelta
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cluster.serving.http.endpoint import Json
    from cluster.serving.responses.responses_body import Echo
    from cluster.serving.servicer import GenerationCall, GenerationOutput, Usage
    from cluster.serving.text.text_stream import SequenceOutput
    from cluster.serving.tools.turn_reader import ToolCallDelta, TurnDelta
    from cluster.serving.tools.turns import Turns
    from pagedray.errors import PagedRayError

__all__ = ["ResponsesResponse"]

_encode = msgspec.json.Encoder().encode

_LARGE_BYTES = 2**14
_CALL_PREFIX = "call_"

_Kind = Literal["message", "reasoning", "function_call"]
_KINDS: Mapping[str, _Kind] = {"reasoning": "reasoning", "content": "message"}
_PREFIXES: Mapping[_Kind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_EVENTS: Mapping[_Kind, str] = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


@dataclass(slots=True)
class _Item:
    """An item of the output: a message, reasoning, or a tool call with its arguments."""

    kind: _Kind
    id: str
    call_id: str | None = None
    function: FunctionName | None = None
    """The function of a tool call."""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self, text: str) -> Json:
        """Return the item's content with this text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def as_json(self, status: str) -> Json:
        written: Json = {"id": self.id, "type": self.kind, "status": status}
        if self.function is not None:
            if self.function.namespace is not None:
                written["namespace"] = self.function.namespace
            name = self.function.name
            return written | {"call_id": self.call_id, "name": name, "arguments": self.text}
        content = [] if status == "in_progress" else [self.part(self.text)]
        if self.kind == "reasoning":
            return written | {"summary": [], "content": content, "encrypted_content": None}
        return written | {"role": "assistant", "content": content}


class ResponsesResponse(EventResponse):
    """The response to one call."""

    def __init__(
        self,
        generation: GenerationCall,
        turns: Turns,
        *,
        model: str,
        created_s: int,
        echo: Echo,
        response_id: str,
        names: Mapping[str, FunctionName],
        keep: Callable[[Sequence[Json], bytes], None] | None = None,
    ) -> None:
        """`echo` is the repeated part of the request.

        `keep` stores output and JSON of the complete response. `names` are the functions in
        namespaces, by the names that the model knows.
        """
        super().__init__(generation, turns)
        self._names = names
        self._keep = keep
        self._repeated = echo.large
        self._head: Json = {
            "id": response_id,
            "object": "response",
            "created_at": created_s,
            "model": model,
            "error": None,
            **echo.fields,
        }
        self._items: list[_Item] = []
        self._is_open = False
        """Whether the last item is being written."""

    def _collect(self, delta: TurnDelta) -> None:
        self._add(delta, None)

    def _encode_events(self, output: GenerationOutput) -> bytes | tuple[bytes, ...]:
        events: list[bytes] = []
        is_repeating = not self._num_events
        if not self._num_events:
            started = self._parts({"status": "in_progress", "output": [], "usage": None})
            self._write_response("created", started, events)
            self._write_response("in_progress", started, events)
        for sequence in output.sequences:
            if sequence.failure is not None:
                continue
            self._add(self._delta(sequence), events)
            if sequence.finish_reason is not None:
                self._end_items(_status(sequence), events)
                ended = self._encode_response(sequence, output.usage)
                self._write_response(_status(sequence), ended, events)
                is_repeating = True
        # The response repeats this part, which takes long to copy.
        is_large = is_repeating and len(self._repeated) > _LARGE_BYTES
        return tuple(events) if is_large else b"".join(events)

    def _add(self, delta: TurnDelta, events: list[bytes] | None) -> None:
        """Add the turn's progress to the items, with its events."""
        for part in delta.parts:
            if isinstance(part, TextDelta):
                kind = _KINDS[part.kind]
                if not self._is_open or self._items[-1].kind != kind:
                    self._begin_item(kind, events)
                self._add_text(part.text, events)
                continue
            if part.name is not None:
                function = self._names.get(part.name) or FunctionName(part.name)
                self._begin_item(
                    "function_call", events, call_id=self._call_id(part), function=function
                )
            if part.arguments:
                self._add_text(part.arguments, events)

    def _call_id(self, call: ToolCallDelta) -> str | None:
        """Return the id of a call, which is the same in a replica that continues the response."""
        continuation = self._generation.continuation
        if continuation is None or call.id is None:
            return call.id
        secret = continuation.secret(f"call {call.index}")
        prefix = _CALL_PREFIX if call.id.startswith(_CALL_PREFIX) else ""
        return prefix + secret[: len(call.id) - len(prefix)]

    def _add_text(self, text: str, events: list[bytes] | None) -> None:
        item = self._items[-1]
        item.pieces.append(text)
        fields: Json = {**self._place(), "delta": text}
        if item.kind == "message":
            fields["logprobs"] = []
        self._write(f"{_EVENTS[item.kind]}.delta", fields, events)

    def _begin_item(
        self,
        kind: _Kind,
        events: list[bytes] | None,
        *,
        call_id: str | None = None,
        function: FunctionName | None = None,
    ) -> None:
        self._end_item("completed", events)
        item_id = f"{_PREFIXES[kind]}_{self._generation.id}_{len(self._items)}"
        item = _Item(kind, item_id, call_id, function)
        self._items.append(item)
        self._is_open = True
        fields: Json = {"output_index": len(self._items) - 1, "item": item.as_json("in_progress")}
        self._write("response.output_item.added", fields, events)
        if kind != "function_call":
            fields = {**self._place(), "part": item.part("")}
            self._write("response.content_part.added", fields, events)

    def _end_item(self, status: str, events: list[bytes] | None) -> None:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        ended = f"{_EVENTS[item.kind]}.done"
        if item.function is not None:
            fields = {**self._place(), "name": item.function.name, "arguments": item.text}
            self._write(ended, fields, events)
        else:
            fields = {**self._place(), "text": item.text}
            if item.kind == "message":
                fields["logprobs"] = []
            self._write(ended, fields, events)
            fields = {**self._place(), "part": item.part(item.text)}
            self._write("response.content_part.done", fields, events)
        fields = {"output_index": len(self._items) - 1, "item": item.as_json(status)}
        self._write("response.output_item.done", fields, events)

    def _end_items(self, status: str, events: list[bytes] | None) -> None:
        """End the output, which has an item even if it is empty."""
        if not self._items:
            self._begin_item("message", events)
        self._end_item(status, events)

    def _place(self) -> Json:
        """Return where the last item is, and its content if it is not a call."""
        item = self._items[-1]
        place: Json = {"item_id": item.id, "output_index": len(self._items) - 1}
        return place if item.kind == "function_call" else place | {"content_index": 0}

    def _write(self, kind: str, fields: Json, events: list[bytes] | None) -> None:
        """Add an event to the stream; a response that is not streamed has no events."""
        if events is None:
            return
        written = _encode({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), written))

    def _write_response(self, kind: str, parts: Sequence[bytes], events: list[bytes]) -> None:
        """Add an event with the response."""
        events.append(
            b'event: response.%b\ndata: {"type":"response.%b","sequence_number":%d,"response":'
            % (kind.encode(), kind.encode(), self._num_events)
        )
        events += parts
        events.append(b"}\n\n")
        self._num_events += 1

    def _parts(self, fields: Json) -> tuple[bytes, ...]:
        """Return the response in JSON."""
        return _encode(self._head | fields)[:-1] + b",", self._repeated, b"}"

    def _encode_response(self, last: SequenceOutput, usage: Usage) -> tuple[bytes, ...]:
        status = _status(last)
        self._end_items(status, None)
        items = [item.as_json("completed") for item in self._items[:-1]]
        items.append(self._items[-1].as_json(status))
        is_cut = last.finish_reason is FinishReason.LENGTH
        whole = self._parts(
            {
                "status": status,
                "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
                "output": items,
                "usage": self._usage(usage),
            }
        )
        # Before the client has it, who may continue it at once.
        if self._keep is not None and last.finish_reason is not FinishReason.ABORT:
            self._keep(items, b"".join(whole))
        return whole

    def _usage(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.num_generated_tokens,
            "output_tokens_details": {"reasoning_tokens": self._turns.num_reasoning_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
        }

    def _error_event(self, error: PagedRayError) -> bytes:
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
