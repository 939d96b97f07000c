"""A moment of a rank: on the host's clock, or on a GPU's stream."""

from __future__ import annotations

import time
from typing import Protocol, Self

import torch

__all__ = ["DeviceEvent", "record_event"]


class DeviceEvent(Protocol):
    """What has been reached once all work before it is done."""

    def query(self) -> bool:
        """Return whether it has been reached."""

    def synchronize(self) -> None:
        """Return once it has been reached."""

    # Any two moments are of one kind; the device's own type says no more.
    def elapsed_time(self, end_event: Self) -> float:
        """Return the milliseconds from here to a later moment, both reached."""


class _HostMoment:
    """Reached when it is made: what a CPU does is done when the call returns."""

    def __init__(self) -> None:
        self._time_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: _HostMoment) -> float:
        return (end_event._time_s - self._time_s) * 1e3


def record_event(device: torch.device) -> DeviceEvent:
    """Return this moment of a device."""
    if device.type != "cuda":
        return _HostMoment()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
