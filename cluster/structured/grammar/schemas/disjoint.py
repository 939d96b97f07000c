"""Whether schemas are mutually exclusive, by a conservative check."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

__all__ = ["are_disjoint"]


def are_disjoint(branches: Sequence[object], resolve: Callable[[object], object]) -> bool:
    """Return whether types, constants or a required property's constants differ in all branches.

    `resolve` returns the target of a `$ref`.
    """
    schemas = [_resolved(branch, resolve) for branch in branches]
    return all(_differ(a, b) for a, b in combinations(schemas, 2))


def _resolved(branch: object, resolve: Callable[[object], object]) -> Mapping[str, object]:
    if isinstance(branch, Mapping) and "$ref" in branch:
        branch = resolve(branch["$ref"])
    return branch if isinstance(branch, Mapping) else {}


def _differ(a: Mapping[str, object], b: Mapping[str, object]) -> bool:
    values_a, values_b = _values(a), _values(b)
    if values_a is not None and values_b is not None:
        return not values_a & values_b
    types_a, types_b = _types(a), _types(b)
    if types_a and types_b and not types_a & types_b:
        return True
    if types_a != {"object"} or types_b != {"object"}:
        return False
    # A property that both require and whose values differ.
    required_a, required_b = _required_properties(a), _required_properties(b)
    return any(
        _values_differ(part, required_b[name])
        for name, part in required_a.items()
        if name in required_b
    )


def _required_properties(schema: Mapping[str, object]) -> dict[str, object]:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return {}
    names = {one for one in required if isinstance(one, str)}
    return {name: part for name, part in properties.items() if name in names}


def _values_differ(a: object, b: object) -> bool:
    values_a, values_b = _values(a), _values(b)
    return values_a is not None and values_b is not None and not values_a & values_b


def _values(schema: object) -> set[str] | None:
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        # Numbers are not compared: 1 and 1.0 are the same value.
        return None
    return {json.dumps(one) for one in values}


def _types(schema: Mapping[str, object]) -> set[str]:
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return set()
    # An integer is a number.
    return {"number" if name == "integer" else name for name in names}
