"""Expressions for ranges match exactly the numbers between their bounds."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest

from cluster.structured.grammar.expressions import Expression, size_of
from cluster.structured.grammar.number_ranges import numbers_between
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
        low, high, is_low_open=is_low_open, is_high_open=is_high_open, is_integer=is_integer
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
