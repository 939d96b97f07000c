"""What a body with `use_beam_search` may contain."""

from __future__ import annotations

from cluster.serving.beam_input import check_length_penalty
from pagedray.errors import InvalidRequestError

__all__ = ["check_beams"]

_UNSUPPORTED = (
    "allowed_token_ids",
    "bad_words",
    "best_of",
    "echo",
    "frequency_penalty",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "logit_bias",
    "min_tokens",
    "presence_penalty",
    "prompt_logprobs",
    "repetition_penalty",
    "response_format",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "tools",
)
"""Parameters that would change which beams are found, and what is not computed with them."""
_WITHOUT_EFFECT = {"repetition_penalty": 1, "response_format": {"type": "text"}}


def check_beams(body: object, use_beam_search: bool, length_penalty: float | None) -> None:
    """Raise InvalidRequestError if the fields of a body exclude each other."""
    if not use_beam_search:
        if length_penalty not in (None, 1):
            raise InvalidRequestError(
                "length_penalty requires use_beam_search = true.", param="length_penalty"
            )
        return
    if length_penalty is not None:
        check_length_penalty(length_penalty, "length_penalty")
    for name in _UNSUPPORTED:
        value = getattr(body, name, None)
        if value and value != _WITHOUT_EFFECT.get(name):
            raise InvalidRequestError(
                f"{name} cannot be combined with use_beam_search.", param=name
            )
