"""Errors that name the field of a body, by the client's name for it."""

from __future__ import annotations

import copy
import re
from itertools import islice
from typing import TYPE_CHECKING

from cluster.serving.schema.body import Body, BodyPart, OpenPart, names_of, part_at
from pagedray.errors import InvalidRequestError
from pagedray.text import nearest_name, quote, quote_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pydantic import ValidationError

__all__ = ["field_error", "missing_field", "path_of", "renamed", "unsupported_field"]

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]{1,64}")
_MAX_NAMES = 64
"""Names of an object that are compared with a missing name."""
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def missing_field(
    names: Sequence[str], given: object, where: str, kinds: Iterable[type[BodyPart]]
) -> InvalidRequestError:
    """Return the error for a part, at the path `where`, that has none of the fields of `names`.

    A name in it that is like one of them, and no field of the part's possible kinds, is named.
    Otherwise the first field is.
    """
    known = {own for kind in kinds for own in names_of(kind)}
    own_names = islice(given, _MAX_NAMES) if isinstance(given, dict) else ()
    unknown = [own for own in own_names if own not in known]
    for name in names:
        nearest = nearest_name(name, unknown)
        if nearest is not None and _PLAIN_NAME.fullmatch(nearest) is not None:
            wrong = path_of(where, nearest)
            return InvalidRequestError(
                f"{wrong} is not supported: did you mean {name}?", param=wrong
            )
    missing = path_of(where, names[0])
    return InvalidRequestError(f"{missing} is required.", param=missing)


def renamed(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """Return an error with a field's name replaced by the client's name for it."""
    name = names.get(error.param or "")
    if name is None:
        return error
    text = str(error)
    if text.startswith((f"{error.param} ", f"{error.param}.")):
        text = name + text[len(error.param or "") :]
    copied = copy.copy(error)
    copied.args, copied.param = (text,), name
    return copied


def unsupported_field(name: str, kind: type[BodyPart], where: str = "") -> InvalidRequestError:
    """Return the error for a name in the part at the path `where`."""
    whole = path_of(where, name)
    if _PLAIN_NAME.fullmatch(whole) is None:
        return InvalidRequestError(f"{quote(whole)} is not supported.")
    reason, nearest, known = None, None, names_of(kind)
    if issubclass(kind, OpenPart):
        reason = kind.rejected.get(name)
    if issubclass(kind, Body):
        reason, nearest = kind.rejected.get(name), kind.synonyms.get(name)
        known = known.union(kind.ignored, kind.defaults)
    if reason is None:
        nearest = nearest or nearest_name(name, known - {name})
        reason = "" if nearest is None else f"did you mean {nearest}?"
    text = f"{whole} is not supported{f': {reason}' if reason else ''}"
    return InvalidRequestError(text if text.endswith("?") else f"{text}.", param=whole)


def field_error(error: ValidationError, prefix: str, part: type[BodyPart]) -> InvalidRequestError:
    """Return the error for the first invalid field of a part at the path `prefix`."""
    details = error.errors(include_url=False, include_context=True)[0]
    path = [str(step) for step in details["loc"]]
    where = ".".join([prefix, *path] if prefix else path)
    kind, given = details["type"], details["input"]
    if kind in ("extra_forbidden", "missing"):
        holder = ".".join(([prefix] if prefix else []) + path[:-1])
        inner = part_at(part, details["loc"][:-1])
        if kind == "missing":
            return missing_field((path[-1],), given, holder, (inner,))
        return unsupported_field(path[-1], inner, holder)
    if kind == "literal_error":
        expected = _one_of(details["ctx"]["expected"])
    else:
        expected = _EXPECTED.get(kind, "a valid value")
    return InvalidRequestError(f"{where} must be {expected}, not {quote_json(given)}.", param=where)


def _one_of(expected: str) -> str:
    """Return pydantic's list of a field's values, with `true` and `false` as in JSON."""
    if expected in ("True", "False"):
        return expected.lower()
    return f"one of {expected}" if " or " in expected else expected


def path_of(where: str, name: str) -> str:
    """Return the path of a field in the part at the path `where`, which is empty for a body."""
    return f"{where}.{name}" if where else name
