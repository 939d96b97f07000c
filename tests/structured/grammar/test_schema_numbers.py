"""Expressions for ranges match exactly the numbers between their bounds."""

from __future__ import annotations

import json
import random
import re
import struct
from fractions import Fraction
from math import inf, isfinite, nextafter

import jsonschema
import pytest

from cluster.structured.grammar.expressions import (
    JSON_RULES,
    Alternation,
    Characters,
    Concat,
    Expression,
    Repeat,
    Rule,
    Text,
    replaced,
    size_of,
)
from cluster.structured.grammar.schema_numbers import Grid, Multiples, number_of, numbers_between
from pagedray.errors import InvalidRequestError
from tests.slow_params import some_slow
from tests.structured.grammar.as_regex import as_regex


def between(
    low: Fraction | None,
    high: Fraction | None,
    *,
    is_low_open: bool = False,
    is_high_open: bool = False,
    is_integer: bool = False,
) -> Expression:
    return numbers_between(
        low,
        high,
        is_low_open=is_low_open,
        is_high_open=is_high_open,
        grid=Grid(0 if is_integer else 6),
        multiples=Multiples({}),
    )


@pytest.mark.parametrize("seed", range(60))
def test_numbers_are_in_the_range_exactly_if_they_match(seed: int) -> None:
    generator = random.Random(seed)
    is_integer = generator.random() < 0.5
    units = [1] if is_integer else [1, 10, 100, 1000]
    low: Fraction | None = Fraction(generator.randint(-3000, 3000), generator.choice(units))
    assert low is not None
    high: Fraction | None = low + Fraction(generator.randint(1, 2000), generator.choice(units))
    assert high is not None
    ends = low, high
    low, high = (end if generator.random() < 0.8 else None for end in ends)
    is_low_open, is_high_open = generator.random() < 0.4, generator.random() < 0.4
    try:
        expression = between(
            low, high, is_low_open=is_low_open, is_high_open=is_high_open, is_integer=is_integer
        )
    except InvalidRequestError:
        assert is_integer
        assert ends[1] - ends[0] == 1
        return
    assert size_of(expression) < 10_000
    pattern = re.compile(as_regex(expression))
    for _ in range(100):
        step = Fraction(generator.randint(-2000, 2000) or 1, generator.choice(units))
        number = generator.choice(ends) + step
        text = str(int(number)) if is_integer else f"{float(number):.6f}"
        is_above = low is None or number > low or (number == low and not is_low_open)
        is_below = high is None or number < high or (number == high and not is_high_open)
        is_in = is_above and is_below
        assert bool(pattern.fullmatch(text)) == is_in, (low, high, text)
        if pattern.fullmatch(text.rstrip("0").rstrip(".")) and not is_integer:
            assert is_in


def rule_of(expression: Expression) -> Expression | None:
    if not isinstance(expression, Rule):
        return None
    return replaced(JSON_RULES[expression.name], rule_of)


def written(number: float) -> set[str]:
    """Return a double as Python, JavaScript and C write it."""
    short, long = repr(number), f"{number:.16e}"
    mantissa, _, exponent = f"{number:e}".partition("e")
    return {short, long, short.replace("e-0", "e-").upper(), f"{mantissa}e{int(exponent)}"}


def random_double(generator: random.Random) -> float:
    if generator.random() < 0.5:
        return generator.uniform(-1, 1) * 10.0 ** generator.randint(-20, 20)
    (number,) = struct.unpack("<d", generator.randbytes(8))
    return float(number)


@pytest.mark.parametrize("seed", range(60))
def test_doubles_are_in_the_range_exactly_if_they_match(seed: int) -> None:
    generator = random.Random(seed)
    ends = sorted(filter(isfinite, (random_double(generator) for _ in range(9))))
    low, high = ends[0], ends[generator.randrange(1, len(ends))]
    schema: dict[str, object] = {}
    names = generator.choice([(), ("minimum",), ("exclusiveMaximum",), ("minimum", "maximum")])
    names += generator.choice([(), ("exclusiveMinimum", "exclusiveMaximum")])
    for name in names:
        schema[name] = Fraction(repr(low if name.lower().endswith("minimum") else high))
    expression = number_of(schema, "#", Multiples({}), is_integer=False)
    pattern = re.compile(as_regex(replaced(expression, rule_of)))
    validator = jsonschema.Draft202012Validator(
        {name: float(bound) for name, bound in schema.items()}  # type: ignore[arg-type]  # fractions
    )
    numbers = [random_double(generator) for _ in range(60)] + [low, high, -low, 0.0, 5e-324]
    numbers += [generator.uniform(0, 1) * high, nextafter(low, high), nextafter(high, low)]
    numbers += [nextafter(low, -inf), nextafter(high, inf), (low + high) / 2]
    for number in filter(isfinite, numbers):
        for text in written(number):
            is_in = validator.is_valid(json.loads(text))
            is_zero = float(text) == 0
            if pattern.fullmatch(text):
                assert is_in, (schema, text)
            elif is_in and not is_zero and not 0 < abs(number) < 1e-322:
                # All that is left out is digits near a bound that a shorter text has.
                assert text not in {repr(number), repr(number).upper()}, (schema, text)


def matches(schema: dict[str, object], text: str, *, is_integer: bool) -> bool:
    rules = dict(JSON_RULES)
    expression = number_of(schema, "#", Multiples(rules), is_integer=is_integer)
    return len(text) in ends(expression, rules, text, 0)


INT64 = str(2**63 - 1)
FLOAT = Fraction("3.4028234663852886e38")
DOUBLE = Fraction("1.7976931348623157e308")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({}, (INT64, "-9223372036854775808", "1412345678901234567", "0"), ("9223372036854775808",)),
        ({"minimum": 0}, ("1735689600123456", INT64, "0"), ("-1", "9223372036854775808", "1.5")),
        ({"minimum": -(2**53) + 1, "maximum": 2**53 - 1}, ("9007199254740991", "-9007199254740991"),
         ("9007199254740992", "-9007199254740992")),
        ({"minimum": -(2**63), "exclusiveMaximum": 2**63}, (INT64, "-9223372036854775808"),
         ("9223372036854775808", "-9223372036854775809")),
        ({"minimum": 0, "maximum": 2**64 - 1}, ("18446744073709551615",),
         ("18446744073709551616",)),
        ({"minimum": -FLOAT}, ("-9223372036854775808", INT64), ("a",)),
        ({"minimum": Fraction("1e30")}, ("1" + 30 * "0", "3" * 35), ("9" * 30,)),
        ({"maximum": -(10**25)}, ("-1" + 25 * "0",), ("-9" * 25, "0")),
        ({"minimum": Fraction("0.0"), "maximum": Fraction("255.0")}, ("255", "0"), ("256", "-1")),
        ({"minimum": 0, "exclusiveMinimum": True}, ("1", INT64), ("0",)),
        ({"maximum": 5, "exclusiveMaximum": False}, ("5", "-5"), ("6",)),
        ({"format": "int32"}, ("2147483647", "-2147483648"), ("2147483648",)),
        ({"format": "uint32", "minimum": 0}, ("4294967295",), ("4294967296", "-1")),
        ({"format": "uint64"}, ("18446744073709551615",), ("18446744073709551616", "-1")),
        ({"format": "int64"}, (INT64,), ("9223372036854775808",)),
        ({"format": "int32", "maximum": 7}, ("7", "-2147483648"), ("8",)),
        ({"format": "uint8", "minimum": 0, "maximum": 255}, ("255",), ("256",)),
        ({"multipleOf": 5}, ("9223372036854775805",), ("9223372036854775804",)),
        ({"multipleOf": 1000, "minimum": 0}, ("1735689600123000",), ("1735689600123456",)),
    ],
)  # fmt: skip
def test_integers_are_whole(
    schema: dict[str, object], good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    assert [matches(schema, text, is_integer=True) for text in good] == [True] * len(good)
    assert [matches(schema, text, is_integer=True) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({}, ("1e-7", "5e-324", "1.7976931348623157e+308", "0.1234567890123456", "-0.0", "1E+22",
              "123456789012345678901", "2.2250738585072014e-308"), ("2e308", "1e309", "01", "1.")),
        ({"minimum": 0, "maximum": 1},
         ("1e-7", "1e-07", "0.30000000000000004", "1.0", "1e0", "0.0000001", "9.999e-1", "5E-324"),
         ("1.0000000000000002", "1e1", "-1e-7", "1.1e0", "1.00000000001e+0")),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ("1e-300", "0.9999999999999999", "1e-1"),
         ("0", "0.0", "1", "1.0", "0.99999999999999999", "1e0", "1e-324",
          "9.99999999999999999e-1")),
        ({"minimum": -FLOAT, "maximum": FLOAT},
         ("3.4028234663852886e+38", "-3.4028234663852886e38", "1e38", "0.5"),
         ("3.4028234663852887e+38", "4e38", "1e39", "-4e38")),
        ({"minimum": -DOUBLE, "maximum": DOUBLE},
         ("1.7976931348623157e308", "-1.7976931348623157e+308", "7"), ("1.8e308",)),
        ({"minimum": 0}, ("1e22", "1.5e300", "123456789012.34567", "0.1"),
         ("-1", "-1e-5", "2e308")),
        ({"maximum": Fraction("-0.5")}, ("-0.5", "-5e-1", "-1e9"), ("-0.4999999999", "-4e-1", "1")),
        ({"minimum": -90, "maximum": 90}, ("-89.99999999999999", "9e1", "45.5"), ("90.1", "9.1e1")),
        ({"minimum": 10**30, "maximum": 10**31}, ("1e30", "5.5e30"), ("1", "2e31")),
        ({"minimum": Fraction("1e-30"), "maximum": Fraction("1e-25")},
         ("1e-30", "2e-26"), ("0", "2e-25")),
        ({"minimum": 0, "exclusiveMinimum": True}, ("1e-5",), ("0", "0.00")),
        ({"multipleOf": Fraction(1, 2)}, ("0", "-0.5", "12.5", "-3"), ("0.25", "1.", "-0", "0.55")),
        ({"multipleOf": Fraction(1, 4)}, ("1.25", "0.5", "99.75", "-0.75"), ("1.2", "0.15")),
        ({"multipleOf": Fraction(1, 20)}, ("1.05", "0.95", "7"), ("0.01", "0.951")),
    ],
)  # fmt: skip
def test_doubles_are_whole(
    schema: dict[str, object], good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    assert [matches(schema, text, is_integer=False) for text in good] == [True] * len(good)
    assert [matches(schema, text, is_integer=False) for text in bad] == [False] * len(bad)


def test_a_range_without_a_number_is_rejected() -> None:
    with pytest.raises(InvalidRequestError, match="bounds that allow no number"):
        between(Fraction(1, 10**9), Fraction(2, 10**9))
    with pytest.raises(InvalidRequestError, match="bounds that allow no number"):
        between(Fraction(3), Fraction(4), is_low_open=True, is_high_open=True, is_integer=True)


def ends(expression: Expression, rules: dict[str, Expression], text: str, at: int) -> set[int]:
    """Return where the matches end that begin at a place of a text."""
    match expression:
        case Text(literal):
            return {at + len(literal)} if text.startswith(literal, at) else set()
        case Characters(ranges):
            is_in = at < len(text) and any(low <= ord(text[at]) <= high for low, high in ranges)
            return {at + 1} if is_in else set()
        case Rule(name):
            return ends(rules[name], rules, text, at)
        case Concat(parts):
            found = {at}
            for part in parts:
                found = {end for one in found for end in ends(part, rules, text, one)}
            return found
        case Alternation(parts):
            return {end for part in parts for end in ends(part, rules, text, at)}
        case Repeat(part, fewest, most):
            places, found = {at}, {at} if fewest == 0 else set()
            for number in range(1, (len(text) if most is None else most) + 1):
                places = {end for one in places for end in ends(part, rules, text, one)}
                found |= places if number >= fewest else set()
            return found
    raise AssertionError(expression)


@pytest.mark.parametrize("seed", some_slow(range(40), slow=range(20, 40)))
def test_multiples_in_a_range_match(seed: int) -> None:
    generator = random.Random(seed)
    divisor = generator.choice([1, 2, 3, 5, 7, 10, 15, 25, 60, 100, 360, 1000])
    low = generator.randint(-2000, 2000)
    high = low + generator.randint(divisor, 3000)
    schema: dict[str, object] = {"multipleOf": divisor}
    if generator.random() < 0.8:
        schema["minimum"] = low
    if generator.random() < 0.8:
        schema["exclusiveMaximum"] = high
    rules: dict[str, Expression] = {}
    is_integer = generator.random() < 0.5
    expression = number_of(schema, "#", Multiples(rules), is_integer=is_integer)
    numbers = [generator.randint(low - 500, high + 500) for _ in range(200)]
    numbers += [number // divisor * divisor for number in numbers]
    for number in numbers:
        text = str(number)
        is_in = (
            number % divisor == 0
            and ("minimum" not in schema or number >= low)
            and ("exclusiveMaximum" not in schema or number < high)
        )
        assert (len(text) in ends(expression, rules, text, 0)) == is_in, (schema, number)
    assert len("-0") not in ends(expression, rules, "-0", 0)


def test_multiples_of_a_power_of_ten_have_fewer_decimals() -> None:
    schema = {"multipleOf": Fraction(1, 100), "minimum": 1, "maximum": Fraction("1.5")}
    rules: dict[str, Expression] = {}
    expression = number_of(schema, "#", Multiples(rules), is_integer=False)
    for text in ("1.0", "1.05", "1.5", "1.37"):
        assert len(text) in ends(expression, rules, text, 0)
    for text in ("1.001", "1.51", "0.99", "2"):
        assert len(text) not in ends(expression, rules, text, 0)


def test_integers_that_are_multiples_of_a_fraction_have_no_decimals() -> None:
    rules: dict[str, Expression] = {}
    schema = {"multipleOf": Fraction(1, 10), "minimum": 1, "maximum": 3}
    expression = number_of(schema, "#", Multiples(rules), is_integer=True)
    for text in ("1", "2", "3"):
        assert len(text) in ends(expression, rules, text, 0)
    for text in ("1.0", "1.5", "2.1", "3.0"):
        assert len(text) not in ends(expression, rules, text, 0)


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"multipleOf": 0}, "#/multipleOf must be a positive integer"),
        ({"multipleOf": -3}, "#/multipleOf must be a positive integer"),
        ({"multipleOf": Fraction(3, 10)}, "#/multipleOf must be a positive integer"),
        ({"multipleOf": True}, "#/multipleOf must be a number"),
        ({"multipleOf": 999_983}, "multipleOf requires more than 384 states"),
        ({"multipleOf": 7, "minimum": 8, "maximum": 13}, "no multiple of 7"),
    ],
)
def test_multiples_that_take_too_much_or_do_not_exist_are_rejected(
    schema: dict[str, object], what: str
) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        number_of(schema, "#", Multiples({}), is_integer=False)
