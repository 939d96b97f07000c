"""Streams that know what happens before what, and pools that reject unordered accesses.

Every access of a block has the vector clock of its stream. Two accesses of a block, one of which is
a write, must be ordered: on one stream, by an event that a stream waits for, or because the host
saw an event complete before it launched the later one.
"""

from __future__ import annotations

import ctypes
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.batch import BlockCopy, StepPlan
from workers.runner.block_swaps import BlockSwaps, StagingBlocks, SwapFence, SwapStreams
from workers.runner.host_pool import HostPool
from workers.runner.kv_cache import PoolCopier

Clock = dict[str, int]
Place = tuple[str, int]
"""A pool and a block."""
NUM_BLOCKS = 10
NUM_CPU_BLOCKS = 8
NUM_PLANS = 40
SHAPE = 2, 2, 4, 1, 4


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


class RandomPlans:
    """Makes plans as the scheduler may, and knows what every block must hold."""

    def __init__(self, seed: int, *, num_staging: int) -> None:
        self._draws = random.Random(seed)
        self.device = OrderedDevice(lambda: self._draws.random() < 0.4)
        self.pools = OrderedPools(
            self.device, num_blocks=NUM_BLOCKS + num_staging, num_cpu_blocks=NUM_CPU_BLOCKS
        )
        streams = SwapStreams(
            steps=self.device.steps,  # type: ignore[arg-type]  # its events are of the test
            outward=self.device.outward,  # type: ignore[arg-type]
            inward=self.device.inward,  # type: ignore[arg-type]
        )
        staging = StagingBlocks(first_block=NUM_BLOCKS, num_blocks=num_staging)
        self.swaps = BlockSwaps(self.pools, streams, staging)
        self._free = set(range(NUM_BLOCKS))
        self._owned: dict[int, int] = {}
        """What the blocks of sequences hold."""
        self._cpu_free = set(range(NUM_CPU_BLOCKS))
        self._cpu_owned: dict[int, int] = {}
        self._unacknowledged: deque[tuple[SwapFence, list[Callable[[], None]]]] = deque()

    def run_plan(self, step: int) -> None:
        """Launch the copies and the step of a plan, then perhaps acknowledge earlier ones."""
        plan = StepPlan(step, [])
        arrivals: list[Callable[[], None]] = []
        for source in self._drawn(self._free):
            if self._cpu_free and self.pools.device_blocks[source] >= 0:
                copy = BlockCopy(source, self._taken(self._cpu_free))
                plan.evictions.append(copy)
                arrivals.append(self._arrival_at_cpu(copy, self.pools.device_blocks[source]))
        for source in self._drawn(self._owned):
            if self._cpu_free:
                copy = BlockCopy(source, self._taken(self._cpu_free))
                plan.swap_outs.append(copy)
                arrivals.append(self._arrival_at_cpu(copy, self._owned.pop(source)))
                arrivals.append(self._release(source))
        for source in self._drawn(self._cpu_owned):
            if self._free:
                copy = BlockCopy(source, self._taken(self._free))
                plan.swap_ins.append(copy)
                arrivals.append(self._arrival_on_device(copy, self._cpu_owned.pop(source)))
        fence = self.swaps.launch(plan)
        self._unacknowledged.append((fence, arrivals))
        self._run_step(step)
        while self._unacknowledged and self._unacknowledged[0][0].is_reached:
            for arrive in self._unacknowledged.popleft()[1]:
                arrive()

    def _run_step(self, step: int) -> None:
        for block in self._owned:
            assert self.pools.device_blocks[block] == self._owned[block]
        reads = self._drawn(self._owned)
        new = [self._taken(self._free) for _ in range(min(2, len(self._free)))]
        self._owned.update(dict.fromkeys([*new, *self._drawn(self._owned)], step))
        writes = [block for block, value in self._owned.items() if value == step]
        self.pools.run_step(reads=reads, writes=writes, value=step)
        # Their content may be evicted later, and others may take them in the next plan.
        for block in self._drawn(self._owned):
            del self._owned[block]
            self._free.add(block)

    def _arrival_at_cpu(self, copy: BlockCopy, value: int) -> Callable[[], None]:
        def arrive() -> None:
            assert self.pools.cpu_blocks[copy.target] == value
            self._cpu_owned[copy.target] = value

        return arrive

    def _arrival_on_device(self, copy: BlockCopy, value: int) -> Callable[[], None]:
        def arrive() -> None:
            assert self.pools.device_blocks[copy.target] == value
            self._owned[copy.target] = value
            self._cpu_free.add(copy.source)

        return arrive

    def _release(self, block: int) -> Callable[[], None]:
        return lambda: self._free.add(block)

    def _drawn(self, blocks: set[int] | dict[int, int]) -> list[int]:
        return self._draws.sample(sorted(blocks), self._draws.randint(0, len(blocks)) // 2)

    def _taken(self, blocks: set[int]) -> int:
        block = self._draws.choice(sorted(blocks))
        blocks.remove(block)
        return block


@pytest.mark.parametrize("num_staging", [0, 1, 4])
def test_no_block_is_read_before_or_written_beside_its_copies(num_staging: int) -> None:
    for seed in range(40):
        plans = RandomPlans(seed, num_staging=num_staging)
        for step in range(NUM_PLANS):
            plans.run_plan(step)


def test_steps_wait_for_no_copy_of_a_staged_block() -> None:
    plans = RandomPlans(0, num_staging=2)
    device = plans.device
    device.may_complete = lambda: False
    plans.swaps.launch(
        StepPlan(
            0,
            [],
            evictions=[BlockCopy(0, 0), BlockCopy(1, 1)],
            swap_outs=[BlockCopy(2, 2)],
            swap_ins=[BlockCopy(3, 1)],
        )
    )
    assert "outward" not in device.steps.clock
    assert "outward" not in device.inward.clock
    assert "inward" not in device.steps.clock
    # The staging blocks are taken.
    plans.swaps.launch(StepPlan(1, [], evictions=[BlockCopy(4, 4)], swap_outs=[BlockCopy(5, 5)]))
    assert device.steps.clock["outward"] == 4


def test_staging_blocks_that_are_not_needed_stay_free() -> None:
    plans = RandomPlans(0, num_staging=3)
    device = plans.device
    device.may_complete = lambda: False
    plans.swaps.launch(StepPlan(0, [], evictions=[BlockCopy(0, 0)]))
    plans.swaps.launch(StepPlan(1, [], evictions=[BlockCopy(1, 1), BlockCopy(2, 2)]))
    assert "outward" not in device.steps.clock


def test_staging_blocks_are_used_again_once_they_were_copied() -> None:
    plans = RandomPlans(0, num_staging=2)
    device = plans.device
    for step in range(5):
        num_known = device.host_clock.get("outward", 0)
        device.may_complete = lambda: False
        evictions = [BlockCopy(0, 0), BlockCopy(1, 1)]
        fence = plans.swaps.launch(StepPlan(step, [], evictions=evictions))
        # The step waits for no copy that has not ended.
        assert device.steps.clock.get("outward", 0) == num_known
        device.may_complete = lambda: True
        assert fence.is_reached


def test_measured_copies_are_those_that_have_ended() -> None:
    plans = RandomPlans(0, num_staging=2)
    plan = StepPlan(0, [], swap_outs=[BlockCopy(2, 2), BlockCopy(3, 3)], swap_ins=[BlockCopy(0, 1)])
    plans.device.may_complete = lambda: False
    fence = plans.swaps.launch(plan)
    assert not fence.is_reached
    assert plans.swaps.take_measurement() == (0, 0.0)
    plans.device.may_complete = lambda: True
    assert fence.is_reached
    assert plans.swaps.take_measurement() == (3, 0.002)
    assert plans.swaps.take_measurement() == (0, 0.0)


class HostCopies:
    """Does what the driver does, on the host, and records the sizes of copies."""

    def __init__(self, *, fails: bool = False) -> None:
        self.sizes: list[int] = []
        self._fails = fails

    def launch(
        self,
        *,
        sources: npt.NDArray[np.uint64],
        targets: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
    ) -> None:
        if self._fails:
            raise RuntimeError("cuMemcpyBatchAsync returned 801 at copy 0")
        self.sizes += sizes.tolist()
        for source, target, size in zip(sources, targets, sizes, strict=True):
            ctypes.memmove(int(target), int(source), int(size))


class PinnedPool(HostPool):
    """Eight blocks in chunks of three, of which some seem to be pinned."""

    def __init__(self, num_pinned: int) -> None:
        super().__init__(8, SHAPE, torch.float32, pinner=None)
        self.blocks_per_chunk = 3
        self._num_pinned = num_pinned
        self.blocks.copy_(torch.randn(8, *SHAPE))

    @property
    def num_pinned_blocks(self) -> int:
        return self._num_pinned


def make_copier(
    batched: HostCopies, *, num_pinned: int, backend: type[TorchSDPABackend] = TorchSDPABackend
) -> tuple[PoolCopier, PinnedPool]:
    device_blocks = torch.randn(9, *SHAPE)
    pool = PinnedPool(num_pinned)
    copier = PoolCopier(backend, device_blocks, pool, batched=batched)  # type: ignore[arg-type]
    return copier, pool


@pytest.mark.parametrize("num_pinned", [0, 3, 8])
@pytest.mark.parametrize("fails", [False, True])
def test_blocks_arrive_whether_pinned_or_not(num_pinned: int, *, fails: bool) -> None:
    copier, pool = make_copier(HostCopies(fails=fails), num_pinned=num_pinned)
    device, host = copier._device_blocks, pool.blocks
    before = device.clone()
    out = [BlockCopy(8, 0), BlockCopy(2, 4), BlockCopy(3, 5), BlockCopy(4, 6)]
    copier.copy_out(out)
    assert torch.equal(host[[0, 4, 5, 6]], before[[8, 2, 3, 4]])
    content = host.clone()
    copier.copy_in([BlockCopy(7, 1), BlockCopy(5, 3), BlockCopy(4, 2)])
    assert torch.equal(device[[1, 3, 2]], content[[7, 5, 4]])
    assert torch.equal(device[[0, 4, 5, 6, 7, 8]], before[[0, 4, 5, 6, 7, 8]])


def test_adjacent_blocks_are_one_copy_within_a_chunk() -> None:
    batched = HostCopies()
    copier, pool = make_copier(batched, num_pinned=8)
    copier.copy_out([BlockCopy(block, block) for block in (5, 3, 1, 2, 4)] + [BlockCopy(8, 7)])
    block_bytes = pool.blocks[0].nbytes
    # Blocks 0 to 2, 3 to 5, 6 and 7 are chunks.
    assert batched.sizes == [2 * block_bytes, 3 * block_bytes, block_bytes]


def recording_backend(calls: list[Sequence[object]]) -> type[TorchSDPABackend]:
    """Return a backend that adds the pairs of each call of `swap_blocks` to `calls`."""

    class RecordingBackend(TorchSDPABackend):
        @staticmethod
        def swap_blocks(
            source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]
        ) -> None:
            calls.append(pairs)
            TorchSDPABackend.swap_blocks(source, target, pairs)

    return RecordingBackend


def test_only_pinned_blocks_are_copied_in_one_call_and_others_chunk_by_chunk() -> None:
    batched = HostCopies()
    calls: list[Sequence[object]] = []
    copier, pool = make_copier(batched, num_pinned=3, backend=recording_backend(calls))
    copier.copy_out([BlockCopy(block, block) for block in (7, 3, 2, 6, 5)])
    assert batched.sizes == [pool.blocks[0].nbytes]
    assert calls == [[[3, 3], [5, 5]], [[6, 6], [7, 7]]]


def test_no_copies_are_no_error() -> None:
    batched = HostCopies()
    copier, _ = make_copier(batched, num_pinned=8)
    copier.copy_out([])
    assert batched.sizes == []


def test_a_driver_that_fails_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    copier, _ = make_copier(HostCopies(fails=True), num_pinned=8)
    for _ in range(3):
        copier.copy_out([BlockCopy(0, 0)])
    assert len(caplog.messages) == 1
    assert "cuMemcpyBatchAsync returned 801" in caplog.messages[0]
