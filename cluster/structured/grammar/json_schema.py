"""JSON schemas as grammars: every text of the grammar is valid under the schema.

The other way round it need not be: properties come in the order in which they are named, and none
are written beside those that are named. A keyword that is not enforced is refused by its name.
"""

from __future__ import annotations

import json
from fractions import Fraction
from typing import NoReturn, cast

from cluster.structured.grammar import json_text
from cluster.structured.grammar.compile_cost import MAX_COST, cost_of
from cluster.structured.grammar.disjoint import are_disjoint
from cluster.structured.grammar.expressions import (
    MAX_SIZE,
    Choice,
    Expression,
    Repeat,
    Rule,
    Text,
    refuse,
    size_of,
)
from cluster.structured.grammar.expressions import Sequence as InOrder
from cluster.structured.grammar.json_strings import FORMATS, limited_string, string_of_pattern
from cluster.structured.grammar.json_text import SPACE, VALUE, separated, surrounded
from cluster.structured.grammar.loops import with_loops_as_rules
from cluster.structured.grammar.schema_numbers import number_of
from cluster.structured.grammar.schema_parts import key_of, leading_items, members_in_order
from cluster.structured.grammar.schema_words import (
    KEYWORDS,
    KNOWN,
    SILENT,
    WHOLE,
    Schema,
    counts_of,
    fail,
    pointer_part,
    resolve,
    types_of,
    types_of_value,
)
from pagedray.errors import InvalidRequestError

__all__ = ["read_json_schema"]

_MAX_DEPTH = 64
_MAX_NODES = 4096
_MAX_ONE_OF = 128
_MAX_PROPERTIES = 256
"""Of one object. Ways to compile grow by the square of their number, and so does memory."""
_MAX_OPTIONAL = 128
"""Properties of one object that may be missing."""


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
        self._patterns: dict[str, Rule] = {}
        self._num_nodes = 0
        self._cost = 0

    def read(
        self, schema: object, path: str, *, depth: int, unguarded: tuple[str, ...]
    ) -> Expression:
        """Return the expression of a schema.

        `unguarded` are the references that led here without a character between them.
        """
        self._num_nodes += 1
        if depth > _MAX_DEPTH or self._num_nodes > _MAX_NODES:
            fail(
                path,
                f"is beyond the {_MAX_NODES} parts that a schema may have, and the {_MAX_DEPTH} "
                "that may be inside one another",
            )
        if schema is True:
            return VALUE
        if not isinstance(schema, dict):
            fail(path, "is a schema that allows nothing, or is none")
        for keyword in schema:
            if keyword not in KNOWN:
                fail(f"{path}/{keyword}", "is a keyword that is not supported")
        whole = WHOLE.intersection(schema)
        if not whole:
            return self._of_types(schema, path, depth)
        if len(whole) > 1 or not schema.keys() <= {*whole, "type", *SILENT}:
            fail(path, f"has {sorted(whole)[0]} beside keywords that limit it further")
        (keyword,) = whole
        if keyword in ("const", "enum"):
            return self._values(schema, path)
        if "type" in schema:
            fail(path, f"has {keyword} beside type")
        if keyword == "$ref":
            return self._reference(schema["$ref"], path, depth, unguarded)
        return self._branches(keyword, schema[keyword], path, depth, unguarded)

    def _reference(
        self, reference: object, path: str, depth: int, unguarded: tuple[str, ...]
    ) -> Expression:
        if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
            fail(f"{path}/$ref", "must refer to a part of the schema, as #/$defs/name does")
        if reference in unguarded:
            fail(f"{path}/$ref", "refers to itself and to nothing else")
        if reference not in self._rules_by_path:
            rule = self._rules_by_path[reference] = Rule(f"part{len(self._rules_by_path)}")
            found = resolve(self._root, reference, path)
            inside = (*unguarded, reference)
            # A part is read once, so what refers to itself in the end is not followed for ever.
            self.rules[rule.name] = self.read(found, reference, depth=depth + 1, unguarded=inside)
        return self._rules_by_path[reference]

    def _branches(
        self, keyword: str, branches: object, path: str, depth: int, unguarded: tuple[str, ...]
    ) -> Expression:
        path = f"{path}/{keyword}"
        if not isinstance(branches, list) or not branches:
            fail(path, "must be a list of schemas")
        if keyword == "allOf" and len(branches) > 1:
            fail(path, "may have one schema only")
        if keyword == "oneOf" and len(branches) > _MAX_ONE_OF:
            # Each is compared with each.
            fail(path, f"may have {_MAX_ONE_OF} schemas at most")
        if keyword == "oneOf" and not are_disjoint(branches, lambda r: self._target(r, path)):
            fail(path, "has schemas that one value may fit both; use anyOf")
        return Choice(
            tuple(
                self.read(branch, f"{path}/{index}", depth=depth + 1, unguarded=unguarded)
                for index, branch in enumerate(branches)
            )
        )

    def _target(self, reference: object, path: str) -> object:
        return resolve(self._root, reference, path) if isinstance(reference, str) else None

    def _values(self, schema: Schema, path: str) -> Expression:
        # Numbers are written as the client wrote them, as far as Python keeps that.
        plain = cast("dict[str, object]", resolve(self._plain_root, path, path))
        values = plain["enum"] if "enum" in plain else [plain["const"]]
        if not isinstance(values, list):
            fail(f"{path}/enum", "must be a list of values")
        types = types_of(schema, path) or tuple(KEYWORDS)
        allowed = [value for value in values if types_of_value(value) & set(types)]
        if not allowed:
            fail(path, "allows no value")
        try:
            written = [json.dumps(value, ensure_ascii=False, allow_nan=False) for value in allowed]
        except (ValueError, RecursionError):
            fail(path, "holds a value that JSON cannot write")
        if any("\ud800" <= character <= "\udfff" for text in written for character in text):
            fail(path, "holds a lone surrogate, which is no character")
        return Choice(tuple(map(Text, dict.fromkeys(written))))

    def _of_types(self, schema: Schema, path: str, depth: int) -> Expression:
        types = types_of(schema, path)
        if types is None:
            # Keywords of a type mean that type; without any, everything is allowed.
            types = tuple(
                name
                for name, keywords in KEYWORDS.items()
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
                return number_of(schema, path, is_integer=name == "integer")
            case "string":
                return self._string(schema, path)
            case "array":
                return self._array(schema, path, depth)
        return self._object(schema, path, depth)

    def _string(self, schema: Schema, path: str) -> Expression:
        limits = [key for key in ("pattern", "format", "minLength", "maxLength") if key in schema]
        if not limits:
            return json_text.STRING
        keyword = limits[0]
        if keyword in ("pattern", "format"):
            if len(limits) > 1:
                fail(f"{path}/{limits[1]}", f"cannot be enforced beside {keyword}")
            return self._pattern(_pattern_of(schema, keyword, path), f"{path}/{keyword}")
        rule, expression = limited_string(*counts_of(schema, path, "minLength", "maxLength"))
        if rule.name not in self.rules:
            self._pay(cost_of(expression), f"{path}/{limits[-1]}")
            self.rules[rule.name] = expression
        return rule

    def _pattern(self, pattern: str, path: str) -> Rule:
        if pattern not in self._patterns:
            try:
                expression = string_of_pattern(pattern)
            except InvalidRequestError as error:
                raise refuse(f"{str(error).removesuffix('.')}, in {path[:200]}.") from None
            self._pay(cost_of(expression), path)
            rule = self._patterns[pattern] = Rule(f"pattern{len(self._patterns)}")
            loops, self.rules[rule.name] = with_loops_as_rules(expression, prefix=f"{rule.name}x")
            self.rules |= loops
        return self._patterns[pattern]

    def _pay(self, cost: int, path: str) -> None:
        """Count what a part costs to compile; refuse the part at which it becomes too much."""
        self._cost += cost
        if self._cost > MAX_COST:
            fail(
                path,
                f"is too much: the strings up to there take {self._cost} states to compile, and at "
                f"most {MAX_COST} are allowed",
            )

    def _array(self, schema: Schema, path: str, depth: int) -> Expression:
        if schema.get("uniqueItems"):
            fail(f"{path}/uniqueItems", "is not supported")
        fewest, most = counts_of(schema, path, "minItems", "maxItems")
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            fail(f"{path}/prefixItems", "must be a list of schemas")
        items = schema.get("items", not prefix)
        if items is False:
            most = len(prefix) if most is None else min(most, len(prefix))
            if fewest > most:
                fail(path, "asks for more items than it allows")
        first = [
            self.read(item, f"{path}/prefixItems/{index}", depth=depth + 1, unguarded=())
            for index, item in enumerate(prefix)
        ][:most]
        if len(first) == most:
            return surrounded("[", leading_items(first, fewest, Repeat(SPACE, 0, 0)), "]")
        item = self.read(items, f"{path}/items", depth=depth + 1, unguarded=())
        if not first:
            return _checked(surrounded("[", separated(item, fewest, most), "]"), schema, path)
        following = InOrder((Text(","), SPACE, item))
        num_left = None if most is None else most - len(first)
        more = Repeat(following, max(0, fewest - len(first)), num_left)
        return _checked(surrounded("[", leading_items(first, fewest, more), "]"), schema, path)

    def _object(self, schema: Schema, path: str, depth: int) -> Expression:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, dict):
            fail(f"{path}/properties", "must be an object of schemas")
        if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
            fail(f"{path}/required", "must be a list of names")
        if missing := [name for name in required if name not in properties]:
            fail(f"{path}/required", f"names {missing[0][:40]!r}, which is not in properties")
        required = frozenset(required)
        if len(properties) > _MAX_PROPERTIES:
            fail(f"{path}/properties", f"may have {_MAX_PROPERTIES} properties at most")
        if len(properties) - len(required) > _MAX_OPTIONAL:
            fail(
                f"{path}/properties",
                f"may have {_MAX_OPTIONAL} properties at most that are not required",
            )
        fewest, most = counts_of(schema, path, "minProperties", "maxProperties")
        if not properties:
            return self._map(schema, path, depth, fewest, most)
        if fewest > len(required) or (most is not None and most < len(properties)):
            fail(path, "has minProperties or maxProperties that its properties do not keep")
        members = [
            InOrder(
                (
                    key_of(name, path),
                    self.read(
                        part,
                        f"{path}/properties/{pointer_part(name)}",
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
        return surrounded("{", members_in_order(members, are_required, self.rules), "}")

    def _map(
        self, schema: Schema, path: str, depth: int, fewest: int, most: int | None
    ) -> Expression:
        given = schema.get("additionalProperties", "properties" not in schema)
        if given is False:
            if fewest:
                fail(path, "asks for more properties than it allows")
            return surrounded("{", InOrder(()), "}")
        if fewest > 1:
            # The names may be the same.
            fail(f"{path}/minProperties", "must be 0 or 1 where no properties are named")
        value = self.read(given, f"{path}/additionalProperties", depth=depth + 1, unguarded=())
        member = InOrder((json_text.STRING, Text(":"), SPACE, value))
        return surrounded("{", separated(member, fewest, most), "}")


def _pattern_of(schema: Schema, keyword: str, path: str) -> str:
    given = schema[keyword]
    if keyword == "format":
        if given not in FORMATS:
            fail(f"{path}/format", f"must be one of {', '.join(FORMATS)}")
        return FORMATS[str(given)]
    if not isinstance(given, str):
        fail(f"{path}/pattern", "must be a regular expression")
    return given


def _checked(array: Expression, schema: Schema, path: str) -> Expression:
    """Return an array's expression, which is repeated as a whole if it is an item itself."""
    size = size_of(array)
    if size > MAX_SIZE:
        keyword = "maxItems" if "maxItems" in schema else "minItems"
        fail(
            f"{path}/{keyword}" if keyword in schema else path,
            f"repeats to {size} characters, and at most {MAX_SIZE} are allowed: what is in an "
            "array counts as often as it may come",
        )
    return array


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
