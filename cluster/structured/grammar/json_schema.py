"""Converts JSON schemas to grammars: every text of the grammar is valid under the schema.

The converse does not hold: properties come in the order of the schema, without any additional
properties. A keyword that cannot be enforced is rejected by its name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from cluster.structured.grammar.expressions import (
    BOOLEAN,
    COMMA,
    JSON_RULES,
    NULL,
    SPACE,
    STRING,
    VALUE,
    Alternation,
    Concat,
    Expression,
    Repeat,
    Rule,
    Text,
    optional,
    separated,
    size_of,
    surrounded,
)
from cluster.structured.grammar.rewrites import (
    MAX_CHAIN,
    counted_letters,
    inline_rules,
    with_shared_parts,
)
from cluster.structured.grammar.schema_keywords import (
    KEYWORDS,
    STANDALONE,
    VALUE_LIMITS,
    Schema,
    are_disjoint,
    check_keywords,
    count_limits_of,
    escaped_pointer,
    fail,
    finite_values,
    is_found,
    is_within_limits,
    load_schema,
    pointer_of,
    resolve,
    types_of,
    types_of_value,
)
from cluster.structured.grammar.schema_numbers import Multiples, number_of
from cluster.structured.grammar.schema_strings import SchemaStrings

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Member", "members_in_order", "read_json_schema", "read_members"]

_MAX_DEPTH = 64
_MAX_NODES = 16_384
_MAX_ONE_OF = 128
_MAX_PROPERTIES = 256
"""Properties of one object. The time and memory to compile grow with the square of their number."""
_MAX_OPTIONAL = 128
"""Properties of one object that are not required."""
_BY_FORMAT = " for the arguments of strict tools in this format of tool calls"
_MAX_COPIED = 128
"""Characters of a member that is written twice, which takes less memory than a rule."""

_MAX_SETS = 128
"""The sets of values that an array may have so far. The size of a grammar grows with the square of
their number."""


def read_json_schema(text: str) -> tuple[dict[str, Expression], Expression]:
    """Return the rules and the start expression of a schema. Raises InvalidRequestError."""
    reader = _SchemaReader(*load_schema(text))
    start = reader.read_root()
    return inline_rules(*with_shared_parts(reader.rules, start, "shared"))


def read_members(text: str) -> tuple[dict[str, Expression], list[Member] | None, object]:
    """Return rules, the members of objects of a schema, None if these may be any, and the schema.

    Raises InvalidRequestError for a schema of objects with neither.
    """
    schema, plain_schema = load_schema(text)
    reader = _SchemaReader(schema, plain_schema)
    return reader.rules, reader.members_of_root(), plain_schema


class _SchemaReader:
    """Reads one schema and everything it refers to."""

    def __init__(self, root: object, plain_root: object) -> None:
        """`root` has fractions where `plain_root` has floats, which are written as they are."""
        self.rules = dict(JSON_RULES)
        self._strings = SchemaStrings(self.rules)
        self._multiples = Multiples(self.rules)
        self._root = root
        self._plain_root = plain_root
        self._rules_by_path: dict[str, Rule] = {}
        self._num_nodes = 0

    def read_root(self) -> Expression:
        """Return the expression of the whole schema."""
        return self.read(self._root, "#", depth=0, unguarded=())

    def members_of_root(self) -> list[Member] | None:
        """Return the members of the objects that the whole schema allows; None if it allows all."""
        schema = self._root
        if not isinstance(schema, dict) or STANDALONE.intersection(schema):
            fail("#", f"must be an object with properties{_BY_FORMAT}")
        check_keywords(schema, "#")
        if (members := self._members(schema, "#", 0)) is not None:
            return members
        for keyword in ("maxProperties", "minProperties", "patternProperties", "propertyNames"):
            if keyword in schema:
                fail(f"#/{keyword}", f"requires properties{_BY_FORMAT}")
        more = schema.get("additionalProperties", "properties" not in schema)
        if more is False:
            return []
        if more is not True and more != {}:
            fail("#/additionalProperties", f"must be true or false{_BY_FORMAT}")
        return None

    def read(
        self, schema: object, path: str, *, depth: int, unguarded: tuple[str, ...]
    ) -> Expression:
        """Return the expression of a schema.

        `unguarded` are the references that led here without consuming a character.
        """
        self._num_nodes += 1
        if depth > _MAX_DEPTH or self._num_nodes > _MAX_NODES:
            fail(
                path,
                f"exceeds the maximum of {_MAX_NODES} subschemas or of {_MAX_DEPTH} nested levels",
            )
        if schema is True:
            return VALUE
        if not isinstance(schema, dict):
            fail(path, "must be an object or true")
        keywords = check_keywords(schema, path)
        whole = STANDALONE.intersection(schema)
        if not whole:
            return self._of_types(schema, path, depth)
        if whole <= {"const", "enum"} and len(whole) == 1 and keywords <= VALUE_LIMITS | whole:
            return self._values(schema, path)
        if len(whole) > 1 or not keywords <= {*whole, "type"}:
            fail(path, f"combines {sorted(whole)[0]} with other keywords")
        (keyword,) = whole
        if "type" in schema:
            fail(path, f"combines {keyword} with type")
        if keyword == "$ref":
            return self._reference(schema["$ref"], path, depth, unguarded)
        return self._branches(keyword, schema[keyword], path, depth, unguarded)

    def _reference(
        self, reference: object, path: str, depth: int, unguarded: tuple[str, ...]
    ) -> Expression:
        pointer = pointer_of(reference, path)
        if pointer in unguarded:
            fail(f"{path}/$ref", "refers to itself")
        if pointer not in self._rules_by_path:
            rule = self._rules_by_path[pointer] = Rule(f"part{len(self._rules_by_path)}")
            found = resolve(self._root, pointer, path)
            inside = (*unguarded, pointer)
            # A part is read once, so recursive schemas end.
            self.rules[rule.name] = self.read(found, pointer, depth=depth + 1, unguarded=inside)
        return self._rules_by_path[pointer]

    def _branches(
        self, keyword: str, branches: object, path: str, depth: int, unguarded: tuple[str, ...]
    ) -> Expression:
        path = f"{path}/{keyword}"
        if not isinstance(branches, list) or not branches:
            fail(path, "must be a list of schemas")
        if keyword == "allOf" and len(branches) > 1:
            fail(path, "must have exactly one schema")
        if keyword == "oneOf" and len(branches) > _MAX_ONE_OF:
            # All pairs are compared.
            fail(path, f"must have at most {_MAX_ONE_OF} schemas")
        if keyword == "oneOf" and not are_disjoint(branches, lambda r: self._target(r, path)):
            fail(path, "has schemas that are not mutually exclusive; use anyOf")
        return Alternation(
            tuple(
                self.read(branch, f"{path}/{index}", depth=depth + 1, unguarded=unguarded)
                for index, branch in enumerate(branches)
            )
        )

    def _target(self, reference: object, path: str) -> object:
        return resolve(self._root, pointer_of(reference, path), path)

    def _values(self, schema: Schema, path: str) -> Expression:
        # Numbers are written as the client wrote them, as far as Python preserves that.
        plain = cast("dict[str, object]", resolve(self._plain_root, path, path))
        values = plain["enum"] if "enum" in plain else [plain["const"]]
        if not isinstance(values, list):
            fail(f"{path}/enum", "must be a list of values")
        types = types_of(schema, path) or tuple(KEYWORDS)
        allowed = [
            value
            for value in values
            if types_of_value(value) & set(types) and is_within_limits(value, schema, path)
        ]
        if not allowed:
            fail(path, "allows no value")
        try:
            written = [json.dumps(value, ensure_ascii=False, allow_nan=False) for value in allowed]
        except (ValueError, RecursionError):
            fail(path, "has a value that cannot be written as JSON")
        if any("\ud800" <= character <= "\udfff" for text in written for character in text):
            fail(path, "has a lone surrogate")
        return Alternation(tuple(map(Text, dict.fromkeys(written))))

    def _of_types(self, schema: Schema, path: str, depth: int) -> Expression:
        types = types_of(schema, path)
        if types is None:
            # A keyword of a type implies the type; without any, all values are allowed.
            types = tuple(
                name
                for name, keywords in KEYWORDS.items()
                if name != "integer" and keywords.intersection(schema)
            )
            if not types:
                return VALUE
        return Alternation(tuple(self._of_type(name, schema, path, depth) for name in types))

    def _of_type(self, name: str, schema: Schema, path: str, depth: int) -> Expression:
        match name:
            case "null":
                return NULL
            case "boolean":
                return BOOLEAN
            case "integer" | "number":
                return number_of(schema, path, self._multiples, is_integer=name == "integer")
            case "string":
                return self._strings.string_of(schema, path)
            case "array":
                return self._array(schema, path, depth)
        return self._object(schema, path, depth)

    def _array(self, schema: Schema, path: str, depth: int) -> Expression:
        minimum, maximum = count_limits_of(schema, path, "minItems", "maxItems")
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            fail(f"{path}/prefixItems", "must be a list of schemas")
        items = schema.get("items", not prefix)
        if must_differ(schema, path) and (maximum is None or maximum > 1):
            # It rejects unsupported keywords.
            self.read(items, f"{path}/items", depth=depth + 1, unguarded=())
            plain = resolve(self._plain_root, f"{path}/items", path) if "items" in schema else items
            values = finite_values(plain, self._plain_root)
            return unique_items(values, path, self.rules, minimum=minimum, maximum=maximum)
        if items is False:
            maximum = len(prefix) if maximum is None else min(maximum, len(prefix))
            if minimum > maximum:
                fail(path, "requires more items than it allows")
        first = [
            self.read(item, f"{path}/prefixItems/{index}", depth=depth + 1, unguarded=())
            for index, item in enumerate(prefix)
        ][:maximum]
        if len(first) == maximum:
            return surrounded("[", leading_items(first, minimum, Repeat(SPACE, 0, 0)), "]")
        item = self.read(items, f"{path}/items", depth=depth + 1, unguarded=())
        if not first:
            return enclosed_list("[", item, "]", minimum=minimum, maximum=maximum, rules=self.rules)
        num_left = None if maximum is None else maximum - len(first)
        more = more_items(item, max(0, minimum - len(first)), num_left, self.rules)
        return surrounded("[", leading_items(first, minimum, more), "]")

    def _object(self, schema: Schema, path: str, depth: int) -> Expression:
        members = self._members(schema, path, depth)
        if members is None:
            return self._map(schema, path, depth)
        inside = members_in_order(
            [Concat((_key_of(one.name, path), one.value)) for one in members],
            [one.is_required for one in members],
            self.rules,
        )
        return surrounded("{", inside, "}")

    def _members(self, schema: Schema, path: str, depth: int) -> list[Member] | None:
        """Return the members of an object, or None if it has no properties."""
        properties, required = _properties_of(schema, path)
        minimum, maximum = count_limits_of(schema, path, "minProperties", "maxProperties")
        if not properties:
            return None
        for pattern in cast("Schema", schema.get("patternProperties", {})):
            if any(is_found(pattern, name, f"{path}/patternProperties") for name in properties):
                fail(f"{path}/patternProperties", f"has {pattern[:40]!r}, which a property matches")
        if _restricts_names(schema):
            fail(f"{path}/propertyNames", "cannot be combined with properties")
        if minimum > len(required) or (maximum is not None and maximum < len(properties)):
            fail(path, "has minProperties or maxProperties that contradict its properties")
        members = []
        for name, part in properties.items():
            if part is not False or name in required:
                part_path = f"{path}/properties/{escaped_pointer(name)}"
                value = self.read(part, part_path, depth=depth + 1, unguarded=())
                is_required = name in required
                members.append(
                    Member(
                        name=name,
                        schema=resolve(self._plain_root, part_path, path),
                        path=part_path,
                        value=value,
                        is_required=is_required,
                    )
                )
        return members

    def _map(self, schema: Schema, path: str, depth: int) -> Expression:
        minimum, maximum = count_limits_of(schema, path, "minProperties", "maxProperties")
        patterns = schema.get("patternProperties", {})
        if not isinstance(patterns, dict):
            fail(f"{path}/patternProperties", "must be an object of schemas")
        name, value_path = self._name(schema, path, depth), f"{path}/additionalProperties"
        given = schema.get("additionalProperties", "properties" not in schema)
        if patterns:
            # Names that do not match are like additional properties.
            name, given = self._name_of_pattern(patterns, schema, path)
            value_path = f"{path}/patternProperties/{escaped_pointer(next(iter(patterns)))}"
        if given is False and not patterns:
            if minimum:
                fail(path, "requires more properties than it allows")
            return surrounded("{", Concat(()), "}")
        if minimum > 1:
            # Generated names may repeat.
            fail(f"{path}/minProperties", "must be 0 or 1 without properties")
        value = self.read(given, value_path, depth=depth + 1, unguarded=())
        member = Concat((name, Text(":"), SPACE, value))
        return enclosed_list("{", member, "}", minimum=minimum, maximum=maximum, rules=self.rules)

    def _name(self, schema: Schema, path: str, depth: int) -> Expression:
        """Return the names of properties that propertyNames allows."""
        if not _restricts_names(schema):
            return STRING
        given, path = schema["propertyNames"], f"{path}/propertyNames"
        if not isinstance(given, dict):
            fail(path, "must be an object or true")
        if STANDALONE.difference(("const", "enum")).intersection(given):
            fail(path, "must be a schema of strings without references and branches")
        if given.get("type", "string") != "string":
            fail(f"{path}/type", "must be string, as names are")
        return self.read({**given, "type": "string"}, path, depth=depth + 1, unguarded=())

    def _name_of_pattern(
        self, patterns: Schema, schema: Schema, path: str
    ) -> tuple[Expression, object]:
        """Return the names that match the only pattern, and the schema of their values."""
        if _restricts_names(schema):
            fail(f"{path}/propertyNames", "cannot be combined with patternProperties")
        if len(patterns) > 1:
            # A name may match several of them.
            fail(f"{path}/patternProperties", "must have exactly one pattern")
        ((pattern, value),) = patterns.items()
        return self._strings.string_of({"pattern": pattern}, f"{path}/patternProperties"), value


def _properties_of(schema: Schema, path: str) -> tuple[Schema, frozenset[str]]:
    """Return the schemas of an object's properties by name, and the names that are required."""
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, dict):
        fail(f"{path}/properties", "must be an object of schemas")
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        fail(f"{path}/required", "must be a list of names")
    if missing := [name for name in required if name not in properties]:
        fail(f"{path}/required", f"has {missing[0][:40]!r}, which is not in properties")
    names = frozenset(required)
    if len(properties) > _MAX_PROPERTIES:
        fail(f"{path}/properties", f"must have at most {_MAX_PROPERTIES} properties")
    if len(properties) - len(names) > _MAX_OPTIONAL:
        fail(
            f"{path}/properties",
            f"must have at most {_MAX_OPTIONAL} properties that are not required",
        )
    return properties, names


def _restricts_names(schema: Schema) -> bool:
    given = schema.get("propertyNames", True)
    return given is not True and given not in ({}, {"type": "string"})


def _key_of(name: str, path: str) -> Expression:
    """Return a property's name and the colon after it."""
    if any("\ud800" <= character <= "\udfff" for character in name):
        fail(f"{path}/properties", "has a name with a lone surrogate")
    return Concat((Text(json.dumps(name, ensure_ascii=False)), Text(":"), SPACE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A property that an object may have."""

    name: str
    schema: object
    path: str
    """The JSON pointer of its schema."""
    value: Expression
    """Its value as JSON."""
    is_required: bool


def members_in_order(
    members: Sequence[Expression],
    are_required: Sequence[bool],
    rules: dict[str, Expression],
    *,
    separator: Concat = COMMA,
) -> Expression:
    """Return members in order with a separator; optional members may be omitted.

    `rules` gets rules for parts of them, most of which are used once.
    """
    add = _Rules(rules)
    if not any(are_required):
        return _any_of(members, add, separator)
    first = are_required.index(True)
    found: Expression = Concat(())
    for member, is_required in zip(members[:first:-1], are_required[:first:-1], strict=True):
        more = Concat((*separator.parts, member))
        found = add.rule(Concat((more if is_required else optional(more), found)))
    found = Concat((members[first], found))
    for member in members[first - 1 :: -1] if first else ():
        found = add.rule(Concat((optional(Concat((member, *separator.parts))), found)))
    return found


def _any_of(members: Sequence[Expression], add: _Rules, separator: Concat) -> Expression:
    """Return members in order, any of which may be omitted."""
    found: Expression | None = None
    for member in reversed(members):
        if found is None:
            found = add.rule(member)
            continue
        # Without groups, of which xgrammar would make rules.
        one = member if size_of(member) <= _MAX_COPIED else add.rule(member)
        found = add.rule(Alternation((one, Concat((one, *separator.parts, found)), found)))
    return Concat(()) if found is None else optional(found)


class _Rules:
    """Adds rules for the members of one object."""

    def __init__(self, rules: dict[str, Expression]) -> None:
        self._rules = rules
        self._number = len(rules)

    def rule(self, expression: Expression) -> Rule:
        """Add a rule and return a reference to it."""
        rule = Rule(f"from{self._number}x{len(self._rules) - self._number}")
        self._rules[rule.name] = expression
        return rule


def enclosed_list(
    left: str,
    part: Expression,
    right: str,
    *,
    minimum: int,
    maximum: int | None,
    rules: dict[str, Expression],
) -> Expression:
    """Return `minimum` to `maximum` parts separated by commas, between two brackets."""
    part = _short(part, rules)
    if max(minimum, maximum or 0) <= MAX_CHAIN:
        return surrounded(left, separated(part, minimum, maximum), right)
    more = more_items(part, max(minimum - 1, 0), None if maximum is None else maximum - 1, rules)
    some = Concat((part, more))
    return surrounded(left, some if minimum else optional(some), right)


def more_items(
    item: Expression, minimum: int, maximum: int | None, rules: dict[str, Expression]
) -> Expression:
    """Return `minimum` to `maximum` items, each after a comma."""
    following = Concat((*COMMA.parts, _short(item, rules)))
    prefix = f"list{len(rules)}x"
    return counted_letters((following,), minimum, maximum, (), prefix=prefix, rules=rules)


def _short(part: Expression, rules: dict[str, Expression]) -> Expression:
    """Return a part, as a rule if it is long."""
    if size_of(part) <= _MAX_COPIED:
        return part
    rule = Rule(f"item{len(rules)}")
    rules[rule.name] = part
    return rule


def leading_items(items: Sequence[Expression], minimum: int, more: Expression) -> Expression:
    """Return items in order; items after the first `minimum` are optional."""
    following = more
    for index in range(len(items) - 1, -1, -1):
        comma = () if index == 0 else (Text(","), SPACE)
        following = Concat((*comma, items[index], following))
        if index >= minimum:
            following = optional(following)
    return following


def must_differ(schema: Schema, path: str) -> bool:
    """Return whether the items of an array must be unique."""
    given = schema.get("uniqueItems", False)
    if not isinstance(given, bool):
        fail(f"{path}/uniqueItems", "must be true or false")
    if given and schema.get("prefixItems"):
        fail(f"{path}/uniqueItems", "cannot be combined with prefixItems")
    return given


def unique_items(
    values: Sequence[object] | None,
    path: str,
    rules: dict[str, Expression],
    *,
    minimum: int,
    maximum: int | None,
) -> Expression:
    """Return arrays of `minimum` to `maximum` different values, in any order.

    Items have these `values`; None are unlimited. Rules are added to `rules`.
    """
    if values is None:
        fail(
            f"{path}/uniqueItems",
            "is supported only for items whose values are listed (enum, const, boolean or null), "
            "or with maxItems 1",
        )
    texts = list({_equality_key(value): _text_of(value) for value in reversed(values)}.values())
    texts.reverse()
    maximum = len(texts) if maximum is None else min(maximum, len(texts))
    if minimum > maximum:
        fail(path, "requires more different items than it allows")
    prefix = f"unique{len(rules)}x"
    pending, found = [0], {0}
    while pending:
        used = pending.pop()
        choices: list[Expression] = [Concat(())] if used.bit_count() >= minimum else []
        for place, text in enumerate(texts if used.bit_count() < maximum else ()):
            after = used | 1 << place
            if after == used:
                continue
            if after not in found:
                found.add(after)
                pending.append(after)
            comma = COMMA.parts if used else ()
            choices.append(Concat((*comma, Text(text), Rule(f"{prefix}{after}"))))
        if len(found) > _MAX_SETS:
            fail(
                f"{path}/uniqueItems",
                f"needs more than {_MAX_SETS} rules; allow fewer values, or set maxItems",
            )
        rules[f"{prefix}{used}"] = Alternation(tuple(choices))
    return surrounded("[", Rule(f"{prefix}0"), "]")


def _text_of(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _equality_key(value: object) -> str:
    """Return a text that is the same for values that JSON Schema considers equal."""
    return json.dumps(_normalized(value), sort_keys=True)


def _normalized(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_normalized(one) for one in value]
    if isinstance(value, dict):
        return {name: _normalized(one) for name, one in value.items()}
    return value
