"""The declaration of a body: its fields, and the parameters that are ignored or rejected."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import ClassVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, JsonValue

__all__ = [
    "Body",
    "BodyPart",
    "Defaults",
    "OpenPart",
    "integers_of",
    "named_schema",
    "names_of",
    "part_at",
    "parts_of",
]

Defaults = Mapping[str, tuple[object, ...]]


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
