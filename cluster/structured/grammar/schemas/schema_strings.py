"""The strings that a JSON schema allows, and what they cost to compile."""

from cluster.structured.grammar import json_text
from cluster.structured.grammar.compile_cost import MAX_COST, cost_of
from cluster.structured.grammar.expressions import (
    Concat,
    Expression,
    Rule,
    Text,
    invalid_structure,
)
from cluster.structured.grammar.json_text import (
    CONTENT,
    ESCAPE,
    PLAIN,
    STRING_END,
    as_json_string,
)
from cluster.structured.grammar.loops import counted_letters, with_loops_as_rules
from cluster.structured.grammar.regex import ends_with_anchor, read_regex
from cluster.structured.grammar.schemas.schema_keywords import Schema, count_limits_of, fail
from cluster.structured.grammar.schemas.string_formats import STRING_FORMATS, StringFormat
from pagedray.errors import InvalidRequestError

__all__ = ["SchemaStrings", "found_in", "limited_string"]


class SchemaStrings:
    """Makes the rules of all strings of one schema, and limits their total cost."""

    any_string: Expression = json_text.STRING
    _rule_prefix = ""

    def __init__(self, rules: dict[str, Expression]) -> None:
        """Rules are added to `rules`."""
        self._rules = rules
        self._patterns: dict[str, Rule] = {}
        self._cost = 0

    def string_of(self, schema: Schema, path: str) -> Expression:
        """Return the strings that a schema allows. Raises InvalidRequestError."""
        limits = [key for key in ("pattern", "format", "minLength", "maxLength") if key in schema]
        if not limits:
            return self.any_string
        keyword = limits[0]
        if keyword == "pattern":
            limits = [key for key in limits if key != "format" or _format_of(schema, path)]
            if len(limits) > 1:
                fail(f"{path}/{limits[1]}", "cannot be combined with pattern")
            if not isinstance(schema["pattern"], str):
                fail(f"{path}/pattern", "must be a regular expression")
            return self._pattern(schema["pattern"], f"{path}/pattern")
        if keyword == "format" and (found := _format_of(schema, path)) is not None:
            return self._pattern(found.pattern, f"{path}/format")
        minimum, maximum = count_limits_of(schema, path, "minLength", "maxLength")
        if not minimum and maximum is None:
            return self.any_string
        num_rules = len(self._rules)
        limited = self.limited_string(minimum, maximum)
        self._add_cost(len(self._rules) - num_rules, f"{path}/{limits[-1]}")
        return limited

    def limited_string(self, minimum: int, maximum: int | None) -> Expression:
        """Return strings of `minimum` to `maximum` characters."""
        return limited_string(self._rules, minimum, maximum)

    def string_of_pattern(self, pattern: str) -> Expression:
        """Return strings in which a regular expression matches. Raises InvalidRequestError."""
        before, expression, after = found_in(pattern, CONTENT)
        string = as_json_string(expression)
        assert isinstance(string, Concat)
        left, content, right = string.parts
        return Concat((left, *before, content, *after, right))

    def _pattern(self, pattern: str, path: str) -> Rule:
        if pattern not in self._patterns:
            try:
                expression = self.string_of_pattern(pattern)
            except InvalidRequestError as error:
                raise invalid_structure(
                    f"{str(error).removesuffix('.')}, in {path[:200]}."
                ) from None
            self._add_cost(cost_of(expression), path)
            rule = Rule(f"{self._rule_prefix}pattern{len(self._patterns)}")
            self._patterns[pattern] = rule
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


def limited_string(rules: dict[str, Expression], minimum: int, maximum: int | None) -> Expression:
    """Return JSON strings of `minimum` to `maximum` characters, whose rules are added to `rules`.

    All strings share them, as they are slow to compile.
    """
    found = counted_letters(
        (PLAIN, ESCAPE), minimum, maximum, STRING_END.parts, prefix="string", rules=rules
    )
    return Concat((Text('"'), found))


_Parts = tuple[Expression, ...]


def found_in(pattern: str, text: Expression) -> tuple[_Parts, Expression, _Parts]:
    """Return a regular expression, with the text that may be before and after it.

    Raises InvalidRequestError.
    """
    expression = read_regex(pattern)
    # Without an anchor the pattern may match anywhere in the string. One that belongs to the first
    # or last alternative only is applied to all of them, which allows no other strings.
    before: _Parts = () if pattern.startswith("^") else (text,)
    after: _Parts = () if ends_with_anchor(pattern) else (text,)
    return before, expression, after


def _format_of(schema: Schema, path: str) -> StringFormat | None:
    """Return the format of strings, which must be within their limits of length.

    Other formats are annotations, as the standard allows; None stands for them.
    """
    name = schema["format"]
    if not isinstance(name, str):
        fail(f"{path}/format", "must be the name of a format")
    found = STRING_FORMATS.get(name)
    if found is None:
        return None
    minimum, maximum = count_limits_of(schema, path, "minLength", "maxLength")
    shown = f"the format {name}, whose strings have {found.min_length} to {found.max_length}"
    if minimum > found.min_length:
        fail(f"{path}/minLength", f"cannot be combined with {shown} characters here")
    if maximum is not None and maximum < found.max_length:
        fail(f"{path}/maxLength", f"cannot be combined with {shown} characters here")
    return found
