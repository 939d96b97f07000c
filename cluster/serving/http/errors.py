"""Errors in the format of OpenAI, and the formats of other APIs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from starlette.types import Scope

    from pagedray.errors import PagedRayError

__all__ = [
    "MAX_HEADERS",
    "MAX_HEAD_BYTES",
    "OPENAI_ERRORS",
    "ErrorFormat",
    "Json",
    "check_head",
    "error_body",
    "head_without_upgrade",
    "rejection_body",
]

Json = dict[str, object]

MAX_HEADERS = 128
MAX_HEAD_BYTES = 2**16
"""The limit of a head, and of the chunk extensions and trailers around the chunks of a body."""
_Headers = list[tuple[bytes, bytes]]
"""Names in lower case, and values."""
_VERSIONS = ("1.0", "1.1")


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


def check_head(scope: Scope) -> None:
    """Raise HTTPException for a head that is too large, or that a proxy might read differently."""
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        raise HTTPException(431, f"A request may have at most {MAX_HEADERS} headers.")
    url = scope.get("raw_path", b"") + scope.get("query_string", b"")
    if len(url) + sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEAD_BYTES:
        raise HTTPException(431, f"The head of the request exceeds {MAX_HEAD_BYTES} bytes.")
    # Requests that did not come over a connection, such as requests of a batch, have no version.
    if "http_version" in scope and _is_ambiguous(scope["http_version"], headers):
        raise HTTPException(400, "The request is not valid HTTP.", {"connection": "close"})


def _is_ambiguous(version: str, headers: _Headers) -> bool:
    """Return whether a proxy might take another host for the request's, or another body."""
    names = [name for name, _ in headers]
    num_hosts = names.count(b"host")
    if version not in _VERSIONS or num_hosts > 1 or (version == "1.1" and not num_hosts):
        return True
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if not codings:
        return False
    # HTTP/1.0 has no chunks, so a proxy may take all bytes after the head for the body.
    return version == "1.0" or len(codings) > 1 or codings[0].lower() != b"chunked"


def head_without_upgrade(method: bytes, url: bytes, version: str, headers: _Headers) -> bytes:
    """Return a head that requests no other protocol."""
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % (name, value) for name, value in headers if name != b"upgrade"]
    return b"\r\n".join((*lines, b"", b""))
