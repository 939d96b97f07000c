"""The numbers that a JSON schema allows, as expressions for their digits."""

from collections.abc import Callable, Mapping
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
from cluster.structured.grammar.schema_keywords import KEYWORDS, Schema, fail

__all__ = ["number_of", "numbers_between"]

_NUM_INTEGER_DIGITS = 15
_NUM_DECIMALS = 6


def number_of(schema: Schema, path: str, *, is_integer: bool) -> Expression:
    """Return the numbers that a schema allows. Raises InvalidRequestError."""
    bounds: dict[str, Fraction] = {}
    for keyword in KEYWORDS["number"].intersection(schema):
        value = schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | Fraction):
            fail(f"{path}/{keyword}", "must be a number")
        bound = Fraction(value)
        if abs(bound) > 10**15 or bound.denominator > 10**15:
            fail(f"{path}/{keyword}", "must have at most 15 digits before and after the point")
        bounds[keyword] = bound
    if not bounds:
        return json_text.INTEGER if is_integer else json_text.NUMBER
    low, is_low_open = _closest(bounds, "minimum", "exclusiveMinimum", max)
    high, is_high_open = _closest(bounds, "maximum", "exclusiveMaximum", min)
    return numbers_between(
        low, high, is_low_open=is_low_open, is_high_open=is_high_open, is_integer=is_integer
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
    is_integer: bool,
) -> Expression:
    """Return numbers of up to 15 digits and 6 decimals between two bounds; None means no bound.

    Raises InvalidRequestError if there are none.
    """
    num_decimals = 0 if is_integer else _NUM_DECIMALS
    scale = 10**num_decimals
    largest = 10**_NUM_INTEGER_DIGITS * scale - 1
    first = -largest if low is None else max(-largest, ceil(low * scale))
    last = largest if high is None else min(largest, floor(high * scale))
    first += is_low_open and first == (low or 0) * scale and low is not None
    last -= is_high_open and last == (high or 0) * scale and high is not None
    if first > last:
        raise invalid_structure(
            f"structure has numeric bounds that allow no number of up to {_NUM_INTEGER_DIGITS} "
            f"digits and {num_decimals} decimals."
        )
    parts: list[Expression] = []
    if first < 0:
        # Zero has no sign.
        parts += (
            Concat((Text("-"), part))
            for part in _magnitudes(max(1, -min(last, -1)), -first, num_decimals)
        )
    if last >= 0:
        parts += _magnitudes(max(first, 0), last, num_decimals)
    return Alternation(tuple(parts))


def _magnitudes(first: int, last: int, num_decimals: int) -> list[Expression]:
    """Return expressions of the numbers `first` to `last` in units of the last decimal."""
    parts: list[Expression] = []
    # One group for each number of digits before the point; 0.5 has one digit there.
    for num_digits in range(num_decimals + 1, max(len(str(last)), num_decimals + 1) + 1):
        lowest = 0 if num_digits == num_decimals + 1 else 10 ** (num_digits - 1)
        low, high = max(first, lowest), min(last, 10**num_digits - 1)
        if low <= high:
            parts += _of_length(f"{low:0{num_digits}}", f"{high:0{num_digits}}", num_decimals)
    return parts


def _of_length(low: str, high: str, num_decimals: int) -> list[Expression]:
    """Return expressions of the digits from `low` to `high`, which have the same length."""
    same = 0
    while same < len(low) and low[same] == high[same]:
        same += 1
    if same == len(low):
        return [_number(low, None, num_decimals, len(low))]
    parts: list[Expression] = []
    length = len(low)
    # A bound whose remaining digits are unrestricted is merged into the middle range.
    is_low_whole = set(low[same + 1 :]) <= {"0"}
    is_high_whole = set(high[same + 1 :]) <= {"9"}
    # Numbers that share a prefix with `low`, or with `high`, and the middle range.
    for at in range(length - 1, same, -1):
        if low[at] < "9" and not is_low_whole:
            parts.append(_number(low[:at], (int(low[at]) + 1, 9), num_decimals, length))
        if high[at] > "0" and not is_high_whole:
            parts.append(_number(high[:at], (0, int(high[at]) - 1), num_decimals, length))
    between = int(low[same]) + (not is_low_whole), int(high[same]) - (not is_high_whole)
    if between[0] <= between[1]:
        parts.append(_number(low[:same], between, num_decimals, length))
    if not is_low_whole:
        parts.append(_number(low, None, num_decimals, length))
    if not is_high_whole:
        parts.append(_number(high, None, num_decimals, length))
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
