"""The multiples of integers, as rules for the digits that may follow others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.structured.grammar.expressions import (
    Alternation,
    Characters,
    Concat,
    Expression,
    Rule,
    Text,
    invalid_structure,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Multiples"]

_MAX_RULES = 384
"""Rules of one schema. The time to compile grows with the square of their number."""
_ZERO = 0x30


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

        `rest` is the remainder of the number whose last digits are zeros.
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
        """Return one of these digits and those that complete a multiple; None if none do."""
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
