"""Writes schemas with fewer keywords: merges combined schemas, and replaces those of draft 7.

The result allows no value that the original schema does not allow. A schema that cannot be
rewritten stays as it is, so that its reader rejects it by the name of the keyword.
"""

from __future__ import annotations

import json
from fractions import Fraction
from math import isinf
from typing import NoReturn, TypeAlias, cast

from cluster.structured.grammar.expressions import invalid_structure
from cluster.structured.grammar.schema_keywords import (
    ANNOTATIONS,
    KNOWN,
    pointer_of,
    resolve,
)
from pagedray.errors import InvalidRequestError

__all__ = ["load_schema", "rewritten"]

_Json: TypeAlias = "dict[str, object]"
_ONE = ("items", "additionalProperties", "propertyNames", "additionalItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_REWRITTEN = frozenset(
    ("not", "items", "additionalItems", "propertyNames", "allOf", "anyOf", "oneOf")
)
"""Schemas without these keywords are copied."""
_ITEMS = frozenset(("items", "prefixItems", "uniqueItems"))
_MAX_DEPTH = 64
_MAX_BRANCHES = 128
_MAX_MERGES = 1024
"""Merges of one schema; branches within branches may need a power of two of them."""

_RESTRICTING = KNOWN - ANNOTATIONS | {"not"}
_MAX_EXPONENT = 400
"""The largest exponent of a number; no float has a larger exponent."""


def rewritten(root: object) -> object:
    """Return a schema with fewer keywords, with the same parts at the targets of references."""
    return _Rewriter(root).schema(root, 0)


class _Rewriter:
    def __init__(self, root: object) -> None:
        self._root = root
        self._targets: dict[str, object] = {}
        """Schemas of merged references, by pointer; unmerged while being read."""
        self._num_merges = 0

    def schema(self, given: object, depth: int) -> object:
        """Return a schema, and everything in it, with fewer keywords."""
        if not isinstance(given, dict) or depth > _MAX_DEPTH:
            return given
        found = dict(given)
        for name, part in given.items():
            if isinstance(part, dict):
                if name in _ONE:
                    found[name] = self.schema(part, depth + 1)
                elif name in _MAPS:
                    found[name] = {key: self.schema(one, depth + 1) for key, one in part.items()}
            elif isinstance(part, list) and name in _LISTS:
                found[name] = [self.schema(one, depth + 1) for one in part]
        if found.get("nullable") is True and isinstance(found.get("type"), str):
            # As in OpenAPI 3.0, which requires the type beside it.
            found["type"] = [found["type"], "null"]
        if _REWRITTEN.isdisjoint(found):
            return found
        if _restricting(found) == {"not"} and _is_any(found["not"]):
            # Allows nothing.
            return False
        self._spell_items(found)
        self._list_names(found)
        return self._combined(found, depth)

    def _spell_items(self, found: _Json) -> None:
        """Replace the lists of `items` of draft 7."""
        more = found.pop("additionalItems", None)
        if isinstance(found.get("items"), list) and "prefixItems" not in found:
            found["prefixItems"] = found.pop("items")
            if more is not None and more is not True:
                found["items"] = more

    def _list_names(self, found: _Json) -> None:
        """Make properties of the names that propertyNames lists, if some of them are required."""
        names = found.get("propertyNames")
        if isinstance(names, dict) and "$ref" in names and not _restricting(names) - {"$ref"}:
            names = self._target(names["$ref"], 0)
            if isinstance(names, dict) and (names.get("type") == "string" or "enum" in names):
                found["propertyNames"] = names
        listed = names.get("enum") if isinstance(names, dict) else None
        required, value = found.get("required"), found.get("additionalProperties")
        properties = found.get("properties", {})
        if not isinstance(listed, list) or not isinstance(required, list) or not required:
            return
        known = {name for name in listed if isinstance(name, str)}
        if not isinstance(value, dict) or properties or not known.issuperset(map(str, required)):
            return
        if _restricting(cast("_Json", names)) <= {"enum", "type"}:
            del found["propertyNames"], found["additionalProperties"]
            found["properties"] = {name: value for name in listed if name in known}

    def _combined(self, found: _Json, depth: int) -> object:
        """Merge allOf, and the keywords beside anyOf and oneOf with each branch."""
        for name in ("anyOf", "oneOf"):
            branches = found.get(name)
            if isinstance(branches, list) and any(part is not False for part in branches):
                found[name] = [part for part in branches if part is not False]
        branches = found.get("allOf")
        if isinstance(branches, list) and branches:
            base = {name: value for name, value in found.items() if name != "allOf"}
            is_combined = len(branches) > 1 or bool(_restricting(base))
            if is_combined and len(branches) <= _MAX_BRANCHES:
                merged: _Json | None = base
                for branch in branches:
                    if merged is not None:
                        merged = self._merged(merged, branch, depth)
                if merged is None:
                    return found
                found = merged
        for name in ("anyOf", "oneOf"):
            base = {key: value for key, value in found.items() if key != name}
            branches = found.get(name)
            if not isinstance(branches, list) or not _restricting(base):
                continue
            if len(branches) > _MAX_BRANCHES:
                continue
            alternatives, name_then = branches, name
            if name == "oneOf" and (exclusive := _one_required(branches)) is not None:
                alternatives, name_then = exclusive, "anyOf"
            shared = {key: value for key, value in base.items() if key not in ANNOTATIONS}
            parts = [self._merged(shared, branch, depth) for branch in alternatives]
            if all(part is not None for part in parts):
                kept = {key: value for key, value in base.items() if key in ANNOTATIONS}
                return kept | {name_then: parts}
        return found

    def _merged(self, a: _Json, branch: object, depth: int) -> _Json | None:
        """Return a schema of the values that two schemas allow, or None if it is not found."""
        if branch is True:
            return a
        self._num_merges += 1
        if self._num_merges > _MAX_MERGES:
            return None
        if isinstance(branch, dict) and "$ref" in branch:
            if _restricting(branch) != {"$ref"}:
                return None
            branch = self._target(branch["$ref"], depth)
        if not isinstance(branch, dict) or "$ref" in a or "$ref" in branch:
            return None
        b = {name: value for name, value in branch.items() if name not in ANNOTATIONS}
        if not b.keys() <= KNOWN:
            return None
        if a.keys() & _ITEMS and b.keys() & _ITEMS:
            return None
        if not (_permits(a, b) and _permits(b, a)):
            return None
        both = dict(a)
        for name, value in b.items():
            if name not in both or both[name] == value:
                both[name] = value
            elif name == "properties":
                own, others = cast("_Json", both[name]), cast("_Json", value)
                joined = {
                    key: self._both(own[key], part, depth) if key in own else part
                    for key, part in others.items()
                }
                both[name] = own | joined
            elif name == "required":
                both[name] = list(dict.fromkeys([*cast("list[str]", both[name]), *_names(value)]))
            elif name == "additionalProperties" and (_is_any(both[name]) or _is_any(value)):
                both[name] = value if _is_any(both[name]) else both[name]
            else:
                return None
        return both

    def _both(self, a: object, b: object, depth: int) -> object:
        if a == b:
            return a
        return False if a is False or b is False else self._combined({"allOf": [a, b]}, depth + 1)

    def _target(self, reference: object, depth: int) -> object:
        try:
            pointer = pointer_of(reference, "#")
            if pointer not in self._targets:
                self._targets[pointer] = found = resolve(self._root, pointer, "#")
                self._targets[pointer] = self.schema(found, depth + 1)
        except InvalidRequestError:
            # Its reader says where the reference is.
            return None
        return self._targets[pointer]


def _restricting(schema: _Json) -> frozenset[str]:
    return _RESTRICTING.intersection(schema)


def _is_any(schema: object) -> bool:
    return schema is True or schema == {}


def _names(value: object) -> list[str]:
    return value if isinstance(value, list) else []


def _permits(a: _Json, b: _Json) -> bool:
    """Return whether `a` has all properties of `b`, if `a` limits others."""
    if _is_any(a.get("additionalProperties", True)) and "patternProperties" not in a:
        return True
    properties = a.get("properties", {})
    others = b.get("properties", {})
    if not isinstance(properties, dict) or not isinstance(others, dict):
        return False
    return others.keys() <= properties.keys()


def _one_required(branches: list[object]) -> list[object] | None:
    """Return branches for `anyOf` if each requires another single property, as protobuf's oneof."""
    names = []
    for branch in branches:
        if not isinstance(branch, dict) or _restricting(branch) != {"required"}:
            return None
        required = _names(branch["required"])
        if len(required) != 1 or not isinstance(required[0], str):
            return None
        names.append(required[0])
    if len(set(names)) < len(names):
        return None
    return [
        {"required": [name], "properties": {other: False for other in names if other != name}}
        for name in names
    ]


def load_schema(text: str) -> tuple[object, object]:
    """Return a schema, rewritten, with fractions where it has floats, and with the floats.

    Raises InvalidRequestError.
    """
    has_floats = False

    def read_float(digits: str) -> Fraction:
        nonlocal has_floats
        has_floats = True
        return _fraction(digits)

    try:
        schema = json.loads(text, parse_constant=_reject_constant, parse_float=read_float)
    except ValueError as error:
        raise invalid_structure(f"structure is not valid JSON: {error}.") from error
    except RecursionError:
        raise invalid_structure("structure is a JSON Schema that is nested too deeply.") from None
    exact = rewritten(schema)
    return exact, rewritten(json.loads(text)) if has_floats else exact


def _fraction(text: str) -> Fraction:
    """Return a number exactly. Raises ValueError if it has no finite float."""
    _, _, exponent = text.lower().partition("e")
    # A fraction has as many digits as its exponent says.
    if abs(int(exponent or 0)) > _MAX_EXPONENT or isinf(float(text)):
        raise ValueError(f"{text:.40} is beyond the range of a number")
    return Fraction(text)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")
