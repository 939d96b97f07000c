"""JSON that clients send as Python objects, and values written as JSON again.

Parsing costs time and memory per object rather than per byte, so objects are counted before they
are made.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from math import isinf
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args, get_origin

import msgspec
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from pydantic_core import from_json

from cluster.serving.intake import LARGEST, RequestSize, check_num_messages
from pagedray.errors import ContextLengthError, InvalidRequestError, invalid_field
from pagedray.text import misspelled_name, nearest_name, quote, quote_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Body",
    "BodyPart",
    "Defaults",
    "OpenPart",
    "check_counts",
    "described",
    "json_text",
    "missing_field",
    "named_schema",
    "read_arguments",
    "read_body",
    "read_json",
    "read_part",
    "renamed",
]

_MAX_CONTAINERS = 2**13
_MAX_STRINGS = 2**15
_ONE_BRACKET = bytes.maketrans(b"[{}", b"]]]")
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * 309
"""Without an exponent, numbers of fewer digits are in the range of a double."""
_NO_ARGUMENTS = ("", "null", '""')
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_MAX_ESCAPES = 2**15
"""Backslashes of arguments in which halves of characters are replaced."""

Defaults = Mapping[str, tuple[object, ...]]
_MAX_COMPARED = 16
"""With more fields of a client's own in an object, none of them counts as misspelled."""
_NO_EFFECT: tuple[object, ...] = (None, False, "", [], {})
AnyBody = TypeVar("AnyBody", bound="Body")
Part = TypeVar("Part", bound="BodyPart")
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


def read_json(
    raw: bytes, size: RequestSize = LARGEST, *, what: str = "The body"
) -> dict[str, object]:
    """Return the JSON object in `raw`. Raises InvalidRequestError, naming `what`.

    Duplicate names in an object are rejected, because a proxy might read the other value, and so
    are numbers that would be read as infinite.
    """
    check_counts(raw, what, size)
    try:
        parsed = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"{what} is not valid JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise InvalidRequestError(f"{what} must be a JSON object.")
    _check_values(raw, parsed, what)
    return parsed


def check_counts(raw: bytes, what: str, size: RequestSize = LARGEST) -> None:
    """Raise InvalidRequestError, naming `what`, if there are too many objects to parse."""
    quotes, containers, commas = _count(raw)
    num_fewest = min(size.num_list_values, size.num_values)
    if quotes <= 2 * _MAX_STRINGS and containers <= _MAX_CONTAINERS and commas <= num_fewest:
        return
    # Quotes, brackets and commas inside strings made the count too high.
    num_strings, bare = _outside_strings(raw)
    _check(f"{what} may have at most {{}} strings, not {{}}.", num_strings, _MAX_STRINGS)
    _, num_containers, num_commas = _count(bare)
    _check(
        f"{what} may have at most {{}} arrays and objects, not {{}}.",
        num_containers,
        _MAX_CONTAINERS,
    )
    if num_commas > num_fewest:
        num_entries = 1 + max(part.count(b",") for part in bare.translate(_ONE_BRACKET).split(b"]"))
        if num_entries > size.num_list_values:
            raise ContextLengthError(
                f"{what} has a list or an object of {num_entries} entries, but the context length "
                f"of {size.context} (--max-model-len) allows at most {size.num_list_values}."
            )
    _check(f"{what} may have at most {{}} values, not {{}}.", num_commas, size.num_values)


def _check_values(raw: bytes, parsed: dict[str, object], what: str) -> None:
    """Raise InvalidRequestError for a duplicate name, or a number that was read as infinite."""
    # Each name is followed by a colon, but of duplicates only the last was kept.
    _, bare = _outside_strings(raw)
    num_left = bare.count(b":")
    num_objects = bare.count(b"{")
    may_be_infinite = _may_be_infinite(bare)
    waiting: list[object] = [parsed]
    while waiting and (num_objects or may_be_infinite):
        container = waiting.pop()
        if isinstance(container, dict):
            num_objects -= 1
            num_left -= len(container)
            values = list(container.values())
        else:
            assert isinstance(container, list)
            values = container
        waiting += [value for value in values if isinstance(value, dict | list)]
        if may_be_infinite and any(isinstance(value, float) and isinf(value) for value in values):
            raise _out_of_range(container, what, is_field=container is parsed)
    if num_left:
        raise InvalidRequestError(f"{what} has an object with a duplicate name.")


def _may_be_infinite(bare: bytes) -> bool:
    """Return whether there are exponents or long fractions, given the bytes outside of strings."""
    if b"E" in bare or bare.count(b"e") > bare.count(b"true") + bare.count(b"false"):
        return True
    # Integers of any length are not floats.
    return b"." in bare and _LONG_NUMBER in bare.translate(_DIGITS_AS_ZEROS)


def _out_of_range(container: object, what: str, *, is_field: bool) -> InvalidRequestError:
    pairs = container.items() if isinstance(container, dict) else ()
    names = (name for name, value in pairs if isinstance(value, float) and isinf(value))
    name = next(names, None)
    where = "" if name is None else f" for {quote(name)}"
    return InvalidRequestError(
        f"{what} has a number{where} that exceeds the range of a double.",
        param=name if is_field else None,
    )


def _outside_strings(raw: bytes) -> tuple[int, bytes]:
    """Return the number of strings, and the bytes outside of strings unless they are too many."""
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = raw.count(b'"') // 2
    return num_strings, b"" if num_strings > _MAX_STRINGS else b"".join(raw.split(b'"')[::2])


def _count(raw: bytes) -> tuple[int, int, int]:
    """Return the numbers of quotes, of containers and of commas."""
    # Only invalid JSON has more closing than opening brackets.
    opened = raw.count(b"[") + raw.count(b"{")
    closed = raw.count(b"]") + raw.count(b"}")
    return raw.count(b'"'), max(opened, closed), raw.count(b",")


def _check(text: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequestError(text.format(most, count))


def json_text(value: object, param: str, *, most_bytes: int) -> str:
    """Return a value of the field `param` in JSON. Raises InvalidRequestError if it is longer."""
    # Much faster than the other encoder, which would hold the event loop for a large value.
    num_bytes = len(msgspec.json.encode(value))
    if num_bytes > most_bytes:
        raise invalid_field(param, f"may have at most {most_bytes} bytes of JSON, not {num_bytes}.")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise invalid_field(param, "contains a number that JSON cannot represent.") from error


def read_arguments(text: str, param: str) -> dict[str, object]:
    """Return the arguments of a call, none if the text is empty. Raises InvalidRequestError.

    The end of the arguments is missing if the call was cut off.
    """
    if text.strip() in _NO_ARGUMENTS:
        return {}
    try:
        arguments = _parsed(text)
    except ValueError:
        arguments = _without_halves(text)
    if not isinstance(arguments, dict):
        raise invalid_field(param, "must be a JSON object as a string.")
    try:
        # The encoder finds infinite numbers faster than Python code does.
        json.dumps(arguments, allow_nan=False)
    except ValueError as error:
        raise invalid_field(param, "has a number that exceeds the range of a double.") from error
    return arguments


def _parsed(text: str) -> object:
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        if not str(error).startswith("EOF while parsing"):
            raise
    return from_json(text, allow_inf_nan=False, allow_partial="trailing-strings")


def _without_halves(text: str) -> object:
    """Return a text with a replacement for each half of a character."""
    if _HALF.search(text) is None or text.count("\\") > _MAX_ESCAPES:
        return None
    try:
        return _parsed(_ESCAPE.sub(_whole_escape, text))
    except ValueError:
        return None


def _whole_escape(found: re.Match[str]) -> str:
    return found[0] if found["half"] is None else "\\ufffd"


class BodyPart(BaseModel):
    """Part of a body or a parameter."""

    model_config = ConfigDict(extra="forbid", strict=True)


class OpenPart(BodyPart):
    """Part of a conversation or a tool, in which clients may have fields of their own."""

    model_config = ConfigDict(extra="allow")
    rejected: ClassVar[Mapping[str, str]] = {}
    """Fields that would change the answer, with an alternative or the reason for rejection."""


class Body(BodyPart):
    """The body of one endpoint."""

    defaults: ClassVar[Defaults] = {}
    """Unsupported parameters and their values without effect."""
    ignored: ClassVar[Mapping[str, str]] = {}
    """Parameters that cannot change the answer, and why."""
    in_ignored: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Their rejected fields, with an alternative."""
    rejected: ClassVar[Mapping[str, str]] = {}
    """Unsupported parameters, with an alternative or the reason for rejection."""
    synonyms: ClassVar[Mapping[str, str]] = {}
    """Names of parameters in other APIs, with our names."""
    max_entries: ClassVar[Mapping[str, int]] = {}
    """Lists with a maximum length, checked before their entries are validated."""
    ids_field: ClassVar[str | None] = None
    """The field that holds token ids, which are the longest lists."""
    with_nulls: ClassVar[frozenset[str]] = frozenset()
    """Parameters inside which a null is ignored."""

    def check_fields(self) -> None:
        """Raise InvalidRequestError if parameters cannot be used together."""


# Any: JSON, and a pydantic field.
def described(text: str, default: object = None, /, **schema: Any) -> Any:
    """Return a field with a description and more of its schema; `...` is no default."""
    return Field(default, description=text, json_schema_extra=schema or None)


def named_schema(name: str) -> dict[str, JsonValue]:
    """Return the placeholder for another part's schema in a field's documentation."""
    return {"x-part": name}


@functools.cache
def parts_of(kind: type[BodyPart]) -> Mapping[str, tuple[type[BodyPart], bool]]:
    """Return the parts that fields of a part are, and whether the fields are lists of them."""
    found: dict[str, tuple[type[BodyPart], bool]] = {}
    for name, field in kind.model_fields.items():
        # Of a list its entries' type, of `X | None` both.
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BodyPart):
                found[name] = (inner, get_origin(field.annotation) is list)
    return found


def part_at(kind: type[BodyPart], path: Iterable[int | str]) -> type[BodyPart]:
    """Return the kind of the part at a path inside another part; without fields if none."""
    for step in path:
        if isinstance(step, str):
            kind, _ = parts_of(kind).get(step, (BodyPart, False))
    return kind


@functools.cache
def integers_of(kind: type[BodyPart]) -> frozenset[str]:
    """Return the names of a part's fields that are integers."""
    fields = kind.model_fields.items()
    return frozenset(name for name, field in fields if field.annotation in (int, int | None))


@functools.cache
def names_of(kind: type[BodyPart]) -> frozenset[str]:
    """Return the names of a part's fields as clients write them."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


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
            raise invalid_field(name, f"may have at most {limit} entries, not {len(value)}.")
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
            raise invalid_field(param, f"is not supported: {reason}.")


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
            return invalid_field(wrong, f"is not supported: did you mean {name}?")
    missing = path_of(where, names[0])
    return invalid_field(missing, "is required.")


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
    return invalid_field(where, f"must be {expected}, not {quote_json(given)}.")


def _one_of(expected: str) -> str:
    """Return pydantic's list of a field's values, with `true` and `false` as in JSON."""
    if expected in ("True", "False"):
        return expected.lower()
    return f"one of {expected}" if " or " in expected else expected


def path_of(where: str, name: str) -> str:
    """Return the path of a field in the part at the path `where`, which is empty for a body."""
    return f"{where}.{name}" if where else name
