"""Errors in the format of OpenAI, and the formats of other APIs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedray.errors import PagedRayError

__all__ = [
    "OPENAI_ERRORS",
    "ErrorFormat",
    "Json",
    "error_body",
    "rejection_body",
]

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
