"""The strings that a JSON schema allows, without quotes and escapes."""

from __future__ import annotations

from cluster.structured.grammar.expressions import (
    Characters,
    Concat,
    Expression,
    Repeat,
    Text,
    complement,
    invalid_structure,
    replaced,
)
from cluster.structured.grammar.loops import counted_letters
from cluster.structured.grammar.schemas.schema_strings import SchemaStrings

__all__ = ["RawStrings", "without_angle"]

_ANGLE = (ord("<"), ord("<"))
_LETTER = complement((_ANGLE,))


class RawStrings(SchemaStrings):
    """Makes strings without `<`, so that no mark can be in them."""

    any_string = any_text = Repeat(_LETTER, 0, None)
    _rule_prefix = "raw"

    def limited_string(self, minimum: int, maximum: int | None) -> Expression:
        return counted_letters((_LETTER,), minimum, maximum, (), prefix="raw", rules=self._rules)

    def string_of_pattern(self, parts: tuple[Expression, ...]) -> Expression:
        return replaced(Concat(parts), _without_angle)


def without_angle(characters: Characters) -> Characters:
    """Return characters other than `<`."""
    return complement((*complement(characters.ranges).ranges, _ANGLE))


def _without_angle(expression: Expression) -> Expression | None:
    if isinstance(expression, Text) and "<" in expression.text:
        raise invalid_structure(
            "structure requires '<' in a string, which the format of tool calls does not allow."
        )
    return without_angle(expression) if isinstance(expression, Characters) else None
