"""The strings that a JSON schema allows, and what they cost to compile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.structured.grammar import json_text
from cluster.structured.grammar.compile_cost import MAX_COST, cost_of
from cluster.structured.grammar.expressions import Expression, Rule, invalid_structure
from cluster.structured.grammar.json_strings import FORMATS, limited_string, string_of_pattern
from cluster.structured.grammar.loops import with_loops_as_rules
from cluster.structured.grammar.schema_keywords import count_limits_of, fail
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from cluster.structured.grammar.schema_keywords import Schema

__all__ = ["SchemaStrings"]


class SchemaStrings:
    """Makes the rules of all strings of one schema, and limits their total cost."""

    def __init__(self, rules: dict[str, Expression]) -> None:
        """Rules are added to `rules`."""
        self._rules = rules
        self._patterns: dict[str, Rule] = {}
        self._cost = 0

    def string_of(self, schema: Schema, path: str) -> Expression:
        """Return the strings that a schema allows. Raises InvalidRequestError."""
        limits = [key for key in ("pattern", "format", "minLength", "maxLength") if key in schema]
        if not limits:
            return json_text.STRING
        keyword = limits[0]
        if keyword in ("pattern", "format"):
            if len(limits) > 1:
                fail(f"{path}/{limits[1]}", f"cannot be combined with {keyword}")
            return self._pattern(_pattern_of(schema, keyword, path), f"{path}/{keyword}")
        rule, expression = limited_string(*count_limits_of(schema, path, "minLength", "maxLength"))
        if rule.name not in self._rules:
            self._add_cost(cost_of(expression), f"{path}/{limits[-1]}")
            self._rules[rule.name] = expression
        return rule

    def _pattern(self, pattern: str, path: str) -> Rule:
        if pattern not in self._patterns:
            try:
                expression = string_of_pattern(pattern)
            except InvalidRequestError as error:
                raise invalid_structure(
                    f"{str(error).removesuffix('.')}, in {path[:200]}."
                ) from None
            self._add_cost(cost_of(expression), path)
            rule = self._patterns[pattern] = Rule(f"pattern{len(self._patterns)}")
            loops, self._rules[rule.name] = with_loops_as_rules(expression, prefix=f"{rule.name}x")
            self._rules |= loops
        return self._patterns[pattern]

    def _add_cost(self, cost: int, path: str) -> None:
        self._cost += cost
        if self._cost > MAX_COST:
            fail(
                path,
                f"brings the strings of the schema to {self._cost} states, more than the maximum "
                f"of {MAX_COST}",
            )


def _pattern_of(schema: Schema, keyword: str, path: str) -> str:
    given = schema[keyword]
    if keyword == "format":
        if given not in FORMATS:
            fail(f"{path}/format", f"must be one of {', '.join(FORMATS)}")
        return FORMATS[str(given)]
    if not isinstance(given, str):
        fail(f"{path}/pattern", "must be a regular expression")
    return given
