"""What OpenAI clients are sent: whole answers, and the chunks of streamed ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import msgspec

from cluster.serving.text_stream import SequenceOutput
from pagedray.errors import PagedRayError
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from cluster.serving.servicer import Generation, GenerationOutput, Usage
    from cluster.serving.token_bytes import TokenBytes
    from pagedray.batch import TokenLogprobs

__all__ = ["Answer", "ChatAnswer", "CompletionAnswer", "error_body"]

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""

Json = dict[str, object]
_encode = msgspec.json.Encoder().encode


def error_body(message: str, kind: str, param: str | None = None) -> Json:
    """Return an error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


@dataclass(slots=True)
class _Choice:
    """One sequence of a whole answer, while it grows."""

    texts: list[str] = field(default_factory=list)
    outputs: list[SequenceOutput] = field(default_factory=list)
    num_characters: int = 0
    """Of the tokens whose log-probabilities were written."""


class Answer(ABC):
    """The answer to one call, in the words of one endpoint."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self,
        generation: Generation,
        token_bytes: TokenBytes,
        *,
        model: str,
        created_s: int,
        num_per_prompt: int,
        has_logprobs: bool,
        includes_usage: bool,
    ) -> None:
        self._generation = generation
        self._token_bytes = token_bytes
        self._num_per_prompt = num_per_prompt
        self._has_logprobs = has_logprobs
        self._includes_usage = includes_usage
        self._head: Json = {
            "id": f"{self.id_prefix}-{generation.id}",
            "object": self.kind,
            "created": created_s,
            "model": model,
        }
        self._choices: dict[int, _Choice] = {}

    async def whole(self) -> bytes:
        """Return the answer when it is finished. Raises PagedRayError."""
        usage: Usage | None = None
        async with aclosing(self._generation.outputs()) as outputs:
            async for output in outputs:
                usage = output.usage
                for sequence in output.sequences:
                    _check_failed(sequence)
                    choice = self._choice(sequence)
                    choice.texts.append(sequence.text)
                    choice.outputs.append(sequence)
        assert usage is not None
        choices = [self._whole_choice(index) for index in sorted(self._choices)]
        return _encode({**self._head, "choices": choices, "usage": _usage(usage)})

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield server-sent events; an error after the first becomes the last."""
        self._head["object"] = self.chunk_kind
        try:
            async with aclosing(self._generation.outputs()) as outputs:
                async for output in outputs:
                    written = b"".join([_event(chunk) for chunk in self._chunks(output)])
                    if written:
                        yield written
        except PagedRayError as error:
            yield _event(error_body(str(error), error.openai_type))
        yield b"data: [DONE]\n\n"

    def _chunks(self, output: GenerationOutput) -> Iterator[Json]:
        for sequence in output.sequences:
            _check_failed(sequence)
            is_new = self._index(sequence) not in self._choices
            choice = self._choice(sequence)
            # A chunk without text says something only at the start, at the end, or with
            # log-probabilities.
            if sequence.text or is_new or sequence.finish_reason or sequence.logprobs:
                yield self._chunk(self._chunk_choice(sequence, choice, is_new=is_new))
        if output.is_last and self._includes_usage:
            yield {**self._head, "choices": [], "usage": _usage(output.usage)}

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._head, "choices": [choice]}
        if self._includes_usage:
            chunk["usage"] = None
        return chunk

    def _index(self, sequence: SequenceOutput) -> int:
        return sequence.prompt_index * self._num_per_prompt + sequence.index

    def _choice(self, sequence: SequenceOutput) -> _Choice:
        return self._choices.setdefault(self._index(sequence), _Choice())

    def _whole_choice(self, index: int) -> Json:
        choice = self._choices[index]
        last = choice.outputs[-1]
        return {
            "index": index,
            **self._content("".join(choice.texts)),
            "logprobs": self._logprobs(choice.outputs, choice),
            "finish_reason": _reason(last),
            "stop_reason": last.stop_reason,
        }

    def _chunk_choice(self, sequence: SequenceOutput, choice: _Choice, *, is_new: bool) -> Json:
        return {
            "index": self._index(sequence),
            **self._delta(sequence.text, is_new=is_new),
            "logprobs": self._logprobs([sequence], choice),
            "finish_reason": _reason(sequence),
            "stop_reason": sequence.stop_reason,
        }

    def _logprobs(self, outputs: list[SequenceOutput], choice: _Choice) -> Json | None:
        if not self._has_logprobs:
            return None
        return self._token_logprobs(
            [
                (token_id, logprobs)
                for output in outputs
                for token_id, logprobs in zip(output.token_ids, output.logprobs, strict=True)
            ],
            choice,
        )

    @abstractmethod
    def _content(self, text: str) -> Json:
        """Return the part of a whole choice that holds its text."""

    @abstractmethod
    def _delta(self, text: str, *, is_new: bool) -> Json:
        """Return the part of a streamed choice that holds its text."""

    @abstractmethod
    def _token_logprobs(self, tokens: list[tuple[int, TokenLogprobs]], choice: _Choice) -> Json:
        """Return log-probabilities in the endpoint's shape."""


class CompletionAnswer(Answer):
    """An answer of /v1/completions."""

    id_prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def _content(self, text: str) -> Json:
        return {"text": text}

    def _delta(self, text: str, *, is_new: bool) -> Json:
        return {"text": text}

    def _token_logprobs(self, tokens: list[tuple[int, TokenLogprobs]], choice: _Choice) -> Json:
        texts = [self._token_bytes.text_of(token_id) for token_id, _ in tokens]
        offsets = []
        for text in texts:
            offsets.append(choice.num_characters)
            choice.num_characters += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(logprobs.chosen) for _, logprobs in tokens],
            "top_logprobs": [
                self._top(text, logprobs) for text, (_, logprobs) in zip(texts, tokens, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, text: str, logprobs: TokenLogprobs) -> Json:
        top: Json = {
            self._token_bytes.text_of(token_id): _finite(value)
            for token_id, value in zip(logprobs.token_ids, logprobs.logprobs, strict=True)
        }
        # The chosen token is there even if it is not among the likeliest.
        top.setdefault(text, _finite(logprobs.chosen))
        return top


class ChatAnswer(Answer):
    """An answer of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def _content(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str, *, is_new: bool) -> Json:
        if is_new:
            return {"delta": {"role": "assistant", "content": text}}
        return {"delta": {"content": text} if text else {}}

    def _token_logprobs(self, tokens: list[tuple[int, TokenLogprobs]], choice: _Choice) -> Json:
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
            "logprob": _finite(logprob),
            "bytes": list(self._token_bytes.of(token_id)),
        }


def _event(content: Json) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"


def _check_failed(sequence: SequenceOutput) -> None:
    if sequence.finish_reason is FinishReason.ERROR:
        raise PagedRayError("The engine could not compute the next token.")


def _reason(sequence: SequenceOutput) -> str | None:
    return None if sequence.finish_reason is None else sequence.finish_reason.value


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_generated_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
