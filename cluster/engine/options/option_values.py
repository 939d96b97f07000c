"""Checks the values of options that programs pass, by the annotations of a dataclass."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from pagedray.errors import StartupError
from pagedray.text import quote

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["checked_options"]

Options = TypeVar("Options")


def checked_options(
    given: Mapping[str, object], kind: type[Options], *, what: str, takes_text: bool
) -> Options:
    """Return an object of `kind`, a dataclass, with these fields.

    A field of None has its default. With `takes_text`, strings may hold numbers. Messages call a
    field `what`. Raises StartupError that names the invalid field.
    """
    chosen = {name: _plain(value) for name, value in given.items() if value is not None}
    try:
        return msgspec.convert(chosen, kind, strict=not takes_text)
    except msgspec.ValidationError as error:
        # Such as: Expected `int | null`, got `str` - at `$.num_blocks`
        text, _, path = str(error).partition(" - at `$.")
        if not path:
            raise StartupError(f"{text}.") from None
        name = path.rstrip("`").partition("[")[0]
        choices = _choices(kind, name)
        if choices:
            text = f"allowed are {', '.join(choices)}"
        shown = quote(chosen[name])
        raise StartupError(f"Invalid value {shown} of {what} {name}: {text}.") from None


def _plain(value: object) -> object:
    """Return a path as text."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _choices(kind: type, name: str) -> list[str]:
    """Return the values that a field may have, if its type lists them."""
    hint = get_type_hints(kind)[name]
    parts = (hint, *get_args(hint))
    return [str(one) for part in parts if get_origin(part) is Literal for one in get_args(part)]
