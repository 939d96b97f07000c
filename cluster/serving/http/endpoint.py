"""An endpoint of the HTTP frontend, who may call it, and the formats of errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from cluster.serving.http.http_call import JSON_TYPE, HttpCall
from cluster.serving.inputs import Operation

if TYPE_CHECKING:
    from pagedray.errors import PagedRayError

__all__ = [
    "HEALTHY",
    "OPENAI_ERRORS",
    "Access",
    "Endpoint",
    "ErrorFormat",
    "Json",
    "error_body",
    "json_response",
    "rejection_body",
]

HEALTHY = {"status": "ok"}
"""The body of a health check that succeeds."""

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFormat:
    """How an API writes errors."""

    write: Callable[[Json, int, str], Json]
    """Takes an error in the format of OpenAI, its status, and the id of the request."""
    id_header: str | None = None
    """The header of the response that has the id, if any."""


OPENAI_ERRORS = ErrorFormat(write=lambda body, status, request_id: body)


def error_body(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> Json:
    """Return an error in the format of OpenAI."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def rejection_body(error: PagedRayError) -> Json:
    """Return one of our errors in the format of OpenAI."""
    param = getattr(error, "param", None)
    return error_body(str(error), error.openai_type, param=param, code=error.openai_code)


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
