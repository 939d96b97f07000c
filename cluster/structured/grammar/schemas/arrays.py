"""Parts of the expressions of arrays, and the limit on their size."""

from collections.abc import Sequence

from cluster.structured.grammar.expressions import (
    MAX_SIZE,
    Concat,
    Expression,
    Text,
    optional,
    size_of,
)
from cluster.structured.grammar.json_text import SPACE
from cluster.structured.grammar.schemas.schema_keywords import Schema, fail

__all__ = ["checked_array", "leading_items"]


def checked_array(array: Expression, schema: Schema, path: str) -> Expression:
    """Return an array's expression if it is small enough to be repeated as an item."""
    size = size_of(array)
    if size > MAX_SIZE:
        keyword = "maxItems" if "maxItems" in schema else "minItems"
        fail(
            f"{path}/{keyword}" if keyword in schema else path,
            f"expands to {size} characters, more than the maximum of {MAX_SIZE}; an item counts as "
            "often as it may occur",
        )
    return array


def leading_items(items: Sequence[Expression], minimum: int, more: Expression) -> Expression:
    """Return items in order, of which those after the first `minimum` are optional."""
    following = more
    for index in range(len(items) - 1, -1, -1):
        comma = () if index == 0 else (Text(","), SPACE)
        following = Concat((*comma, items[index], following))
        if index >= minimum:
            following = optional(following)
    return following
