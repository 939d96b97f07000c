"""Limits of single operations of a template, by what they are given.

They are checked before the operation, which might fill the memory at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import TYPE_CHECKING, Any

from jinja2.utils import Namespace

from cluster.serving.text.rendering_budget import MAX_TOTAL, TemplateLimitError

if TYPE_CHECKING:
    from types import BuiltinMethodType

__all__ = [
    "FILTER_CHECKS",
    "check_format",
    "check_method",
    "check_power",
    "check_product",
    "check_text",
    "listed",
    "num_elements",
]

_MAX_ELEMENTS = 2**18
"""Elements of a list or mapping, those of its elements included."""
_MAX_NUMBER = 10_000
"""Of a number by which a text or list is multiplied, or another number is raised."""
_MAX_WIDTH = 999
"""Of a format."""
_MAX_DIGITS = 16
"""To which a number is rounded, or by which JSON is indented."""
_REMOVED_METHODS = frozenset(
    ("center", "encode", "expandtabs", "ljust", "rjust", "translate", "zfill")
)
_LARGE_WIDTH = re.compile(r"[0-9]{4}|\*|\{[^}]*\{")
"""A width in a format that is large, or that an argument decides."""
_FIELD_OF_FIELD = re.compile(r"\{[^{}:!]*[.\[]")
"""A field of a format that is part of an argument, whose size is that of something else."""
_VIEWS = (KeysView, ValuesView, ItemsView)


# Any: values of templates, here and below.
def num_elements(value: Any) -> int:
    """Return the number of elements of a list or mapping, with those of its elements.

    Raises TemplateLimitError if it, or its text, is too large.
    """
    return _size_of(value)[0]


def check_text(value: Any) -> None:
    """Raise TemplateLimitError if the text of a value is too large."""
    if not isinstance(value, str):
        _size_of(value)


def listed(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments whose elements can be counted."""
    return tuple(list(one) if isinstance(one, Iterator) else one for one in values)


def check_product(left: Any, right: Any) -> None:
    """Raise TemplateLimitError for a product that is too large."""
    for factor, other in ((left, right), (right, left)):
        if isinstance(other, str | list | tuple):
            size = len(other) if isinstance(other, str) else num_elements(other)
            if size * max(int(factor), 0) > _MAX_ELEMENTS:
                raise TemplateLimitError("the template multiplies something too often")
        elif isinstance(other, int) and other.bit_length() > _MAX_NUMBER:
            raise TemplateLimitError("the template computes too large a number")


def check_power(base: Any, exponent: Any) -> None:
    """Raise TemplateLimitError for a power that may be too large."""
    if not (_is_small(base) and _is_small(exponent)):
        raise TemplateLimitError(f"numbers of an operator ** must not exceed {_MAX_NUMBER}")


def check_format(form: Any, values: Any = (), *more: Any, **named: Any) -> None:
    """Raise TemplateLimitError for a format whose result may be too large."""
    form = str(form)
    if _LARGE_WIDTH.search(form):
        raise TemplateLimitError(f"a width of a format must not exceed {_MAX_WIDTH}")
    if _FIELD_OF_FIELD.search(form):
        raise TemplateLimitError("parts of arguments are not supported in a format")
    given = (*(values if isinstance(values, list | tuple) else (values,)), *more, *named.values())
    longest = max((_size_of(one)[1] for one in given), default=0)
    if longest * (form.count("%") + form.count("{")) > MAX_TOTAL:
        raise TemplateLimitError("the template formats too many texts")


def check_method(method: BuiltinMethodType, arguments: tuple[Any, ...]) -> None:
    """Raise TemplateLimitError for a method of a value that may make something too large."""
    owner, name = method.__self__, method.__name__
    if isinstance(owner, str):
        if name in _REMOVED_METHODS:
            raise TemplateLimitError(f"the method {name} of texts is not supported")
        if name == "replace":
            _check_replacement(owner, *arguments)
        elif name == "join":
            _check_join(arguments[0] if arguments else (), owner)
    elif isinstance(owner, int | float | bytes | type):
        raise TemplateLimitError(f"the method {name} is not supported")


def _size_of(value: Any) -> tuple[int, int]:
    """Return the elements and the characters of a value, with those of its elements.

    Raises TemplateLimitError if there are too many.
    """
    num_found = num_characters = 0
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            num_characters += len(one)
            continue
        if isinstance(one, int):
            # A decimal digit is more than three bits.
            num_characters += one.bit_length() // 3
            continue
        if isinstance(one, Namespace):
            # Its text consists of these.
            one = one._Namespace__attrs
        if isinstance(one, Mapping):
            one = (*one.keys(), *one.values())
        elif isinstance(one, _VIEWS):
            one = tuple(one)
        if isinstance(one, list | tuple):
            num_found += len(one)
            if num_found > _MAX_ELEMENTS or num_characters > MAX_TOTAL:
                raise TemplateLimitError("the template makes a list that is too large")
            waiting += one
    if num_characters > MAX_TOTAL:
        raise TemplateLimitError("the template makes a list of too much text")
    return num_found, num_characters


def _check_replacement(text: Any, old: Any, new: Any, *_: Any) -> None:
    for one in (text, old, new):
        check_text(one)
    text, old, new = str(text), str(old), str(new)
    num_found = text.count(old)
    if num_found * len(new) > MAX_TOTAL:
        raise TemplateLimitError("the template replaces something by too long a text")


def _check_join(values: Any, d: Any = "", attribute: Any = None) -> None:
    if attribute is not None:
        raise TemplateLimitError("the attribute of the filter join is not supported; use map")
    check_text(d)
    if isinstance(values, str):
        num_values, size = len(values), len(values)
    else:
        num_values, size = len(values), _size_of(values)[1]
    if size + num_values * len(str(d)) > MAX_TOTAL:
        raise TemplateLimitError("the template joins too many texts")


def _check_number(_: Any, number: Any = 0, *more: Any, indent: Any = None, **named: Any) -> None:
    for value in (number, indent, named.get("precision")):
        if isinstance(value, int | float) and abs(value) > _MAX_DIGITS:
            raise TemplateLimitError(f"a number of a filter must not exceed {_MAX_DIGITS}")
        if isinstance(value, str) and len(value) > _MAX_DIGITS:
            raise TemplateLimitError(f"an indent must not have more than {_MAX_DIGITS} characters")


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    check_text(text)
    size = len(width) if isinstance(width, str) else int(width)
    if (str(text).count("\n") + 1) * size > MAX_TOTAL:
        raise TemplateLimitError("the template indents too much")


def _check_sum(*values: Any, start: Any = 0, **_: Any) -> None:
    if not isinstance((*values, None, None)[2] or start, int | float):
        raise TemplateLimitError("the filter sum must start from a number")


def _check_value(value: Any = "", *_: Any, **__: Any) -> None:
    """Check a value that a filter turns into text."""
    check_text(value)


FILTER_CHECKS: dict[str, Callable[..., None]] = {
    "format": check_format,
    "indent": _check_indent,
    "join": _check_join,
    "replace": _check_replacement,
    "round": _check_number,
    "sum": _check_sum,
    "tojson": _check_number,
    **dict.fromkeys(
        (
            *("capitalize", "e", "escape", "lower", "safe", "string", "title", "trim", "truncate"),
            *("upper", "wordcount"),
        ),
        _check_value,
    ),
}
"""What is checked of the arguments of filters."""


def _is_small(number: Any) -> bool:
    return isinstance(number, int | float) and abs(number) <= _MAX_NUMBER
