"""Streams of work, of a GPU or of the host, where work ends when its call returns."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

import torch

from workers.device_event import DeviceEvent, record_event

__all__ = ["CudaStream", "DeviceStream", "HostStream", "StepStream"]


class DeviceStream(Protocol):
    """Work that runs in order, concurrently with other streams unless one waits for the other."""

    def active(self) -> AbstractContextManager[object]:
        """Return a context in which copies and kernels go to this stream."""

    def record(self) -> DeviceEvent:
        """Return an event that completes with all work on this stream so far."""

    def wait_for(self, event: DeviceEvent) -> None:
        """Have all later work on this stream wait for an event; the host does not wait."""


class HostStream:
    """Stands for every stream where there is no GPU, or nothing to copy."""

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self) -> DeviceEvent:
        return record_event(torch.device("cpu"))

    def wait_for(self, event: DeviceEvent) -> None:
        assert event.query()


class CudaStream:
    """A stream of its own on a GPU; steps do not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def active(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def record(self) -> DeviceEvent:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def wait_for(self, event: DeviceEvent) -> None:
        self._stream.wait_event(cast("torch.cuda.Event", event))


class StepStream:
    """The stream of a GPU that is current where it is used: that of the steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self) -> DeviceEvent:
        return record_event(self._device)

    def wait_for(self, event: DeviceEvent) -> None:
        torch.cuda.current_stream(self._device).wait_event(cast("torch.cuda.Event", event))
