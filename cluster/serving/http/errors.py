"""Errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedray.errors import PagedRayError

__all__ = ["ErrorShape", "Json", "error_body", "openai_error", "refusal_body"]

Json = dict[str, object]
ErrorShape = Callable[[Json, int], Json]
"""Writes an error that is given in OpenAI's shape, with its status, in that of another API."""


def openai_error(body: Json, status: int) -> Json:
    """Return the error as it is."""
    return body


def error_body(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> Json:
    """Return an error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal_body(error: PagedRayError) -> Json:
    """Return one of our errors in OpenAI's shape."""
    param = getattr(error, "param", None)
    return error_body(str(error), error.openai_type, param=param, code=error.openai_code)
