"""An endpoint of the HTTP frontend, and who may call it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec
from starlette.responses import Response

from cluster.serving.http.errors import OPENAI_ERRORS, ErrorFormat
from cluster.serving.http.http_call import JSON_TYPE, HttpCall
from cluster.serving.inputs import Operation

__all__ = ["HEALTHY", "Access", "Endpoint", "json_response"]

HEALTHY = {"status": "ok"}
"""The body of a health check that succeeds."""


class Access(Enum):
    """Who may call an endpoint."""

    PUBLIC = "public"
    TENANTS = "tenants"
    ADMINS = "admins"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method of one path."""

    method: str
    path: str
    """A name in braces matches the rest of a path, up to the text after the braces."""
    handler: Callable[[HttpCall], Awaitable[Response]] = field(repr=False)
    access: Access = Access.TENANTS
    operation: Operation | None = None
    """The operation of the engine that its calls wait for, if any."""
    errors: ErrorFormat = OPENAI_ERRORS
    """The format of its errors, and of errors of missing paths below its own."""
    is_counted: bool = False
    """Whether its calls count toward the limit of open calls; calls of an operation always do."""
    is_health_check: bool = False
    """Whether its failures are not logged."""


def json_response(
    content: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response in JSON."""
    return Response(
        msgspec.json.encode(content), status_code=status, headers=headers, media_type=JSON_TYPE
    )
