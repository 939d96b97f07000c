"""Literal texts around the arguments of calls."""

from cluster.structured.grammar.expressions import Concat, Expression, Text
from cluster.structured.grammar.json_text import SPACE

__all__ = ["Texts", "spaced"]

Texts = tuple[str, ...]
"""Literal texts with optional whitespace between them."""


def spaced(texts: Texts) -> Expression:
    """Return the expression of texts."""
    parts: list[Expression] = []
    for text in texts:
        parts += (SPACE, Text(text)) if text else (SPACE,)
    return Concat(tuple(parts[1:]))
