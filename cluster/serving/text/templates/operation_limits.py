"""Limits on the operands of single operations of a template.

They are checked before the operation, which might otherwise fill the memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from cluster.serving.text.templates.format_limits import check_percent_format
from cluster.serving.text.templates.rendering_budget import MAX_TOTAL, TemplateLimitError
from cluster.serving.text.templates.value_sizes import (
    MAX_ELEMENTS,
    check_text,
    num_characters,
    num_elements,
)

if TYPE_CHECKING:
    from types import BuiltinMethodType

__all__ = ["FILTER_CHECKS", "check_method", "check_power", "check_product", "listed"]

_MAX_BASE = 10_000
"""The largest base and the largest exponent of a power."""
_MAX_FACTOR_BITS = 10_000
_MAX_INTEGER_DIGITS = 4300
"""Digits of a text that is read as an integer: Python's own limit for decimal digits."""
_MAX_SPLIT = 2**23
"""Characters of a text that is split into a list, which takes many times the memory."""
_MAX_DIGITS = 16
"""Decimal places to which a number is rounded."""
_MAX_INDENT = 16
"""Characters by which JSON is indented, or that separate its values."""
_REMOVED_METHODS = frozenset(
    ("center", "encode", "expandtabs", "ljust", "rjust", "translate", "zfill")
)
_SPLITTING_METHODS = frozenset(("rsplit", "split", "splitlines"))


# Any: values of templates, here and below.
def listed(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with lists in place of iterators, so that elements can be counted."""
    return tuple(list(one) if isinstance(one, Iterator) else one for one in values)


def check_product(left: Any, right: Any) -> None:
    """Raise TemplateLimitError for a product that is too large."""
    for factor, other in ((left, right), (right, left)):
        if isinstance(other, str | list | tuple):
            size = len(other) if isinstance(other, str) else num_elements(other)
            if size * max(int(factor), 0) > MAX_ELEMENTS:
                raise TemplateLimitError("the template repeats a value too often")
        elif isinstance(other, int) and other.bit_length() > _MAX_FACTOR_BITS:
            raise TemplateLimitError("the template computes a number that is too large")


def check_power(base: Any, exponent: Any) -> None:
    """Raise TemplateLimitError for a power that may be too large."""
    if not (_is_small(base) and _is_small(exponent)):
        raise TemplateLimitError(f"numbers of an operator ** must not exceed {_MAX_BASE}")


def check_method(method: BuiltinMethodType, arguments: tuple[Any, ...]) -> None:
    """Raise TemplateLimitError for a call of a method that may return too much."""
    owner, name = method.__self__, method.__name__
    if isinstance(owner, str):
        if name in _REMOVED_METHODS:
            raise TemplateLimitError(f"the method {name} of strings is not supported")
        if name in _SPLITTING_METHODS:
            _check_split(owner)
        elif name == "replace":
            _check_replacement(owner, *arguments)
        elif name == "join":
            _check_join(arguments[0] if arguments else (), owner)
    elif isinstance(owner, int | float | bytes | type):
        raise TemplateLimitError(f"the method {name} is not supported")


def _check_list(value: Any, *_: Any, **__: Any) -> None:
    """Check a text or a collection that becomes a list."""
    num_elements(value)
    if isinstance(value, str) and len(value) > _MAX_SPLIT:
        raise TemplateLimitError("the template splits a text that is too long")


def _check_split(value: Any, *_: Any, **__: Any) -> None:
    """Check a value before its text becomes a list."""
    check_text(value)
    _check_list(value)


def _check_replacement(text: Any, old: Any, new: Any, count: Any = None) -> None:
    """Check a replacement as if `count` did not limit it."""
    for one in (text, old, new):
        check_text(one)
    text, old, new = str(text), str(old), str(new)
    num_found = text.count(old)
    if num_found * len(new) > MAX_TOTAL:
        raise TemplateLimitError("the template makes a replacement that is too long")


def _check_join(values: Any, d: Any = "", attribute: Any = None) -> None:
    if attribute is not None:
        raise TemplateLimitError("the attribute of the filter join is not supported; use map")
    check_text(d)
    _check_list(values)
    if num_characters(values) + len(values) * len(str(d)) > MAX_TOTAL:
        raise TemplateLimitError("the template joins texts that are too long")


def _check_format(form: Any, /, *values: Any, **named: Any) -> None:
    check_text(form)
    check_percent_format(str(form), named or values)


def _check_rounding(_: Any, precision: Any = 0, method: Any = None) -> None:
    if isinstance(precision, int | float) and abs(precision) > _MAX_DIGITS:
        raise TemplateLimitError(f"the precision of the filter round must not exceed {_MAX_DIGITS}")


def _check_json(_: Any, *arguments: Any, **named: Any) -> None:
    for one in (*arguments, *named.values()):
        texts = one if isinstance(one, list | tuple) else (one,)
        for text in texts:
            size = len(text) if isinstance(text, str) else text
            if isinstance(size, int) and size > _MAX_INDENT:
                raise TemplateLimitError(
                    "an indent or separator of the filter tojson must not exceed "
                    f"{_MAX_INDENT} characters"
                )


def _check_integer(value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, str) and len(value) > _MAX_INTEGER_DIGITS:
        raise TemplateLimitError("the template reads a number that is too long")


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    _check_split(text)
    size = len(width) if isinstance(width, str) else int(width)
    if (str(text).count("\n") + 1) * size > MAX_TOTAL:
        raise TemplateLimitError("the template indents a text that is too long")


def _check_sum(_: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise TemplateLimitError("the start of the filter sum must be a number")


def _check_value(value: Any = "", *_: Any, **__: Any) -> None:
    """Check a value that a filter turns into text."""
    check_text(value)


FILTER_CHECKS: dict[str, Callable[..., None]] = {
    "format": _check_format,
    "indent": _check_indent,
    "int": _check_integer,
    "join": _check_join,
    "replace": _check_replacement,
    "round": _check_rounding,
    "sum": _check_sum,
    "tojson": _check_json,
    **dict.fromkeys(("groupby", "list", "sort"), _check_list),
    **dict.fromkeys(("title", "wordcount"), _check_split),
    **dict.fromkeys(
        ("capitalize", "e", "escape", "lower", "safe", "string", "trim", "truncate", "upper"),
        _check_value,
    ),
}
"""The checks of the arguments of filters, by their names."""


def _is_small(number: Any) -> bool:
    return isinstance(number, int | float) and abs(number) <= _MAX_BASE
