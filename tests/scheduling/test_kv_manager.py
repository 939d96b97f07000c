from __future__ import annotations

import pytest

from cluster.scheduling.kv_manager import Admitted, KvManager, KvOptions, Refusal
from cluster.scheduling.sequence import Swapped
from pagedray.batch import BlockCopy
from tests.scheduling.kv_sequences import (
    admit,
    make_manager,
    make_sequences,
    run_prompt,
    swap_in,
    swap_out,
)
from tests.scheduling.test_block_pool import state_of


def test_admitted_sequence_has_blocks_for_its_tokens() -> None:
    kv = make_manager()
    (sequence,) = make_sequences(9)
    assert admit(kv, sequence, num_tokens=9)
    assert kv.pool.num_free == kv.pool.num_blocks - 3
    assert len(sequence.blocks.extend(5, kv.block_size)) == 2
    assert sequence.blocks.num_slots == 8
    assert len(sequence.blocks.extend(9, kv.block_size)) == 1


def test_rejected_admission_changes_nothing() -> None:
    kv = make_manager(num_blocks=4)
    run_prompt(kv, make_sequences(8)[0])
    before = state_of(kv.pool)
    (sequence,) = make_sequences(17)
    assert not admit(kv, sequence, num_tokens=17)
    assert state_of(kv.pool) == before
    assert list(sequence.blocks.ids) == []


def test_spare_blocks_stay_free() -> None:
    kv = make_manager(num_blocks=4)
    (sequence,) = make_sequences(9)
    assert not admit(kv, sequence, num_tokens=9, num_spare=2)
    assert admit(kv, sequence, num_tokens=9, num_spare=1)


def test_hits_that_are_idle_count_as_taken() -> None:
    kv = make_manager(num_blocks=3)
    (first,) = make_sequences(9)
    run_prompt(kv, first)
    kv.release(first)
    (second,) = make_sequences(9)
    assert not admit(kv, second, num_tokens=13)
    assert admit(kv, second, num_tokens=12)


def test_known_prefix_is_not_computed_again() -> None:
    kv = make_manager()
    first, second = make_sequences(10)[0], make_sequences(10)[0]
    run_prompt(kv, first)
    assert admit(kv, second, num_tokens=10)
    assert second.num_computed == 8
    assert second.blocks.ids == first.blocks.ids[:2]
    assert (kv.num_queried_tokens, kv.num_hit_tokens) == (20, 8)


def test_one_token_is_computed_though_all_are_known() -> None:
    kv = make_manager()
    first, second = make_sequences(8)[0], make_sequences(8)[0]
    run_prompt(kv, first)
    assert admit(kv, second, num_tokens=8)
    assert second.num_computed == 4


def test_partial_block_is_not_shared() -> None:
    kv = make_manager()
    first, second = make_sequences(7)[0], make_sequences(9)[0]
    run_prompt(kv, first)
    assert admit(kv, second, num_tokens=9)
    assert second.blocks.ids == first.blocks.ids[:1]


def test_prefix_of_another_tenant_is_not_known() -> None:
    kv = make_manager()
    run_prompt(kv, make_sequences(10)[0])
    (other,) = make_sequences(10, tenant="other")
    assert admit(kv, other, num_tokens=10)
    assert other.num_computed == 0


def test_prefix_outlives_its_sequence_until_the_block_is_needed() -> None:
    kv = make_manager(num_blocks=3)
    (first,) = make_sequences(9)
    run_prompt(kv, first)
    kv.release(first)
    assert (kv.pool.num_free, kv.pool.num_idle) == (3, 2)
    for _ in range(3):
        kv.pool.allocate()
    assert len(kv.device) == 0


def test_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    kv = make_manager(num_blocks=2)
    (first,) = make_sequences(8)
    run_prompt(kv, first)
    blocks = list(first.blocks.ids)
    kv.release(first)
    assert kv.pool.allocate() == blocks[1]


def test_forgotten_sequence_leaves_no_prefix() -> None:
    kv = make_manager()
    first, second = make_sequences(9)[0], make_sequences(9)[0]
    run_prompt(kv, first)
    kv.forget_blocks(first)
    kv.release(first)
    assert kv.pool.num_idle == 0
    assert admit(kv, second, num_tokens=9)
    assert second.num_computed == 0


def test_nothing_is_hashed_without_a_prefix_cache() -> None:
    kv = make_manager(enable_prefix_cache=False)
    (sequence,) = make_sequences(9)
    run_prompt(kv, sequence)
    kv.release(sequence)
    assert sequence.blocks.keys == []
    assert kv.pool.num_idle == 0


def test_fork_shares_full_blocks_and_copies_the_last() -> None:
    kv = make_manager()
    first, second = make_sequences(10, n=2)
    run_prompt(kv, first)
    admission = kv.fork(second, first, num_tokens=10, num_spare=0)
    assert isinstance(admission, Admitted)
    assert admission.copies == [BlockCopy(first.blocks.ids[2], second.blocks.ids[2])]
    assert second.blocks.ids[:2] == first.blocks.ids[:2]
    assert second.blocks.ids[2] != first.blocks.ids[2]
    assert second.num_computed == 9
    assert second.blocks.num_slots == 12


def test_fork_copies_a_full_last_block_because_its_last_slot_is_written() -> None:
    kv = make_manager()
    first, second = make_sequences(8, n=2)
    run_prompt(kv, first)
    admission = kv.fork(second, first, num_tokens=8, num_spare=0)
    assert isinstance(admission, Admitted)
    assert admission.copies == [BlockCopy(first.blocks.ids[1], second.blocks.ids[1])]


def test_fork_copies_nothing_if_the_last_block_has_one_token() -> None:
    kv = make_manager()
    first, second = make_sequences(9, n=2)
    run_prompt(kv, first)
    assert kv.fork(second, first, num_tokens=9, num_spare=0) == Admitted(donor=first)
    assert second.blocks.ids[2] != first.blocks.ids[2]


def test_rejected_fork_changes_nothing() -> None:
    kv = make_manager(num_blocks=3)
    first, second = make_sequences(10, n=2)
    run_prompt(kv, first)
    before = state_of(kv.pool)
    assert kv.fork(second, first, num_tokens=10, num_spare=0) is Refusal.NO_ROOM
    assert state_of(kv.pool) == before


def test_swapped_out_blocks_are_free_once_the_step_is_acknowledged() -> None:
    kv = make_manager(enable_prefix_cache=False)
    (sequence,) = make_sequences(10)
    run_prompt(kv, sequence)
    copies = swap_out(kv, sequence, step=5)
    assert isinstance(sequence.state, Swapped)
    assert [copy.target for copy in copies] == sequence.state.cpu_ids
    assert (kv.pool.num_free, kv.pool.num_in_transit) == (5, 3)
    kv.acknowledge(4)
    assert kv.pool.num_in_transit == 3
    kv.acknowledge(5)
    assert (kv.pool.num_free, kv.pool.num_in_transit) == (8, 0)


def test_a_sequence_of_one_block_can_be_swapped_out() -> None:
    kv = make_manager(num_cpu_blocks=1)
    (sequence,) = make_sequences(3)
    run_prompt(kv, sequence)
    assert kv.can_swap_out(sequence)
    assert len(swap_out(kv, sequence, step=0)) == 1


def test_swap_out_copies_only_blocks_without_another_owner() -> None:
    kv = make_manager()
    first, second = make_sequences(10)[0], make_sequences(10)[0]
    run_prompt(kv, first)
    run_prompt(kv, second)
    assert len(swap_out(kv, second, step=0)) == 1
    kv.release(first)
    assert kv.pool.num_in_transit == 1
    kv.acknowledge(0)
    assert kv.pool.num_free == 8


def test_shared_blocks_are_found_again_when_a_sequence_returns() -> None:
    kv = make_manager()
    first, second = make_sequences(10)[0], make_sequences(10)[0]
    run_prompt(kv, first)
    run_prompt(kv, second)
    outs = swap_out(kv, second, step=0)
    kv.acknowledge(0)
    ins = swap_in(kv, second, num_tokens=10)
    assert [copy.source for copy in ins] == [copy.target for copy in outs]
    assert list(second.blocks.ids) == [*first.blocks.ids[:2], ins[0].target]
    assert second.num_computed == 10


def test_a_sequence_whose_shared_blocks_were_evicted_loses_the_others_too() -> None:
    kv = make_manager()
    first, second = make_sequences(10)[0], make_sequences(10)[0]
    run_prompt(kv, first)
    run_prompt(kv, second)
    swap_out(kv, second, step=0)
    kv.acknowledge(0)
    kv.release(first)
    for block in [kv.pool.allocate() for _ in range(8)]:
        kv.pool.release(block)
    assert kv.swap_in(second, 1, num_tokens=10, num_spare=0) is Refusal.LOST
    assert isinstance(second.state, Swapped)
    assert second.state.cpu_ids == []
    assert kv.cpu_pool.num_free == 8


def test_blocks_that_are_still_cached_are_not_copied_back() -> None:
    kv = make_manager()
    (sequence,) = make_sequences(10)
    run_prompt(kv, sequence)
    blocks = sequence.blocks.ids
    assert len(swap_out(kv, sequence, step=0)) == 3
    kv.acknowledge(0)
    ins = swap_in(kv, sequence, num_tokens=10)
    assert len(ins) == 1
    assert sequence.blocks.ids[:2] == blocks[:2]
    # The blocks that were not needed are free at once.
    assert kv.cpu_pool.num_free == 7


def test_swapped_in_blocks_hold_what_was_swapped_out() -> None:
    kv = make_manager(enable_prefix_cache=False)
    (sequence,) = make_sequences(10)
    run_prompt(kv, sequence)
    outs = swap_out(kv, sequence, step=0)
    kv.acknowledge(0)
    ins = swap_in(kv, sequence, num_tokens=10)
    assert [copy.source for copy in ins] == [copy.target for copy in outs]
    assert [copy.target for copy in ins] == list(sequence.blocks.ids)
    assert kv.cpu_pool.num_in_transit == 3
    kv.acknowledge(1)
    assert kv.cpu_pool.num_free == 8


def test_swapped_in_prefix_is_known_again() -> None:
    kv = make_manager(num_blocks=4)
    first, second = make_sequences(10)[0], make_sequences(10)[0]
    run_prompt(kv, first)
    swap_out(kv, first, step=0)
    kv.acknowledge(0)
    for block in [kv.pool.allocate() for _ in range(4)]:
        kv.pool.release(block)
    swap_in(kv, first, num_tokens=10)
    kv.acknowledge(1)
    kv.register_blocks(first)
    assert admit(kv, second, num_tokens=10)
    assert second.blocks.ids == first.blocks.ids[:2]


def test_rejected_swap_in_changes_nothing() -> None:
    kv = make_manager(num_blocks=3)
    (sequence,) = make_sequences(10)
    run_prompt(kv, sequence)
    swap_out(kv, sequence, step=0)
    before = state_of(kv.pool), state_of(kv.cpu_pool)
    assert kv.swap_in(sequence, 1, num_tokens=10, num_spare=0) is Refusal.NO_ROOM
    assert (state_of(kv.pool), state_of(kv.cpu_pool)) == before


def test_released_sequence_leaves_blocks_that_are_still_copied_in_transit() -> None:
    kv = make_manager()
    (sequence,) = make_sequences(10)
    run_prompt(kv, sequence)
    swap_out(kv, sequence, step=0)
    kv.release(sequence)
    assert kv.cpu_pool.num_in_transit == 3
    kv.acknowledge(0)
    assert kv.cpu_pool.num_free == 8


def test_sequence_larger_than_the_cpu_pool_is_not_swapped() -> None:
    kv = make_manager(num_cpu_blocks=2)
    (sequence,) = make_sequences(10)
    run_prompt(kv, sequence)
    assert not kv.can_swap_out(sequence)


@pytest.mark.parametrize(
    ("num_cpu_blocks", "has_cpu_cache", "is_open", "expected"),
    [
        pytest.param(3, True, True, True, id="room"),
        pytest.param(2, True, True, False, id="no room"),
        pytest.param(3, True, False, False, id="copies are not worth it"),
        pytest.param(3, False, False, False, id="no cache"),
    ],
)
def test_blocks_of_a_released_sequence_are_kept(
    num_cpu_blocks: int, has_cpu_cache: bool, is_open: bool, expected: bool
) -> None:
    kv = make_manager(num_cpu_blocks=num_cpu_blocks, has_cpu_cache=has_cpu_cache)
    if kv.cpu is not None:
        kv.cpu.policy.is_open = is_open
    (sequence,) = make_sequences(10)
    run_prompt(kv, sequence)
    assert kv.keeps_released(sequence) == expected


@pytest.mark.parametrize(
    ("is_enabled", "has_cpu_tier", "num_cpu_blocks", "num_disk_blocks", "tiers"),
    [
        (True, True, 8, 16, (True, True, True)),
        (True, True, 8, 0, (True, True, False)),
        (True, True, 0, 16, (True, False, False)),
        (True, False, 8, 16, (True, False, False)),
        (False, True, 8, 16, (False, False, False)),
    ],
)
def test_a_tier_needs_the_one_above_it(
    is_enabled: bool,
    has_cpu_tier: bool,
    num_cpu_blocks: int,
    num_disk_blocks: int,
    tiers: tuple[bool, bool, bool],
) -> None:
    kv = KvManager(
        KvOptions(
            block_size=4,
            num_blocks=8,
            num_cpu_blocks=num_cpu_blocks,
            num_disk_blocks=num_disk_blocks,
            enable_prefix_cache=is_enabled,
            enable_cpu_prefix_cache=has_cpu_tier,
        ),
        costs=None,
        max_num_tokens=100,
    )
    assert (kv.device.is_enabled, kv.cpu.is_enabled, kv.disk is not None) == tiers
    # Sequences may be swapped out without a cache.
    assert kv.cpu_pool.num_blocks == num_cpu_blocks
