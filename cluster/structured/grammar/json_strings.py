"""JSON strings whose content a pattern or a format describes."""

from __future__ import annotations

from cluster.structured.grammar.expressions import Choice, Expression, Repeat, Rule, Sequence, Text
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
# Each character of them counts when they are compiled: not as long as they might be.
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
"""Regular expressions of strings that have the format, if not of all of them."""


def limited_string(fewest: int, most: int | None) -> tuple[Rule, Expression]:
    """Return the rule of JSON strings of so many characters, and what it says.

    It is a rule of its own, since to compile so many characters once takes long enough.
    """
    rule = Rule(f"string{fewest}to{'' if most is None else most}")
    return rule, Sequence((Text('"'), Repeat(PLAIN, fewest, most), *STRING_END.parts))


def string_of_pattern(pattern: str) -> Expression:
    """Return JSON strings in which a regular expression matches. Raises InvalidRequestError."""
    expression = read_regex(pattern)
    # Without an anchor it may match anywhere.
    before = () if pattern.startswith("^") else (CONTENT,)
    after = () if pattern.endswith("$") else (CONTENT,)
    string = as_json_string(expression)
    assert isinstance(string, Sequence)
    left, content, right = string.parts
    if isinstance(expression, Choice) and (before or after) and not (before and after):
        # An anchor belongs to one of the alternatives only.
        before = after = ()
    return Sequence((left, *before, content, *after, right))
