"""A plot of columns, drawn with characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["draw_plot"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.:-=+*#"


def draw_plot(
    values: Sequence[float | None],
    *,
    num_places: int,
    width: int,
    height: int,
    top: float = 0.0,
    is_ascii: bool = False,
) -> str:
    """Return `height` lines of `width` characters: the highest value of each column.

    `values` are the latest of `num_places` equally long intervals; the latest is at the right. A
    column without a value is blank. The scale begins at 0 and ends at `top` or a higher value.
    """
    width = min(width, num_places)
    columns: list[float | None] = [None] * width
    shown = values[-num_places:]
    for place, value in enumerate(shown, num_places - len(shown)):
        column = place * width // num_places
        known = columns[column]
        if value is not None and (known is None or value > known):
            columns[column] = value
    top = max(top, *(value for value in columns if value is not None), 0.0)
    chars = _ASCII if is_ascii else _BLOCKS
    num_steps = len(chars) * height
    # The lowest value has a mark too, which distinguishes it from a missing value.
    marks = [
        0 if value is None else 1 + (round(value / top * (num_steps - 1)) if top > 0.0 else 0)
        for value in columns
    ]
    return "\n".join(
        "".join(_char(mark - row * len(chars), chars) for mark in marks)
        for row in reversed(range(height))
    )


def _char(num_eighths: int, chars: str) -> str:
    if num_eighths <= 0:
        return " "
    return chars[min(num_eighths, len(chars)) - 1]
