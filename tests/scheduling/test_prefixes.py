"""Prefixes that come back from the CPU pool and the disk, seen from plans."""

from __future__ import annotations

import pytest

from bench.scheduler.conversations import ConversationShape, run_conversations
from cluster.scheduling.kv_manager import KvOptions
from cluster.scheduling.sequence import Arriving, DiskRead, Running, Waiting
from cluster.simulation.step_cost import StepCost
from cluster.simulation.virtual_replica import VirtualReplica, distinct_prompt
from pagedray.config import Preemption, SchedulerConfig
from tests.scheduling.fake_worker import known_tokens
from tests.scheduling.harness import Harness


def evicted(*, num_cpu_blocks: int = 16) -> Harness:
    """Return a harness whose CPU pool has the first prompt, of two full blocks."""
    harness = Harness(block_size=4, num_blocks=4, num_cpu_blocks=num_cpu_blocks, preemption="swap")
    harness.add([1] * 9, max_tokens=1)
    harness.drain()
    harness.add([2] * 13, max_tokens=1)
    harness.drain()
    return harness


def test_a_block_is_copied_in_the_plan_that_overwrites_it() -> None:
    harness = evicted()
    (plan,) = [plan for plan in harness.plans if plan.evictions]
    (start,) = plan.starts
    # The table of the one that starts has them.
    taken = {*start.block_ids, *(b for one in plan.sequences for b in one.new_block_ids)}
    assert {copy.source for copy in plan.evictions} <= taken


def test_a_sequence_computes_only_what_was_not_copied_back_once_that_has_arrived() -> None:
    harness = evicted()
    harness.add([1] * 8 + [5], max_tokens=1)
    plan = harness.plan()
    assert len(plan.swap_ins) == 2
    assert plan.starts[0].block_ids == [copy.target for copy in plan.swap_ins]
    assert plan.sequences == []
    sequence = harness.sequences[-1]
    assert isinstance(sequence.state, Arriving)
    harness.execute()
    harness.collect()
    assert harness.schedule() is None
    harness.acknowledge()
    plan = harness.plan()
    assert [(one.first_position, one.num_tokens) for one in plan.sequences] == [(8, 1)]
    harness.drain()
    (event,) = [event for event in harness.results.events if event.request_id == "request-2"]
    assert event.num_cached_tokens == 8


@pytest.mark.parametrize("is_kept", [True, False])
def test_prefixes_are_found_in_a_pool_only_if_it_outlives_its_rank(*, is_kept: bool) -> None:
    harness = evicted()
    harness.replace_worker(keeps_cpu_pool=is_kept)
    harness.add([1] * 9, max_tokens=1)
    assert len(harness.plan().swap_ins) == 2 * is_kept
    harness.drain()
    stats = harness.scheduler.stats()
    assert (stats.num_kept_cpu_blocks, stats.num_kept_hit_tokens) == (2 * is_kept, 8 * is_kept)


def test_a_block_whose_copy_no_rank_has_reported_does_not_outlive_it() -> None:
    harness = Harness(block_size=4, num_blocks=4, num_cpu_blocks=16, preemption="swap")
    harness.add([1] * 9, max_tokens=1)
    harness.drain()
    harness.add([2] * 13, max_tokens=1)
    plan = harness.plan()
    assert plan.evictions
    harness.replace_worker(keeps_cpu_pool=True)
    assert harness.scheduler.stats().num_kept_cpu_blocks == 0
    harness.drain()


def test_a_pool_does_not_outlive_ranks_that_die_before_their_first_step_ends() -> None:
    harness = evicted()
    harness.replace_worker(keeps_cpu_pool=True)
    harness.replace_worker(keeps_cpu_pool=True)
    stats = harness.scheduler.stats()
    assert (stats.num_cached_cpu_blocks, stats.num_free_cpu_blocks) == (0, 16)


def test_hits_count_as_kept_only_in_blocks_that_outlived_a_rank() -> None:
    harness = evicted(num_cpu_blocks=3)
    harness.replace_worker(keeps_cpu_pool=True)
    # The second prompt takes the places of blocks that outlived the rank.
    for token_id in (3, 4, 3):
        harness.add([token_id] * 13, max_tokens=1)
        harness.drain()
    stats = harness.scheduler.stats()
    assert stats.num_kept_cpu_blocks == 2
    assert stats.num_cpu_hit_tokens > 0
    assert stats.num_kept_hit_tokens == 0


def test_an_aborted_sequence_leaves_what_is_being_copied_back() -> None:
    harness = evicted()
    request_id = harness.add([1] * 9, max_tokens=1)
    harness.schedule()
    harness.abort(request_id)
    harness.drain()
    harness.add([1] * 9, max_tokens=1)
    plan = harness.plan()
    # They are on the device.
    assert plan.swap_ins == []
    assert [one.first_position for one in plan.sequences] == [8]
    harness.drain()


def test_a_step_copies_no_more_tokens_back_than_it_may_compute() -> None:
    harness = Harness(
        block_size=4,
        num_blocks=8,
        num_cpu_blocks=64,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        preemption="swap",
    )
    for token_id in (1, 2, 4, 5, 6, 7):
        harness.add([token_id] * 9, max_tokens=1)
        harness.drain()
    for token_id in (1, 2):
        harness.add([token_id] * 9, max_tokens=1)
    plans = [harness.schedule(), harness.schedule()]
    assert [len(plan.swap_ins) for plan in plans if plan is not None] == [2, 2]
    harness.drain()


def test_conversations_that_outgrow_the_device_start_in_a_third_of_the_time() -> None:
    shape = ConversationShape(num_conversations=32, num_turns=8, num_answer_tokens=400, think_s=3.0)
    without, with_tier = (
        run_conversations(shape, enable_cpu_prefix_cache=has_tier) for has_tier in (False, True)
    )
    assert with_tier.mean_ttft_s < without.mean_ttft_s / 3
    assert with_tier.stats.num_cpu_hit_tokens > 0
    assert with_tier.duration_s < 1.05 * without.duration_s


def test_prompts_that_never_come_back_are_hardly_copied() -> None:
    durations = []
    for has_tier in (False, True):
        replica = make_replica(num_blocks=1000, enable_cpu_prefix_cache=has_tier)
        for number in range(400):
            replica.submit(distinct_prompt(number, 1000), num_output_tokens=4)
        replica.run()
        durations.append(replica.now_s)
    assert durations[1] < 1.03 * durations[0]


def test_no_time_depends_on_which_prompts_of_other_tenants_are_in_the_cpu_pool() -> None:
    def ben_after(prompts_of_ann: list[list[int]], tenant: str = "ben") -> list[float]:
        """Return the times to the first tokens of prompts, which Ann may have sent before."""
        replica = make_replica(num_blocks=200, enable_cpu_prefix_cache=True)
        for prompt in prompts_of_ann:
            replica.submit(prompt, num_output_tokens=1, tenant="ann")
            replica.run()
        for number in range(100, 105):
            replica.submit(distinct_prompt(number, 1000), num_output_tokens=1, tenant="ann")
            replica.run()
        times = []
        for number in range(5):
            prompt = distinct_prompt(number, 1000)
            call = replica.submit(
                prompt, num_output_tokens=1, tenant=tenant, arrival_s=replica.now_s
            )
            replica.run()
            times.append(call.ttft_s)
        return times

    same = [distinct_prompt(number, 1000) for number in range(5)]
    others = [distinct_prompt(number, 1000) for number in range(50, 55)]
    assert ben_after(same) == ben_after(others)
    # Her own come back sooner.
    assert sum(ben_after(same, "ann")) < 0.7 * sum(ben_after(others, "ann"))


def make_replica(*, num_blocks: int, enable_cpu_prefix_cache: bool) -> VirtualReplica:
    return VirtualReplica(
        SchedulerConfig(max_num_seqs=16, max_queued_tokens=10**7),
        KvOptions(
            block_size=16,
            num_blocks=num_blocks,
            num_cpu_blocks=4 * num_blocks,
            enable_cpu_prefix_cache=enable_cpu_prefix_cache,
        ),
        StepCost.linear(step_s=1e-3, token_s=30e-6, block_s=45e-6),
        max_model_len=2000,
    )


def on_disk(
    *, max_num_seqs: int = 8, preemption: Preemption = "swap", token_s: float = 0.0
) -> Harness:
    """Return a harness whose disk alone has the first prompt, of two full blocks."""
    harness = Harness(
        block_size=4,
        num_blocks=6,
        num_cpu_blocks=8,
        num_disk_blocks=20,
        max_num_seqs=max_num_seqs,
        preemption=preemption,
        block_copy_s=token_s,
        token_s=token_s,
    )
    for token_id in (1, 2, 4, 5, 6, 8, 10, 12):
        harness.add([token_id] * 9, max_tokens=1)
        harness.drain()
        # What the last step did not write, the next one does.
        harness.add([7], max_tokens=2)
        harness.drain()
    kv = harness.scheduler._kv
    assert kv.disk is not None
    assert kv.cpu is not None
    first = harness.sequences[0].blocks.keys
    assert [kv.disk.find_block(key) is not None for key in first] == [True, True]
    assert [kv.cpu.find_block(key) for key in first] == [None, None]
    assert [kv.device.find_block(key) for key in first] == [None, None]
    return harness


def test_a_sequence_waits_without_a_row_until_its_blocks_are_read_and_then_copied() -> None:
    harness = on_disk()
    harness.add([1] * 8 + [5], max_tokens=1)
    sequence = harness.sequences[-1]
    plan = harness.plan()
    assert (len(plan.disk_reads), plan.starts, plan.sequences) == (2, [], [])
    assert isinstance(sequence.state, Waiting)
    harness.execute()
    harness.collect()
    harness.acknowledge()
    # An acknowledgement says nothing of files.
    assert harness.schedule() is None
    harness.end_disk_jobs()
    plan = harness.plan()
    assert [copy.target for copy in plan.swap_ins] == plan.starts[0].block_ids
    harness.drain()
    assert harness.results.events[-1].num_cached_tokens == 8
    stats = harness.scheduler.stats()
    assert (stats.num_read_blocks, stats.num_disk_hit_tokens) == (2, 8)


def test_a_sequence_reads_no_blocks_that_are_computed_sooner() -> None:
    # Copying a block takes as long as computing a token; reading one takes longer.
    harness = on_disk(preemption="auto", token_s=1e-3)
    harness.add([1] * 8 + [5], max_tokens=1)
    plan = harness.plan()
    assert len(plan.disk_reads) == 2
    harness.settle()
    harness.drain()
    harness.add([2] * 8 + [5], max_tokens=1)
    plan = harness.plan()
    assert plan.disk_reads == []
    assert plan.sequences[0].num_tokens == 9
    harness.drain()


def test_a_sequence_whose_blocks_cannot_be_read_computes_them() -> None:
    harness = on_disk()
    harness.add([1] * 8 + [5], max_tokens=1)
    harness.schedule()
    harness.end_disk_jobs(num_failed=2)
    harness.drain()
    assert harness.results.events[-1].num_cached_tokens == 0
    assert harness.scheduler.stats().num_failed_reads == 2


def test_others_start_while_a_sequence_waits_for_the_disk() -> None:
    harness = on_disk(max_num_seqs=1)
    harness.add([1] * 8 + [5], max_tokens=1)
    harness.add([7], max_tokens=1)
    plan = harness.plan()
    assert len(plan.disk_reads) == 2
    assert [known_tokens(start) for start in plan.starts] == [[7]]
    harness.drain()


def test_a_second_sequence_waits_for_the_same_blocks_and_reads_none() -> None:
    harness = on_disk()
    for _ in range(2):
        harness.add([1] * 8 + [5], max_tokens=1)
    plan = harness.plan()
    assert (len(plan.disk_reads), plan.starts) == (2, [])
    for sequence in harness.sequences[-2:]:
        assert isinstance(sequence.state, Waiting)
        assert sequence.state.disk_read == DiskRead(plan.step)
    harness.drain()
    assert {event.num_cached_tokens for event in harness.results.events[-2:]} == {8}


def test_another_tenant_waits_for_no_block_of_the_first() -> None:
    harness = on_disk()
    harness.add([1] * 8 + [5], max_tokens=1, tenant="other")
    plan = harness.plan()
    assert (plan.disk_reads, plan.sequences[0].num_tokens) == ([], 9)
    harness.drain()


def test_new_ranks_have_no_prefixes_in_their_files() -> None:
    harness = on_disk()
    harness.add([1] * 8 + [5], max_tokens=1)
    harness.schedule()
    harness.replace_worker()
    plan = harness.plan()
    assert (plan.disk_reads, plan.sequences[0].num_tokens) == ([], 9)
    harness.drain()


def test_no_row_is_taken_for_a_sequence_that_waits_for_the_disk() -> None:
    harness = on_disk(max_num_seqs=1)
    harness.add([7] * 3, max_tokens=12, priority=1)
    harness.step()
    urgent = harness.add([1] * 8 + [5], max_tokens=1, priority=0)
    plan = harness.plan()
    assert len(plan.disk_reads) == 2
    running, waiting = harness.sequences[-2:]
    assert (type(running.state), type(waiting.state)) == (Running, Waiting)
    harness.settle()
    while not harness.results.tokens[urgent, 0]:
        harness.step()
    assert running.num_preemptions == 1
    assert harness.results.events[-1].num_cached_tokens == 8
    harness.drain()
