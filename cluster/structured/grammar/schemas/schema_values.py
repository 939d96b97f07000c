"""What can be said about the values of a JSON schema without reading it as a grammar."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.structured.grammar.schemas.schema_keywords import (
    ANNOTATIONS,
    KNOWN,
    pointer_of,
    resolve,
    types_of_value,
)
from pagedray.errors import InvalidRequestError

__all__ = ["finite_values", "is_unrestricted", "kinds_of", "resolved"]

_MAX_DEPTH = 16
"""Depth of nested references and branches."""


def kinds_of(schema: object, root: object) -> frozenset[str]:
    """Return the types that values of a schema may have; empty if it does not specify them."""
    return _kinds(schema, root, 0)


def resolved(schema: object, root: object) -> object:
    """Return what a schema that only refers to another one stands for."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            break
        if isinstance(reference := schema.get("$ref"), str):
            schema = _target(reference, root)
        elif isinstance(parts := schema.get("allOf"), list) and len(parts) == 1:
            schema = parts[0]
        else:
            break
    return schema


def is_unrestricted(schema: object, root: object) -> bool:
    """Return whether all values of the types that a schema allows are valid."""
    return _is_unrestricted(schema, root, 0)


def finite_values(schema: object, root: object) -> list[object] | None:
    """Return all values of a schema that lists them, or None."""
    return _finite(schema, root, 0)


def _kinds(schema: object, root: object, depth: int) -> frozenset[str]:
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    if "type" in schema:
        given = schema["type"]
        names = given if isinstance(given, list) else [given]
        return frozenset(name for name in names if isinstance(name, str))
    if isinstance(values := _listed(schema), list):
        return frozenset().union(*map(types_of_value, values))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(keyword), list):
            found = [_kinds(branch, root, depth + 1) for branch in branches]
            return frozenset().union(*found) if all(found) else frozenset()
    return frozenset()


def _is_unrestricted(schema: object, root: object, depth: int) -> bool:
    schema = resolved(schema, root)
    if schema is True:
        return True
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return False
    keywords = schema.keys() & KNOWN - ANNOTATIONS
    for keyword in ("anyOf", "oneOf"):
        if keywords == {keyword} and isinstance(branches := schema[keyword], list):
            return all(_is_unrestricted(branch, root, depth + 1) for branch in branches)
    return keywords <= {"type"}


def _finite(schema: object, root: object, depth: int) -> list[object] | None:
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    if isinstance(values := _listed(schema), list):
        types = _kinds(schema, root, depth)
        return [value for value in values if not types_of_value(value).isdisjoint(types)]
    if schema.get("type") == "null":
        return [None]
    if schema.get("type") == "boolean":
        return [True, False]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(keyword), list):
            found: list[object] = []
            for branch in branches:
                part = _finite(branch, root, depth + 1)
                if part is None:
                    return None
                found += part
            return found
    return None


def _listed(schema: Mapping[str, object]) -> object:
    return schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None


def _target(reference: str, root: object) -> object:
    try:
        return resolve(root, pointer_of(reference, "#"), "#")
    except InvalidRequestError:
        return None
