"""The latencies that a load test measures."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GOALS", "METRICS"]

METRICS: Mapping[str, str] = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Between tokens",
    "e2el": "End to end",
}
"""Latencies by name. `tpot` is the mean of a request after its first token; `itl` are the times
between its messages, each of which may have several tokens."""
GOALS = ("ttft", "tpot", "e2el")
"""Figures that `--goodput` may limit: each request has a value of them."""
