"""Copies between the pools, on their own streams, while steps run.

Outward and inward copies run at the same time. They wait for the steps before them, and no step
waits for them: the scheduler uses a block only once the copies that read or write it have ended.
The exception is a block that is evicted, which the next step may overwrite: its content is staged
before, and the step waits only for blocks without a staging block.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch

from pagedray.batch import BlockCopy, StepPlan
from workers.device_event import DeviceEvent, record_event

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = [
    "BlockSwaps",
    "CudaStream",
    "HostStream",
    "Pools",
    "StagingBlocks",
    "StepStream",
    "SwapFence",
    "SwapStreams",
]


class Pools(Protocol):
    """Copies blocks on the stream that is active."""

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy device blocks, staging blocks included, to CPU blocks."""

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy CPU blocks to device blocks."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks within the device, staging blocks included."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SwapStreams:
    """The streams of steps and of copies."""

    steps: DeviceStream
    outward: DeviceStream
    inward: DeviceStream


@dataclass(frozen=True, slots=True, eq=False)
class SwapFence:
    """The copies that were launched up to a step."""

    last_copies: tuple[DeviceEvent, ...]
    """The last copy of each stream."""

    @property
    def is_reached(self) -> bool:
        """Whether all these copies have ended."""
        return all(event.query() for event in self.last_copies)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Span:
    """Copies on one stream."""

    num_blocks: int
    started: DeviceEvent
    ended: DeviceEvent


class BlockSwaps:
    """Launches the copies of plans, in the order of the plans."""

    def __init__(self, pools: Pools, streams: SwapStreams, staging: StagingBlocks) -> None:
        self._pools = pools
        self._streams = streams
        self._staging = staging
        self._last_out: DeviceEvent | None = None
        self._last_in: DeviceEvent | None = None
        self._unmeasured: deque[_Span] = deque()

    def launch(self, plan: StepPlan) -> SwapFence:
        """Launch the copies of a plan between the pools; its step must be launched after them."""
        if plan.evictions or plan.swap_outs or plan.swap_ins:
            self._launch(plan)
        last_copies = self._last_out, self._last_in
        return SwapFence(tuple(event for event in last_copies if event is not None))

    def take_measurement(self) -> tuple[int, float]:
        """Return how many blocks were copied since the last call, and the seconds that took.

        Seconds of copies that ran at the same time in both directions are added up.
        """
        num_blocks, seconds = 0, 0.0
        while self._unmeasured and self._unmeasured[0].ended.query():
            span = self._unmeasured.popleft()
            num_blocks += span.num_blocks
            seconds += span.started.elapsed_time(span.ended) / 1e3
        return num_blocks, seconds

    def _launch(self, plan: StepPlan) -> None:
        steps, inward = self._streams.steps, self._streams.inward
        staging_blocks = self._staging.take(len(plan.evictions))
        unstaged = plan.evictions[len(staging_blocks) :]
        to_stage, staged = [], []
        for copy, block in zip(plan.evictions, staging_blocks, strict=False):
            to_stage.append(BlockCopy(copy.source, block))
            staged.append(BlockCopy(block, copy.target))
        self._pools.copy_blocks(to_stage)
        # Sources were written by earlier steps, and targets may have been read by them.
        steps_ended = steps.record()
        if plan.evictions or plan.swap_outs:
            unstaged_read = self._launch_outward(
                unstaged, [*staged, *plan.swap_outs], steps_ended=steps_ended
            )
            assert self._last_out is not None
            self._staging.give_back(staging_blocks, self._last_out)
            if unstaged:
                # Blocks that come in or that the step writes may take the place of these.
                steps.wait_for(unstaged_read)
                inward.wait_for(unstaged_read)
        if plan.swap_ins:
            inward.wait_for(steps_ended)
            with inward.active():
                started = inward.record()
                self._pools.swap_in(plan.swap_ins)
                self._last_in = inward.record()
            self._unmeasured.append(
                _Span(num_blocks=len(plan.swap_ins), started=started, ended=self._last_in)
            )

    def _launch_outward(
        self, first: list[BlockCopy], others: list[BlockCopy], *, steps_ended: DeviceEvent
    ) -> DeviceEvent:
        """Copy blocks to the host; return the event that completes with the first of them."""
        outward = self._streams.outward
        outward.wait_for(steps_ended)
        with outward.active():
            started = outward.record()
            self._pools.swap_out(first)
            first_read = outward.record()
            self._pools.swap_out(others)
            self._last_out = outward.record()
        num_blocks = len(first) + len(others)
        self._unmeasured.append(_Span(num_blocks=num_blocks, started=started, ended=self._last_out))
        return first_read


class StagingBlocks:
    """Gives out blocks, and takes them back once the copies from them have ended."""

    def __init__(self, *, first_block: int, num_blocks: int) -> None:
        self._free = list(range(first_block, first_block + num_blocks))
        self._in_use: deque[tuple[DeviceEvent, list[int]]] = deque()

    def take(self, num_blocks: int) -> list[int]:
        """Return free blocks, at most `num_blocks`; `give_back` must follow."""
        while self._in_use and self._in_use[0][0].query():
            self._free += self._in_use.popleft()[1]
        num_left = max(len(self._free) - num_blocks, 0)
        taken = self._free[num_left:]
        del self._free[num_left:]
        return taken

    def give_back(self, blocks: list[int], copied: DeviceEvent) -> None:
        """Take blocks back that were read once `copied` has completed."""
        if blocks:
            self._in_use.append((copied, blocks))


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
