"""Beam search of the Python API, in the form of vLLM's.

Each step is one request for each beam, whose blocks are found in the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.sampling_params import SamplingParams
from cluster.serving.beams.input import check_length_penalty
from cluster.serving.beams.search import Beam, BeamSearch, EarlyStopping
from cluster.serving.beams.step import beam_step
from pagedray.batch import TokenLogprobs
from pagedray.errors import EngineError, InvalidRequestError
from pagedray.field_checks import check_bool
from pagedray.request import FinishReason
from pagedray.sampling_params import MAX_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.generation import Generation
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.request import Request

__all__ = [
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "BeamSearches",
    "first_logprobs",
]


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
            raise InvalidRequestError(
                f"beam_width must be from 1 to {MAX_LOGPROBS}, not {self.beam_width!r}.",
                param="beam_width",
            )
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequestError(
                f"early_stopping must be true, false or never, not {self.early_stopping!r}.",
                param="early_stopping",
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
    """The searches of some prompts, whose steps are computed together."""

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
        raise InvalidRequestError(
            f"beam_width must be from 1 to {most} for this model, not {params.beam_width}.",
            param="beam_width",
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
