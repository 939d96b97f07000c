"""Limits of the two kinds of formatting in a template: `'%s' % value` and `'{}'.format(value)`.

A short format can produce a large text: by a width, or by naming a long argument many times.
"""

from __future__ import annotations

import re
from string import Formatter
from typing import TYPE_CHECKING, Any

from cluster.serving.text.templates.rendering_budget import MAX_TOTAL, TemplateLimitError
from cluster.serving.text.templates.value_sizes import num_characters

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["check_brace_format", "check_percent_format"]

_MAX_FIELDS = 10_000
_MAX_WIDTH = 999
_MAX_WIDTH_DIGITS = len(str(_MAX_WIDTH))
_CONVERSION = re.compile(
    r"%(?:\([^()]*\))?[-+ #0]*(?P<width>\*|[0-9]*)(?:\.(?P<precision>\*|[0-9]*))?[hlL]?(?P<kind>.)",
    re.DOTALL,
)
# `str.format` accepts decimal digits of any script, unlike the operator `%`.
_LARGE_NUMBER = re.compile(rf"\d{{{_MAX_WIDTH_DIGITS + 1}}}")


# Any: values of templates, here and below.
def check_percent_format(form: str, values: Any) -> None:
    """Raise TemplateLimitError if `form % values` may be too large."""
    given = values if isinstance(values, tuple) else (values,)
    _check_result(form.count("%"), given)
    for found in _CONVERSION.finditer(form):
        if found["kind"] == "(":
            raise TemplateLimitError("parentheses in names are not supported in a format")
        for number in (found["width"], found["precision"]):
            if number == "*" or len(number or "") > _MAX_WIDTH_DIGITS:
                raise _width_error()


def check_brace_format(form: str, values: Iterable[Any]) -> None:
    """Raise TemplateLimitError if `form.format(*values)` may be too large.

    `values` includes the named arguments.
    """
    _check_result(form.count("{"), values)
    for _, name, spec, _ in Formatter().parse(form):
        if name is None or spec is None:
            continue
        if "." in name or "[" in name:
            # Its size is not that of the argument.
            raise TemplateLimitError(
                "attributes and items of arguments are not supported in a format"
            )
        if "{" in spec or _LARGE_NUMBER.search(spec):
            raise _width_error()


def _check_result(num_fields: int, values: Iterable[Any]) -> None:
    if num_fields > _MAX_FIELDS:
        raise TemplateLimitError("the template formats too many fields")
    if num_fields * max(map(num_characters, values), default=0) > MAX_TOTAL:
        raise TemplateLimitError("the template formats a text that is too long")


def _width_error() -> TemplateLimitError:
    return TemplateLimitError(f"the width of a format must be a number of at most {_MAX_WIDTH}")
