"""The numbers that a JSON schema allows, as expressions for their digits."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, inf, nextafter
from typing import TYPE_CHECKING

from cluster.structured.grammar.expressions import (
    FRACTION,
    INTEGER,
    MORE_DIGITS,
    NUMBER,
    Alternation,
    Characters,
    Concat,
    Expression,
    Repeat,
    Rule,
    Text,
    invalid_structure,
    optional,
)
from cluster.structured.grammar.schema_keywords import Schema, fail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["Grid", "Multiples", "number_of", "numbers_between"]

_NUM_DIGITS = 15
"""Digits before the point of multiples of a fraction, which doubles have exactly."""
_NUM_WHOLE_DIGITS = 21
"""Digits before the point of other numbers, which have exponents above that."""
_NUM_DECIMALS = 20
_MAX_MULTIPLE_DECIMALS = 6
_MAX_FRACTIONS = 256
_MAX_BOUND_DIGITS = 40
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_INT64 = -(2**63), 2**63 - 1
_MAX_UINT64 = 2**64 - 1
_RANGES = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": _INT64,
    "uint32": (0, 2**32 - 1),
    "uint64": (0, _MAX_UINT64),
}
"""The integers of formats that OpenAPI and generators for Rust and protobuf write."""
_LEAST_EXPONENT = -324
"""Below it, doubles are zero."""
_MAX_DOUBLE = Fraction(sys.float_info.max)
_ANY_DIGIT = Characters(((0x30, 0x39),))
_NOT_ZERO = Characters(((0x31, 0x39),))

_MAX_RULES = 384
"""Rules of one schema. The time to compile grows with the square of their number."""
_ZERO = 0x30


@dataclass(frozen=True, slots=True)
class Grid:
    """Numbers of this many decimals, or the multiples of an integer."""

    num_decimals: int
    divisor: int = 1


def number_of(schema: Schema, path: str, multiples: Multiples, *, is_integer: bool) -> Expression:
    """Return the numbers that a schema allows. Raises InvalidRequestError."""
    bounds = _bounds_of(schema, path)
    has_multiples = "multipleOf" in schema
    limits = _RANGES.get(str(schema.get("format"))) if is_integer else None
    if not bounds and not has_multiples and limits in (None, _INT64):
        return INTEGER if is_integer else NUMBER
    low, is_low_open = _closest(bounds, "minimum", "exclusiveMinimum", max)
    high, is_high_open = _closest(bounds, "maximum", "exclusiveMaximum", min)
    grid = Grid(0)
    if has_multiples and not bounds and not is_integer and (parts := _fractions_of(schema)):
        return _with_fractions(parts, multiples)
    if has_multiples:
        grid = _grid_of(schema, path, is_integer=is_integer)
    elif not is_integer:
        grid = Grid(_NUM_DECIMALS)
    if limits is not None:
        if low is None or low < limits[0]:
            low, is_low_open = Fraction(limits[0]), False
        if high is None or high > limits[1]:
            high, is_high_open = Fraction(limits[1]), False
    return numbers_between(
        low,
        high,
        is_low_open=is_low_open,
        is_high_open=is_high_open,
        grid=grid,
        multiples=multiples,
    )


def _bounds_of(schema: Schema, path: str) -> dict[str, Fraction]:
    bounds: dict[str, Fraction] = {}
    for name in _BOUNDS:
        value = schema.get(name)
        if isinstance(value, bool) and name.startswith("exclusive"):
            # As in OpenAPI 3.0, it says whether the other bound is excluded.
            other = "minimum" if name == "exclusiveMinimum" else "maximum"
            if value and other in bounds:
                bounds[name] = bounds[other]
        elif name in schema:
            bounds[name] = _number_at(schema, name, path)
    return bounds


def _number_at(schema: Schema, keyword: str, path: str) -> Fraction:
    value = schema[keyword]
    if isinstance(value, bool) or not isinstance(value, int | Fraction):
        fail(f"{path}/{keyword}", "must be a number")
    number = Fraction(value)
    if abs(number) > _MAX_DOUBLE:
        fail(f"{path}/{keyword}", "must be in the range of a double")
    return number


def _fractions_of(schema: Schema) -> list[str]:
    """Return the decimals of the multiples of 0.5, 0.25 and so on; empty for other divisors."""
    divisor, scale = schema["multipleOf"], 10**_MAX_MULTIPLE_DECIMALS
    if not isinstance(divisor, Fraction) or divisor.numerator != 1:
        return []
    number = divisor.denominator
    if number > _MAX_FRACTIONS or scale % number or number in (1, 10, 100):
        return []
    units = (scale // number * index for index in range(1, number))
    return [f"{unit:0{_MAX_MULTIPLE_DECIMALS}}".rstrip("0") for unit in units]


def _with_fractions(decimals: list[str], multiples: Multiples) -> Expression:
    """Return all numbers with these decimals, or with none."""
    most = Fraction(10**_NUM_DIGITS - 1)
    whole = numbers_between(
        -most, most, is_low_open=False, is_high_open=False, grid=Grid(0), multiples=multiples
    )
    part = Concat((Text("."), Alternation(tuple(map(Text, decimals)))))
    return Alternation((Concat((whole, optional(part))), Concat((Text("-0"), part))))


def _grid_of(schema: Schema, path: str, *, is_integer: bool) -> Grid:
    """Return the numbers that multipleOf allows."""
    divisor = _number_at(schema, "multipleOf", path)
    if divisor > 0 and divisor.denominator == 1:
        return Grid(0, divisor.numerator)
    if divisor > 0 and divisor.numerator == 1:
        if is_integer:
            return Grid(0)
        num_decimals = len(str(divisor.denominator)) - 1
        if divisor.denominator == 10**num_decimals and num_decimals <= _MAX_MULTIPLE_DECIMALS:
            return Grid(num_decimals)
    fail(
        f"{path}/multipleOf",
        "must be a positive integer, or 0.1, 0.01 and so on to 0.000001; without bounds also 0.5, "
        "0.25 and so on",
    )


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
    """Return numbers between two bounds; None means no bound.

    Raises InvalidRequestError if there are none.
    """
    num_decimals = grid.num_decimals
    if num_decimals == 0:
        first, last = _whole_bounds(low, high, is_low_open=is_low_open, is_high_open=is_high_open)
    else:
        # Parsers round to doubles, which must not be the bound.
        if low is not None and is_low_open:
            double = nextafter(float(low), inf)
            low = min(Fraction(double), Fraction(repr(double)))
        if high is not None and is_high_open:
            double = nextafter(float(high), -inf)
            high = max(Fraction(double), Fraction(repr(double)))
        scale = 10**num_decimals
        num_whole = _NUM_WHOLE_DIGITS if num_decimals == _NUM_DECIMALS else _NUM_DIGITS
        largest = 10**num_whole * scale - 1
        first = -largest if low is None else max(-largest, ceil(low * scale))
        last = largest if high is None else min(largest, floor(high * scale))
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
    if num_decimals == _NUM_DECIMALS:
        least, most = -_MAX_DOUBLE if low is None else low, _MAX_DOUBLE if high is None else high
        parts += _with_exponents(max(least, Fraction(0)), most)
        parts += (
            Concat((Text("-"), part)) for part in _with_exponents(max(-most, Fraction(0)), -least)
        )
    if not parts:
        kind = "number" if grid.divisor == 1 else f"multiple of {grid.divisor}"
        raise invalid_structure(
            f"structure has numeric bounds that allow no {kind} of up to {_MAX_BOUND_DIGITS} "
            f"digits and {num_decimals} decimals."
        )
    return Alternation(tuple(parts))


def _whole_bounds(
    low: Fraction | None, high: Fraction | None, *, is_low_open: bool, is_high_open: bool
) -> tuple[int, int]:
    """Return the first and the last integer, of 64 bits if such integers exist."""
    first = None if low is None else floor(low) + 1 if is_low_open else ceil(low)
    last = None if high is None else ceil(high) - 1 if is_high_open else floor(high)
    most = _MAX_UINT64 if last is not None else _INT64[1]
    if (first is None or first <= most) and (last is None or last >= _INT64[0]):
        least = _INT64[0] if first is None else max(first, _INT64[0])
        return least, most if last is None else min(last, most)
    largest = 10**_MAX_BOUND_DIGITS - 1
    first = -largest if first is None else max(first, -largest)
    return first, largest if last is None else min(last, largest)


def _with_exponents(least: Fraction, most: Fraction) -> list[Expression]:
    """Return expressions of positive numbers with one digit before the point and an exponent."""
    if most <= 0 or most < least:
        return []
    last = _exponent_of(most)
    first = max(_LEAST_EXPONENT, _exponent_of(least)) if least > 0 else _LEAST_EXPONENT
    parts: list[Expression] = []
    writer = _Writer(Grid(_NUM_DECIMALS), Multiples({}))
    scale = 10**_NUM_DECIMALS
    for exponent in sorted({first, last} if first <= last else ()):
        unit = Fraction(10) ** exponent
        low = max(scale, ceil(least / unit * scale))
        high = min(10 * scale - 1, floor(most / unit * scale))
        if low <= high:
            mantissa = Alternation(tuple(_magnitudes(low, high, writer)))
            parts.append(Concat((mantissa, _exponents(exponent, exponent))))
    if last - first > 1:
        parts.append(Concat((_NOT_ZERO, FRACTION, _exponents(first + 1, last - 1))))
    return parts


def _exponent_of(number: Fraction) -> int:
    """Return the exponent of a positive number with one digit before the point."""
    exponent = len(str(number.numerator)) - len(str(number.denominator))
    return exponent if number >= Fraction(10) ** exponent else exponent - 1


def _exponents(first: int, last: int) -> Expression:
    """Return the mark of an exponent and the exponents of a range."""
    writer = _Writer(Grid(0), Multiples({}))
    parts: list[Expression] = []
    for sign, low, high in (
        (optional(Text("+")), max(first, 0), last),
        (Text("-"), max(-last, 1), -first),
    ):
        if low <= min(high, 9):
            # Python writes two digits at least.
            digit = Characters(((0x30 + low, 0x30 + min(high, 9)),))
            parts.append(Concat((sign, optional(Text("0")), digit)))
        parts += (Concat((sign, part)) for part in _magnitudes(max(low, 10), high, writer))
    return Concat((Characters(((0x45, 0x45), (0x65, 0x65))), Alternation(tuple(parts))))


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
    whole: list[int] = []
    # One group for each number of digits before the point; 0.5 has one digit there.
    for num_digits in range(num_decimals + 1, max(len(str(last)), num_decimals + 1) + 1):
        lowest = 0 if num_digits == num_decimals + 1 else 10 ** (num_digits - 1)
        low, high = max(first, lowest), min(last, 10**num_digits - 1)
        if lowest and (low, high) == (lowest, 10**num_digits - 1) and writer.grid.divisor == 1:
            whole.append(num_digits - num_decimals)
        elif low <= high:
            parts += _of_length(f"{low:0{num_digits}}", f"{high:0{num_digits}}", writer)
    if whole:
        more = Repeat(_ANY_DIGIT, whole[0] - 1, whole[-1] - 1)
        parts.append(Concat((_NOT_ZERO, more, *_fraction(num_decimals))))
    return parts


def _fraction(num_decimals: int) -> tuple[Expression, ...]:
    if num_decimals == _NUM_DECIMALS:
        return (FRACTION,)
    if not num_decimals:
        return ()
    return (optional(Concat((Text("."), Repeat(_ANY_DIGIT, 1, num_decimals)))),)


def _of_length(low: str, high: str, writer: _Writer) -> list[Expression]:
    """Return expressions of the digits from `low` to `high`, which have the same length."""
    same = 0
    while same < len(low) and low[same] == high[same]:
        same += 1
    if same == len(low):
        return writer.numbers(low, None, len(low))
    parts: list[Expression] = []
    length = len(low)
    # A bound with unrestricted remaining digits is merged into the middle range.
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

    Of `length` digits the last `num_decimals` are decimals, of which trailing zeros may be omitted.
    """
    num_whole = length - num_decimals
    whole: list[Expression] = [Text(head[:num_whole])] if head[:num_whole] else []
    given = head[num_whole:]
    following: list[Expression] = []
    if digit is not None:
        following.append(Characters(((0x30 + digit[0], 0x30 + digit[1]),)))
        if len(head) < num_whole:
            whole += following
            num_left = num_whole - len(head) - 1
            whole += [Repeat(_ANY_DIGIT, num_left, num_left)] if num_left else []
            following = []
    if not num_decimals:
        return Concat(tuple(whole))
    if digit is not None and not following:
        return Concat((*whole, *_fraction(num_decimals)))
    num_free = num_decimals - len(given) - len(following)
    if num_decimals == _NUM_DECIMALS:
        following.append(MORE_DIGITS)
    elif num_free:
        following.append(Repeat(_ANY_DIGIT, 0, num_free))
    if digit is not None and digit[0]:
        return Concat((*whole, Text("." + given), *following))
    shortest = given.rstrip("0")
    num_zeros = len(given) - len(shortest)
    rest: list[Expression] = []
    if digit is not None:
        rest.append(Concat((Text(num_zeros * "0"), *following)))
    if num_zeros:
        rest.append(Repeat(Characters(((0x30, 0x30),)), 1, num_zeros))
    if not shortest:
        more = Concat((Text("."), Alternation(tuple(rest))))
        return Concat((*whole, *((optional(more),) if rest else ())))
    more = Concat((Text("." + shortest), *((optional(Alternation(tuple(rest))),) if rest else ())))
    return Concat((*whole, more))


class Multiples:
    """Makes the rules of all multiples in one schema."""

    def __init__(self, rules: dict[str, Expression]) -> None:
        """Rules are added to `rules`."""
        self._rules = rules
        self._num_rules = 0

    def beginning_with(
        self, head: str, digit: tuple[int, int] | None, length: int, divisor: int
    ) -> list[Expression]:
        """Return an expression of the multiples of this many digits, if there are any.

        They start with `head` and, if it is given, with a digit in a range after it. Raises
        InvalidRequestError if they need too many rules.
        """
        num_left = length - len(head)
        rest = int(head or "0") * 10**num_left % divisor
        if digit is None:
            found = self._following(rest, num_left, divisor)
        else:
            found = self._choice(range(digit[0], digit[1] + 1), rest, num_left, divisor)
        return [] if found is None else [Concat((Text(head), found))]

    def _following(self, rest: int, num_digits: int, divisor: int) -> Expression | None:
        """Return the digits that complete a multiple; None if none do.

        `rest` is the remainder of the number with zeros as last digits.
        """
        if -rest % divisor >= 10**num_digits:
            return None
        if num_digits == 0:
            return Concat(())
        rule = Rule(f"multiple{divisor}x{num_digits}x{rest}")
        if rule.name not in self._rules:
            self._num_rules += 1
            if self._num_rules > _MAX_RULES:
                raise invalid_structure(
                    f"structure has a JSON Schema in which multipleOf requires more than "
                    f"{_MAX_RULES} states; use a smaller divisor, or a minimum and a maximum."
                )
            found = self._choice(range(10), rest, num_digits, divisor)
            assert found is not None
            self._rules[rule.name] = found
        return rule

    def _choice(
        self, digits: Iterable[int], rest: int, num_digits: int, divisor: int
    ) -> Expression | None:
        """Return one of these digits and the digits that complete a multiple; None if none do."""
        by_rest: dict[int, list[int]] = {}
        for digit in digits:
            changed = (rest + digit * 10 ** (num_digits - 1)) % divisor
            by_rest.setdefault(changed, []).append(digit)
        parts: list[Expression] = []
        for changed, same in by_rest.items():
            following = self._following(changed, num_digits - 1, divisor)
            if following is not None:
                ranges = tuple((_ZERO + digit, _ZERO + digit) for digit in same)
                parts.append(Concat((Characters(ranges), following)))
        return Alternation(tuple(parts)) if parts else None
