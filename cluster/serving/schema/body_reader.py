"""The reader of JSON bodies, which validates them as an endpoint declares them.

An unsupported parameter is rejected unless its value has no effect: null, or its default. Hints
that cannot change the answer are ignored, and so are clients' own fields of messages and tools.
"""

from __future__ import annotations

import copy
import re
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from pydantic import TypeAdapter, ValidationError

from cluster.serving.intake import LARGEST, RequestSize, check_num_messages
from cluster.serving.json_body import read_json
from cluster.serving.schema.body import (
    Body,
    BodyPart,
    OpenPart,
    integers_of,
    names_of,
    part_at,
    parts_of,
)
from pagedray.errors import ContextLengthError, InvalidRequestError
from pagedray.text import misspelled_name, nearest_name, quote, quote_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["missing_field", "read_body", "read_part", "renamed"]

_MAX_COMPARED = 16
"""With more fields of a client's own in an object, none of them counts as misspelled."""
_NO_EFFECT: tuple[object, ...] = (None, False, "", [], {})
AnyBody = TypeVar("AnyBody", bound=Body)
Part = TypeVar("Part", bound=BodyPart)

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


def read_body(
    kind: type[AnyBody],
    raw: bytes,
    size: RequestSize = LARGEST,
    *,
    note_ignored: Callable[[str], None],
) -> AnyBody:
    """Return the checked body of a call. Raises InvalidRequestError.

    `note_ignored` is called with the name of each parameter that is ignored, and may reject it.
    """
    try:
        given = read_json(raw, size)
    except ContextLengthError as error:
        error.param = kind.ids_field
        raise
    supported = _supported(given, kind, size, note_ignored)
    body = _validated(kind, supported, "")
    body.check_fields()
    return body


def read_part(kind: type[Part], given: object, where: str) -> Part:
    """Return the part of a body at the path `where`. Raises InvalidRequestError."""
    return _validated(kind, _without_nulls(given), where)


def _validated(kind: type[Part], given: object, where: str) -> Part:
    _check_num_names(kind, given, where)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise field_error(error, where, kind) from error


def _check_num_names(kind: type[BodyPart], given: object, where: str) -> None:
    """Raise InvalidRequestError for an object that has more names than fields.

    pydantic would make an error for each unknown name, which takes long for thousands. Of an open
    part, the names are checked.
    """
    if not isinstance(given, dict):
        return
    if issubclass(kind, OpenPart):
        _check_own_names(kind, given, where)
    elif len(given) > len(kind.model_fields):
        _check_type(kind, given, where)
        known = names_of(kind)
        unknown = next(name for name in given if name not in known)
        raise unsupported_field(unknown, kind, where)
    for name, (part, is_list) in parts_of(kind).items():
        inside, value = path_of(where, name), given.get(name)
        if is_list and isinstance(value, list):
            for index, one in enumerate(value):
                if isinstance(one, dict):
                    _check_num_names(part, one, f"{inside}.{index}")
        else:
            _check_num_names(part, value, inside)


def _check_own_names(kind: type[OpenPart], given: dict[str, object], where: str) -> None:
    """Raise InvalidRequestError for a field that would change the answer, or is misspelled."""
    known = names_of(kind)
    if given.keys() <= known:
        return
    own = [name for name in given if name not in known]
    missing = known - given.keys()
    for name in own:
        is_text = isinstance(name, str)
        if not is_text or (name in kind.rejected and given[name] not in _NO_EFFECT):
            raise unsupported_field(str(name), kind, where)
        if is_text and len(own) <= _MAX_COMPARED and given[name] is not None:
            meant = misspelled_name(name, missing)
            if meant is not None:
                raise unsupported_field(name, kind, where)


def _check_type(kind: type[BodyPart], given: dict[str, object], where: str) -> None:
    """Raise InvalidRequestError for an object of another type, which has other names."""
    field = kind.model_fields.get("type")
    if field is None or field.annotation is None or "type" not in given:
        return
    try:
        TypeAdapter(field.annotation).validate_python(given["type"], strict=True)
    except ValidationError as error:
        raise field_error(error, path_of(where, "type"), BodyPart) from error


def _supported(
    given: dict[str, object],
    kind: type[Body],
    size: RequestSize,
    note_ignored: Callable[[str], None],
) -> dict[str, object]:
    """Return the parameters that are fields of the body."""
    kept: dict[str, object] = {}
    for name, limit in kind.max_entries.items():
        value = given.get(name)
        if name == "messages" and isinstance(value, list):
            check_num_messages(len(value), size)
        if isinstance(value, list) and len(value) > limit:
            raise InvalidRequestError(
                f"{name} may have at most {limit} entries, not {len(value)}.", param=name
            )
    for name, value in given.items():
        if value is None:
            continue
        if name in kind.model_fields:
            if type(value) is float and value.is_integer() and name in integers_of(kind):
                # Some languages have no integers.
                value = int(value)
            kept[name] = _without_nulls(value) if name in kind.with_nulls else value
        elif name in kind.ignored:
            _check_ignored(name, value, kind.in_ignored.get(name, {}))
            note_ignored(name)
        elif not _is_one_of(value, kind.defaults.get(name, ())):
            raise unsupported_field(name, kind)
    return kept


def _check_ignored(name: str, value: object, rejected: Mapping[str, str]) -> None:
    """Raise InvalidRequestError if a parameter that is ignored has a field that is not."""
    if not isinstance(value, dict):
        return
    for inner, reason in rejected.items():
        if value.get(inner) not in (None, False):
            param = f"{name}.{inner}"
            raise InvalidRequestError(f"{param} is not supported: {reason}.", param=param)


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        if None not in value.values():
            return value
        return {name: inner for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    # In Python True equals 1, in JSON it does not.
    return any(value == other and type(value) is type(other) for other in allowed)


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
