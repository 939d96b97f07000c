"""The strings that a JSON schema allows, and what they cost to compile."""

from cluster.structured.grammar import json_text
from cluster.structured.grammar.compile_cost import MAX_COST, cost_of
from cluster.structured.grammar.expressions import (
    Alternation,
    Concat,
    Expression,
    Repeat,
    Rule,
    Text,
    invalid_structure,
)
from cluster.structured.grammar.json_text import CONTENT, PLAIN, STRING_END, as_json_string
from cluster.structured.grammar.loops import with_loops_as_rules
from cluster.structured.grammar.regex import read_regex
from cluster.structured.grammar.schema_keywords import Schema, count_limits_of, fail
from pagedray.errors import InvalidRequestError

__all__ = ["SchemaStrings", "limited_string"]

_DATE = (
    r"[0-9]{3}[1-9]-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
    r"|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
)
_ZONE = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,6}})?{_ZONE}"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# Each character costs time to compile, so labels and atoms are shorter than the standards allow.
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,18}[A-Za-z0-9])?"
_ATOM = "[A-Za-z0-9_%+-]"
_HEX = "[0-9a-fA-F]"

_FORMATS = {
    "date": rf"^{_DATE}$",
    "time": rf"^{_TIME}$",
    "date-time": rf"^{_DATE}T{_TIME}$",
    "email": rf"^{_ATOM}{{1,20}}(?:\.{_ATOM}{{1,12}}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{1,2}}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL}){{0,3}}$",
    "ipv4": rf"^{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}$",
    "uuid": rf"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
}
"""A regular expression for each format; every match is valid, the converse need not hold."""


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
                expression = _string_of_pattern(pattern)
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


def limited_string(minimum: int, maximum: int | None) -> tuple[Rule, Expression]:
    """Return a rule of JSON strings of `minimum` to `maximum` characters, and its expression.

    It is a separate rule because it is slow to compile: all strings of these limits share it.
    """
    rule = Rule(f"string{minimum}to{'' if maximum is None else maximum}")
    return rule, Concat((Text('"'), Repeat(PLAIN, minimum, maximum), *STRING_END.parts))


def _string_of_pattern(pattern: str) -> Expression:
    """Return JSON strings in which a regular expression matches. Raises InvalidRequestError."""
    expression = read_regex(pattern)
    # Without an anchor the pattern may match anywhere in the string.
    before = () if pattern.startswith("^") else (CONTENT,)
    after = () if pattern.endswith("$") else (CONTENT,)
    string = as_json_string(expression)
    assert isinstance(string, Concat)
    left, content, right = string.parts
    if isinstance(expression, Alternation) and (before or after) and not (before and after):
        # An anchor belongs to one of the alternatives only.
        before = after = ()
    return Concat((left, *before, content, *after, right))


def _pattern_of(schema: Schema, keyword: str, path: str) -> str:
    given = schema[keyword]
    if keyword == "format":
        if given not in _FORMATS:
            fail(f"{path}/format", f"must be one of {', '.join(_FORMATS)}")
        return _FORMATS[str(given)]
    if not isinstance(given, str):
        fail(f"{path}/pattern", "must be a regular expression")
    return given
