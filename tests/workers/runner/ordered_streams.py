"""Streams that know what happens before what, and pools that reject unordered accesses.

Every access of a block has the vector clock of its stream. Two accesses of a block, one of which is
a write, must be ordered: on one stream, by an event that a stream waits for, or because the host
saw an event complete before it launched the later one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pagedray.batch import BlockCopy

Clock = dict[str, int]
Place = tuple[str, int]
"""A pool and a block."""


def _merge(clock: Clock, other: Clock) -> None:
    for name, count in other.items():
        clock[name] = max(clock.get(name, 0), count)


class OrderedEvent:
    """Completes when the test says so, with all that happens before it."""

    def __init__(self, device: OrderedDevice, clock: Clock) -> None:
        self._device = device
        self.clock = clock
        self._is_complete = False

    def query(self) -> bool:
        self._is_complete = self._is_complete or self._device.may_complete()
        if self._is_complete:
            _merge(self._device.host_clock, self.clock)
        return self._is_complete

    def synchronize(self) -> None:
        raise AssertionError("The host must not wait.")

    def elapsed_time(self, end_event: OrderedEvent) -> float:
        return 1.0


class OrderedStream:
    """A stream of an `OrderedDevice`."""

    def __init__(self, device: OrderedDevice, name: str) -> None:
        self._device = device
        self.name = name
        self.clock: Clock = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        former, self._device.current = self._device.current, self
        yield
        self._device.current = former

    def record(self) -> OrderedEvent:
        return OrderedEvent(self._device, dict(self.clock))

    def wait_for(self, event: OrderedEvent) -> None:
        _merge(self.clock, event.clock)


class OrderedDevice:
    """Streams, and the accesses of blocks on them."""

    def __init__(self, may_complete: Callable[[], bool]) -> None:
        """`may_complete` is asked whenever the host asks for an event."""
        self.may_complete = may_complete
        self.host_clock: Clock = {}
        self.steps = OrderedStream(self, "steps")
        self.outward = OrderedStream(self, "outward")
        self.inward = OrderedStream(self, "inward")
        self.current = self.steps
        self._reads: defaultdict[Place, list[tuple[str, int]]] = defaultdict(list)
        self._writes: defaultdict[Place, list[tuple[str, int]]] = defaultdict(list)

    def access(self, *, reads: Sequence[Place], writes: Sequence[Place]) -> None:
        """Launch work on the current stream; raises AssertionError if its order is open."""
        stream = self.current
        _merge(stream.clock, self.host_clock)
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        now = stream.name, stream.clock[stream.name]
        for place in reads:
            self._check(place, self._writes[place], "reads")
            self._reads[place].append(now)
        for place in writes:
            self._check(place, self._writes[place] + self._reads[place], "writes")
            self._writes[place], self._reads[place] = [now], []

    def _check(self, place: Place, earlier: list[tuple[str, int]], verb: str) -> None:
        for name, count in earlier:
            assert self.current.clock.get(name, 0) >= count, (
                f"{self.current.name} {verb} {place} beside {name}"
            )


class OrderedPools:
    """The content of both pools, which copies change as their order says."""

    def __init__(self, device: OrderedDevice, *, num_blocks: int, num_cpu_blocks: int) -> None:
        self._device = device
        self.device_blocks = [-1] * num_blocks
        self.cpu_blocks = [-1] * num_cpu_blocks

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            self._device.access(reads=[("device", copy.source)], writes=[("cpu", copy.target)])
            self.cpu_blocks[copy.target] = self.device_blocks[copy.source]

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            self._device.access(reads=[("cpu", copy.source)], writes=[("device", copy.target)])
            self.device_blocks[copy.target] = self.cpu_blocks[copy.source]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            self._device.access(reads=[("device", copy.source)], writes=[("device", copy.target)])
            self.device_blocks[copy.target] = self.device_blocks[copy.source]

    def run_step(self, *, reads: Sequence[int], writes: Sequence[int], value: int) -> None:
        """Read and write device blocks as a forward pass does."""
        self._device.access(
            reads=[("device", block) for block in reads],
            writes=[("device", block) for block in writes],
        )
        for block in writes:
            self.device_blocks[block] = value
