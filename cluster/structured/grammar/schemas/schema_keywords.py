"""The keywords of JSON Schema, and how the simplest of them are read."""

import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NoReturn, cast
from urllib.parse import unquote

from cluster.structured.grammar.expressions import invalid_structure
from pagedray.text import nearest_name

__all__ = [
    "ANNOTATIONS",
    "KEYWORDS",
    "KNOWN",
    "STANDALONE",
    "VALUE_LIMITS",
    "Schema",
    "check_keywords",
    "count_limits_of",
    "escaped_pointer",
    "fail",
    "is_found",
    "is_within_limits",
    "pointer_of",
    "resolve",
    "types_of",
    "types_of_value",
]

MAX_COUNT = 4096
"""The largest minLength, minItems and minProperties."""
_MOST = 2**17

_INDEX = re.compile("0|[1-9][0-9]{0,4}")
"""What a JSON pointer to an item of a list contains."""

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


def fail(path: str, what: str) -> NoReturn:
    """Raise InvalidRequestError for the part of a schema at a JSON pointer."""
    end = "" if what.endswith("?") else "."
    raise invalid_structure(f"structure has an unsupported JSON Schema: {path[:200]} {what}{end}")


def check_keywords(schema: Schema, path: str) -> set[str]:
    """Return the keywords of a schema that restrict values.

    Raises InvalidRequestError for a keyword that cannot be enforced, and for a misspelled one.
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
