"""Beam search, as transformers defines it: which beams continue, and which are results.

It knows neither engine nor text: log-probabilities come in, beams to compute go out.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec.structs import replace

from pagedray.batch import TokenLogprobs
from pagedray.errors import InvalidRequestError, invalid_field
from pagedray.sampling_params import SamplingParams
from pagedray.text import pluralize, quote

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pagedray.config import SchedulerConfig
    from pagedray.request import Request

__all__ = [
    "Beam",
    "BeamSearch",
    "EarlyStopping",
    "beam_step",
    "check_beam_sampling",
    "check_beams_fit",
    "check_length_penalty",
]

EarlyStopping = bool | Literal["never"]
_MOST_PENALTY = 10
_UNUSED = frozenset(("disable_spec_decode", "min_p", "seed", "temperature", "top_k", "top_p"))
"""Parameters without an effect: beams are not sampled, and each step adds one token to them."""
_ALLOWED = _UNUSED | {"ignore_eos", "logprobs", "max_tokens", "n"}
_ZERO_COUNTS = frozenset(("prompt_logprobs", "thinking_token_budget"))
"""Parameters that have an effect if they are 0."""
_DEFAULTS = msgspec.structs.asdict(SamplingParams())


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation of the prompt."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities at each position; `chosen` is the beam's own token."""
    cumulative_logprob: float = 0.0
    is_ended: bool = False
    """Whether it ends with an end-of-sequence token, which `token_ids` includes."""


class BeamSearch:
    """The beams of one prompt."""

    def __init__(
        self,
        *,
        width: int,
        max_tokens: int,
        eos_token_ids: Collection[int],
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        """Search for `width` continuations.

        The score of a finished beam is its log-probability, divided by its number of tokens to the
        power of `length_penalty`. The search ends when `width` beams have finished and no running
        beam is likely to score higher: as if none grew longer, or with `never` and a positive
        penalty as if each grew to `max_tokens`. With an `early_stopping` of true it ends when
        `width` have finished.
        """
        self._width = width
        self._max_tokens = max_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._running: list[Beam] = [Beam()]
        self._finished: list[tuple[float, Beam]] = []

    @property
    def num_logprobs(self) -> int:
        """Number of most likely tokens that a step needs after each beam.

        As many of them may end a beam as there are end-of-sequence tokens.
        """
        return self._width + len(self._eos_token_ids)

    @property
    def running(self) -> Sequence[Beam]:
        """The beams that need their next tokens; empty if the search has ended."""
        return self._running

    @property
    def best(self) -> list[tuple[float, Beam]]:
        """The finished beams with their scores, the best first."""
        return self._finished

    def advance(self, found: Sequence[TokenLogprobs]) -> None:
        """Take the most likely tokens after each running beam, and choose the next beams."""
        candidates = sorted(
            (-(beam.cumulative_logprob + logprob), number, index)
            for number, (beam, likeliest) in enumerate(zip(self._running, found, strict=True))
            for index, logprob in enumerate(likeliest.logprobs)
        )
        length = len(self._running[0].token_ids) + 1
        is_longest = length == self._max_tokens
        running: list[Beam] = []
        scored: list[tuple[float, Beam]] = []
        for place, (_, number, index) in enumerate(candidates):
            is_best = place < self._width
            if not is_best and (is_longest or len(running) == self._width):
                # Making all of them would take long.
                break
            beam = self._grown(self._running[number], found[number], index)
            if not (beam.is_ended or is_longest):
                running.append(beam)
            elif is_best:
                # A beam that is not among the best is not a result, even if it has ended.
                scored.append((self._score(beam.cumulative_logprob, length), beam))
        self._finished = sorted(self._finished + scored, key=lambda one: -one[0])[: self._width]
        self._running = running
        if self._running and self._is_done(length):
            self._running = []

    def _grown(self, beam: Beam, likeliest: TokenLogprobs, index: int) -> Beam:
        token_id, logprob = likeliest.token_ids[index], likeliest.logprobs[index]
        return Beam(
            (*beam.token_ids, token_id),
            (*beam.logprobs, replace(likeliest, chosen=logprob)),
            beam.cumulative_logprob + logprob,
            token_id in self._eos_token_ids,
        )

    def _is_done(self, length: int) -> bool:
        if len(self._finished) < self._width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0.0:
            length = self._max_tokens
        possible = self._score(self._running[0].cumulative_logprob, length)
        return possible <= self._finished[-1][0]

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return cumulative_logprob / math.pow(length, self._length_penalty)


def check_length_penalty(value: object, param: str) -> float:
    """Return the length penalty of a beam search. Raises InvalidRequestError."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= _MOST_PENALTY
    ):
        raise invalid_field(
            param, f"must be from -{_MOST_PENALTY} to {_MOST_PENALTY}, not {quote(value)}."
        )
    return float(value)


def check_beam_sampling(sampling: Mapping[str, object], param: str) -> None:
    """Raise InvalidRequestError for parameters that would change which beams are found.

    `param` is the parameter that requests the search.
    """
    for name, value in sampling.items():
        is_given = value is not None if name in _ZERO_COUNTS else bool(value)
        if is_given and name not in _ALLOWED and value != _DEFAULTS.get(name):
            raise invalid_field(name, f"cannot be combined with {param}.")


def beam_step(request: Request, beam: Beam, num_logprobs: int) -> Request:
    """Return a request for a token after a beam of `request`, with the most likely tokens there.

    The prefix cache has the blocks before it.
    """
    return replace(
        request,
        id=secrets.token_hex(16),
        prompt_token_ids=request.prompt_token_ids + beam.token_ids,
        # An end-of-sequence token is a token like others here.
        sampling=SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=num_logprobs, ignore_eos=True
        ),
        generated_token_ids=(),
    )


def check_beams_fit(
    requests: Sequence[Request], width: int, limits: SchedulerConfig, *, param: str
) -> None:
    """Raise InvalidRequestError if the longest step of searches exceeds an empty queue.

    The requests of a step are submitted together; otherwise they would wait without end. `param` is
    the name of the width.
    """
    num_beams = width * len(requests)
    if num_beams == 1:
        # A single request always has room.
        return
    if num_beams > limits.max_queued_requests:
        raise InvalidRequestError(
            f"A beam search with {param} {width} for {pluralize(len(requests), 'prompt')} has "
            f"{num_beams} beams, which exceeds max_queued_requests, {limits.max_queued_requests}.",
            param=param,
        )
    num_tokens = width * sum(
        len(request.prompt_token_ids) + request.sampling.max_tokens for request in requests
    )
    if num_tokens > limits.max_queued_tokens:
        raise InvalidRequestError(
            f"A beam search with {param} {width} has up to {num_tokens} tokens, max_tokens "
            f"included, which exceeds max_queued_tokens, {limits.max_queued_tokens}.",
            param=param,
        )
