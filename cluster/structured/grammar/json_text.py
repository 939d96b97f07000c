"""The grammar of JSON as rules that schemas refer to, and strings that match an expression.

Strings contain no unnecessary escapes and so no half of a surrogate pair, numbers fit in the usual
types of parsers, and there is at most one line feed between two tokens of JSON, with an indentation
of limited length.
"""

import json

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
    optional,
)

__all__ = [
    "ARRAY",
    "BOOLEAN",
    "COMMA",
    "CONTENT",
    "ESCAPE",
    "FRACTION",
    "INTEGER",
    "JSON_RULES",
    "MORE_DIGITS",
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
BOOLEAN = Alternation((Text("true"), Text("false")))
NULL = Text("null")
ARRAY = Rule("array")
OBJECT = Rule("object")
VALUE = Rule("value")

_QUOTE = Text('"')
_AFTER_STRING = Characters(tuple((ord(c), ord(c)) for c in ",:]}"))
# xgrammar relies on it if the rule is used once, so it must not allow other whitespace.
STRING_END = Concat((_QUOTE, Lookahead(Concat((SPACE, _AFTER_STRING)))))
"""The closing quote of a string."""
COMMA = Concat((Text(","), SPACE))
_DIGIT = Characters(((0x30, 0x39),))
# Characters that JSON requires to be escaped.
_ESCAPED = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
PLAIN = complement(_ESCAPED)
_MAX_INDENT = 32
"""Maximum number of spaces and tabs after a line feed, as some models write them forever."""
_SHORT_ESCAPES = '"\\\b\f\n\r\t'


def _digits(minimum: int, maximum: int) -> Expression:
    return Repeat(_DIGIT, minimum, maximum)


def _one_of(characters: str) -> Expression:
    return Characters(tuple((ord(c), ord(c)) for c in sorted(characters)))


ESCAPE = Concat((Text("\\"), _one_of('"\\/bfnrt')))
# xgrammar precomputes the tokens that may follow within a rule but not across rules: text that one
# token may span is not split into rules.
CONTENT = Concat(
    (
        Repeat(PLAIN, 0, None),
        Repeat(Concat((*ESCAPE.parts, Repeat(PLAIN, 0, None))), 0, None),
    )
)


def separated(part: Expression, minimum: int, maximum: int | None) -> Expression:
    """Return `minimum` to `maximum` parts separated by commas."""
    if maximum == 0:
        return Concat(())
    num_more = None if maximum is None else maximum - 1
    more = Repeat(Concat((COMMA, part)), max(minimum - 1, 0), num_more)
    some = Concat((part, more))
    return some if minimum > 0 else optional(some)


def surrounded(left: str, inside: Expression, right: str) -> Expression:
    """Return an array or an object with this content."""
    return Concat((Text(left), SPACE, inside, SPACE, Text(right)))


def as_json_string(expression: Expression) -> Expression:
    """Return JSON strings with contents that match an expression."""
    return Concat((_QUOTE, _as_content(expression), _QUOTE))


def _as_content(expression: Expression) -> Expression:
    match expression:
        case Text(text):
            return Text(json.dumps(text, ensure_ascii=False)[1:-1])
        case Characters():
            return _characters(expression)
        case Concat(parts):
            return Concat(tuple(map(_as_content, parts)))
        case Alternation(parts):
            return Alternation(tuple(map(_as_content, parts)))
        case Repeat(part, minimum, maximum):
            return Repeat(_as_content(part), minimum, maximum)
    return expression


def _characters(expression: Characters) -> Expression:
    # The intersection of two sets is the complement of their complements' union.
    plain = complement((*complement(expression.ranges).ranges, *_ESCAPED))
    parts: list[Expression] = [plain] if plain.ranges else []
    escapes = "".join(
        json.dumps(character)[2:-1]
        for character in _SHORT_ESCAPES
        if any(low <= ord(character) <= high for low, high in expression.ranges)
    )
    if escapes:
        parts.append(Concat((Text("\\"), _one_of(escapes))))
    if not parts:
        # Control characters are allowed only if the expression allows nothing else.
        controls = {c for low, high in expression.ranges for c in range(low, high + 1)}
        parts = [Text(f"\\u{code_point:04x}") for code_point in sorted(controls)]
    return parts[0] if len(parts) == 1 else Alternation(tuple(parts))


def _at_most(bound: str) -> list[Expression]:
    """Return the integers with the same number of digits that are at most this."""
    found: list[Expression] = [Text(bound)]
    for place, digit in enumerate(bound):
        least = "0" if place else "1"
        if least < digit:
            below = Characters(((ord(least), ord(digit) - 1),))
            num_left = len(bound) - place - 1
            found.append(Concat((Text(bound[:place]), below, _digits(num_left, num_left))))
    return found


_SIGN = optional(Text("-"))
_NOT_ZERO = Characters(((0x31, 0x39),))
MORE_DIGITS = Rule("digits")
FRACTION = Rule("fraction")
_INTEGER = Alternation(
    (
        Concat((_SIGN, Text("0"))),
        Concat((_SIGN, _NOT_ZERO, MORE_DIGITS)),
        *(Concat((_SIGN, one)) for one in _at_most(str(2**63 - 1))),
        Text(str(-(2**63))),
    )
)
"""Integers of 64 bits."""
_E = _one_of("eE")
# Numbers are finite as doubles, and may have more digits than doubles.
_NUMBER = Concat(
    (
        _SIGN,
        Alternation(
            (
                Concat(
                    (
                        Alternation((Text("0"), Concat((_NOT_ZERO, _digits(0, 3), MORE_DIGITS)))),
                        FRACTION,
                        optional(Concat((_E, optional(_one_of("+-")), _digits(1, 2)))),
                    )
                ),
                *(
                    Concat((_NOT_ZERO, FRACTION, _E, sign, one))
                    for sign, most in ((optional(Text("+")), "307"), (Text("-"), "324"))
                    for one in _at_most(most)
                ),
                *(
                    Concat((*mantissa, _E, optional(Text("+")), Text("308")))
                    for mantissa in (
                        (Text("1"),),
                        (Text("1."), Characters(((0x30, 0x36),)), MORE_DIGITS),
                        (Text("1.7976931348623157"),),
                    )
                ),
            )
        ),
    )
)
_MEMBER = Concat((STRING, Text(":"), SPACE, VALUE))
_INDENT = Concat((Text("\n"), Repeat(_one_of("\t "), 0, _MAX_INDENT)))

JSON_RULES: dict[str, Expression] = {
    "space": optional(Alternation((Text(" "), _INDENT))),
    "string": Concat((_QUOTE, CONTENT, *STRING_END.parts)),
    MORE_DIGITS.name: _digits(0, 17),
    FRACTION.name: optional(Concat((Text("."), _digits(1, 3), MORE_DIGITS))),
    "integer": _INTEGER,
    "number": _NUMBER,
    "array": surrounded("[", separated(VALUE, 0, None), "]"),
    "object": surrounded("{", separated(_MEMBER, 0, None), "}"),
    "value": Alternation((OBJECT, ARRAY, STRING, NUMBER, BOOLEAN, NULL)),
}
