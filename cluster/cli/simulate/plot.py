"""An SVG file of a simulation over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.simulation.fleet import Sample

__all__ = ["draw_samples"]

_WIDTH, _PANEL_HEIGHT = 800, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 30, 25
_COLORS = ("#1f6fb2", "#d1662a")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    title: str
    lines: Sequence[tuple[str, Sequence[float]]]
    """The name and the values of each line."""


def draw_samples(samples: Sequence[Sample]) -> str:
    """Return an SVG document with one panel above another."""
    times = [one.time_s for one in samples]
    panels = (
        _Panel(
            title="sequences",
            lines=(
                ("running", [one.num_running for one in samples]),
                ("waiting", [one.num_waiting for one in samples]),
            ),
        ),
        _Panel(
            title="blocks in use, percent",
            lines=(("blocks", [100.0 * one.kv_use for one in samples]),),
        ),
        _Panel(
            title="generated tokens per second",
            lines=(("tokens", _rates(times, [one.num_generated_tokens for one in samples])),),
        ),
        _Panel(
            title="preemptions since the start",
            lines=(("preemptions", [one.num_preemptions for one in samples]),),
        ),
    )
    height = len(panels) * _PANEL_HEIGHT + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += _draw_panel(panel, times, top=number * _PANEL_HEIGHT)
    parts.append(f'<text x="{_WIDTH / 2}" y="{height - 6}" text-anchor="middle">seconds</text>')
    return "\n".join((*parts, "</svg>", ""))


def _draw_panel(panel: _Panel, times: Sequence[float], *, top: int) -> Iterator[str]:
    left, right = _LEFT, _WIDTH - _RIGHT
    high, low = top + _TOP, top + _PANEL_HEIGHT - _BOTTOM
    most = max((value for _, values in panel.lines for value in values), default=0.0) or 1.0
    last_s = max(times, default=0.0) or 1.0
    yield f'<text x="{left}" y="{high - 10}" font-weight="bold">{panel.title}</text>'
    for part in (0.0, 0.5, 1.0):
        y = low - part * (low - high)
        x = left + part * (right - left)
        yield f'<line x1="{left}" x2="{right}" y1="{y}" y2="{y}" stroke="#dddddd"/>'
        yield f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{part * most:,.4g}</text>'
        yield f'<text x="{x}" y="{low + 16}" text-anchor="middle">{part * last_s:,.4g}</text>'
    for number, (name, values) in enumerate(panel.lines):
        color = _COLORS[number]
        points = " ".join(
            f"{left + time_s / last_s * (right - left):.1f},{low - value / most * (low - high):.1f}"
            for time_s, value in zip(times, values, strict=True)
        )
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        if len(panel.lines) > 1:
            x = right - 80 * (len(panel.lines) - number - 1)
            yield f'<text x="{x}" y="{high - 10}" text-anchor="end" fill="{color}">{name}</text>'


def _rates(times: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Return by how much a count grows per second, from the sample before."""
    pairs = pairwise([(0.0, 0), *zip(times, counts, strict=True)])
    return [
        (later - earlier) / max(later_s - earlier_s, 1e-9)
        for (earlier_s, earlier), (later_s, later) in pairs
    ]
