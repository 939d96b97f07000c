"""The order of copies between the pools and steps, for random plans that keep the protocol."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from pagedray.batch import BlockCopy, StepPlan
from tests.workers.runner.ordered_streams import OrderedDevice, OrderedPools
from workers.runner.block_swaps import BlockSwaps, StagingBlocks, SwapFence, SwapStreams

NUM_BLOCKS = 10
NUM_CPU_BLOCKS = 8
NUM_PLANS = 40


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
