"""The sampling parameters of the Python API, which take the forms that vLLM's take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import msgspec

from pagedray.errors import invalid_field
from pagedray.field_checks import MAX_COUNT, check_bool
from pagedray.sampling_params import SamplingParams as EngineSamplingParams
from pagedray.text import nearest_name, quote

__all__ = ["RequestOutputKind", "SamplingParams", "engine_fields"]

_UNLIMITED = -1
_TEXT_FIELDS = frozenset(
    ("detokenize", "skip_special_tokens", "include_stop_str_in_output", "output_kind")
)

_EMPTY_FIELDS = (
    "allowed_token_ids",
    "bad_words",
    "logit_bias",
    "logprob_token_ids",
    "stop",
    "stop_token_ids",
)
"""Fields in which None is the same as none of them, as in vLLM."""


class RequestOutputKind(IntEnum):
    """The tokens that each result of `AsyncLLM.generate` contains."""

    CUMULATIVE = 0
    """All tokens so far."""
    DELTA = 1
    """The tokens since the previous result."""
    FINAL_ONLY = 2
    """All tokens, in a single result."""


_STRUCTURE = "use structure, a Structure"
_REJECTED: Mapping[str, str] = {
    "best_of": "it is a parameter of requests over HTTP",
    "early_stopping": "it is a field of BeamSearchParams",
    "extra_args": "third-party code is not loaded",
    "guided_decoding": _STRUCTURE,
    "length_penalty": "it is a field of BeamSearchParams",
    "logits_processors": "third-party code is not loaded; logit_bias, allowed_token_ids and "
    "bad_words change logits",
    "repetition_detection": "use repetition_penalty, frequency_penalty or presence_penalty",
    "structured_outputs": _STRUCTURE,
    "truncate_prompt_tokens": "truncate prompts in the program, or over HTTP with this parameter",
    "use_beam_search": "call beam_search()",
}
"""Fields of vLLM's class that this class lacks, each with an alternative."""
_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "early_stopping": (False,),
    "extra_args": ({},),
    "flat_logprobs": (False, True),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "skip_clone": (False, True),
    "skip_reading_prefix_cache": (False, True),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
"""Values of vLLM's fields that ask for our behavior; so does None."""


class _FieldNames(msgspec.StructMeta):
    """Makes parameters, and names the field that an unknown one stands for."""

    # Any: fields of all types.
    def __call__(self, *args: Any, **fields: Any) -> Any:
        for name in fields.keys() - set(self.__struct_fields__):
            _check_unknown(name, fields.pop(name), self.__struct_fields__)
        return super().__call__(*args, **fields)


def _check_unknown(name: str, value: object, known: Sequence[str]) -> None:
    """Raise an error unless a field of vLLM asks for our behavior."""
    allowed = _WITHOUT_EFFECT.get(name, ())
    if name in (*_REJECTED, *_WITHOUT_EFFECT) and (value is None or value in allowed):
        return
    if name in _REJECTED:
        raise invalid_field(name, f"is not supported: {_REJECTED[name]}.")
    if name in _WITHOUT_EFFECT:
        raise invalid_field(name, f"must be {' or '.join(map(str, allowed))}, not {quote(value)}.")
    nearest = nearest_name(name, known)
    hint = "" if nearest is None else f"; did you mean {nearest!r}?"
    raise TypeError(f"Unexpected keyword argument {name!r}{hint}")


class SamplingParams(
    EngineSamplingParams, metaclass=_FieldNames, frozen=True, kw_only=True, omit_defaults=True
):
    """How tokens are sampled, when generation stops, and the contents of the text.

    Raises InvalidRequestError, which names the field and its allowed values.
    """

    max_tokens: int | None = 16  # type: ignore[assignment]  # None only when it is made
    """Maximum number of tokens per completion; None or -1 is as many as fit into the context."""
    stop: str | Sequence[str] | None = ()  # type: ignore[assignment]  # None only when it is made
    """A string, or several, that end a completion; they are not part of its text."""
    stop_token_ids: Sequence[int] | None = ()  # type: ignore[assignment]  # as above
    """Token ids that end a completion."""
    allowed_token_ids: Sequence[int] | None = ()  # type: ignore[assignment]  # as above
    """Token ids that may be generated, including end-of-sequence tokens; empty allows all."""
    logprob_token_ids: Sequence[int] | None = ()  # type: ignore[assignment]  # as above
    """Token ids to return log-probabilities for, in place of the most likely tokens; requires
    `logprobs`.
    """
    bad_words: Sequence[str] | None = ()  # type: ignore[assignment]  # as above
    """Texts that are not generated."""
    logit_bias: Mapping[int, float] | None = {}  # type: ignore[assignment]  # as above
    """Added to the logits of these token ids."""
    detokenize: bool = True
    """Whether completions have a text; required for stop strings."""
    skip_special_tokens: bool = True
    """Whether special tokens are omitted from the text."""
    include_stop_str_in_output: bool = False
    """Whether the text includes the stop string or token that ended it."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """The tokens that each result of `AsyncLLM.generate` contains."""

    def __post_init__(self) -> None:
        if self.max_tokens in (None, _UNLIMITED):
            msgspec.structs.force_setattr(self, "max_tokens", MAX_COUNT)
        for name in _EMPTY_FIELDS:
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, {} if name == "logit_bias" else ())
        if self.thinking_token_budget == _UNLIMITED:
            msgspec.structs.force_setattr(self, "thinking_token_budget", None)
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,) if self.stop else ())
        for name in ("detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            check_bool(name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise invalid_field(
                "output_kind", f"must be a RequestOutputKind, not {quote(self.output_kind)}."
            )
        super().__post_init__()


# Any: fields of all types.
def engine_fields(params: EngineSamplingParams) -> dict[str, Any]:
    """Return the fields that the engine knows; without `max_tokens` if it was None."""
    given = msgspec.structs.asdict(params)
    if given["max_tokens"] == MAX_COUNT:
        del given["max_tokens"]
    return {name: value for name, value in given.items() if name not in _TEXT_FIELDS}
