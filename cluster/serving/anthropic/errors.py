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


def anthropic_error(body: Json, status: int) -> Json:
    """Return an error that is given in OpenAI's shape, with its status."""
    message = cast("Json", body["error"])["message"]
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}
