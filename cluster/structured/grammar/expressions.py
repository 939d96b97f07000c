"""What grammars are made of, and how that is written in the EBNF that xgrammar reads.

xgrammar has readers of its own for regular expressions and JSON schemas, which pass over what they
do not know. Ours refuse it, so everything that they take is in what they make.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedray.errors import InvalidRequestError

__all__ = [
    "MAX_SIZE",
    "Ahead",
    "Characters",
    "Choice",
    "Expression",
    "Repeat",
    "Rule",
    "Sequence",
    "Text",
    "characters_but",
    "optional",
    "refuse",
    "size_of",
    "write",
]

Ranges = tuple[tuple[int, int], ...]
"""First and last code points, ascending and apart."""

MAX_SIZE = 10_000
"""Characters, counted as often as they are repeated, of one rule or expression."""
_MAX_CODE_POINT = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of some ranges; surrogates are none."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Text:
    """These characters."""

    text: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after another."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any one of them."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """So many times; `most` None is without end."""

    part: Expression
    fewest: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """What a rule of the grammar says."""

    name: str


@dataclass(frozen=True, slots=True)
class Ahead:
    """Nothing, at the end of a rule behind which this always comes, or the end of the text.

    It lets xgrammar tell beforehand that a token which goes on otherwise may not follow.
    """

    part: Expression


Expression = Characters | Text | Sequence | Choice | Repeat | Rule | Ahead


def refuse(message: str) -> InvalidRequestError:
    """Return the refusal of a structure."""
    return InvalidRequestError(message, param="structure")


def optional(part: Expression) -> Repeat:
    """Return the part or nothing."""
    return Repeat(part, 0, 1)


def characters_but(ranges: Ranges) -> Characters:
    """Return all characters that are in none of these ranges."""
    left, first = [], 0
    for low, high in sorted((*ranges, _SURROGATES)):
        if low > first:
            left.append((first, low - 1))
        first = max(first, high + 1)
    if first <= _MAX_CODE_POINT:
        left.append((first, _MAX_CODE_POINT))
    return Characters(tuple(left))


def size_of(expression: Expression) -> int:
    """Return the characters of an expression, counted as often as they are repeated at most.

    What is repeated without end counts once more than it must be.
    """
    match expression:
        case Text(text):
            return len(text)
        case Sequence(parts) | Choice(parts):
            return sum(map(size_of, parts))
        case Repeat(part, fewest, most):
            return max(1, fewest + 1 if most is None else most) * size_of(part)
    return 1


def write(rules: dict[str, Expression], start: Expression) -> str:
    """Return a grammar in EBNF. Raises InvalidRequestError if a part of it is too large."""
    lines = []
    for name, expression in {"root": start, **rules}.items():
        size = size_of(expression)
        if size > MAX_SIZE:
            raise refuse(
                f"structure repeats to {size} characters where {MAX_SIZE} are allowed: "
                "a repetition counts as often as it may be repeated."
            )
        lines.append(f"{name} ::= {_written(expression)}\n")
    return "".join(lines)


def _written(expression: Expression) -> str:
    match expression:
        case Text(text):
            return f'"{"".join(_escaped(ord(character)) for character in text)}"'
        case Characters(ranges):
            if not ranges:
                raise refuse("structure has a set of characters that holds none.")
            return "[" + "".join(f"{_escaped(low)}-{_escaped(high)}" for low, high in ranges) + "]"
        case Sequence(parts):
            return " ".join(map(_grouped, parts)) or '""'
        case Choice(parts):
            return " | ".join(map(_grouped, parts)) or '""'
        case Repeat(part, fewest, most):
            return _grouped(part) + _count(fewest, most)
        case Rule(name):
            return name
        case Ahead(part):
            return f"(={_written(part)})"


def _grouped(expression: Expression) -> str:
    written = _written(expression)
    return f"({written})" if isinstance(expression, Sequence | Choice | Repeat) else written


def _count(fewest: int, most: int | None) -> str:
    match fewest, most:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
    return f"{{{fewest},{'' if most is None else most}}}"


def _escaped(code_point: int) -> str:
    character = chr(code_point)
    if character.isascii() and (character.isalnum() or character == " "):
        return character
    return f"\\U{code_point:08x}"
