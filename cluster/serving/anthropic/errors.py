"""Errors in Anthropic's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.serving.http.errors import Json

__all__ = ["anthropic_error"]

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


def anthropic_error(body: Json, status: int) -> Json:
    """Return an error that is given in OpenAI's shape, with its status."""
    given = cast("Json", body["error"])
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: Json = {"type": kind, "message": given["message"]}
    if given["param"] == "thread":
        error["details"] = _NO_THREADS
    return {"type": "error", "error": error, "request_id": None}
