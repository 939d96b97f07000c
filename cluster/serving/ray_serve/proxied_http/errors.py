"""The errors of calls that no replica completes, in the format of the API that was called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cluster.serving.anthropic.endpoints import anthropic_error
from cluster.serving.http.errors import rejection_body
from cluster.serving.openai.response_choice import DONE_EVENT, error_event

if TYPE_CHECKING:
    from starlette.types import Message

    from pagedray.errors import PagedRayError

__all__ = ["error_response", "last_events"]

_encode = msgspec.json.encode


def error_response(path: str, error: PagedRayError, status: int) -> list[Message]:
    """Return the messages of a whole response with a status."""
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    return [
        {"type": "http.response.start", "status": status, "headers": headers},
        {"type": "http.response.body", "body": _body_of(path, error)},
    ]


def last_events(path: str, error: PagedRayError, *, num_events: int) -> bytes:
    """Return the end of a stream that has this number of events."""
    if path.endswith("/messages"):
        return b"event: error\ndata: %b\n\n" % _body_of(path, error)
    if path.endswith("/responses"):
        fields = {
            "type": "error",
            "sequence_number": num_events,
            "code": error.openai_code or error.openai_type,
            "message": str(error),
            "param": None,
        }
        return b"event: error\ndata: %b\n\n" % _encode(fields)
    return error_event(error) + DONE_EVENT


def _body_of(path: str, error: PagedRayError) -> bytes:
    body = rejection_body(error)
    if path.endswith(("/messages", "/messages/count_tokens")):
        body = anthropic_error(body, error.http_status)
    return _encode(body)
