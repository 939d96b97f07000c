"""What a body with `use_beam_search` may contain."""

from __future__ import annotations

from cluster.serving.beams.input import check_beam_sampling, check_length_penalty
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import SamplingParams

__all__ = ["check_beams"]

_SAMPLING = SamplingParams.__struct_fields__
_UNSUPPORTED = (
    "best_of",
    "echo",
    "functions",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "response_format",
    "structured_outputs",
    "tools",
)
"""Other fields that would change which beams are found, or are not computed with them."""
_WITHOUT_EFFECT = {"response_format": {"type": "text"}}


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
    sampling = {name: getattr(body, name, None) for name in _SAMPLING}
    check_beam_sampling(sampling, "use_beam_search")
    for name in _UNSUPPORTED:
        value = getattr(body, name, None)
        if value and value != _WITHOUT_EFFECT.get(name):
            raise InvalidRequestError(
                f"{name} cannot be combined with use_beam_search.", param=name
            )
