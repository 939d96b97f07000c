"""The result of a prompt, and its collection from events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.serving.text.stop_strings import StopStrings
from cluster.serving.text.text_stream import SequenceOutput, TextStream
from pagedray.batch import PromptToken, TokenLogprobs
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.scheduling.event import TokenEvent
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.request import Request

__all__ = ["Collector", "Completion", "Generation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished completion of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """Includes the end-of-sequence or stop token."""
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Empty, or one for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A prompt and its completions."""

    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    prompt_logprobs: tuple[PromptToken | None, ...] = ()
    """Empty, or one for each token of the prompt; the first has none, since nothing precedes it."""


class Collector:
    """Collects the completions of one request."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request = request
        stops = StopStrings(request.sampling.stop)
        self._streams = [
            TextStream(request, index, tokenizer.token_bytes, stops=stops)
            for index in range(request.sampling.n)
        ]
        self._outputs: list[list[SequenceOutput]] = [[] for _ in self._streams]
        self._num_cached_tokens = 0
        self._prompt_logprobs: list[PromptToken | None] = []

    @property
    def is_finished(self) -> bool:
        return all(stream.is_finished for stream in self._streams)

    def push_event(self, event: TokenEvent) -> SequenceOutput:
        """Add an event and return its output."""
        stream = self._streams[event.index]
        if stream.is_finished:
            return SequenceOutput(index=event.index, text="", token_ids=())
        self._num_cached_tokens = max(self._num_cached_tokens, event.num_cached_tokens)
        if event.prompt_logprobs:
            self._prompt_logprobs.append(None)
            for part in event.prompt_logprobs:
                self._prompt_logprobs += part.tokens()
        output = stream.add_events([event])
        self._outputs[event.index].append(output)
        return output

    def generation(self) -> Generation:
        return Generation(
            prompt_token_ids=self._request.prompt_token_ids,
            completions=tuple(
                _completion(index, outputs) for index, outputs in enumerate(self._outputs)
            ),
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=tuple(self._prompt_logprobs),
        )


def _completion(index: int, outputs: Sequence[SequenceOutput]) -> Completion:
    last = outputs[-1]
    assert last.finish_reason is not None
    return Completion(
        index=index,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
    )
