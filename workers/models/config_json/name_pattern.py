"""Regular expressions of layers' names in a checkpoint's configuration.

Python's matcher tries all ways in which a name may match. Their number grows exponentially with the
length of the name if one repetition is inside another, and with the number of repetitions.
"""

from __future__ import annotations

import re

__all__ = ["PatternError", "name_pattern"]

_MAX_LENGTH = 500
_MAX_REPETITIONS = 4
_MAX_OPTIONS = 4
_DIGITS = (r"\d", "[0-9]")
_MAX_DIGIT_REPETITIONS = 16
"""More are allowed of digits, of which names have few in a row."""
_TOKENS = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:[:=!]|<[=!])|\(\??|[*+?]\??|\{\d*,?\d*\}\??|.",
    re.DOTALL,
)


class PatternError(ValueError):
    """A text that is not a valid pattern, or a pattern that may take long to match."""


def name_pattern(text: str, form: str = "{}") -> re.Pattern[str]:
    """Return the pattern of a text, put into a form. Raises PatternError."""
    if len(text) > _MAX_LENGTH:
        raise PatternError(f"has more than {_MAX_LENGTH} characters")
    _check_repetitions(text)
    try:
        return re.compile(form.format(text))
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"is not a valid pattern: {error}") from None


def _check_repetitions(text: str) -> None:
    """Raise PatternError for too many repetitions, and for repetitions of ambiguous parts."""
    num_repetitions = num_digit_repetitions = num_options = 0
    # Whether each open group, and the group just closed, has several ways to match.
    groups = [False]
    has_ways = False
    before = ""
    for token in _TOKENS.findall(text):
        is_repetition = token[0] in "*+" or (token[0] == "{" and len(token) > 1)
        if is_repetition and has_ways:
            raise PatternError("repeats a group with a repetition or with alternatives")
        num_repetitions += is_repetition and before not in _DIGITS
        num_digit_repetitions += is_repetition and before in _DIGITS
        num_options += token[0] == "?"
        has_ways = False
        if token == "(?":
            raise PatternError("has a group of a kind that is not supported")
        if token[0] == "(":
            groups.append(False)
        elif token == ")" and len(groups) > 1:
            has_ways = groups.pop()
            groups[-1] = groups[-1] or has_ways
        elif is_repetition or token[0] in "?|":
            groups[-1] = True
        before = token
    if num_repetitions > _MAX_REPETITIONS or num_options > _MAX_OPTIONS:
        raise PatternError(
            f"has more than {_MAX_REPETITIONS} repetitions or {_MAX_OPTIONS} optional parts"
        )
    if num_digit_repetitions > _MAX_DIGIT_REPETITIONS:
        raise PatternError(f"has more than {_MAX_DIGIT_REPETITIONS} repetitions of digits")
