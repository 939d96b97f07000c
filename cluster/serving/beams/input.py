"""The parameters that a call with a beam search may have, in any protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import SamplingParams
from pagedray.text import quote

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_beam_sampling", "check_length_penalty"]

_MOST_PENALTY = 10
# The first five have no effect: beams are not sampled.
_ALLOWED = frozenset(
    ("min_p", "seed", "temperature", "top_k", "top_p", "ignore_eos", "logprobs", "max_tokens", "n")
)
_ZERO_COUNTS = frozenset(("prompt_logprobs", "thinking_token_budget"))
"""Parameters that have an effect if they are 0."""
_DEFAULTS = msgspec.structs.asdict(SamplingParams())


def check_length_penalty(value: object, param: str) -> float:
    """Return the length penalty of a beam search. Raises InvalidRequestError."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= _MOST_PENALTY
    ):
        raise InvalidRequestError(
            f"{param} must be from -{_MOST_PENALTY} to {_MOST_PENALTY}, not {quote(value)}.",
            param=param,
        )
    return float(value)


def check_beam_sampling(sampling: Mapping[str, object], param: str) -> None:
    """Raise InvalidRequestError for parameters that would change which beams are found.

    `param` is the parameter that requests the search.
    """
    for name, value in sampling.items():
        is_given = value is not None if name in _ZERO_COUNTS else bool(value)
        if is_given and name not in _ALLOWED and value != _DEFAULTS.get(name):
            raise InvalidRequestError(f"{name} cannot be combined with {param}.", param=name)
