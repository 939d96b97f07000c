"""The response of /v1/chat/completions: an assistant message, with or without tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.serving.openai.generation_response import (
    GenerationResponse,
    ResponseChoice,
    ResponseOptions,
)
from cluster.serving.openai.prompt_reports import finite

if TYPE_CHECKING:
    from cluster.serving.http.errors import Json
    from cluster.serving.servicer import GenerationCall
    from cluster.serving.text.text_stream import SequenceOutput
    from cluster.serving.text.token_bytes import TokenBytes
    from cluster.serving.tools.tool_choice import ToolUse
    from cluster.serving.tools.turn_reader import ToolCallDelta, TurnDelta, TurnReader
    from pagedray.batch import TokenLogprobs

__all__ = ["ChatCompletionResponse"]


@dataclass(slots=True)
class _WholeCall:
    """A tool call of a complete choice."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def as_json(self) -> Json:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": "".join(self.arguments)},
        }


class ChatCompletionResponse(GenerationResponse):
    """A response of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    bare_begin = b',"delta":{"content":'
    bare_end = b"}"
    has_prompt_in_choice = False

    def __init__(
        self,
        generation: GenerationCall,
        token_bytes: TokenBytes,
        options: ResponseOptions,
        tools: ToolUse,
    ) -> None:
        super().__init__(generation, token_bytes, options)
        self._tools = tools
        self._calls: dict[int, dict[int, _WholeCall]] = {}
        """The calls of each complete choice, by their indices in the turn."""

    def _reader(self) -> TurnReader | None:
        return self._tools.reader() if self._tools.is_read else None

    def _reason(self, sequence: SequenceOutput, choice: ResponseChoice) -> str | None:
        reason = super()._reason(sequence, choice)
        has_calls = choice.reader is not None and choice.reader.num_calls
        if reason == "stop" and has_calls and not self._tools.ends_as_text:
            return "tool_calls"
        return reason

    def _add_content(self, text: str, choice: ResponseChoice) -> None:
        if choice.reader is None:
            choice.texts.append(text)
        else:
            # Reading all of it at the end would hold the event loop.
            self._add_turn(choice.reader.read_piece(text), choice)

    def _content(self, choice: ResponseChoice) -> Json:
        if choice.reader is not None:
            self._add_turn(choice.reader.flush(), choice)
        calls = self._calls.pop(choice.index, {})
        message: Json = {"role": "assistant", "content": "".join(choice.texts), "refusal": None}
        if calls:
            message["tool_calls"] = [call.as_json() for call in calls.values()]
            message["content"] = message["content"] or None
        return {"message": message}

    def _add_turn(self, read: TurnDelta, choice: ResponseChoice) -> None:
        choice.texts.append(read.content)
        calls = self._calls.setdefault(choice.index, {})
        for delta in read.calls:
            if delta.name is not None:
                assert delta.id is not None
                calls[delta.index] = _WholeCall(delta.id, delta.name)
            calls[delta.index].arguments.append(delta.arguments)

    def _delta(self, sequence: SequenceOutput, choice: ResponseChoice) -> Json:
        content = sequence.text
        calls: tuple[ToolCallDelta, ...] = ()
        if choice.reader is not None:
            content, calls = _read(choice.reader, sequence)
        delta: Json = {"role": "assistant"} if choice.is_new else {}
        if content or (choice.is_new and not calls):
            delta["content"] = content
        if calls:
            delta["tool_calls"] = [_call_delta(call) for call in calls]
        return delta

    def _wrapped(self, delta: Json) -> Json:
        return {"delta": delta}

    def _token_logprobs(
        self, tokens: list[tuple[int, TokenLogprobs]], choice: ResponseChoice
    ) -> Json:
        return {"content": [self._entry(*token) for token in tokens], "refusal": None}

    def _entry(self, token_id: int, logprobs: TokenLogprobs) -> Json:
        top = zip(logprobs.token_ids, logprobs.logprobs, strict=True)
        return {
            **self._token(token_id, logprobs.chosen),
            "top_logprobs": [self._token(other, value) for other, value in top],
        }

    def _token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._token_bytes.bytes_of(token_id)),
        }


def _read(reader: TurnReader, sequence: SequenceOutput) -> tuple[str, tuple[ToolCallDelta, ...]]:
    read = reader.read_piece(sequence.text)
    if sequence.finish_reason is None:
        return read.content, tuple(read.calls)
    rest = reader.flush()
    return read.content + rest.content, (*read.calls, *rest.calls)


def _call_delta(call: ToolCallDelta) -> Json:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
