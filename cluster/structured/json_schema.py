"""JSON schemas as grammars: every text of the grammar is valid under the schema.

The other way round it need not be: properties come in the order in which they are named, and none
are written beside those that are named. A keyword that is not enforced is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NoReturn, cast

from cluster.structured import json_text
from cluster.structured.disjoint import are_disjoint
from cluster.structured.expressions import (
    Choice,
    Expression,
    Repeat,
    Rule,
    Text,
    optional,
    refuse,
)
from cluster.structured.expressions import Sequence as InOrder
from cluster.structured.json_strings import FORMATS, string_of_pattern
from cluster.structured.json_text import SPACE, VALUE, separated, surrounded
from cluster.structured.number_ranges import numbers_between

__all__ = ["read_json_schema"]

_MAX_DEPTH = 64
_MAX_NODES = 4096
_MAX_COUNT = 4096
"""Characters of a string, or items of an array, that a schema may count to."""

# Words about a schema that say nothing of its values.
_SILENT = frozenset(
    (
        *("title", "description", "default", "examples", "$comment", "$schema", "$id"),
        *("deprecated", "readOnly", "writeOnly", "discriminator", "$defs", "definitions"),
    )
)
_KEYWORDS: Mapping[str, frozenset[str]] = {
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
_WHOLE = frozenset(("$ref", "const", "enum", "anyOf", "oneOf", "allOf"))
"""Keywords that say all there is to say of a value."""
_KNOWN = frozenset(("type",)).union(_SILENT, _WHOLE, *_KEYWORDS.values())

Schema = Mapping[str, object]


def read_json_schema(text: str) -> tuple[dict[str, Expression], Expression]:
    """Return the rules and the start of a schema's grammar. Raises InvalidRequestError."""
    try:
        schema = json.loads(text, parse_constant=_refuse_constant, parse_float=Fraction)
    except ValueError as error:
        raise refuse(f"structure is not a JSON schema: {error}.") from error
    except RecursionError:
        raise refuse("structure is a JSON schema that is too deep.") from None
    reader = _Reader(schema, json.loads(text))
    start = reader.read(schema, "#", depth=0, unguarded=())
    return reader.rules, start


class _Reader:
    """Reads one schema and all that it refers to."""

    def __init__(self, root: object, plain_root: object) -> None:
        """`plain_root` has floats for fractions, as they are to be written."""
        self.rules = dict(json_text.JSON_RULES)
        self._root = root
        self._plain_root = plain_root
        self._rules_by_path: dict[str, Rule] = {}
        self._num_nodes = 0

    def read(
        self, schema: object, path: str, *, depth: int, unguarded: tuple[str, ...]
    ) -> Expression:
        """Return the expression of a schema.

        `unguarded` are the references that led here without a character between them.
        """
        self._num_nodes += 1
        if depth > _MAX_DEPTH or self._num_nodes > _MAX_NODES:
            raise refuse(
                f"structure has a JSON schema of more than {_MAX_NODES} parts, or more than "
                f"{_MAX_DEPTH} inside one another."
            )
        if schema is True:
            return VALUE
        if not isinstance(schema, dict):
            _fail(path, "is a schema that allows nothing, or is none")
        for keyword in schema:
            if keyword not in _KNOWN:
                _fail(f"{path}/{keyword}", "is a keyword that is not supported")
        whole = _WHOLE.intersection(schema)
        if not whole:
            return self._of_types(schema, path, depth)
        if len(whole) > 1 or not schema.keys() <= {*whole, "type", *_SILENT}:
            _fail(path, f"has {sorted(whole)[0]} beside keywords that limit it further")
        (keyword,) = whole
        if keyword in ("const", "enum"):
            return self._values(schema, path)
        if "type" in schema:
            _fail(path, f"has {keyword} beside type")
        if keyword == "$ref":
            return self._reference(schema["$ref"], path, depth, unguarded)
        return self._branches(keyword, schema[keyword], path, depth, unguarded)

    def _reference(
        self, reference: object, path: str, depth: int, unguarded: tuple[str, ...]
    ) -> Expression:
        if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
            _fail(f"{path}/$ref", "must refer to a part of the schema, as #/$defs/name does")
        if reference in unguarded:
            _fail(f"{path}/$ref", "refers to itself and to nothing else")
        if reference not in self._rules_by_path:
            rule = self._rules_by_path[reference] = Rule(f"part{len(self._rules_by_path)}")
            found = _resolve(self._root, reference, path)
            inside = (*unguarded, reference)
            # A part is read once, so what refers to itself in the end is not followed for ever.
            self.rules[rule.name] = self.read(found, reference, depth=depth + 1, unguarded=inside)
        return self._rules_by_path[reference]

    def _branches(
        self, keyword: str, branches: object, path: str, depth: int, unguarded: tuple[str, ...]
    ) -> Expression:
        path = f"{path}/{keyword}"
        if not isinstance(branches, list) or not branches:
            _fail(path, "must be a list of schemas")
        if keyword == "allOf" and len(branches) > 1:
            _fail(path, "may have one schema only")
        if keyword == "oneOf" and not are_disjoint(branches, lambda r: self._target(r, path)):
            _fail(path, "has schemas that one value may fit both; use anyOf")
        return Choice(
            tuple(
                self.read(branch, f"{path}/{index}", depth=depth + 1, unguarded=unguarded)
                for index, branch in enumerate(branches)
            )
        )

    def _target(self, reference: object, path: str) -> object:
        return _resolve(self._root, reference, path) if isinstance(reference, str) else None

    def _values(self, schema: Schema, path: str) -> Expression:
        # Numbers are written as the client wrote them, as far as Python keeps that.
        plain = cast("dict[str, object]", _resolve(self._plain_root, path, path))
        values = plain["enum"] if "enum" in plain else [plain["const"]]
        if not isinstance(values, list):
            _fail(f"{path}/enum", "must be a list of values")
        types = _types(schema, path) or tuple(_KEYWORDS)
        allowed = [value for value in values if _type_of(value) & set(types)]
        if not allowed:
            _fail(path, "allows no value")
        try:
            written = [json.dumps(value, ensure_ascii=False, allow_nan=False) for value in allowed]
        except (ValueError, RecursionError):
            _fail(path, "holds a value that JSON cannot write")
        if any("\ud800" <= character <= "\udfff" for text in written for character in text):
            _fail(path, "holds a lone surrogate, which is no character")
        return Choice(tuple(map(Text, dict.fromkeys(written))))

    def _of_types(self, schema: Schema, path: str, depth: int) -> Expression:
        types = _types(schema, path)
        if types is None:
            # Keywords of a type mean that type; without any, everything is allowed.
            types = tuple(
                name
                for name, keywords in _KEYWORDS.items()
                if name != "integer" and keywords.intersection(schema)
            )
            if not types:
                return VALUE
        return Choice(tuple(self._of_type(name, schema, path, depth) for name in types))

    def _of_type(self, name: str, schema: Schema, path: str, depth: int) -> Expression:
        match name:
            case "null":
                return json_text.NULL
            case "boolean":
                return json_text.BOOLEAN
            case "integer" | "number":
                return _number(schema, path, is_integer=name == "integer")
            case "string":
                return self._string(schema, path)
            case "array":
                return self._array(schema, path, depth)
        return self._object(schema, path, depth)

    def _string(self, schema: Schema, path: str) -> Expression:
        limits = [key for key in ("pattern", "format", "minLength", "maxLength") if key in schema]
        if "pattern" in limits:
            if len(limits) > 1:
                _fail(f"{path}/{limits[1]}", "cannot be enforced beside pattern")
            pattern = schema["pattern"]
            if not isinstance(pattern, str):
                _fail(f"{path}/pattern", "must be a regular expression")
            return string_of_pattern(pattern)
        if "format" in limits:
            if len(limits) > 1:
                _fail(f"{path}/{limits[1]}", "cannot be enforced beside format")
            if schema["format"] not in FORMATS:
                _fail(f"{path}/format", f"must be one of {', '.join(FORMATS)}")
            return string_of_pattern(FORMATS[str(schema["format"])])
        fewest, most = _counts(schema, path, "minLength", "maxLength")
        if not limits:
            return json_text.STRING
        # A rule of its own, since to compile so many characters once takes long enough.
        rule = Rule(f"string{fewest}to{'' if most is None else most}")
        content = Repeat(json_text.PLAIN, fewest, most)
        self.rules[rule.name] = InOrder((Text('"'), content, Text('"')))
        return rule

    def _array(self, schema: Schema, path: str, depth: int) -> Expression:
        if schema.get("uniqueItems"):
            _fail(f"{path}/uniqueItems", "is not supported")
        fewest, most = _counts(schema, path, "minItems", "maxItems")
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            _fail(f"{path}/prefixItems", "must be a list of schemas")
        items = schema.get("items", not prefix)
        if items is False:
            most = len(prefix) if most is None else min(most, len(prefix))
            if fewest > most:
                _fail(path, "asks for more items than it allows")
        first = [
            self.read(item, f"{path}/prefixItems/{index}", depth=depth + 1, unguarded=())
            for index, item in enumerate(prefix)
        ][:most]
        if len(first) == most:
            return surrounded("[", _leading(first, fewest, Repeat(SPACE, 0, 0)), "]")
        item = self.read(items, f"{path}/items", depth=depth + 1, unguarded=())
        if not first:
            return surrounded("[", separated(item, fewest, most), "]")
        following = InOrder((Text(","), SPACE, item))
        num_left = None if most is None else most - len(first)
        more = Repeat(following, max(0, fewest - len(first)), num_left)
        return surrounded("[", _leading(first, fewest, more), "]")

    def _object(self, schema: Schema, path: str, depth: int) -> Expression:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, dict):
            _fail(f"{path}/properties", "must be an object of schemas")
        if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
            _fail(f"{path}/required", "must be a list of names")
        if missing := [name for name in required if name not in properties]:
            _fail(f"{path}/required", f"names {missing[0][:40]!r}, which is not in properties")
        fewest, most = _counts(schema, path, "minProperties", "maxProperties")
        if not properties:
            return self._map(schema, path, depth, fewest, most)
        if fewest > len(required) or (most is not None and most < len(properties)):
            _fail(path, "has minProperties or maxProperties that its properties do not keep")
        members = [
            InOrder(
                (
                    _key(name, path),
                    self.read(
                        part,
                        f"{path}/properties/{_pointer_part(name)}",
                        depth=depth + 1,
                        unguarded=(),
                    ),
                )
            )
            for name, part in properties.items()
            if not (part is False and name not in required)
        ]
        are_required = [
            name in required
            for name, part in properties.items()
            if not (part is False and name not in required)
        ]
        return surrounded("{", self._members(members, are_required), "}")

    def _members(self, members: Sequence[Expression], are_required: Sequence[bool]) -> Expression:
        """Return members in order with commas between those that are there.

        From the last on there are two rules a member: what follows if there is one before it, and
        what follows if there is none.
        """
        number = len(self.rules)
        behind: Expression = InOrder(())
        alone: Expression = InOrder(())
        for index in range(len(members) - 1, -1, -1):
            member, is_required = members[index], are_required[index]
            with_comma = InOrder((Text(","), SPACE, member))
            first = InOrder((member, behind))
            new_alone = first if is_required else Choice((first, alone))
            behind = InOrder((with_comma if is_required else optional(with_comma), behind))
            # Rules of their own, so that what follows is written once.
            for name, rule in (
                (f"more{number}x{index}", behind),
                (f"from{number}x{index}", new_alone),
            ):
                self.rules[name] = rule
            behind, alone = Rule(f"more{number}x{index}"), Rule(f"from{number}x{index}")
        return alone

    def _map(
        self, schema: Schema, path: str, depth: int, fewest: int, most: int | None
    ) -> Expression:
        given = schema.get("additionalProperties", "properties" not in schema)
        if given is False:
            if fewest:
                _fail(path, "asks for more properties than it allows")
            return surrounded("{", InOrder(()), "}")
        if fewest > 1:
            # The names may be the same.
            _fail(f"{path}/minProperties", "must be 0 or 1 where no properties are named")
        value = self.read(given, f"{path}/additionalProperties", depth=depth + 1, unguarded=())
        member = InOrder((json_text.STRING, Text(":"), SPACE, value))
        return surrounded("{", separated(member, fewest, most), "}")


def _leading(items: Sequence[Expression], fewest: int, more: Expression) -> Expression:
    """Return items in order, of which those behind the first `fewest` may be missing."""
    following = more
    for index in range(len(items) - 1, -1, -1):
        comma = () if index == 0 else (Text(","), SPACE)
        following = InOrder((*comma, items[index], following))
        if index >= fewest:
            following = optional(following)
    return following


def _number(schema: Schema, path: str, *, is_integer: bool) -> Expression:
    bounds: dict[str, Fraction] = {}
    for keyword in _KEYWORDS["number"].intersection(schema):
        value = schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | Fraction):
            _fail(f"{path}/{keyword}", "must be a number")
        bound = Fraction(value)
        if abs(bound) > 10**15 or bound.denominator > 10**15:
            _fail(f"{path}/{keyword}", "must have at most 15 digits before and behind the point")
        bounds[keyword] = bound
    if not bounds:
        return json_text.INTEGER if is_integer else json_text.NUMBER
    low, is_low_open = _closest(bounds, "minimum", "exclusiveMinimum", max)
    high, is_high_open = _closest(bounds, "maximum", "exclusiveMaximum", min)
    return numbers_between(
        low, high, is_low_open=is_low_open, is_high_open=is_high_open, is_integer=is_integer
    )


def _closest(
    bounds: Mapping[str, Fraction], closed: str, opened: str, pick: object
) -> tuple[Fraction | None, bool]:
    found = [bounds[keyword] for keyword in (closed, opened) if keyword in bounds]
    if not found:
        return None, False
    bound = max(found) if pick is max else min(found)
    return bound, bounds.get(opened) == bound


def _counts(schema: Schema, path: str, low: str, high: str) -> tuple[int, int | None]:
    for keyword in (low, high):
        value = schema.get(keyword, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
            _fail(f"{path}/{keyword}", f"must be an integer from 0 to {_MAX_COUNT}")
    fewest = cast("int", schema.get(low, 0))
    most = cast("int | None", schema.get(high))
    if most is not None and most < fewest:
        _fail(path, f"has {high} below {low}")
    return fewest, most


def _types(schema: Schema, path: str) -> tuple[str, ...] | None:
    given = schema.get("type")
    if given is None and "type" not in schema:
        return None
    types = [given] if isinstance(given, str) else given
    if (
        not isinstance(types, list)
        or not types
        or not all(isinstance(name, str) and name in _KEYWORDS for name in types)
    ):
        _fail(f"{path}/type", f"must be of {', '.join(_KEYWORDS)}")
    return tuple(dict.fromkeys(types))


def _type_of(value: object) -> set[str]:
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


def _key(name: str, path: str) -> Expression:
    if any("\ud800" <= character <= "\udfff" for character in name):
        _fail(f"{path}/properties", "has a name with a lone surrogate, which is no character")
    return InOrder((Text(json.dumps(name, ensure_ascii=False)), Text(":"), SPACE))


def _pointer_part(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _resolve(root: object, pointer: str, path: str) -> object:
    """Return what a JSON pointer behind a # points at."""
    found = root
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdigit() and len(key) < 6 and int(key) < len(found):
            found = found[int(key)]
        else:
            _fail(f"{path}/$ref", "refers to what is not there")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _fail(path: str, what: str) -> NoReturn:
    raise refuse(f"structure has a JSON schema whose {path[:200]} {what}.")
