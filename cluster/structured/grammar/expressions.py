"""The expressions that grammars consist of, and their EBNF as xgrammar reads it.

xgrammar has its own parsers for regular expressions and JSON schemas, which ignore unknown
features. Ours reject them, so that everything a parser accepts is enforced.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "BOOLEAN",
    "COMMA",
    "CONTENT",
    "ESCAPE",
    "JSON_RULES",
    "MAX_COST",
    "MAX_OPTIONAL_RUN",
    "MAX_SIZE",
    "NULL",
    "OBJECT",
    "PLAIN",
    "SPACE",
    "STRING",
    "STRING_END",
    "VALUE",
    "Alternation",
    "Characters",
    "Concat",
    "Expression",
    "Lookahead",
    "Ranges",
    "Repeat",
    "Rule",
    "Text",
    "as_json_string",
    "complement",
    "cost_of",
    "invalid_structure",
    "optional",
    "optional_run_of",
    "replaced",
    "separated",
    "size_of",
    "surrounded",
    "write_ebnf",
]

Ranges = tuple[tuple[int, int], ...]
"""First and last code points, ascending and disjoint."""
MAX_SIZE = 10_000
"""Characters of the repetitions of one rule or expression when they are expanded."""
_MAX_CODE_POINT = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
MAX_COST = 1024
"""More states than this take too long to compile on any machine, with any vocabulary."""
MAX_OPTIONAL_RUN = 256
"""Consecutive optional parts; these make about 30 000 transitions."""
_MAX_STATES = 192
"""States counted for a repetition: xgrammar does not unroll longer repetitions."""
_NUM_WIDE_LETTERS = 16


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of these ranges, which contain no surrogates."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Text:
    """A literal text."""

    text: str


@dataclass(frozen=True, slots=True)
class Concat:
    """All parts, one after another."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    """Any one of the parts."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part `minimum` to `maximum` times; None means without limit."""

    part: Expression
    minimum: int
    maximum: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """A reference to a rule of the grammar."""

    name: str


@dataclass(frozen=True, slots=True)
class Lookahead:
    """An assertion at the end of a rule: the part, or the end of the text, always follows the rule.

    With it xgrammar can rule out tokens that span the end of the rule when it compiles.
    """

    part: Expression


Expression = Characters | Text | Concat | Alternation | Repeat | Rule | Lookahead


def invalid_structure(message: str) -> InvalidRequestError:
    """Return the error for a structure that is invalid or not supported."""
    return InvalidRequestError(message, param="structure")


def optional(part: Expression) -> Repeat:
    """Return the part, zero or one time."""
    return Repeat(part, 0, 1)


def complement(ranges: Ranges) -> Characters:
    """Return all characters outside of these ranges."""
    left, first = [], 0
    for low, high in sorted((*ranges, _SURROGATES)):
        if low > first:
            left.append((first, low - 1))
        first = max(first, high + 1)
    if first <= _MAX_CODE_POINT:
        left.append((first, _MAX_CODE_POINT))
    return Characters(tuple(left))


def replaced(
    expression: Expression, replacement: Callable[[Expression], Expression | None]
) -> Expression:
    """Return an expression in which every part that has a replacement is replaced by it."""
    found = replacement(expression)
    if found is not None:
        return found
    match expression:
        case Concat(parts):
            return Concat(tuple(replaced(part, replacement) for part in parts))
        case Alternation(parts):
            return Alternation(tuple(replaced(part, replacement) for part in parts))
        case Repeat(part, minimum, maximum):
            return Repeat(replaced(part, replacement), minimum, maximum)
        case Lookahead(part):
            return Lookahead(replaced(part, replacement))
    return expression


def size_of(expression: Expression) -> int:
    """Return the number of characters of an expression with repetitions expanded.

    A repetition without limit counts `minimum + 1` times.
    """
    match expression:
        case Text(text):
            return len(text)
        case Concat(parts) | Alternation(parts):
            return sum(map(size_of, parts))
        case Repeat(part, minimum, maximum):
            return max(1, minimum + 1 if maximum is None else maximum) * size_of(part)
    return 1


def _repeated_size(expression: Expression) -> int:
    """Return the number of characters of all repetitions; other characters cost little."""
    match expression:
        case Concat(parts) | Alternation(parts):
            return sum(map(_repeated_size, parts))
        case Repeat(part, _, 1):
            return _repeated_size(part)
        case Repeat():
            return size_of(expression)
    return 0


def write_ebnf(rules: dict[str, Expression], start: Expression) -> str:
    """Return a grammar in EBNF. Raises InvalidRequestError if a rule is too large."""
    lines = []
    for name, expression in {"root": start, **rules}.items():
        size = _repeated_size(expression)
        if size > MAX_SIZE:
            raise invalid_structure(
                f"structure expands to {size} characters, more than the maximum of {MAX_SIZE}; "
                "a repetition counts at its maximum."
            )
        lines.append(f"{name} ::= {_written(expression)}\n")
    return "".join(lines)


def _written(expression: Expression) -> str:
    match expression:
        case Text(text):
            return f'"{"".join(_escaped(ord(character)) for character in text)}"'
        case Characters(ranges):
            if not ranges:
                raise invalid_structure("structure has an empty character set.")
            return "[" + "".join(f"{_escaped(low)}-{_escaped(high)}" for low, high in ranges) + "]"
        case Concat(parts):
            return " ".join(map(_grouped, parts)) or '""'
        case Alternation(parts):
            return " | ".join(map(_grouped, parts)) or '""'
        case Repeat(part, minimum, maximum):
            return _grouped(part) + _count(minimum, maximum)
        case Rule(name):
            return name
        case Lookahead(part):
            return f"(={_written(part)})"


def _grouped(expression: Expression) -> str:
    written = _written(expression)
    return f"({written})" if isinstance(expression, Concat | Alternation | Repeat) else written


def _count(minimum: int, maximum: int | None) -> str:
    match minimum, maximum:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
    return f"{{{minimum},{'' if maximum is None else maximum}}}"


def _escaped(code_point: int) -> str:
    character = chr(code_point)
    if character.isascii() and (character.isalnum() or character == " "):
        return character
    return f"\\U{code_point:08x}"


def cost_of(expression: Expression) -> int:
    """Return the number of states in which most tokens may follow; a rule counts as none."""
    match expression:
        case Characters():
            return int(_is_wide(expression))
        case Concat(parts) | Alternation(parts):
            return sum(map(cost_of, parts))
        case Repeat(part, minimum, maximum):
            num_rounds = minimum + 1 if maximum is None else maximum
            return min(num_rounds, _MAX_STATES) * cost_of(part)
    return 0


def _is_wide(characters: Characters) -> bool:
    letters = (*range(0x41, 0x5B), *range(0x61, 0x7B))
    found = sum(any(low <= one <= high for low, high in characters.ranges) for one in letters)
    return found >= _NUM_WIDE_LETTERS


def optional_run_of(expression: Expression) -> int:
    """Return the length of the longest run of optional parts."""
    return _run(expression).longest


@dataclass(frozen=True, slots=True)
class _OptionalRun:
    """Numbers of consecutive optional parts in an expression."""

    longest: int = 0
    """The longest run anywhere in the expression."""
    first: int = 0
    """The run at its beginning; all parts if the whole expression is optional."""
    last: int = 0
    """The run at its end."""
    is_whole: bool = False
    """Whether the whole expression is optional."""


_ONE_OPTIONAL = _OptionalRun(1, 1, 1, is_whole=True)


def _run(expression: Expression) -> _OptionalRun:
    match expression:
        case Concat(parts):
            return _run_of_concat(parts)
        case Alternation(parts):
            found = [_run(part) for part in parts]
            is_whole = any(one.is_whole for one in found)
            first = max(int(is_whole), *(one.first for one in found))
            last = max(int(is_whole), *(one.last for one in found))
            longest = max(first, last, *(one.longest for one in found))
            return _OptionalRun(longest, first, last, is_whole)
        case Repeat(Text() | Characters(), 0, _):
            return _ONE_OPTIONAL
        case Repeat(part, minimum, maximum):
            inner = _run(part)
            num_rounds = minimum + 1 if maximum is None else maximum
            if inner.is_whole:
                total = max(1, num_rounds) * max(1, inner.first)
                return _OptionalRun(total, total, total, is_whole=True)
            if minimum == 0:
                return _OptionalRun(max(1, inner.longest), 1, 1, is_whole=True)
            between = inner.last + inner.first if num_rounds > 1 else 0
            return _OptionalRun(max(inner.longest, between), inner.first, inner.last)
    return _OptionalRun()


def _run_of_concat(parts: tuple[Expression, ...]) -> _OptionalRun:
    longest = last = 0
    first: int | None = None
    for part in parts:
        inner = _run(part)
        longest = max(longest, inner.longest, last + inner.first)
        if inner.is_whole:
            last += inner.first
            continue
        if first is None:
            first = last + inner.first
        last = inner.last
    if first is None:
        return _OptionalRun(max(longest, last), last, last, is_whole=True)
    return _OptionalRun(max(longest, last), first, last)


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
    (Repeat(PLAIN, 0, None), Repeat(Concat((*ESCAPE.parts, Repeat(PLAIN, 0, None))), 0, None))
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
