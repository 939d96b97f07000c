"""Figures as text, and text that cannot steer the terminal."""

from __future__ import annotations

from rich.text import Text

from cluster.cli.server_connection import printable

__all__ = ["number_text", "part_text", "plain_text", "seconds_text"]


def number_text(value: float) -> str:
    """Return a number, with a decimal if it is below 100."""
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def part_text(part: int, whole: int) -> str:
    """Return a percentage, or a dash if there is nothing of which it is a part."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def plain_text(text: str, style: str = "") -> Text:
    """Return a styled text without control characters."""
    return Text(printable(text), style)


def seconds_text(seconds: float | None) -> str:
    """Return a duration in the unit that fits it, or a dash if there was none."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    return f"{minutes // 60} h {minutes % 60} min"
