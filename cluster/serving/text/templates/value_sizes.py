"""Sizes of a template's values, which are limited before an operation copies or writes them.

Values other than texts, numbers and collections of these are not written: the representation of
functions and generators contains their addresses in memory.
"""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from typing import Any

from jinja2 import Undefined
from jinja2.utils import Namespace

from cluster.serving.text.templates.rendering_budget import MAX_TOTAL, TemplateLimitError

__all__ = ["MAX_ELEMENTS", "check_text", "num_characters", "num_elements"]

MAX_ELEMENTS = 2**18
"""Elements of a list or mapping, including nested elements."""
_VIEWS = (KeysView, ValuesView, ItemsView)
_WRITTEN = (complex, float, range, Undefined, type(None))
"""Types that are written, in addition to texts, integers and collections."""


# Any: values of templates, here and below.
def num_elements(value: Any) -> int:
    """Return the number of elements of a list or mapping, nested elements included.

    Raises TemplateLimitError if it, or its text, is too large.
    """
    return _size_of(value, is_written=False)[0]


def num_characters(value: Any) -> int:
    """Return the number of characters of a text, or of all texts in a list or mapping.

    Raises TemplateLimitError if there are too many, or if something has no text of its own.
    """
    return _size_of(value, is_written=True)[1]


def check_text(value: Any) -> None:
    """Raise TemplateLimitError if a value has no text of its own, or too large a text."""
    if not isinstance(value, str):
        _size_of(value, is_written=True)


def _size_of(value: Any, *, is_written: bool) -> tuple[int, int]:
    """Return the elements and the characters of a value, nested values included.

    Raises TemplateLimitError if there are too many, or if a written value has no text.
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
            if num_found > MAX_ELEMENTS or num_characters > MAX_TOTAL:
                raise TemplateLimitError("the template creates a list that is too large")
            waiting += one
        elif is_written and not isinstance(one, _WRITTEN):
            raise TemplateLimitError("the template outputs a value that is not text")
    if num_characters > MAX_TOTAL:
        raise TemplateLimitError("the template creates a list with too much text")
    return num_found, num_characters
