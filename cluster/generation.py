"""The result of a prompt, and its collection from events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.sampling_params import SamplingParams as TextParams
from cluster.serving.reasoning.reasoning_reader import ReasoningReader
from cluster.serving.text.stop_strings import StopStrings
from cluster.serving.text.text_stream import SequenceOutput, TextStream
from cluster.serving.tools.channel_reader import ChannelTexts
from pagedray.batch import PromptToken
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.scheduling.event import TokenEvent
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.batch import PromptLogprobs, TokenLogprobs
    from pagedray.reasoning import Reasoning
    from pagedray.request import Request
    from pagedray.sampling_params import SamplingParams

__all__ = ["Collector", "Completion", "Generation", "Logprob"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token at one position, before temperature and penalties."""

    logprob: float
    rank: int | None
    """1 for the most likely token; None for a sampled token that is not among the requested most
    likely tokens."""
    decoded_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """Includes the end-of-sequence or stop token."""
    finish_reason: FinishReason | None
    """None until the completion has finished, which only occurs in results of `AsyncLLM`."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the completion."""
    reasoning: str | None = None
    """The model's reasoning before its reply to a conversation, without marks; None if there is
    none."""
    content: str = ""
    """The text after the reasoning; the whole text if there is no reasoning."""
    logprobs: tuple[Mapping[int, Logprob], ...] | None = None
    """For each token, its log-probability and those of the most likely tokens at its position; None
    if not requested."""

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log-probabilities of the tokens; None if they were not requested."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(found[token_id].logprob for token_id, found in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A prompt and its completions."""

    request_id: str
    prompt: str | None
    """The text of the prompt; None if it was given as token ids or as a conversation."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    prompt_logprobs: tuple[Mapping[int, Logprob] | None, ...] | None = None
    """For each token of the prompt, as in a completion, but None for the first token, which has no
    context; None if not requested."""

    @property
    def finished(self) -> bool:
        """Whether all completions have finished, which is always true for results of `LLM`."""
        return all(output.finish_reason is not None for output in self.outputs)


class _Progress:
    """What one completion has so far, or since the last result."""

    def __init__(
        self, index: int, reader: ReasoningReader | ChannelTexts | None, *, has_text: bool
    ) -> None:
        self._index = index
        self._reader = reader
        self._has_text = has_text
        self._text = ""
        self._reasoning = ""
        self._content = ""
        self._token_ids: list[int] = []
        self._logprobs: list[Mapping[int, Logprob]] = []
        self._last: SequenceOutput | None = None

    @property
    def has_news(self) -> bool:
        """Whether there was an output since `clear`."""
        return self._last is not None

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def add(self, output: SequenceOutput, logprobs: Iterable[Mapping[int, Logprob]]) -> None:
        text = output.text if self._has_text else ""
        content = text
        if self._reader is not None:
            is_last = output.finish_reason is not None
            reasoning, content = self._reader.read_piece(text, is_last=is_last)
            self._reasoning += reasoning
        self._text += text
        self._content += content
        self._token_ids += output.token_ids
        self._logprobs += logprobs
        self._last = output

    def clear(self) -> None:
        """Forget what the last result has."""
        self._text = self._reasoning = self._content = ""
        self._token_ids.clear()
        self._logprobs.clear()
        self._last = None

    def completion(self, *, has_logprobs: bool) -> Completion:
        return Completion(
            index=self._index,
            text=self._text,
            reasoning=self._reasoning or None,
            content=self._content,
            token_ids=tuple(self._token_ids),
            finish_reason=None if self._last is None else self._last.finish_reason,
            stop_reason=None if self._last is None else self._last.stop_reason,
            logprobs=tuple(self._logprobs) if has_logprobs else None,
        )


class Collector:
    """Collects the completions of one request."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        params: SamplingParams | None = None,
    ) -> None:
        """`request_id` is what results are called, by default as the request.

        `params` decide what becomes of the text; None is their default."""
        self.request = request
        self._token_text = tokenizer.token_bytes.text_of
        self._id = request_id or request.id
        self._prompt = prompt
        text = params if isinstance(params, TextParams) else TextParams()
        stops = StopStrings(request.sampling.stop)
        marks = request.reasoning
        skips_special_tokens = text.skip_special_tokens and not (
            marks is not None and marks.has_special_tokens
        )
        self._streams = [
            TextStream(
                request,
                index,
                tokenizer.token_bytes,
                stops=stops,
                skips_special_tokens=skips_special_tokens,
                includes_stop=text.include_stop_str_in_output,
            )
            for index in range(request.sampling.n)
        ]
        self._progress = [
            _Progress(
                index,
                None if request.reasoning is None else _reader_of(request.reasoning),
                has_text=text.detokenize,
            )
            for index in range(request.sampling.n)
        ]
        self._num_cached_tokens = 0
        self._prompt_logprobs: list[Mapping[int, Logprob] | None] = []

    @property
    def is_finished(self) -> bool:
        """Whether all completions have ended."""
        return all(stream.is_finished for stream in self._streams)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all completions so far."""
        return sum(one.num_tokens for one in self._progress)

    def push_events(self, events: Sequence[TokenEvent]) -> SequenceOutput:
        """Add the next events of one sequence and return their output."""
        index = events[0].index
        stream = self._streams[index]
        if stream.is_finished:
            return SequenceOutput(index=index, text="", token_ids=())
        for event in events:
            self._num_cached_tokens = max(self._num_cached_tokens, event.num_cached_tokens)
            for part in event.prompt_logprobs:
                self._prompt_logprobs += map(self._described, part.tokens(), self._prompt_ids(part))
        output = stream.add_events(events)
        self._progress[index].add(output, map(self._described, output.logprobs, output.token_ids))
        return output

    def generation(self) -> Generation:
        """Return what there is so far, of all completions."""
        return self._result(self._progress)

    def take_delta(self) -> Generation:
        """Return what completions gained since the last call, of those that did."""
        found = self._result([one for one in self._progress if one.has_news])
        for one in self._progress:
            one.clear()
        return found

    def _result(self, progress: Sequence[_Progress]) -> Generation:
        has_logprobs = self.request.sampling.logprobs is not None
        return Generation(
            request_id=self._id,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=tuple(one.completion(has_logprobs=has_logprobs) for one in progress),
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=(
                None
                if self.request.sampling.prompt_logprobs is None
                else (None, *self._prompt_logprobs)
            ),
        )

    def _prompt_ids(self, part: PromptLogprobs) -> tuple[int, ...]:
        return self.request.prompt_token_ids[part.first_position : part.end]

    def _described(self, found: TokenLogprobs | PromptToken, token_id: int) -> dict[int, Logprob]:
        """Return the log-probabilities at one position, by token; the most likely come first."""
        pairs = zip(found.token_ids, found.logprobs, strict=True)
        is_ranked = isinstance(found, PromptToken) or not self.request.sampling.logprob_token_ids
        described = {
            other: Logprob(logprob, rank if is_ranked else None, self._token_text(other))
            for rank, (other, logprob) in enumerate(pairs, 1)
        }
        if token_id not in described:
            rank = found.rank if isinstance(found, PromptToken) else None
            described[token_id] = Logprob(found.chosen, rank, self._token_text(token_id))
        return described


def _reader_of(reasoning: Reasoning) -> ReasoningReader | ChannelTexts:
    if reasoning.has_channels:
        return ChannelTexts(is_open=reasoning.is_open)
    return ReasoningReader(reasoning)
