"""JSON schemas without the texts that describe values, which are most of the schemas of tools."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.structured.grammar.schema_keywords import ANNOTATIONS, KNOWN

__all__ = ["bare_schema"]

_OF_SCHEMAS = frozenset(("$defs", "definitions", "patternProperties", "properties"))
"""Keywords with schemas by name."""
_OF_VALUES = frozenset(("const", "enum", "required"))
"""Keywords with values that have no schemas."""


def bare_schema(schema: Mapping[str, object]) -> dict[str, object]:
    """Return a schema that allows the same values, without keywords that do not restrict them."""
    return {
        keyword: _bare_part(keyword, part)
        for keyword, part in schema.items()
        if keyword in _OF_SCHEMAS or keyword not in ANNOTATIONS
    }


def _bare_part(keyword: str, part: object) -> object:
    # Keywords that are not known may have definitions by names.
    if keyword in _OF_VALUES or keyword not in KNOWN:
        return part
    if keyword in _OF_SCHEMAS and isinstance(part, Mapping):
        return {name: _bare(schema) for name, schema in part.items()}
    if isinstance(part, list):
        return [_bare(schema) for schema in part]
    return _bare(part)


def _bare(schema: object) -> object:
    return bare_schema(schema) if isinstance(schema, Mapping) else schema
