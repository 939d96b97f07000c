"""The format of responses of /v1/chat/completions: messages, with or without tool calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from cluster.serving.openai.response_choice import TextOffsets, finite
from cluster.serving.text.text_stream import IncrementalDetokenizer
from cluster.serving.tools.turn_reader import TurnDelta
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from cluster.serving.http.endpoint import Json
    from cluster.serving.openai.response_choice import (
        CompleteChoice,
        ResponseChoice,
        ResponseOptions,
        StreamedChoice,
    )
    from cluster.serving.servicer import GenerationCall, Usage
    from cluster.serving.text.text_stream import SequenceOutput, TokenBytes
    from cluster.serving.tools.turn_reader import ToolCallDelta
    from cluster.serving.tools.turns import Turn, Turns
    from pagedray.batch import TokenLogprobs

__all__ = ["ChatFormat", "ChoiceFormat", "CompletionFormat"]


class ChoiceFormat(ABC):
    """How one endpoint writes the response to one call."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    bare_begin: ClassVar[bytes]
    """The JSON between a choice's index and its text."""
    bare_end: ClassVar[bytes]
    has_prompt_in_choice: ClassVar[bool]
    """Whether choices contain the data of their prompt, since there may be several prompts."""

    def __init__(
        self, generation: GenerationCall, token_bytes: TokenBytes, options: ResponseOptions
    ) -> None:
        self.generation = generation
        self.token_bytes = token_bytes
        self.options = options

    def head(self, kind: str) -> Json:
        """Return the fields of an object of this kind that do not depend on the output."""
        return {
            "id": f"{self.id_prefix}-{self.generation.id}",
            "object": kind,
            "created": self.options.created_s,
            "model": self.options.model,
        }

    def usage(self, usage: Usage) -> Json:
        """Return the numbers of tokens."""
        return {
            "prompt_tokens": usage.num_prompt_tokens,
            "completion_tokens": usage.num_generated_tokens,
            "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        }

    def prompt_ids(self, prompt_index: int) -> Json:
        """Return the token ids of a prompt."""
        return {"prompt_token_ids": self.generation.prompts[prompt_index]}

    def begin_turn(self) -> Turn | None:
        """Return the reader of reasoning and tool calls in a choice, or None without either."""
        return None

    def reason(self, sequence: SequenceOutput, choice: ResponseChoice) -> str | None:
        """Return why a choice has ended, or None if it has not."""
        reason = sequence.finish_reason
        # OpenAI defines no such reason; an event with the error follows.
        return None if reason is None or reason is FinishReason.ERROR else reason.value

    def logprobs(self, output: SequenceOutput, choice: ResponseChoice) -> Json | None:
        """Return the log-probabilities of an output's tokens, or None if they are not requested."""
        if not self.options.has_logprobs:
            return None
        tokens = zip(output.token_ids, output.logprobs, strict=True)
        return self.token_logprobs(list(tokens), choice)

    def token_text(self, token_id: int) -> str:
        """Return a token as log-probabilities name it."""
        if self.options.names_tokens_by_id:
            return f"token_id:{token_id}"
        return self.token_bytes.text_of(token_id)

    def add_content(self, sequence: SequenceOutput, choice: CompleteChoice) -> None:
        """Add an output to a complete choice."""
        choice.texts.append(sequence.text)

    @abstractmethod
    def content(self, choice: CompleteChoice) -> Json:
        """Return the content of a complete choice."""

    @abstractmethod
    def delta(self, sequence: SequenceOutput, choice: StreamedChoice) -> Json:
        """Return the delta of a streamed choice, which may be empty."""

    @abstractmethod
    def wrapped(self, delta: Json) -> Json:
        """Return the content of a streamed choice with this delta."""

    @abstractmethod
    def token_logprobs(
        self, tokens: list[tuple[int, TokenLogprobs]], choice: ResponseChoice
    ) -> Json:
        """Return log-probabilities in the endpoint's format."""


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


class ChatFormat(ChoiceFormat):
    """The format of /v1/chat/completions."""

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
        turns: Turns,
        *,
        has_functions: bool,
    ) -> None:
        """With `has_functions`, the call of a choice is written as `function_call`."""
        super().__init__(generation, token_bytes, options)
        self._turns = turns
        self._has_functions = has_functions
        self._reasoning: dict[int, list[str]] = {}
        """The reasoning of each choice of a complete response."""
        self._calls: dict[int, dict[int, _WholeCall]] = {}
        """The calls of each complete choice, by their indices in the turn."""

    def begin_turn(self) -> Turn | None:
        return self._turns.begin_turn() if self._turns.are_read else None

    def usage(self, usage: Usage) -> Json:
        written = super().usage(usage)
        details: Json = {}
        if self._turns.has_reasoning:
            details["reasoning_tokens"] = self._turns.num_reasoning_tokens
        if self.generation.has_prediction:
            details["accepted_prediction_tokens"] = usage.num_accepted_tokens
            details["rejected_prediction_tokens"] = usage.num_refused_tokens
        if details:
            written["completion_tokens_details"] = details
        return written

    def reason(self, sequence: SequenceOutput, choice: ResponseChoice) -> str | None:
        reason = super().reason(sequence, choice)
        has_calls = choice.turn is not None and choice.turn.has_calls
        if reason == "stop" and has_calls and not self._turns.tools.ends_as_text:
            return "function_call" if self._has_functions else "tool_calls"
        return reason

    def add_content(self, sequence: SequenceOutput, choice: CompleteChoice) -> None:
        if choice.turn is None:
            choice.texts.append(sequence.text)
        else:
            # Reading all of it at the end would hold the event loop.
            self._add_turn(choice.turn.read(sequence), choice)

    def content(self, choice: CompleteChoice) -> Json:
        calls = self._calls.pop(choice.index, {})
        message: Json = {"role": "assistant", "content": "".join(choice.texts), "refusal": None}
        reasoning = "".join(self._reasoning.pop(choice.index, ()))
        if reasoning:
            message |= _both_names(reasoning)
        if calls:
            written = [call.as_json() for call in calls.values()]
            if self._has_functions:
                message["function_call"] = written[0]["function"]
            else:
                message["tool_calls"] = written
            message["content"] = message["content"] or None
        return {"message": message}

    def _add_turn(self, read: TurnDelta, choice: CompleteChoice) -> None:
        choice.texts.append(read.content)
        if read.reasoning:
            self._reasoning.setdefault(choice.index, []).append(read.reasoning)
        calls = self._calls.setdefault(choice.index, {})
        for delta in read.calls:
            if delta.name is not None:
                assert delta.id is not None
                calls[delta.index] = _WholeCall(delta.id, delta.name)
            calls[delta.index].arguments.append(delta.arguments)

    def delta(self, sequence: SequenceOutput, choice: StreamedChoice) -> Json:
        if choice.turn is None:
            read = TurnDelta(content=sequence.text)
        else:
            read = choice.turn.read(sequence)
        delta: Json = {"role": "assistant"} if choice.is_new else {}
        if read.reasoning:
            delta |= _both_names(read.reasoning)
        if read.content or (choice.is_new and not (read.calls or read.reasoning)):
            delta["content"] = read.content
        if read.calls and self._has_functions:
            delta["function_call"] = _function_delta(read.calls)
        elif read.calls:
            delta["tool_calls"] = [_call_delta(call) for call in read.calls]
        return delta

    def wrapped(self, delta: Json) -> Json:
        return {"delta": delta}

    def token_logprobs(
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
            "token": self.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(self.token_bytes.bytes_of(token_id)),
        }


def _both_names(reasoning: str) -> Json:
    """Return reasoning by the names that clients of DeepSeek and vLLM, and of OpenRouter, read."""
    return {"reasoning_content": reasoning, "reasoning": reasoning}


def _call_delta(call: ToolCallDelta) -> Json:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _function_delta(calls: list[ToolCallDelta]) -> Json:
    """Return the sum of several pieces of the only call."""
    name = calls[0].name
    delta: Json = {} if name is None else {"name": name}
    return {**delta, "arguments": "".join(call.arguments for call in calls)}


class CompletionFormat(ChoiceFormat):
    """The format of /v1/completions."""

    id_prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"
    bare_begin = b',"text":'
    bare_end = b""
    has_prompt_in_choice = True

    def content(self, choice: CompleteChoice) -> Json:
        return {"text": "".join(choice.texts)}

    def delta(self, sequence: SequenceOutput, choice: StreamedChoice) -> Json:
        return {"text": sequence.text} if sequence.text else {}

    def wrapped(self, delta: Json) -> Json:
        return delta or {"text": ""}

    def token_logprobs(
        self, tokens: list[tuple[int, TokenLogprobs]], choice: ResponseChoice
    ) -> Json:
        token_ids = [token_id for token_id, _ in tokens]
        texts = [self.token_text(token_id) for token_id in token_ids]
        if choice.offsets is None:
            choice.offsets = self._offsets(choice.index // self.options.num_per_prompt)
        return {
            "tokens": texts,
            "token_logprobs": [finite(logprobs.chosen) for _, logprobs in tokens],
            "top_logprobs": [
                self._top(text, logprobs) for text, (_, logprobs) in zip(texts, tokens, strict=True)
            ],
            "text_offset": choice.offsets.of_tokens(token_ids),
        }

    def _offsets(self, prompt_index: int) -> TextOffsets:
        """Return the offsets of the text generated for a prompt."""
        detokenizer = IncrementalDetokenizer.after(
            self.generation.prompts[prompt_index],
            self.token_bytes,
            skips_special_tokens=self.options.skips_special_tokens,
        )
        echoed = self.options.echoed_texts
        text = echoed[prompt_index] if echoed else ""
        return TextOffsets(self.token_bytes, detokenizer, text=text)

    def _top(self, text: str, logprobs: TokenLogprobs) -> Json:
        top: Json = {
            self.token_text(token_id): finite(value)
            for token_id, value in zip(logprobs.token_ids, logprobs.logprobs, strict=True)
        }
        # The sampled token is included even if it is not among the top tokens.
        top.setdefault(text, finite(logprobs.chosen))
        return top
