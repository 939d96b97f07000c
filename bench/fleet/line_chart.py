"""Line charts above one another as an SVG document, over a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Chart", "draw_charts"]

_WIDTH, _HEIGHT = 700, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 40, 30, 25
_COLOR = "#1f6fb2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A value over another one; both are positive."""

    title: str
    points: Sequence[tuple[float, float]]


def draw_charts(charts: Sequence[Chart], *, x_title: str) -> str:
    """Return an SVG document."""
    height = len(charts) * _HEIGHT + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, chart in enumerate(charts):
        parts += _draw(chart, top=number * _HEIGHT)
    parts.append(f'<text x="{_WIDTH / 2}" y="{height - 6}" text-anchor="middle">{x_title}</text>')
    return "\n".join((*parts, "</svg>", ""))


def _draw(chart: Chart, *, top: int) -> Iterator[str]:
    left, right = _LEFT, _WIDTH - _RIGHT
    high, low = top + _TOP, top + _HEIGHT - _BOTTOM
    first, last = (math.log(chart.points[place][0]) for place in (0, -1))
    most = max(value for _, value in chart.points)
    yield f'<text x="{left}" y="{high - 10}" font-weight="bold">{chart.title}</text>'
    yield f'<line x1="{left}" x2="{right}" y1="{low}" y2="{low}" stroke="#999999"/>'
    placed = [
        (left + (math.log(x) - first) / (last - first) * (right - left), value, x)
        for x, value in chart.points
    ]
    line = " ".join(f"{x:.1f},{low - value / most * (low - high):.1f}" for x, value, _ in placed)
    yield f'<polyline points="{line}" fill="none" stroke="{_COLOR}" stroke-width="1.5"/>'
    for x, value, number in placed:
        y = low - value / most * (low - high)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_COLOR}"/>'
        yield f'<text x="{x:.1f}" y="{y - 6:.1f}" text-anchor="middle">{value:,.3g}</text>'
        yield f'<text x="{x:.1f}" y="{low + 15}" text-anchor="middle">{number:,g}</text>'
