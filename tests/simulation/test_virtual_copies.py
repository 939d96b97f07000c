"""Copies between the pools in `pagedray simulate`; the expected times are worked out by hand."""

from cluster.scheduling.kv_manager import KvOptions
from cluster.simulation.step_cost import StepCost
from cluster.simulation.virtual_copies import VirtualCopies
from cluster.simulation.virtual_replica import VirtualCall, VirtualReplica, distinct_prompt
from pagedray.batch import BlockCopy, StepPlan
from pagedray.config import SchedulerConfig

COST = StepCost(points=((0, 1.0), (1, 1.0)), block_out_s=3.0, block_in_s=2.0)


def copies(number: int) -> list[BlockCopy]:
    return [BlockCopy(block, block) for block in range(number)]


def test_steps_do_not_wait_for_what_is_swapped_and_directions_not_for_each_other() -> None:
    virtual = VirtualCopies(COST, num_blocks=10)
    plan = StepPlan(0, [], swap_outs=copies(4), swap_ins=copies(5))
    # They wait for the steps before theirs, which end at 6.
    assert virtual.launch(plan, now_s=5.0, steps_ended_s=6.0) == 6.0
    assert virtual.ended_s == 6.0 + 12.0
    assert virtual.launch(StepPlan(1, []), now_s=7.0, steps_ended_s=7.0) == 7.0
    # Those of a direction run in order.
    later = StepPlan(2, [], swap_ins=copies(2))
    assert virtual.launch(later, now_s=8.0, steps_ended_s=8.0) == 8.0
    assert virtual.ended_s == 6.0 + 10.0 + 4.0
    assert virtual.take_measurement(17.0) == (0, 0.0)
    assert virtual.take_measurement(20.0) == (11, 12.0 + 10.0 + 4.0)


def test_a_step_waits_for_evicted_blocks_without_a_staging_block() -> None:
    # 96 blocks have three staging blocks.
    virtual = VirtualCopies(COST, num_blocks=96)
    plan = StepPlan(0, [], evictions=copies(2))
    assert virtual.launch(plan, now_s=0.0, steps_ended_s=0.0) == 0.0
    # Of four blocks one is staged. The other three are copied when the first two are, by 6.
    plan = StepPlan(1, [], evictions=copies(4), swap_ins=copies(1))
    assert virtual.launch(plan, now_s=1.0, steps_ended_s=1.0) == 6.0 + 9.0
    assert virtual.ended_s == 6.0 + 12.0
    # At 6 the two staging blocks are free again.
    plan = StepPlan(2, [], evictions=copies(2))
    assert virtual.launch(plan, now_s=6.0, steps_ended_s=16.0) == 16.0


def run_beside_restored(*, block_out_s: float) -> tuple[VirtualCall, VirtualCall]:
    """Return a request that decodes, and one whose four blocks are copied back meanwhile."""
    replica = VirtualReplica(
        SchedulerConfig(max_num_seqs=4, preemption="swap"),
        KvOptions(block_size=16, num_blocks=200, num_cpu_blocks=400),
        StepCost(points=COST.points, block_out_s=block_out_s, block_in_s=2.0),
        max_model_len=3300,
    )
    prompt = distinct_prompt(0, 4 * 16 + 1)
    replica.submit(prompt, num_output_tokens=1)
    replica.run()
    # It takes the place of all that is cached.
    replica.submit(distinct_prompt(1, 200 * 16 - 1), num_output_tokens=1)
    replica.run()
    assert replica.scheduler.stats().num_saved_blocks == 4
    decoding = replica.submit([7], num_output_tokens=40, arrival_s=1000.0)
    returning = replica.submit(prompt, num_output_tokens=1, arrival_s=1004.5)
    replica.run()
    assert replica.scheduler.stats().num_restored_blocks == 4
    return decoding, returning


def test_others_decode_while_blocks_are_copied_back() -> None:
    decoding, returning = run_beside_restored(block_out_s=0.5)
    assert list(decoding.token_times_s) == [1000.0 + step for step in range(1, 41)]
    # It arrives in the fifth step, when the sixth is planned. Its copies begin once that has ended
    # and take 8 s; by then another step is planned.
    assert returning.first_token_s == 1006.0 + 8.0 + 2.0


def test_a_sequence_waits_for_all_copies_of_the_plan_that_restores_its_blocks() -> None:
    decoding, returning = run_beside_restored(block_out_s=3.0)
    assert list(decoding.token_times_s) == [1000.0 + step for step in range(1, 41)]
    # Five other blocks make room for them and for the next one.
    assert returning.first_token_s == 1006.0 + 15.0 + 2.0
