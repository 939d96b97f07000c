"""The expressions that grammars consist of, and their EBNF as xgrammar reads it.

xgrammar has its own parsers for regular expressions and JSON schemas, which ignore unknown
features. Ours reject them, so that everything a parser accepts is enforced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "MAX_COST",
    "MAX_OPTIONAL_RUN",
    "MAX_SIZE",
    "Alternation",
    "Characters",
    "Concat",
    "Expression",
    "Lookahead",
    "Ranges",
    "Repeat",
    "Rule",
    "Text",
    "complement",
    "cost_of",
    "invalid_structure",
    "optional",
    "optional_run_of",
    "replaced",
    "size_of",
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
