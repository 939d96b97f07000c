"""JSON strings with a limited length, a pattern or a format."""

from __future__ import annotations

from cluster.structured.grammar.expressions import (
    Alternation,
    Concat,
    Expression,
    Repeat,
    Rule,
    Text,
)
from cluster.structured.grammar.json_text import CONTENT, PLAIN, STRING_END, as_json_string
from cluster.structured.grammar.regex import read_regex

__all__ = ["FORMATS", "limited_string", "string_of_pattern"]

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

FORMATS = {
    "date": rf"^{_DATE}$",
    "time": rf"^{_TIME}$",
    "date-time": rf"^{_DATE}T{_TIME}$",
    "email": rf"^{_ATOM}{{1,20}}(?:\.{_ATOM}{{1,12}}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{1,2}}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL}){{0,3}}$",
    "ipv4": rf"^{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}$",
    "uuid": rf"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
}
"""A regular expression for each format; every match is valid, the converse need not hold."""


def limited_string(minimum: int, maximum: int | None) -> tuple[Rule, Expression]:
    """Return a rule of JSON strings of `minimum` to `maximum` characters, and its expression.

    It is a separate rule because it is slow to compile: all strings of these limits share it.
    """
    rule = Rule(f"string{minimum}to{'' if maximum is None else maximum}")
    return rule, Concat((Text('"'), Repeat(PLAIN, minimum, maximum), *STRING_END.parts))


def string_of_pattern(pattern: str) -> Expression:
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
