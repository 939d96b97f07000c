"""Hands a replica's metrics to Ray, which has them on the metrics port of every node.

Under Ray Serve one HTTP port leads to some replica, so that scraping it would tell of that one
only. Ray's own kinds of metric count what they are told; ours are counted already, so that every
sample becomes a gauge, the buckets of histograms too.
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
# Ray's names have no colons, and when a counter was made is of no use.
_NAME = re.compile(r"pagedray_\w+(?<!_created)")


class RayMetrics:
    """Tells Ray of one replica's metrics, again and again, on the running event loop."""

    def __init__(self, metrics: Metrics, tags: Mapping[str, str]) -> None:
        """`tags` tell this replica from others."""
        self._metrics = metrics
        self._tags = dict(tags)
        self._gauges: dict[str, Gauge] = {}
        self._task: asyncio.Task[None] | None = None

    def start_reports(self) -> None:
        """Begin to tell."""
        self._task = asyncio.create_task(self._report_on())

    async def stop_reports(self) -> None:
        """Tell no more. Stopping twice is harmless."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def report_metrics(self) -> None:
        """Tell Ray of the values of this moment."""
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
