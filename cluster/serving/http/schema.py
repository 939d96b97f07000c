"""How the bodies of all endpoints are read and validated.

An unsupported parameter is rejected unless its value has no effect: null, or its default. Hints
that cannot change the answer are ignored.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, JsonValue, TypeAdapter, ValidationError

from cluster.serving.intake.limits import LARGEST, RequestSize, check_num_messages
from cluster.serving.json_bodies.json_body import read_json
from pagedray.errors import ContextLengthError, InvalidRequestError
from pagedray.wording.nearest_name import nearest_name
from pagedray.wording.shown_value import shown_json_value, shown_value

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from cluster.serving.intake.steps import Steps

__all__ = [
    "Body",
    "BodyPart",
    "Defaults",
    "missing_field",
    "named_schema",
    "read_body",
    "read_part",
    "renamed",
]

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]{1,64}")
_MAX_NAMES = 64
"""Names of an object that are compared with a missing one."""
_STEP_ENTRIES = 128
"""Entries of a list that are validated at once."""
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

Defaults = Mapping[str, tuple[object, ...]]


class BodyPart(BaseModel):
    """Part of a body or a parameter."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Body(BodyPart):
    """The body of one endpoint."""

    defaults: ClassVar[Defaults] = {}
    """Unsupported parameters and their values without effect."""
    ignored: ClassVar[Mapping[str, str]] = {}
    """Parameters that cannot change the answer, and why."""
    in_ignored: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Their fields that are rejected, and what to use instead."""
    rejected: ClassVar[Mapping[str, str]] = {}
    """Unsupported parameters, and what to use instead or why they are rejected."""
    synonyms: ClassVar[Mapping[str, str]] = {}
    """Names that other APIs give to parameters, and those that they have here."""
    max_entries: ClassVar[Mapping[str, int]] = {}
    """Lists whose length is checked before their entries are validated."""
    ids_field: ClassVar[str | None] = None
    """The field that holds token ids, which are the longest lists."""
    with_nulls: ClassVar[frozenset[str]] = frozenset()
    """Parameters inside which a null is ignored."""

    def check_fields(self) -> None:
        """Raise InvalidRequestError if parameters cannot be used together."""


AnyBody = TypeVar("AnyBody", bound=Body)
Part = TypeVar("Part", bound=BodyPart)


def named_schema(name: str) -> dict[str, JsonValue]:
    """Return the placeholder for another part's schema in a field's documentation."""
    return {"x-part": name}


def read_body(
    kind: type[AnyBody],
    raw: bytes,
    size: RequestSize = LARGEST,
    *,
    note_ignored: Callable[[str], None],
) -> Steps[AnyBody]:
    """Return the checked body of a call. Raises InvalidRequestError.

    `note_ignored` is called with the name of each parameter that is ignored, and may reject it.
    """
    try:
        given = yield from read_json(raw, size)
    except ContextLengthError as error:
        error.param = kind.ids_field
        raise
    yield
    supported = _supported(given, kind, size, note_ignored)
    yield
    body = yield from _validated_in_steps(kind, supported)
    yield
    body.check_fields()
    return body


def read_part(kind: type[Part], given: object, where: str) -> Part:
    """Return the part of a body at the path `where`. Raises InvalidRequestError."""
    return _validated(kind, _without_nulls(given), where)


def missing_field(
    names: Sequence[str], given: object, where: str, kinds: Iterable[type[BodyPart]]
) -> InvalidRequestError:
    """Return the error for a part, at the path `where`, that has none of the fields of `names`.

    A name in it that is like one of them, and no field of the part's possible kinds, is named.
    Otherwise the first field is.
    """
    known = {own for kind in kinds for own in _names_of(kind)}
    own_names = islice(given, _MAX_NAMES) if isinstance(given, dict) else ()
    unknown = [own for own in own_names if own not in known]
    for name in names:
        nearest = nearest_name(name, unknown)
        if nearest is not None and _PLAIN_NAME.fullmatch(nearest) is not None:
            wrong = _inside(where, nearest)
            return InvalidRequestError(
                f"{wrong} is not supported: did you mean {name}?", param=wrong
            )
    missing = _inside(where, names[0])
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


def _validated(kind: type[Part], given: object, where: str) -> Part:
    _check_num_names(kind, given, where)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=True)[0]
        raise _rejection(details, where, kind) from error


def _validated_in_steps(kind: type[AnyBody], given: dict[str, object]) -> Steps[AnyBody]:
    """Return a validated body, of whose long lists each entry is validated first."""
    validated = dict(given)
    for name, (part, is_list) in _parts_of(kind).items():
        entries = given.get(name)
        if not is_list or not isinstance(entries, list) or len(entries) <= _STEP_ENTRIES:
            continue
        parts: list[BodyPart] = []
        for index, entry in enumerate(entries):
            if index % _STEP_ENTRIES == 0:
                yield
            parts.append(_validated(part, entry, f"{name}.{index}"))
        validated[name] = parts
    return _validated(kind, validated, "")


def _check_num_names(kind: type[BodyPart], given: object, where: str) -> None:
    """Raise InvalidRequestError for an object that has more names than fields.

    pydantic would make an error for each unknown name, which takes long for thousands.
    """
    if not isinstance(given, dict):
        return
    if len(given) > len(kind.model_fields):
        _check_type(kind, given, where)
        known = _names_of(kind)
        unknown = next(name for name in given if name not in known)
        raise _unsupported(unknown, kind, where)
    for name, (part, is_list) in _parts_of(kind).items():
        inside, value = _inside(where, name), given.get(name)
        if is_list and isinstance(value, list):
            for index, one in enumerate(value):
                if isinstance(one, dict):
                    _check_num_names(part, one, f"{inside}.{index}")
        else:
            _check_num_names(part, value, inside)


def _check_type(kind: type[BodyPart], given: dict[str, object], where: str) -> None:
    """Raise InvalidRequestError for an object of another type, which has other names."""
    field = kind.model_fields.get("type")
    if field is None or field.annotation is None or "type" not in given:
        return
    try:
        TypeAdapter(field.annotation).validate_python(given["type"], strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=True)[0]
        raise _rejection(details, _inside(where, "type"), BodyPart) from error


@functools.cache
def _parts_of(kind: type[BodyPart]) -> Mapping[str, tuple[type[BodyPart], bool]]:
    """Return the parts that fields of a part are, and whether the fields are lists of them."""
    found: dict[str, tuple[type[BodyPart], bool]] = {}
    for name, field in kind.model_fields.items():
        # Of a list its entries' type, of `X | None` both.
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BodyPart):
                found[name] = (inner, get_origin(field.annotation) is list)
    return found


def _part_at(kind: type[BodyPart], path: Iterable[int | str]) -> type[BodyPart]:
    """Return the kind of the part at a path inside another; one without fields if it has none."""
    for step in path:
        if isinstance(step, str):
            kind, _ = _parts_of(kind).get(step, (BodyPart, False))
    return kind


@functools.cache
def _names_of(kind: type[BodyPart]) -> frozenset[str]:
    """Return the names of a part's fields as clients write them."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


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
            kept[name] = _without_nulls(value) if name in kind.with_nulls else value
        elif name in kind.ignored:
            _check_ignored(name, value, kind.in_ignored.get(name, {}))
            note_ignored(name)
        elif not _is_one_of(value, kind.defaults.get(name, ())):
            raise _unsupported(name, kind)
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


def _rejection(details: ErrorDetails, prefix: str, part: type[BodyPart]) -> InvalidRequestError:
    path = [str(step) for step in details["loc"]]
    where = ".".join([prefix, *path] if prefix else path)
    kind, given = details["type"], details["input"]
    if kind in ("extra_forbidden", "missing"):
        holder = ".".join(([prefix] if prefix else []) + path[:-1])
        inner = _part_at(part, details["loc"][:-1])
        if kind == "missing":
            return missing_field((path[-1],), given, holder, (inner,))
        return _unsupported(path[-1], inner, holder)
    if kind == "literal_error":
        expected = _one_of(details["ctx"]["expected"])
    else:
        expected = _EXPECTED.get(kind, "a valid value")
    return InvalidRequestError(
        f"{where} must be {expected}, not {shown_json_value(given)}.", param=where
    )


def _one_of(expected: str) -> str:
    """Return pydantic's list of a field's values, with `true` and `false` as in JSON."""
    if expected in ("True", "False"):
        return expected.lower()
    return f"one of {expected}" if " or " in expected else expected


def _unsupported(name: str, kind: type[BodyPart], where: str = "") -> InvalidRequestError:
    """Return the error for a name in the part at the path `where`."""
    whole = _inside(where, name)
    if _PLAIN_NAME.fullmatch(whole) is None:
        return InvalidRequestError(f"{shown_value(whole)} is not supported.")
    reason, nearest, known = None, None, _names_of(kind)
    if issubclass(kind, Body):
        reason, nearest = kind.rejected.get(name), kind.synonyms.get(name)
        known = known.union(kind.ignored, kind.defaults)
    if reason is None:
        nearest = nearest or nearest_name(name, known - {name})
        reason = "" if nearest is None else f"did you mean {nearest}?"
    text = f"{whole} is not supported{f': {reason}' if reason else ''}"
    return InvalidRequestError(text if text.endswith("?") else f"{text}.", param=whole)
