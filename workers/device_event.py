"""Events with timing: recorded on a GPU's stream, or on the host's clock for a CPU."""

from __future__ import annotations

import time
from typing import Protocol, Self

import torch

__all__ = ["DeviceEvent", "record_event"]


class DeviceEvent(Protocol):
    """An event that completes with all work submitted before it, as `torch.cuda.Event` does."""

    def query(self) -> bool:
        """Return whether the event has completed."""

    def synchronize(self) -> None:
        """Wait until the event has completed."""

    def elapsed_time(self, end_event: Self) -> float:
        """Return the milliseconds from this event to a later event; both must have completed."""


class _HostEvent:
    """Completes when it is recorded: on a CPU, work ends when its call returns."""

    def __init__(self) -> None:
        self._time_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: _HostEvent) -> float:
        return (end_event._time_s - self._time_s) * 1e3


def record_event(device: torch.device) -> DeviceEvent:
    """Record an event on the device's current stream."""
    if device.type != "cuda":
        return _HostEvent()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
