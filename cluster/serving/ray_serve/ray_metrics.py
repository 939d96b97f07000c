"""Exports a replica's metrics through Ray, on the metrics port of every node.

Ray Serve's HTTP port leads to any one replica, so it cannot be scraped. Ray's counters and
histograms accumulate what they are given; our values are accumulated already, so every sample is
exported as a gauge, histogram buckets too.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING

from ray.util.metrics import Gauge

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.serving.telemetry.metrics import Metrics

__all__ = ["RayMetrics"]

_PERIOD_S = 5.0
# Ray allows no colons in names; creation times of counters are left out.
_NAME = re.compile(r"pagedray_\w+(?<!_created)")


class RayMetrics:
    """Exports one replica's metrics periodically on the running event loop."""

    def __init__(self, metrics: Metrics, tags: Mapping[str, str]) -> None:
        """`tags` identify the replica."""
        self._metrics = metrics
        self._tags = dict(tags)
        self._gauges: dict[str, Gauge] = {}
        self._task: asyncio.Task[None] | None = None

    def start_reports(self) -> None:
        """Start exporting periodically."""
        self._task = asyncio.create_task(self._report_on())

    async def stop_reports(self) -> None:
        """Stop to export. Stopping twice is harmless."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def report_metrics(self) -> None:
        """Export the current values."""
        for family in self._metrics.registry.collect():
            for sample in family.samples:
                if _NAME.fullmatch(sample.name):
                    gauge = self._gauge(sample.name, family.documentation, tuple(sample.labels))
                    gauge.set(sample.value, {**sample.labels, **self._tags})

    async def _report_on(self) -> None:
        while True:
            self.report_metrics()
            await asyncio.sleep(_PERIOD_S)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Gauge:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = Gauge(name, text or name, tag_keys=(*labels, *self._tags))
            self._gauges[name] = gauge
        return gauge
