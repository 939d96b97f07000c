"""The strings that a JSON schema allows, and their cost of compilation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.structured.grammar.expressions import (
    CONTENT,
    ESCAPE,
    MAX_COST,
    PLAIN,
    STRING,
    STRING_END,
    Alternation,
    Concat,
    Expression,
    Repeat,
    Rule,
    Text,
    as_json_string,
    complement,
    cost_of,
    invalid_structure,
)
from cluster.structured.grammar.regex import ends_with_anchor, read_regex
from cluster.structured.grammar.rewrites import counted_letters, with_loops_as_rules
from cluster.structured.grammar.schema_keywords import Schema, count_limits_of, fail
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["STRING_FORMATS", "SchemaStrings", "limited_string"]

_DATE = (
    r"[0-9]{3}[1-9]-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
    r"|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
)
_ZONE = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,6}})?{_ZONE}"
_NUMBER = "[0-9]{1,4}"
_MINUTES = f"{_NUMBER}M(?:{_NUMBER}S)?"
_DURATION_TIME = f"T(?:{_NUMBER}H(?:{_MINUTES})?|{_MINUTES}|{_NUMBER}S)"
_MONTHS = f"{_NUMBER}M(?:{_NUMBER}D)?"
_DURATION_DATE = f"(?:{_NUMBER}Y(?:{_MONTHS})?|{_MONTHS}|{_NUMBER}D)"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# Each character costs time to compile, so labels, atoms and paths are shorter than the standards
# allow.
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,18}[A-Za-z0-9])?"
_ATOM = "[A-Za-z0-9_+-]"
_HEX = "[0-9a-fA-F]"
_GROUP = f"{_HEX}{{1,4}}"
_URI_TEXT = "[A-Za-z0-9._~!$&'()*+,;=:@/-]"


class SchemaStrings:
    """Makes the rules of all strings of one schema, and limits their total cost."""

    any_string: Expression = STRING
    any_text: Expression = CONTENT
    _rule_prefix = ""

    def __init__(self, rules: dict[str, Expression]) -> None:
        """Rules are added to `rules`."""
        self._rules = rules
        self._patterns: dict[tuple[str, int, int | None], Rule] = {}
        self._cost = 0

    def string_of(self, schema: Schema, path: str) -> Expression:
        """Return the strings that a schema allows. Raises InvalidRequestError."""
        limits = [key for key in ("pattern", "format", "minLength", "maxLength") if key in schema]
        if not limits:
            return self.any_string
        if "pattern" in schema:
            if not isinstance(schema["pattern"], str):
                fail(f"{path}/pattern", "must be a regular expression")
            try:
                return self._pattern(schema["pattern"], schema, path, "pattern")
            except InvalidRequestError:
                # A pattern without a grammar, such as a lookahead, usually belongs to the format.
                if "format" not in schema or _format_of(schema, path) is None:
                    raise
        if "format" in schema and (found := _format_of(schema, path)) is not None:
            return self._pattern(found, schema, path, "format")
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

    def string_of_pattern(self, parts: tuple[Expression, ...]) -> Expression:
        """Return strings of an expression, with the text that may be before and after it."""
        written = [
            (Text('"'),),
            *((one,) if one is CONTENT else _content_of(one) for one in parts),
            (Text('"'),),
        ]
        return Concat(tuple(part for one in written for part in one))

    def _pattern(self, pattern: str, schema: Schema, path: str, keyword: str) -> Rule:
        limits = count_limits_of(schema, path, "minLength", "maxLength")
        key = (pattern, *limits)
        path = f"{path}/{keyword}"
        if key not in self._patterns:
            try:
                parts = found_in(pattern, self.any_text)
                if limits != (0, None):
                    parts = _limited(parts, *limits, self.any_text, path)
                expression = self.string_of_pattern(parts)
            except InvalidRequestError as error:
                raise invalid_structure(
                    f"{str(error).removesuffix('.')}, in {path[:200]}."
                ) from None
            self._add_cost(cost_of(expression), path)
            rule = Rule(f"{self._rule_prefix}pattern{len(self._patterns)}")
            self._patterns[key] = rule
            loops, self._rules[rule.name] = with_loops_as_rules(expression, prefix=f"{rule.name}x")
            self._rules |= loops
        return self._patterns[key]

    def _add_cost(self, cost: int, path: str) -> None:
        self._cost += cost
        if self._cost > MAX_COST:
            fail(
                path,
                f"brings the strings of the schema to {self._cost} states, more than the maximum "
                f"of {MAX_COST}",
            )


def limited_string(rules: dict[str, Expression], minimum: int, maximum: int | None) -> Expression:
    """Return JSON strings of `minimum` to `maximum` characters; `rules` gets their rules.

    All strings share them, as they are slow to compile.
    """
    found = counted_letters(
        (PLAIN, ESCAPE), minimum, maximum, STRING_END.parts, prefix="string", rules=rules
    )
    return Concat((Text('"'), found))


def found_in(pattern: str, text: Expression) -> tuple[Expression, ...]:
    """Return a regular expression, with the text that may be before and after it.

    Raises InvalidRequestError.
    """
    expression = read_regex(pattern)
    # Without an anchor the pattern may match anywhere in the string. An anchor of the first or last
    # alternative only is applied to all of them, which allows no other strings.
    before = () if pattern.startswith("^") else (text,)
    after = () if ends_with_anchor(pattern) else (text,)
    return (*before, expression, *after)


def _content_of(expression: Expression) -> tuple[Expression, ...]:
    string = as_json_string(expression)
    assert isinstance(string, Concat)
    return string.parts[1:-1]


def _format_of(schema: Schema, path: str) -> str | None:
    """Return the pattern of a format; None for other formats, which are annotations."""
    name = schema["format"]
    if not isinstance(name, str):
        fail(f"{path}/format", "must be the name of a format")
    found = STRING_FORMATS.get(name)
    return None if found is None else found.pattern


def _limited(
    parts: tuple[Expression, ...], minimum: int, maximum: int | None, text: Expression, path: str
) -> tuple[Expression, ...]:
    """Return strings of parts of an allowed length, but not all of them if several parts vary."""
    # Text around a pattern is limited like the pattern.
    whole: Expression = Concat(tuple(_ANY_CHARACTERS if part is text else part for part in parts))
    least, most = _lengths_of(whole)
    if minimum > least:
        whole = _at_least(whole, minimum - least, path)
    if maximum is not None and (most is None or most > maximum):
        if _lengths_of(whole)[0] > maximum:
            fail(path, f"has no strings of at most {maximum} characters")
        whole = _at_most(whole, maximum)
    return (whole,)


def _lengths_of(expression: Expression) -> tuple[int, int | None]:
    """Return the fewest and the most characters of a regular expression."""
    match expression:
        case Text(text):
            return len(text), len(text)
        case Concat(parts):
            found = [_lengths_of(part) for part in parts]
            highs = [high for _, high in found if high is not None]
            return sum(low for low, _ in found), sum(highs) if len(highs) == len(found) else None
        case Alternation(parts):
            found = [_lengths_of(part) for part in parts]
            highs = [high for _, high in found if high is not None]
            return min(low for low, _ in found), max(highs) if len(highs) == len(found) else None
        case Repeat(part, minimum, maximum):
            low, high = _lengths_of(part)
            most = None if maximum is None or high is None else maximum * high
            return minimum * low, 0 if high == 0 else most
    return 1, 1


def _at_most(expression: Expression, most: int) -> Expression:
    """Return strings of an expression with at most this many characters, of which it has some."""
    least, highest = _lengths_of(expression)
    assert least <= most
    if highest is not None and highest <= most:
        return expression
    match expression:
        case Concat(parts):
            lengths = [_lengths_of(part) for part in parts]
            left = most - least
            num_varying = sum(low != high for low, high in lengths)
            limited: list[Expression] = []
            for part, (low, high) in zip(parts, lengths, strict=True):
                if low == high:
                    limited.append(part)
                    continue
                limited.append(_at_most(part, low + left // num_varying))
                used = _lengths_of(limited[-1])[1]
                assert used is not None
                left -= used - low
                num_varying -= 1
            return Concat(tuple(limited))
        case Alternation(parts):
            fitting = [part for part in parts if _lengths_of(part)[0] <= most]
            return Alternation(tuple(_at_most(part, most) for part in fitting))
        case Repeat(part, minimum, maximum):
            low, high = _lengths_of(part)
            if minimum:
                part = _at_most(part, most // minimum)
            elif low > most:
                return Concat(())
            else:
                part = _at_most(part, most if high is None else min(most, high))
            length = _lengths_of(part)[1] or 1
            number = most // length
            return Repeat(part, minimum, number if maximum is None else min(number, maximum))
    return expression


def _at_least(expression: Expression, num_more: int, path: str) -> Expression:
    """Return strings of an expression that are longer than the shortest."""
    parts = expression.parts if isinstance(expression, Concat) else (expression,)
    for place in range(len(parts) - 1, -1, -1):
        match parts[place]:
            case Concat():
                changed = _at_least(parts[place], num_more, path)
            case Repeat(part, minimum, maximum) if _lengths_of(part) == (1, 1) and (
                maximum is None or maximum - minimum >= num_more
            ):
                changed = Repeat(part, minimum + num_more, maximum)
            case _:
                continue
        return Concat((*parts[:place], changed, *parts[place + 1 :]))
    fail(path, "has shorter strings than minLength; use a pattern of the same length")


_ANY_CHARACTERS = Repeat(complement(()), 0, None)


@dataclass(frozen=True, slots=True)
class StringFormat:
    """Strings of one format; each is valid, but there may be others."""

    pattern: str
    min_length: int
    max_length: int


STRING_FORMATS: Mapping[str, StringFormat] = {
    "date": StringFormat(rf"^{_DATE}$", 10, 10),
    "time": StringFormat(rf"^{_TIME}$", 9, 21),
    "date-time": StringFormat(rf"^{_DATE}T{_TIME}$", 20, 32),
    "duration": StringFormat(
        rf"^P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|{_NUMBER}W)$", 3, 32
    ),
    "email": StringFormat(
        rf"^{_ATOM}{{1,20}}(?:\.{_ATOM}{{1,12}}){{0,2}}@{_LABEL}(?:\.{_LABEL})?\.[A-Za-z]{{2,12}}$",
        6,
        101,
    ),
    "hostname": StringFormat(rf"^{_LABEL}(?:\.{_LABEL}){{0,3}}$", 1, 83),
    "ipv4": StringFormat(rf"^{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}$", 7, 15),
    "ipv6": StringFormat(
        rf"^(?:(?:{_GROUP}:){{7}}{_GROUP}|(?:{_GROUP}:){{1,4}}(?::{_GROUP}){{1,3}}"
        rf"|::(?:{_GROUP}:){{0,5}}{_GROUP})$",
        3,
        39,
    ),
    "uri": StringFormat(
        rf"^https?://{_LABEL}(?:\.{_LABEL}){{1,2}}(?::[1-9][0-9]{{0,3}})?"
        rf"(?:/{_URI_TEXT}{{0,80}}(?:\?{_URI_TEXT}{{1,40}})?)?$",
        10,
        197,
    ),
    "uuid": StringFormat(
        rf"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$", 36, 36
    ),
}
