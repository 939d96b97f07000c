"""Hypothesis looks for a sequence of calls that breaks an invariant, and shrinks it."""

from contextlib import suppress

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pagedray.config import Preemption
from pagedray.errors import CapacityError, OverloadedError
from tests.scheduling.harness import Harness


class SchedulerMachine(RuleBasedStateMachine):
    """Calls the scheduler and runs its worker in any allowed order."""

    harness: Harness

    @initialize(
        block_size=st.sampled_from([2, 1, 4]),
        num_tokens=st.integers(12, 40),
        num_cpu_blocks=st.sampled_from([40, 4, 0]),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.sampled_from([30, 8, 3, 1]),
        preemption=st.sampled_from(["swap", "recompute", "auto"]),
        block_copy_s=st.sampled_from([0.0, 0.1]),
        enable_prefix_cache=st.booleans(),
        enable_cpu_prefix_cache=st.booleans(),
        num_disk_blocks=st.sampled_from([0, 3, 30]),
    )
    def begin(
        self,
        *,
        block_size: int,
        num_tokens: int,
        num_cpu_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        preemption: Preemption,
        block_copy_s: float,
        enable_prefix_cache: bool,
        enable_cpu_prefix_cache: bool,
        num_disk_blocks: int,
    ) -> None:
        self.harness = Harness(
            block_size=block_size,
            num_blocks=-(-num_tokens // block_size),
            num_cpu_blocks=num_cpu_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=num_tokens,
            max_queued_requests=5,
            preemption=preemption,
            block_copy_s=block_copy_s,
            token_s=0.04,
            enable_prefix_cache=enable_prefix_cache,
            enable_cpu_prefix_cache=enable_cpu_prefix_cache,
            num_disk_blocks=num_disk_blocks,
        )

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        tenant=st.sampled_from(["", "other"]),
        priority=st.integers(0, 1),
        n=st.sampled_from([1, 3]),
        max_tokens=st.sampled_from([30, 10, 2, 1]),
        ignore_eos=st.booleans(),
        deadline_s=st.sampled_from([None, 1.0]),
        num_good=st.sampled_from([None, 2]),
        bad_position=st.sampled_from([None, None, 1, 11]),
        is_masked=st.booleans(),
    )
    def add(
        self,
        *,
        prompt: list[int],
        tenant: str,
        priority: int,
        n: int,
        max_tokens: int,
        ignore_eos: bool,
        deadline_s: float | None,
        num_good: int | None,
        bad_position: int | None,
        is_masked: bool,
    ) -> None:
        with suppress(CapacityError, OverloadedError):
            self.harness.add(
                prompt,
                tenant=tenant,
                priority=priority,
                n=n,
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
                deadline_s=deadline_s,
                bad_length=None if num_good is None else len(prompt) + num_good,
                bad_position=bad_position,
                is_masked=is_masked,
            )

    @rule(num_turns=st.integers(1, 12))
    def turn(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.harness.turn()

    @rule()
    def schedule(self) -> None:
        self.harness.schedule()

    @precondition(lambda self: self.harness.can_execute)
    @rule()
    def execute(self) -> None:
        self.harness.execute()

    @precondition(lambda self: self.harness.worker.outputs)
    @rule()
    def collect(self) -> None:
        self.harness.collect()

    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        low, high = self.harness.acknowledged_step, self.harness.worker.executed_step
        self.harness.acknowledge(data.draw(st.integers(low, high)))

    @rule(is_read=st.booleans(), num_failed=st.sampled_from([0, 0, 1]))
    def end_disk_job(self, *, is_read: bool, num_failed: int) -> None:
        self.harness.end_disk_job(is_read=is_read, num_failed=num_failed)

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.abort(data.draw(st.sampled_from(sorted(self.harness.requests))))

    @precondition(lambda self: self.harness.results.tokens)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.harness.finish(*data.draw(st.sampled_from(sorted(self.harness.results.tokens))))

    @rule(now_s=st.sampled_from([0.5, 1.0]))
    def expire(self, now_s: float) -> None:
        self.harness.expire(now_s)

    @rule(keeps_cpu_pool=st.booleans())
    def replace_worker(self, *, keeps_cpu_pool: bool) -> None:
        self.harness.replace_worker(keeps_cpu_pool=keeps_cpu_pool)

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    database=None,
    derandomize=True,
)
