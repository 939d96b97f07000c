"""Arguments of calls as elements: each has a key, and a value that is a text or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.structured.grammar.calls.element_values import read_value
from cluster.structured.grammar.calls.raw_strings import RawStrings, without_angle
from cluster.structured.grammar.expressions import (
    Alternation,
    Characters,
    Concat,
    Expression,
    Lookahead,
    Repeat,
    Rule,
    Text,
    complement,
    replaced,
)
from cluster.structured.grammar.json_text import JSON_RULES, SPACE, STRING
from cluster.structured.grammar.schemas.json_schema import read_members
from cluster.structured.grammar.schemas.members import members_in_order
from cluster.structured.grammar.schemas.schema_keywords import fail
from cluster.structured.grammar.schemas.schema_values import (
    finite_values,
    is_unrestricted,
    kinds_of,
    resolved,
)
from cluster.structured.grammar.text_until import text_until

if TYPE_CHECKING:
    from collections.abc import Set

    from cluster.structured.grammar.schemas.members import Member
    from cluster.structured.grammar.turn import Grammar

__all__ = ["ARG_KEYS", "PARAMETERS", "ElementNotation"]

_ANY_TEXT = Rule("anytext")
"""Any text up to the end mark, which is part of it."""
_MAX_KEY_LENGTH = 256
_NOT_IN_KEYS = "<>\n\0"
_KEY = Repeat(complement(tuple((ord(one), ord(one)) for one in sorted(_NOT_IN_KEYS))), 1, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementNotation:
    """How a model writes elements. A value ends where its end mark first occurs."""

    key_begin: str
    key_end: Expression
    value_end: str
    line: str
    """What is before the end mark, and no part of the value."""

    def rules(self) -> dict[str, Expression]:
        """Return the rules that the arguments of all calls share."""
        text_rules, start = text_until({self.value_end: Concat(())}, "valuetext", may_end=False)
        json_rules = {name: replaced(one, _as_element) for name, one in JSON_RULES.items()}
        return json_rules | {STRING.name: _STRING} | text_rules | {_ANY_TEXT.name: start}

    def read_arguments(self, schema: str) -> Grammar:
        """Return the grammar of the arguments that a JSON schema allows.

        Raises InvalidRequestError.
        """
        rules, members, root = read_members(schema)
        rules = {name: replaced(one, _as_element) for name, one in rules.items()}
        if members is None:
            any_member = self._member(_KEY, _ANY_TEXT)
            return rules, Repeat(any_member, 0, None)
        values = _ElementValues(self, root, rules)
        written = [self._member(Text(_checked_key(one)), values.value_of(one)) for one in members]
        required = [member.is_required for member in members]
        return rules, members_in_order(written, required, rules, separator=Concat(()))

    def _member(self, key: Expression, value: Expression) -> Expression:
        return Concat((Text(self.key_begin), key, self.key_end, value, SPACE))


class _ElementValues:
    """Makes the expressions of values with their end marks."""

    def __init__(
        self, notation: ElementNotation, root: object, rules: dict[str, Expression]
    ) -> None:
        self._notation = notation
        self._root = root
        self._strings = RawStrings(rules)

    def value_of(self, member: Member) -> Expression:
        """Return what the value of a member may be, as it is read back."""
        schema, root = member.schema, self._root
        kinds = kinds_of(schema, root)
        if is_unrestricted(schema, root) and (not kinds or "string" in kinds):
            return _ANY_TEXT
        if (values := finite_values(schema, root)) is not None:
            return self._listed(values, kinds, member.path)
        if kinds == {"string"}:
            return self._string(schema, member.path)
        value = replaced(member.value, _as_element)
        return Concat((value, SPACE, Text(self._notation.value_end)))

    def _string(self, schema: object, path: str) -> Expression:
        """Return the strings of a schema that has no values of other types."""
        if is_unrestricted(schema, self._root):
            return _ANY_TEXT
        if (values := finite_values(schema, self._root)) is not None:
            return self._listed(values, {"string"}, path)
        schema = resolved(schema, self._root)
        assert isinstance(schema, Mapping)
        branches = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(branches, list):
            return Alternation(tuple(self._string(branch, path) for branch in branches))
        return Concat((self._strings.string_of(schema, path), self._end()))

    def _listed(self, values: list[object], kinds: Set[str], path: str) -> Expression:
        texts = dict.fromkeys(self._text_of(value, kinds, path) for value in values)
        return Concat((Alternation(tuple(map(Text, texts))), self._end()))

    def _text_of(self, value: object, kinds: Set[str], path: str) -> str:
        """Return a value as a text that is read as this value."""
        end = self._notation.value_end
        if isinstance(value, str) and read_value(value, kinds) == value:
            if end in value or "\0" in value:
                fail(path, f"has a value with {end} or NUL, which the format of calls excludes")
            return value
        return json.dumps(value, ensure_ascii=False).replace("<", _ESCAPED_ANGLE)

    def _end(self) -> Expression:
        return Text(self._notation.line + self._notation.value_end)


def _checked_key(member: Member) -> str:
    name = member.name
    if not 0 < len(name) <= _MAX_KEY_LENGTH or not set(name).isdisjoint(_NOT_IN_KEYS):
        fail(
            member.path,
            f"must have a name of 1 to {_MAX_KEY_LENGTH} characters without <, > and line feeds",
        )
    return name


def _as_element(expression: Expression) -> Expression | None:
    """Return what replaces a part of JSON, so that no end mark can be in a string of it."""
    match expression:
        case Text(text) if "<" in text:
            return Text(text.replace("<", _ESCAPED_ANGLE))
        case Characters():
            return without_angle(expression)
        case Lookahead():
            return _AFTER_STRING
    return None


def _one_of(characters: str) -> Characters:
    return Characters(tuple((ord(one), ord(one)) for one in sorted(characters)))


_ESCAPED_ANGLE = "\\u003c"
_AFTER_STRING = Lookahead(Concat((SPACE, _one_of(",:<]}"))))
_ESCAPE = Concat((Text("\\"), _one_of('"\\/bfnrt')))
_CONTROLS = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_ANGLES = Repeat(_one_of("<"), 1, None)
_AFTER_ANGLE = complement((*_CONTROLS, (ord("/"), ord("/")), (ord("<"), ord("<"))))
_STRING = Concat(
    (
        Text('"'),
        Repeat(
            Alternation(
                (
                    complement((*_CONTROLS, (ord("<"), ord("<")))),
                    _ESCAPE,
                    Concat((_ANGLES, Alternation((_AFTER_ANGLE, _ESCAPE)))),
                )
            ),
            0,
            None,
        ),
        Repeat(_one_of("<"), 0, None),
        Text('"'),
        _AFTER_STRING,
    )
)
"""A string of JSON without `</`."""
PARAMETERS = ElementNotation(
    key_begin="<parameter=", key_end=Text(">\n"), value_end="</parameter>", line="\n"
)
ARG_KEYS = ElementNotation(
    key_begin="<arg_key>",
    key_end=Concat((Text("</arg_key>"), SPACE, Text("<arg_value>"))),
    value_end="</arg_value>",
    line="",
)
