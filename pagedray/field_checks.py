"""Checks of the values of a request; errors name the field."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pagedray.errors import invalid_field
from pagedray.text import quote

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_COUNT", "check_bool", "check_float", "check_int", "check_size", "check_token_ids"]

MAX_COUNT = 2**31 - 1
"""The limit of numbers that have no other; messages do not name it."""


def check_bool(name: str, value: object) -> None:
    """Raise InvalidRequestError for a value that is no boolean: text such as "no" would be true."""
    if not isinstance(value, bool):
        raise invalid_field(name, f"must be true or false, not {quote(value)}.")


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise InvalidRequestError unless a value is an integer from `low` to `high`."""
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid_field(name, f"must be an integer, not {quote(value)}.")
    if not low <= value <= high:
        is_only_too_low = high == MAX_COUNT and value < low
        allowed = f"{low} or more" if is_only_too_low else f"from {low} to {high}"
        raise invalid_field(name, f"must be {allowed}, not {quote(value)}.")


def check_float(name: str, value: object, low: float, high: float) -> None:
    """Raise InvalidRequestError unless a value is a number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid_field(name, f"must be a number, not {quote(value)}.")
    # An integer may be too large for a float.
    if -1e300 < value < 1e300 and low <= value <= high:
        return
    raise invalid_field(name, f"must be from {low:g} to {high:g}, not {quote(value)}.")


def check_size(name: str, size: int, most: int) -> None:
    """Raise InvalidRequestError if a list is too long."""
    if size > most:
        raise invalid_field(name, f"may have at most {most} entries, not {size}.")


def check_token_ids(token_ids: Sequence[object], vocab_size: int, param: str) -> None:
    """Raise InvalidRequestError unless all are token ids of a vocabulary of this size."""
    if set(map(type, token_ids)) == {int}:
        # Prompts may be long: the common case needs no Python loop.
        ids = cast("Sequence[int]", token_ids)
        if min(ids) >= 0 and max(ids) < vocab_size:
            return
    for one in token_ids:
        if isinstance(one, bool) or not isinstance(one, int):
            raise invalid_field(param, f"must contain integer token ids, not {quote(one)}.")
        if not 0 <= one < vocab_size:
            raise invalid_field(
                param, f"contains token id {quote(one)}, but ids are 0 to {vocab_size - 1}."
            )
