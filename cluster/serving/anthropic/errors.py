"""Errors in the format of Anthropic, and those about the context also in Anthropic's words."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from cluster.serving.http.errors import ErrorFormat
from pagedray.errors import ContextLengthError, OutputLengthError, PromptLengthError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cluster.serving.http.errors import Json

__all__ = ["ANTHROPIC_ERRORS", "anthropic_error", "rewording_length_errors"]

_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NO_THREADS: Json = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""What lets the tool runner of Anthropic's library send all messages in each request."""


def anthropic_error(body: Json, status: int, request_id: str | None = None) -> Json:
    """Return an error that is given in the format of OpenAI, with its status."""
    given = cast("Json", body["error"])
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: Json = {"type": kind, "message": given["message"]}
    if given["param"] == "thread":
        error["details"] = _NO_THREADS
    return {"type": "error", "error": error, "request_id": request_id}


ANTHROPIC_ERRORS = ErrorFormat(write=anthropic_error, id_header="request-id")


@contextmanager
def rewording_length_errors() -> Iterator[None]:
    """Give a ContextLengthError the message that Anthropic's API has for it.

    Claude Code and other agents find the numbers in it: they reduce `max_tokens`, or shorten the
    conversation.
    """
    try:
        yield
    except ContextLengthError as error:
        reworded = copy.copy(error)
        reworded.args = (_words_of(error),)
        raise reworded from error


def _words_of(error: ContextLengthError) -> str:
    if isinstance(error, OutputLengthError):
        return (
            "input length and `max_tokens` exceed context limit: "
            f"{error.num_prompt_tokens} + {error.max_tokens} > {error.context}, "
            "decrease input length or `max_tokens` and try again"
        )
    if isinstance(error, PromptLengthError):
        return f"prompt is too long: {error.num_tokens} tokens > {error.context - 1} maximum"
    return f"prompt is too long: {error}"
