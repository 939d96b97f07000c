"""The words of JSON schemas: which are known, and how the simplest of them are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, cast

from cluster.structured.grammar.expressions import refuse

__all__ = [
    "KEYWORDS",
    "KNOWN",
    "SILENT",
    "WHOLE",
    "Schema",
    "counts_of",
    "fail",
    "pointer_part",
    "resolve",
    "types_of",
    "types_of_value",
]

MAX_COUNT = 4096
"""Characters of a string, or items of an array, that a schema may count to."""

Schema = Mapping[str, object]

# Words about a schema that say nothing of its values.
SILENT = frozenset(
    (
        *("title", "description", "default", "examples", "$comment", "$schema", "$id"),
        *("deprecated", "readOnly", "writeOnly", "discriminator", "$defs", "definitions"),
    )
)
KEYWORDS: Mapping[str, frozenset[str]] = {
    "null": frozenset(),
    "boolean": frozenset(),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems", "uniqueItems")),
    "object": frozenset(
        ("properties", "required", "additionalProperties", "minProperties", "maxProperties")
    ),
}
WHOLE = frozenset(("$ref", "const", "enum", "anyOf", "oneOf", "allOf"))
"""Keywords that say all there is to say of a value."""
KNOWN = frozenset(("type",)).union(SILENT, WHOLE, *KEYWORDS.values())


def fail(path: str, what: str) -> NoReturn:
    """Refuse a part of a schema, by its place. Raises InvalidRequestError."""
    raise refuse(f"structure has a JSON schema whose {path[:200]} {what}.")


def counts_of(schema: Schema, path: str, low: str, high: str) -> tuple[int, int | None]:
    """Return the least and the most of something that two keywords limit."""
    for keyword in (low, high):
        value = schema.get(keyword, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
            fail(f"{path}/{keyword}", f"must be an integer from 0 to {MAX_COUNT}")
    fewest = cast("int", schema.get(low, 0))
    most = cast("int | None", schema.get(high))
    if most is not None and most < fewest:
        fail(path, f"has {high} below {low}")
    return fewest, most


def types_of(schema: Schema, path: str) -> tuple[str, ...] | None:
    """Return the types that a schema names, or None."""
    given = schema.get("type")
    if given is None and "type" not in schema:
        return None
    types = [given] if isinstance(given, str) else given
    if (
        not isinstance(types, list)
        or not types
        or not all(isinstance(name, str) and name in KEYWORDS for name in types)
    ):
        fail(f"{path}/type", f"must be of {', '.join(KEYWORDS)}")
    return tuple(dict.fromkeys(types))


def types_of_value(value: object) -> set[str]:
    """Return the types that a value is of."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}


def pointer_part(name: str) -> str:
    """Return a name as it is written in a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def resolve(root: object, pointer: str, path: str) -> object:
    """Return what a JSON pointer behind a # points at."""
    found = root
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdigit() and len(key) < 6 and int(key) < len(found):
            found = found[int(key)]
        else:
            fail(f"{path}/$ref", "refers to what is not there")
    return found
