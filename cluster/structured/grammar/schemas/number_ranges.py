"""The numbers that a JSON schema allows, as expressions for their digits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

from cluster.structured.grammar import json_text
from cluster.structured.grammar.expressions import (
    Alternation,
    Characters,
    Concat,
    Expression,
    Repeat,
    Text,
    invalid_structure,
    optional,
)
from cluster.structured.grammar.schemas.multiples import Multiples
from cluster.structured.grammar.schemas.schema_keywords import Schema, fail

__all__ = ["Grid", "number_of", "numbers_between"]

_NUM_INTEGER_DIGITS = 15
_NUM_DECIMALS = 6
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


@dataclass(frozen=True, slots=True)
class Grid:
    """Numbers of this many decimals, or the multiples of an integer."""

    num_decimals: int
    divisor: int = 1


def number_of(schema: Schema, path: str, multiples: Multiples, *, is_integer: bool) -> Expression:
    """Return the numbers that a schema allows. Raises InvalidRequestError."""
    bounds = {name: _number_at(schema, name, path) for name in _BOUNDS if name in schema}
    has_multiples = "multipleOf" in schema
    if not bounds and not has_multiples:
        return json_text.INTEGER if is_integer else json_text.NUMBER
    grid = Grid(0 if is_integer else _NUM_DECIMALS)
    if has_multiples:
        grid = _grid_of(schema, path, is_integer=is_integer)
    low, is_low_open = _closest(bounds, "minimum", "exclusiveMinimum", max)
    high, is_high_open = _closest(bounds, "maximum", "exclusiveMaximum", min)
    return numbers_between(
        low,
        high,
        is_low_open=is_low_open,
        is_high_open=is_high_open,
        grid=grid,
        multiples=multiples,
    )


def _number_at(schema: Schema, keyword: str, path: str) -> Fraction:
    value = schema[keyword]
    if isinstance(value, bool) or not isinstance(value, int | Fraction):
        fail(f"{path}/{keyword}", "must be a number")
    number = Fraction(value)
    if abs(number) > 10**15 or number.denominator > 10**15:
        fail(f"{path}/{keyword}", "must have at most 15 digits before and after the point")
    return number


def _grid_of(schema: Schema, path: str, *, is_integer: bool) -> Grid:
    """Return the numbers that multipleOf allows."""
    divisor = _number_at(schema, "multipleOf", path)
    if divisor > 0 and divisor.denominator == 1:
        return Grid(0, divisor.numerator)
    if divisor > 0 and divisor.numerator == 1:
        if is_integer:
            return Grid(0)
        num_decimals = len(str(divisor.denominator)) - 1
        if divisor.denominator == 10**num_decimals and num_decimals <= _NUM_DECIMALS:
            return Grid(num_decimals)
    fail(f"{path}/multipleOf", "must be a positive integer, or 0.1, 0.01 and so on to 0.000001")


def _closest(
    bounds: Mapping[str, Fraction],
    closed: str,
    opened: str,
    pick: Callable[[list[Fraction]], Fraction],
) -> tuple[Fraction | None, bool]:
    """Return the tighter of two bounds, and whether it is open."""
    found = [bounds[keyword] for keyword in (closed, opened) if keyword in bounds]
    bound = pick(found) if found else None
    return bound, bound is not None and bounds.get(opened) == bound


def numbers_between(
    low: Fraction | None,
    high: Fraction | None,
    *,
    is_low_open: bool,
    is_high_open: bool,
    grid: Grid,
    multiples: Multiples,
) -> Expression:
    """Return numbers of up to 15 digits between two bounds; None means no bound.

    Raises InvalidRequestError if there are none.
    """
    num_decimals = grid.num_decimals
    scale = 10**num_decimals
    largest = 10**_NUM_INTEGER_DIGITS * scale - 1
    first = -largest if low is None else max(-largest, ceil(low * scale))
    last = largest if high is None else min(largest, floor(high * scale))
    first += is_low_open and first == (low or 0) * scale and low is not None
    last -= is_high_open and last == (high or 0) * scale and high is not None
    writer = _Writer(grid, multiples)
    parts: list[Expression] = []
    if first < 0:
        # Zero has no sign.
        parts += (
            Concat((Text("-"), part))
            for part in _magnitudes(max(1, -min(last, -1)), -first, writer)
        )
    if last >= 0:
        parts += _magnitudes(max(first, 0), last, writer)
    if not parts:
        kind = "number" if grid.divisor == 1 else f"multiple of {grid.divisor}"
        raise invalid_structure(
            f"structure has numeric bounds that allow no {kind} of up to {_NUM_INTEGER_DIGITS} "
            f"digits and {num_decimals} decimals."
        )
    return Alternation(tuple(parts))


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the numbers of a grid that start with given digits."""

    grid: Grid
    multiples: Multiples

    def numbers(self, head: str, digit: tuple[int, int] | None, length: int) -> list[Expression]:
        """Return an expression of them, if there are any; see `_number`."""
        if self.grid.divisor == 1:
            return [_number(head, digit, self.grid.num_decimals, length)]
        return self.multiples.beginning_with(head, digit, length, self.grid.divisor)


def _magnitudes(first: int, last: int, writer: _Writer) -> list[Expression]:
    """Return expressions of the numbers `first` to `last` in units of the last decimal."""
    parts: list[Expression] = []
    num_decimals = writer.grid.num_decimals
    # One group for each number of digits before the point; 0.5 has one digit there.
    for num_digits in range(num_decimals + 1, max(len(str(last)), num_decimals + 1) + 1):
        lowest = 0 if num_digits == num_decimals + 1 else 10 ** (num_digits - 1)
        low, high = max(first, lowest), min(last, 10**num_digits - 1)
        if low <= high:
            parts += _of_length(f"{low:0{num_digits}}", f"{high:0{num_digits}}", writer)
    return parts


def _of_length(low: str, high: str, writer: _Writer) -> list[Expression]:
    """Return expressions of the digits from `low` to `high`, which have the same length."""
    same = 0
    while same < len(low) and low[same] == high[same]:
        same += 1
    if same == len(low):
        return writer.numbers(low, None, len(low))
    parts: list[Expression] = []
    length = len(low)
    # A bound whose remaining digits are unrestricted is merged into the middle range.
    is_low_whole = set(low[same + 1 :]) <= {"0"}
    is_high_whole = set(high[same + 1 :]) <= {"9"}
    # Numbers that share a prefix with `low`, or with `high`, and the middle range.
    for at in range(length - 1, same, -1):
        if low[at] < "9" and not is_low_whole:
            parts += writer.numbers(low[:at], (int(low[at]) + 1, 9), length)
        if high[at] > "0" and not is_high_whole:
            parts += writer.numbers(high[:at], (0, int(high[at]) - 1), length)
    between = int(low[same]) + (not is_low_whole), int(high[same]) - (not is_high_whole)
    if between[0] <= between[1]:
        parts += writer.numbers(low[:same], between, length)
    if not is_low_whole:
        parts += writer.numbers(low, None, length)
    if not is_high_whole:
        parts += writer.numbers(high, None, length)
    return parts


def _number(head: str, digit: tuple[int, int] | None, num_decimals: int, length: int) -> Expression:
    """Return numbers that start with `head` and an optional digit, followed by any digits.

    Of `length` digits the last `num_decimals` are decimals; trailing decimals that are zero or
    arbitrary may be omitted.
    """
    num_whole = length - num_decimals
    given: list[Expression] = [Text(character) for character in head]
    if digit is not None:
        given.append(Characters(((0x30 + digit[0], 0x30 + digit[1]),)))
    any_digit = Characters(((0x30, 0x39),))
    whole = given[:num_whole]
    if num_whole > len(whole):
        count = num_whole - len(whole)
        whole.append(Repeat(any_digit, count, count))
    decimals = given[num_whole:]
    # Trailing zeros of fixed decimals are omitted.
    while digit is None and decimals and decimals[-1] == Text("0"):
        decimals.pop()
    num_free = 0 if digit is None else min(length - len(given), num_decimals)
    if not decimals and not num_free:
        return Concat(tuple(whole))
    if not decimals:
        return Concat((*whole, optional(Concat((Text("."), Repeat(any_digit, 1, num_free))))))
    free = (Repeat(any_digit, 0, num_free),) if num_free else ()
    return Concat((*whole, Text("."), *decimals, *free))
