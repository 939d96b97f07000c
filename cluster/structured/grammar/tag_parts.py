"""The parts of a structural tag as JSON: checks of their names, types and values.

Every function names the place of an invalid value by its path, such as `format.tags.0.end`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from cluster.structured.grammar.expressions import invalid_structure
from pagedray.text import nearest_name

__all__ = [
    "Part",
    "Tag",
    "check_names",
    "check_type",
    "fail_at",
    "flag_of",
    "joined_path",
    "list_of",
    "schema_of",
    "string_of",
    "tag_of",
    "tags_of",
    "text_of",
    "triggers_of",
]

_MOST_SHOWN = 64
"""Characters of an unknown name that an error shows."""

Part = Mapping[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A part between two marks, which is read later."""

    path: str
    begin: str
    content: object
    content_path: str
    end: str


def fail_at(path: str, what: str) -> NoReturn:
    """Raise InvalidRequestError, as all functions below do, for the value at a path."""
    raise invalid_structure(f"{joined_path('structure', path) if path else 'structure'} {what}.")


def joined_path(path: str, name: str) -> str:
    """Return the path of a name at a path, which is empty for the whole tag."""
    return f"{path}.{name}" if path else name


def check_names(part: Part, path: str, names: Sequence[str]) -> None:
    """Check that a part has no other names than these."""
    for name in part:
        if name not in names:
            nearest = nearest_name(name[:_MOST_SHOWN], names)
            hint = f"did you mean {nearest}?" if nearest else f"allowed are {', '.join(names)}."
            shown = joined_path("structure", joined_path(path, name[:_MOST_SHOWN]))
            raise invalid_structure(f"{shown} is not supported: {hint}")


def check_type(part: Part, path: str, name: str) -> None:
    """Check the type of a part that may leave it out."""
    if part.get("type", name) != name:
        fail_at(joined_path(path, "type"), f"must be {name}")


def tags_of(part: Part, path: str) -> list[Tag]:
    """Return the list `tags` of a part."""
    tags = list_of(part, "tags", path)
    return [tag_of(one, f"{path}.tags.{index}") for index, one in enumerate(tags)]


def tag_of(part: Part, path: str) -> Tag:
    """Return a part as a tag."""
    check_names(part, path, ("type", "begin", "content", "end"))
    check_type(part, path, "tag")
    return Tag(
        path=path,
        begin=text_of(part, "begin", path),
        content=part.get("content"),
        content_path=f"{path}.content",
        end=string_of(part, "end", path),
    )


def triggers_of(part: Part, path: str) -> list[str]:
    """Return the list `triggers` of a part, of non-empty strings."""
    triggers = part.get("triggers")
    if not isinstance(triggers, list) or not triggers:
        fail_at(joined_path(path, "triggers"), "must be a non-empty list")
    for index, trigger in enumerate(triggers):
        if not isinstance(trigger, str) or not trigger:
            fail_at(f"{joined_path(path, 'triggers')}.{index}", "must be a non-empty string")
    return triggers


def schema_of(part: Part, name: str, path: str) -> object:
    """Return a JSON Schema, which is an object or a boolean."""
    schema = part.get(name)
    if not isinstance(schema, dict | bool):
        fail_at(joined_path(path, name), "must be a JSON Schema")
    return schema


def list_of(part: Part, name: str, path: str) -> list[Part]:
    """Return a non-empty list of objects."""
    given = part.get(name)
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
        fail_at(joined_path(path, name), "must be a non-empty list of objects")
    return given


def text_of(part: Part, name: str, path: str) -> str:
    """Return a non-empty string."""
    if not part.get(name):
        fail_at(joined_path(path, name), "must be a non-empty string")
    return string_of(part, name, path)


def string_of(part: Part, name: str, path: str) -> str:
    """Return a string, which a grammar can contain."""
    given = part.get(name)
    if not isinstance(given, str):
        fail_at(joined_path(path, name), "must be a string")
    if any("\ud800" <= character <= "\udfff" or not ord(character) for character in given):
        fail_at(joined_path(path, name), "has NUL or a lone surrogate")
    return given


def flag_of(part: Part, name: str, path: str) -> bool:
    """Return a boolean; False if it is absent."""
    given = part.get(name, False)
    if not isinstance(given, bool):
        fail_at(joined_path(path, name), "must be true or false")
    return given
