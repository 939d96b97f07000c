"""Parameters in the query of requests for stored responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.serving.responses.included_fields import INCLUDE, check_included_fields
from pagedray.errors import InvalidRequestError
from pagedray.text import nearest_name, quote

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.datastructures import QueryParams

__all__ = ["check_include", "check_whole", "read_query"]

_LIST = "[]"
"""Ends the name of a list, as OpenAI's clients write it."""


def read_query(params: QueryParams, known: Collection[str]) -> dict[str, str]:
    """Return the values of parameters by name. Raises InvalidRequestError for an unknown one."""
    found: dict[str, str] = {}
    for given, value in params.multi_items():
        name = given.removesuffix(_LIST)
        if name not in known:
            nearest = nearest_name(name, known)
            hint = "." if nearest is None else f": did you mean {nearest}?"
            shown = name if name.isidentifier() and len(name) <= 64 else quote(name)
            raise InvalidRequestError(f"{shown} is not supported in the query{hint}", param=shown)
        if name in found and name != INCLUDE:
            raise InvalidRequestError(f"{name} is given twice in the query.", param=name)
        found[name] = value
    return found


def check_include(params: QueryParams) -> None:
    """Raise InvalidRequestError if a client requests fields that it cannot have."""
    values = (*params.getlist(INCLUDE), *params.getlist(INCLUDE + _LIST))
    check_included_fields(name for value in values for name in value.split(","))


def check_whole(params: QueryParams) -> None:
    """Check that a client reads a response as a whole. Raises InvalidRequestError."""
    given = read_query(params, (INCLUDE, "include_obfuscation", "starting_after", "stream"))
    check_include(params)
    if given.get("stream", "false") != "false":
        raise InvalidRequestError(
            "stream must be false: a stored response is complete.", param="stream"
        )
    if "starting_after" in given:
        raise InvalidRequestError(
            "starting_after is not supported: a stored response is complete.",
            param="starting_after",
        )
