"""The keywords of JSON Schema, and how the simplest of them are read."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from math import isinf
from typing import Any, NoReturn, TypeAlias, cast
from urllib.parse import unquote

from cluster.structured.grammar.expressions import invalid_structure
from pagedray.errors import InvalidRequestError
from pagedray.text import nearest_name

__all__ = [
    "ANNOTATIONS",
    "KEYWORDS",
    "KNOWN",
    "STANDALONE",
    "VALUE_LIMITS",
    "Schema",
    "are_disjoint",
    "check_keywords",
    "count_limits_of",
    "escaped_pointer",
    "fail",
    "finite_values",
    "is_found",
    "is_unrestricted",
    "is_within_limits",
    "kinds_of",
    "load_schema",
    "pointer_of",
    "resolve",
    "resolved",
    "types_of",
    "types_of_value",
]

MAX_COUNT = 4096
"""The largest minLength, minItems and minProperties."""
_MOST = 2**17
_INDEX = re.compile("0|[1-9][0-9]{0,4}")
"""The index in a JSON pointer to an item of a list."""
Schema = Mapping[str, object]
ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "$comment", "$schema", "$id"),
        *("deprecated", "readOnly", "writeOnly", "discriminator", "$defs", "definitions"),
        *("$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "id", "example"),
        *("contentEncoding", "contentMediaType", "contentSchema", "externalDocs", "xml"),
        *("nullable", "enumNames", "enumDescriptions", "markdownDescription", "~standard"),
        *("isRequired", "ref", "tsType"),
    )
)
"""Usual keywords that do not restrict values; all that are not known do not, either."""
_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
KEYWORDS: Mapping[str, frozenset[str]] = {
    "null": frozenset(),
    "boolean": frozenset(),
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems", "uniqueItems")),
    "object": frozenset(
        (
            *("properties", "required", "additionalProperties", "patternProperties"),
            *("propertyNames", "minProperties", "maxProperties"),
        )
    ),
}
_UNSUPPORTED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains"),
        *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
        *("formatMinimum", "formatMaximum", "formatExclusiveMinimum", "formatExclusiveMaximum"),
        *("propertyDependencies", "divisibleBy", "disallow"),
    )
)
"""Keywords that restrict values and cannot be enforced."""
_UNEVALUATED = {"unevaluatedProperties": "properties", "unevaluatedItems": "prefixItems"}
"""Keywords that have no effect beside others, which allow nothing more."""
STANDALONE = frozenset(("$ref", "const", "enum", "anyOf", "oneOf", "allOf"))
"""Keywords that define a schema on their own and cannot be combined with others."""
VALUE_LIMITS = frozenset(("type", "minimum", "maximum", "pattern", "format")).union(
    ("minLength", "maxLength", "exclusiveMinimum", "exclusiveMaximum")
)
"""Keywords that the values of `enum` and `const` are compared with."""
_RESTRICTING = frozenset(("type",)).union(STANDALONE, *KEYWORDS.values())
KNOWN = _RESTRICTING | ANNOTATIONS
_TYPES_OF_VALUES: Mapping[type, set[str]] = {
    type(None): {"null"},
    bool: {"boolean"},
    int: {"integer", "number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
}
_MAX_DEPTH = 16
"""Depth of nested references and branches."""

_Json: TypeAlias = "dict[str, object]"
_ONE = ("items", "additionalProperties", "propertyNames", "additionalItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_REWRITTEN = frozenset(
    ("not", "items", "additionalItems", "propertyNames", "allOf", "anyOf", "oneOf")
)
"""Schemas without these keywords are copied."""
_ITEMS = frozenset(("items", "prefixItems", "uniqueItems"))
_MAX_REWRITTEN_DEPTH = 64
_MAX_BRANCHES = 128
_MAX_MERGES = 1024
"""Merges of one schema; branches within branches may need a power of two of them."""
_LIMITING = KNOWN - ANNOTATIONS | {"not"}
_MAX_EXPONENT = 400
"""The largest exponent of a number; no float has a larger exponent."""


def fail(path: str, what: str) -> NoReturn:
    """Raise InvalidRequestError for the part of a schema at a JSON pointer."""
    end = "" if what.endswith("?") else "."
    raise invalid_structure(f"structure has an unsupported JSON Schema: {path[:200]} {what}{end}")


def check_keywords(schema: Schema, path: str) -> set[str]:
    """Return the keywords of a schema that restrict values.

    Raises InvalidRequestError for a keyword that cannot be enforced or is misspelled.
    """
    for keyword in sorted(schema.keys() - KNOWN):
        beside = _UNEVALUATED.get(keyword, keyword)
        is_free = beside in schema or schema[keyword] in (True, {})
        if keyword in _UNSUPPORTED or (keyword in _UNEVALUATED and not is_free):
            fail(f"{path}/{keyword}", "is not a supported keyword")
        # As the standard requires, other keywords are ignored. A misspelled keyword is rejected,
        # or the model would ignore a limit that the client has set.
        if not keyword.startswith("x-") and (nearest := nearest_name(keyword, _RESTRICTING)):
            fail(f"{path}/{keyword}", f"is not a supported keyword; did you mean {nearest}?")
    return {keyword for keyword in schema if keyword in _RESTRICTING}


def count_limits_of(schema: Schema, path: str, low: str, high: str) -> tuple[int, int | None]:
    """Return the minimum and the maximum that two keywords set."""
    for keyword, most in ((low, MAX_COUNT), (high, 2**63 - 1)):
        value = schema.get(keyword, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            fail(f"{path}/{keyword}", f"must be an integer from 0 to {most}")
    minimum = cast("int", schema.get(low, 0))
    maximum = cast("int | None", schema.get(high))
    if maximum is not None:
        # No output is as long as the upper of these.
        maximum = None if maximum > 8 * _MOST else min(maximum, _MOST)
    if maximum is not None and maximum < minimum:
        fail(path, f"has {high} below {low}")
    return minimum, maximum


def types_of(schema: Schema, path: str) -> tuple[str, ...] | None:
    """Return the types that `type` lists, or None without `type`."""
    given = schema.get("type")
    if given is None and "type" not in schema:
        return None
    types = [given] if isinstance(given, str) else given
    if (
        not isinstance(types, list)
        or not types
        or not all(isinstance(name, str) and name in KEYWORDS for name in types)
    ):
        fail(f"{path}/type", f"must be one or several of {', '.join(KEYWORDS)}")
    return tuple(dict.fromkeys(types))


def types_of_value(value: object) -> set[str]:
    """Return the JSON Schema types of a value from JSON."""
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    return _TYPES_OF_VALUES[type(value)]


def is_within_limits(value: object, schema: Schema, path: str) -> bool:
    """Return whether a listed value is within the limits of a schema for its type."""
    if isinstance(value, str):
        low, high = count_limits_of(schema, path, "minLength", "maxLength")
        pattern = schema.get("pattern", "")
        if not isinstance(pattern, str):
            fail(f"{path}/pattern", "must be a regular expression")
        is_long = high is not None and len(value) > high
        return len(value) >= low and not is_long and is_found(pattern, value, f"{path}/pattern")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    # Any: numbers of several types
    compared: tuple[tuple[str, Callable[[Any, Any], bool]], ...] = (
        *(("minimum", operator.ge), ("maximum", operator.le)),
        *(("exclusiveMinimum", operator.gt), ("exclusiveMaximum", operator.lt)),
    )
    for keyword, compare in compared:
        bound = schema.get(keyword, value)
        if isinstance(bound, bool) or not isinstance(bound, int | float | Fraction):
            fail(f"{path}/{keyword}", "must be a number")
        if keyword in schema and not compare(value, bound):
            return False
    return True


def is_found(pattern: str, text: str, path: str) -> bool:
    """Return whether a regular expression of a client matches anywhere in a text."""
    try:
        return re.search(pattern, text) is not None
    except re.error:
        fail(path, "has a regular expression that is not supported")


def escaped_pointer(name: str) -> str:
    """Return a name escaped for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def pointer_of(reference: object, path: str) -> str:
    """Return the JSON pointer of a `$ref` at a path. Raises InvalidRequestError."""
    if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
        fail(f"{path}/$ref", "must refer to a part of the schema, such as #/$defs/name")
    # It is a URI, in which generators encode names such as Page<User>.
    return unquote(reference)


def resolve(root: object, pointer: str, path: str) -> object:
    """Return the target of a JSON pointer. Raises InvalidRequestError."""
    found = root
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and _INDEX.fullmatch(key) and int(key) < len(found):
            found = found[int(key)]
        else:
            fail(f"{path}/$ref", "refers to a missing definition")
    return found


def kinds_of(schema: object, root: object) -> frozenset[str]:
    """Return the types that values of a schema may have; empty if it does not specify them."""
    return _kinds(schema, root, 0)


def resolved(schema: object, root: object) -> object:
    """Return the schema that a schema refers to, if it only refers."""
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
    # A property that both require, with different values.
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
        if not isinstance(given, dict) or depth > _MAX_REWRITTEN_DEPTH:
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
    return _LIMITING.intersection(schema)


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
