"""Fields of items that a client requests in addition to the usual ones, by OpenAI's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.errors import InvalidRequestError
from pagedray.text import quote_json

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["INCLUDE", "check_included_fields"]

INCLUDE = "include"
"""The name of the parameter."""
_LOGPROBS = "message.output_text.logprobs"
_WITHOUT_EFFECT = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Fields of items that no response has, or that are optional."""


def check_included_fields(names: Iterable[object]) -> None:
    """Raise InvalidRequestError for log-probabilities, and names unknown to OpenAI's API."""
    for name in names:
        if name == _LOGPROBS:
            raise InvalidRequestError(
                f"{_LOGPROBS} is not supported in include: use /v1/chat/completions.",
                param=INCLUDE,
            )
        if name not in _WITHOUT_EFFECT:
            raise InvalidRequestError(
                f"include may contain {', '.join(_WITHOUT_EFFECT)}, not {quote_json(name)}.",
                param=INCLUDE,
            )
