"""The result of a prompt, and its collection from events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.llm.sampling_params import SamplingParams
from cluster.serving.beam_search import (
    Beam,
    BeamSearch,
    EarlyStopping,
    beam_step,
    check_length_penalty,
)
from cluster.serving.reasoning import ReasoningReader
from cluster.serving.text.text_stream import SequenceOutput, StopStrings, TextStream
from cluster.serving.tools.channel_reader import ChannelTexts
from pagedray.batch import PromptToken, TokenLogprobs
from pagedray.errors import EngineError, invalid_field
from pagedray.field_checks import check_bool
from pagedray.request import FinishReason
from pagedray.sampling_params import MAX_LOGPROBS
from pagedray.sampling_params import SamplingParams as EngineSamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.scheduling.event import TokenEvent
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.batch import PromptLogprobs
    from pagedray.request import Reasoning, Request

__all__ = [
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "BeamSearches",
    "Collector",
    "Completion",
    "Generation",
    "Logprob",
    "first_logprobs",
]


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
    """For each token, its log-probability and the most likely tokens at its position; None if not
    requested.
    """

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
    """The progress of a completion, so far or since the last result."""

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
        """Forget the contents of the last result."""
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
        params: EngineSamplingParams | None = None,
    ) -> None:
        """`request_id` names the results, by default as the request.

        `params` control the text; None is their default.
        """
        self.request = request
        self._token_text = tokenizer.token_bytes.text_of
        self._id = request_id or request.id
        self._prompt = prompt
        text = params if isinstance(params, SamplingParams) else SamplingParams()
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
        """Return all completions so far."""
        return self._result(self._progress)

    def take_delta(self) -> Generation:
        """Return the progress of completions since the last call, without unchanged completions."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """The parameters of a beam search. Raises InvalidRequestError."""

    beam_width: int
    """Number of beams, and of results."""
    max_tokens: int
    """Maximum number of tokens per beam."""
    ignore_eos: bool = False
    """Whether beams continue past the model's end-of-sequence tokens."""
    temperature: float = 0.0
    """Has no effect: beams are not sampled."""
    length_penalty: float = 1.0
    """Exponent of the number of tokens by which the log-probability of a beam is divided."""
    early_stopping: EarlyStopping = False
    """When the search ends once `beam_width` beams have finished: with True immediately, with False
    when no running beam is likely to score higher, with `never` when none can."""
    include_stop_str_in_output: bool = False
    """Whether texts include an end-of-sequence token."""

    def __post_init__(self) -> None:
        # The sampling parameters of its requests check the number of tokens.
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        # A boolean is an integer.
        if (
            isinstance(self.beam_width, bool)
            or not isinstance(self.beam_width, int)
            or not 1 <= self.beam_width <= MAX_LOGPROBS
        ):
            raise invalid_field(
                "beam_width", f"must be from 1 to {MAX_LOGPROBS}, not {self.beam_width!r}."
            )
        if self.early_stopping not in (True, False, "never"):
            raise invalid_field(
                "early_stopping", f"must be true, false or never, not {self.early_stopping!r}."
            )
        check_length_penalty(self.length_penalty, "length_penalty")

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of a request for all tokens of a beam."""
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=0.0, logprobs=0, ignore_eos=self.ignore_eos
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """A finished beam, with its prompt."""

    tokens: tuple[int, ...]
    """The token ids of the prompt and of the generated text."""
    text: str
    """The prompt and the generated text."""
    cum_logprob: float
    """The sum of the log-probabilities of the generated tokens."""
    score: float
    """The score by which beams are ordered."""
    logprobs: tuple[TokenLogprobs, ...]
    """The log-probabilities at each generated position."""
    finish_reason: FinishReason
    stop_reason: int | None = None
    """The end-of-sequence token that ended the beam."""


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams of a prompt."""

    sequences: tuple[BeamSearchSequence, ...]
    """The found sequences, the best one first."""


class BeamSearches:
    """The searches of some prompts; their steps are computed together."""

    def __init__(self, prompts: Sequence[Request], params: BeamSearchParams) -> None:
        """The request of each prompt has the parameters `params.sampling`.

        Raises InvalidRequestError.
        """
        self._prompts = prompts
        self._params = params
        self._searches = [_search_of(prompt, params) for prompt in prompts]

    def step_requests(self) -> list[Request]:
        """Return requests for the next token of each running beam; none if all have ended."""
        return [
            beam_step(prompt, beam, search.num_logprobs)
            for prompt, search in zip(self._prompts, self._searches, strict=True)
            for beam in search.running
        ]

    def take_step(self, found: Iterable[TokenLogprobs]) -> None:
        """Take the most likely tokens of each of `step_requests`."""
        likeliest = iter(found)
        for search in self._searches:
            if search.running:
                search.advance([next(likeliest) for _ in search.running])

    def outputs(self, tokenizer: Tokenizer) -> list[BeamSearchOutput]:
        """Return the best beams of each prompt."""
        return [
            BeamSearchOutput(
                tuple(
                    _sequence_of(prompt, beam, score, self._params, tokenizer)
                    for score, beam in search.best
                )
            )
            for prompt, search in zip(self._prompts, self._searches, strict=True)
        ]


def first_logprobs(generation: Generation) -> TokenLogprobs:
    """Return the most likely tokens at the first position of a result without sampling.

    Raises EngineError if the engine ended it without a token.
    """
    (output,) = generation.outputs
    if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR) or not output.logprobs:
        reason = "no event" if output.finish_reason is None else output.finish_reason.value
        raise EngineError(f"A step of the beam search ended without a token: {reason}.")
    found = output.logprobs[0]
    values = [one.logprob for one in found.values()]
    return TokenLogprobs(values[0], list(found), values)


def _search_of(prompt: Request, params: BeamSearchParams) -> BeamSearch:
    search = BeamSearch(
        width=params.beam_width,
        max_tokens=params.max_tokens,
        eos_token_ids=() if params.ignore_eos else prompt.eos_token_ids,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
    if search.num_logprobs > MAX_LOGPROBS:
        most = MAX_LOGPROBS - len(prompt.eos_token_ids)
        raise invalid_field(
            "beam_width", f"must be from 1 to {most} for this model, not {params.beam_width}."
        )
    return search


def _sequence_of(
    prompt: Request, beam: Beam, score: float, params: BeamSearchParams, tokenizer: Tokenizer
) -> BeamSearchSequence:
    tokens = prompt.prompt_token_ids + beam.token_ids
    shown = tokens[:-1] if beam.is_ended and not params.include_stop_str_in_output else tokens
    return BeamSearchSequence(
        tokens=tokens,
        text=tokenizer.decode(shown, skip_special_tokens=not params.include_stop_str_in_output),
        cum_logprob=beam.cumulative_logprob,
        score=score,
        logprobs=beam.logprobs,
        finish_reason=FinishReason.STOP if beam.is_ended else FinishReason.LENGTH,
        stop_reason=beam.token_ids[-1] if beam.is_ended else None,
    )
