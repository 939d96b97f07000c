"""Errors in OpenAI's shape, and the shapes of other APIs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedray.errors import PagedRayError

__all__ = ["OPENAI_ERRORS", "ErrorShape", "Json", "error_body", "rejection_body"]

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorShape:
    """How an API writes errors."""

    write: Callable[[Json, int, str], Json]
    """Takes an error in OpenAI's shape, its status, and the id of the request."""
    id_header: str | None = None
    """The header of the response that has the id, if any."""


OPENAI_ERRORS = ErrorShape(write=lambda body, status, request_id: body)


def error_body(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> Json:
    """Return an error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def rejection_body(error: PagedRayError) -> Json:
    """Return one of our errors in OpenAI's shape."""
    param = getattr(error, "param", None)
    return error_body(str(error), error.openai_type, param=param, code=error.openai_code)
