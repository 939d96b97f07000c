"""The grammar of JSON itself, as rules that schemas refer to, and strings of a regular expression.

A string is written without the escapes that it can do without, so none is half a character; no
number is so long that readers refuse it; there is at most one line feed between two words.
"""

from __future__ import annotations

import json

from cluster.structured.grammar.expressions import (
    Ahead,
    Characters,
    Choice,
    Expression,
    Repeat,
    Rule,
    Sequence,
    Text,
    characters_but,
    optional,
)

__all__ = [
    "ARRAY",
    "BOOLEAN",
    "CONTENT",
    "INTEGER",
    "JSON_RULES",
    "NULL",
    "NUMBER",
    "OBJECT",
    "PLAIN",
    "SPACE",
    "STRING",
    "STRING_END",
    "VALUE",
    "as_json_string",
    "separated",
    "surrounded",
]

SPACE = Rule("space")
STRING = Rule("string")
INTEGER = Rule("integer")
NUMBER = Rule("number")
BOOLEAN = Choice((Text("true"), Text("false")))
NULL = Text("null")
ARRAY = Rule("array")
OBJECT = Rule("object")
VALUE = Rule("value")

_QUOTE = Text('"')
_SPACES = Repeat(Characters(((0x09, 0x0A), (0x20, 0x20))), 0, None)
STRING_END = Sequence(
    (_QUOTE, Ahead(Sequence((_SPACES, Characters(tuple((ord(c), ord(c)) for c in ",:]}"))))))
)
"""The quote behind a string, wherever it is."""
_COMMA = Sequence((Text(","), SPACE))
_DIGIT = Characters(((0x30, 0x39),))
# What JSON has in a string only behind a backslash.
_ESCAPED = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
PLAIN = characters_but(_ESCAPED)
_SHORT_ESCAPES = '"\\\b\f\n\r\t'


def _digits(fewest: int, most: int) -> Expression:
    return Repeat(_DIGIT, fewest, most)


def _one_of(characters: str) -> Expression:
    return Characters(tuple((ord(c), ord(c)) for c in sorted(characters)))


# xgrammar knows beforehand what may follow inside one rule, and must look where rules meet: no
# rule is made of what a token may span.
CONTENT = Sequence(
    (
        Repeat(PLAIN, 0, None),
        Repeat(Sequence((Text("\\"), _one_of('"\\/bfnrt'), Repeat(PLAIN, 0, None))), 0, None),
    )
)


def separated(part: Expression, fewest: int, most: int | None) -> Expression:
    """Return so many parts with commas between them."""
    if most == 0:
        return Sequence(())
    more = Repeat(Sequence((_COMMA, part)), max(fewest - 1, 0), None if most is None else most - 1)
    some = Sequence((part, more))
    return some if fewest > 0 else optional(some)


def surrounded(left: str, inside: Expression, right: str) -> Expression:
    """Return an array or an object of what is inside."""
    return Sequence((Text(left), SPACE, inside, SPACE, Text(right)))


def as_json_string(expression: Expression) -> Expression:
    """Return JSON strings whose content is of an expression."""
    return Sequence((_QUOTE, _as_content(expression), _QUOTE))


def _as_content(expression: Expression) -> Expression:
    match expression:
        case Text(text):
            return Text(json.dumps(text, ensure_ascii=False)[1:-1])
        case Characters():
            return _characters(expression)
        case Sequence(parts):
            return Sequence(tuple(map(_as_content, parts)))
        case Choice(parts):
            return Choice(tuple(map(_as_content, parts)))
        case Repeat(part, fewest, most):
            return Repeat(_as_content(part), fewest, most)
    return expression


def _characters(expression: Characters) -> Expression:
    # What is in none of the complements is in both sets.
    plain = characters_but((*characters_but(expression.ranges).ranges, *_ESCAPED))
    parts: list[Expression] = [plain] if plain.ranges else []
    parts += (
        Text(json.dumps(character)[1:-1])
        for character in _SHORT_ESCAPES
        if any(low <= ord(character) <= high for low, high in expression.ranges)
    )
    if not parts:
        # Control characters only, which nobody wants unless asked for.
        controls = {c for low, high in expression.ranges for c in range(low, high + 1)}
        parts = [Text(f"\\u{code_point:04x}") for code_point in sorted(controls)]
    return parts[0] if len(parts) == 1 else Choice(tuple(parts))


_INTEGER = Sequence(
    (
        optional(Text("-")),
        Choice((Text("0"), Sequence((Characters(((0x31, 0x39),)), _digits(0, 17))))),
    )
)
_FRACTION = Sequence((Text("."), _digits(1, 18)))
_EXPONENT = Sequence((_one_of("eE"), optional(_one_of("+-")), _digits(1, 2)))
_MEMBER = Sequence((STRING, Text(":"), SPACE, VALUE))
_INDENT = Sequence((Text("\n"), Repeat(_one_of("\t "), 0, None)))

JSON_RULES: dict[str, Expression] = {
    "space": optional(Choice((Text(" "), _INDENT))),
    "string": Sequence((_QUOTE, CONTENT, *STRING_END.parts)),
    "integer": _INTEGER,
    "number": Sequence((_INTEGER, optional(_FRACTION), optional(_EXPONENT))),
    "array": surrounded("[", separated(VALUE, 0, None), "]"),
    "object": surrounded("{", separated(_MEMBER, 0, None), "}"),
    "value": Choice((OBJECT, ARRAY, STRING, NUMBER, BOOLEAN, NULL)),
}
