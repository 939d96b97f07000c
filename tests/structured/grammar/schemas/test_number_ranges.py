"""Expressions for ranges match exactly the numbers between their bounds."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest

from cluster.structured.grammar.expressions import (
    Alternation,
    Characters,
    Concat,
    Expression,
    Repeat,
    Rule,
    Text,
    size_of,
)
from cluster.structured.grammar.schemas.multiples import Multiples
from cluster.structured.grammar.schemas.number_ranges import Grid, number_of, numbers_between
from pagedray.errors import InvalidRequestError
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


@pytest.mark.parametrize("seed", range(40))
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
        ({"multipleOf": 999_983}, "multipleOf requires more than 256 states"),
        ({"multipleOf": 7, "minimum": 8, "maximum": 13}, "no multiple of 7"),
    ],
)
def test_multiples_that_take_too_much_or_do_not_exist_are_rejected(
    schema: dict[str, object], what: str
) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        number_of(schema, "#", Multiples({}), is_integer=False)
