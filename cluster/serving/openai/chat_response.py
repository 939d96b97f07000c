"""The response of /v1/chat/completions: an assistant message, with or without tool calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.serving.openai.generation_response import (
    GenerationResponse,
    ResponseChoice,
    ResponseOptions,
    finite,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.serving.http.errors import Json
    from cluster.serving.servicer import GenerationCall
    from cluster.serving.text.text_stream import SequenceOutput
    from cluster.serving.text.token_bytes import TokenBytes
    from cluster.serving.tools.tool_choice import ToolUse
    from cluster.serving.tools.turn_reader import ToolCallDelta, TurnReader
    from pagedray.batch import TokenLogprobs

__all__ = ["ChatCompletionResponse"]


class ChatCompletionResponse(GenerationResponse):
    """A response of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    bare_begin = b',"delta":{"content":'
    bare_end = b"}"

    def __init__(
        self,
        generation: GenerationCall,
        token_bytes: TokenBytes,
        options: ResponseOptions,
        tools: ToolUse,
    ) -> None:
        super().__init__(generation, token_bytes, options)
        self._tools = tools

    def _reader(self) -> TurnReader | None:
        return self._tools.reader() if self._tools.is_read else None

    def _reason(self, sequence: SequenceOutput, choice: ResponseChoice) -> str | None:
        reason = super()._reason(sequence, choice)
        has_calls = choice.reader is not None and choice.reader.num_calls
        if reason == "stop" and has_calls and not self._tools.ends_as_text:
            return "tool_calls"
        return reason

    def _content(self, text: str, choice: ResponseChoice) -> Json:
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if choice.reader is not None:
            read, rest = choice.reader.read_piece(text), choice.reader.flush()
            message["content"] = read.content + rest.content
            calls = _whole_calls([*read.calls, *rest.calls])
            if calls:
                message["tool_calls"] = calls
                message["content"] = message["content"] or None
        return {"message": message}

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
            "token": self._token_bytes.text_of(token_id),
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


def _whole_calls(deltas: Sequence[ToolCallDelta]) -> list[Json]:
    arguments: dict[int, str] = {}
    for delta in deltas:
        arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
    return [
        {
            "id": delta.id,
            "type": "function",
            "function": {"name": delta.name, "arguments": arguments[delta.index]},
        }
        for delta in deltas
        if delta.name is not None
    ]
