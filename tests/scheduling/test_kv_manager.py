"""Blocks of sequences: admission, forks, swaps, and prefixes in every tier."""

from __future__ import annotations

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cluster.scheduling.device_tier import BlockKey, DeviceTier
from cluster.scheduling.kv_manager import Admitted, KvManager, KvOptions, Refusal
from cluster.scheduling.prefix_cache import PrefixCache
from cluster.scheduling.sequence import Sequence, Swapped
from pagedray.batch import BlockCopy
from pagedray.config import StepLimits
from tests.scheduling.builders import (
    admit,
    make_active,
    make_manager,
    make_request,
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


@pytest.mark.parametrize(
    ("num_cached", "num_tokens", "tenant", "num_hit_tokens"),
    [
        pytest.param(10, 10, "", 8, id="full blocks"),
        pytest.param(8, 8, "", 4, id="one token is left to compute"),
        pytest.param(7, 9, "", 4, id="no partial block"),
        pytest.param(10, 10, "other", 0, id="no block of another tenant"),
    ],
)
def test_known_prefix_is_not_computed_again(
    num_cached: int, num_tokens: int, tenant: str, num_hit_tokens: int
) -> None:
    kv = make_manager()
    (first,), (second,) = make_sequences(num_cached), make_sequences(num_tokens, tenant=tenant)
    run_prompt(kv, first)
    assert admit(kv, second, num_tokens=num_tokens)
    assert second.num_computed == num_hit_tokens
    num_shared = num_hit_tokens // 4
    assert second.blocks.ids[:num_shared] == first.blocks.ids[:num_shared]
    assert len(second.blocks.ids) == num_shared
    assert (kv.num_queried_tokens, kv.num_hit_tokens) == (num_cached + num_tokens, num_hit_tokens)


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
    kv.prefixes.forget_blocks(first)
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


# The last slot of a full block is written again; a block of one token is computed again.
@pytest.mark.parametrize(("num_tokens", "copied"), [(10, 2), (8, 1), (9, None)])
def test_fork_shares_full_blocks_and_copies_the_last(num_tokens: int, copied: int | None) -> None:
    kv = make_manager()
    first, second = make_sequences(num_tokens, n=2)
    run_prompt(kv, first)
    copies = [] if copied is None else [copied]
    admitted = kv.fork(second, first, num_tokens=num_tokens, num_spare=0)
    assert isinstance(admitted, Admitted)
    assert admitted.donor is first
    ids = first.blocks.ids, second.blocks.ids
    assert [*admitted.copies] == [BlockCopy(ids[0][at], ids[1][at]) for at in copies]
    num_shared = (num_tokens - 1) // 4
    assert ids[0][:num_shared] == ids[1][:num_shared]
    assert ids[0][num_shared] != ids[1][num_shared]
    assert second.num_computed == num_tokens - 1
    assert second.blocks.num_slots == 4 * (num_shared + 1)


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


def test_swap_out_leaves_blocks_that_drafts_alone_need() -> None:
    kv = make_manager(enable_prefix_cache=False)
    (sequence,) = make_sequences(10)
    run_prompt(kv, sequence)
    for _ in range(2):
        assert kv.append(sequence) is not None
    assert len(sequence.blocks.ids) == 5
    assert len(swap_out(kv, sequence, step=0)) == 3


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
    kv.prefixes.register_blocks(first)
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
        limits=StepLimits(max_num_batched_tokens=100),
    )
    assert (kv.device.is_enabled, kv.cpu.is_enabled, kv.disk is not None) == tiers
    # Sequences may be swapped out without a cache.
    assert kv.cpu_pool.num_blocks == num_cpu_blocks


def evict_all(kv: KvManager, step: int) -> list[BlockCopy]:
    """Have all cached blocks evicted by `step`, and take their copies as done."""
    for block in [kv.pool.allocate() for _ in range(kv.pool.num_free)]:
        kv.pool.release(block)
    evictions, _ = kv.take_copies(step)
    kv.acknowledge(step)
    return evictions


def run_and_evict(kv: KvManager, sequence: Sequence) -> list[BlockCopy]:
    """Compute a prompt, which was finite, and have its blocks evicted."""
    run_prompt(kv, sequence)
    sequence.token_ids = sequence.token_ids + array("I", [0])
    kv.prefixes.mark_verified(sequence)
    kv.release(sequence)
    return evict_all(kv, 0)


def test_evicted_prefix_is_copied_back() -> None:
    kv = make_manager(has_cpu_cache=True)
    evictions = run_and_evict(kv, make_sequences(10)[0])
    (other,), (second,) = make_sequences(10, tenant="other"), make_sequences(10)
    assert admit(kv, other, num_tokens=10) == Admitted()
    assert other.num_computed == 0
    kv.release(other)
    assert admit(kv, second, num_tokens=10) == Admitted(awaits_copies=True)
    assert second.num_computed == 8
    _, restores = kv.take_copies(1)
    assert {copy.source for copy in restores} == {copy.target for copy in evictions}
    assert [copy.target for copy in restores] == list(second.blocks.ids[:2])
    # Its beginning was evicted last.
    assert [copy.source for copy in restores] == [copy.target for copy in reversed(evictions)]


def test_blocks_on_their_way_back_are_shared_and_awaited() -> None:
    kv = make_manager(has_cpu_cache=True)
    run_and_evict(kv, make_sequences(10)[0])
    second, third, fourth = (make_sequences(10)[0] for _ in range(3))
    assert admit(kv, second, num_tokens=10)
    kv.take_copies(1)
    assert admit(kv, third, num_tokens=10) == Admitted(awaits_copies=True)
    assert third.blocks.ids == second.blocks.ids
    assert kv.take_copies(2) == ([], [])
    kv.acknowledge(1)
    assert admit(kv, fourth, num_tokens=10) == Admitted()


def test_blocks_that_were_on_their_way_back_to_dead_ranks_are_not_awaited_again() -> None:
    kv = make_manager(has_cpu_cache=True)
    run_and_evict(kv, make_sequences(10)[0])
    (second,) = make_sequences(10)
    assert admit(kv, second, num_tokens=10)
    kv.take_copies(1)
    kv.clear()
    second.drop_blocks()
    (third, fourth) = (make_sequences(10)[0] for _ in range(2))
    run_prompt(kv, third)
    assert admit(kv, fourth, num_tokens=10) == Admitted()
    assert fourth.num_computed == 8


def test_blocks_without_finite_logits_are_not_kept_when_they_are_evicted() -> None:
    kv = make_manager(has_cpu_cache=True)
    (sequence,) = make_sequences(10)
    run_prompt(kv, sequence)
    kv.release(sequence)
    assert evict_all(kv, 0) == []


def test_forgotten_blocks_are_not_copied_back() -> None:
    kv = make_manager(has_cpu_cache=True)
    (first,) = make_sequences(10)
    run_and_evict(kv, first)
    kv.prefixes.forget_blocks(first)
    (second,) = make_sequences(10)
    assert admit(kv, second, num_tokens=10)
    assert second.num_computed == 0
    assert kv.cpu_pool.num_idle == 0


def test_a_preempted_sequence_takes_the_place_of_cached_blocks() -> None:
    kv = make_manager(num_cpu_blocks=3, has_cpu_cache=True)
    run_and_evict(kv, make_sequences(12)[0])
    assert (kv.cpu_pool.num_free, kv.cpu_pool.num_idle) == (3, 3)
    (running,) = make_sequences(10, tenant="other")
    run_prompt(kv, running)
    assert kv.can_swap_out(running)
    assert len(swap_out(kv, running, step=1)) == 3
    assert kv.cpu_pool.num_idle == 0
    (second,) = make_sequences(12)
    assert admit(kv, second, num_tokens=12)
    assert second.num_computed == 0


def test_blocks_that_are_copied_back_do_not_lose_their_place_meanwhile() -> None:
    kv = make_manager(num_blocks=3, num_cpu_blocks=4, has_cpu_cache=True)
    run_and_evict(kv, make_sequences(10)[0])
    (other,) = make_sequences(10, tenant="other")
    run_prompt(kv, other)
    other.token_ids = other.token_ids + array("I", [0])
    kv.prefixes.mark_verified(other)
    kv.release(other)
    kv.take_copies(1)
    kv.acknowledge(1)
    # The blocks of the other one are evicted for it in the same plan.
    (second,) = make_sequences(10)
    assert admit(kv, second, num_tokens=10)
    evictions, restores = kv.take_copies(2)
    assert len(evictions) == len(restores) == 2
    assert not {copy.target for copy in evictions} & {copy.source for copy in restores}


def test_no_block_is_copied_back_that_the_device_has_behind_a_missing_one() -> None:
    kv = make_manager(has_cpu_cache=True)
    assert kv.cpu is not None
    first, second = (make_sequences(13)[0] for _ in range(2))
    run_prompt(kv, first)
    keys, blocks = first.blocks.keys, first.blocks.ids
    kv.release(first)
    for key, block in zip(keys, blocks, strict=False):
        kv.cpu.save_block(key, block)
    kv.take_copies(0)
    kv.acknowledge(0)
    # The second of three is left on the device.
    for block in (blocks[0], blocks[2]):
        kv.device.forget_block(block)
    assert admit(kv, second, num_tokens=13)
    _, restores = kv.take_copies(1)
    assert [copy.target for copy in restores] == [second.blocks.ids[0], second.blocks.ids[2]]
    assert second.blocks.ids[1] == blocks[1]
    assert len(second.blocks.ids) == 3
    assert kv.device.find_block(keys[1]) == blocks[1]


BLOCK_SIZE = 2
NUM_BLOCKS = 12


class WatchedTier(DeviceTier):
    """Counts look-ups."""

    __slots__ = ("num_lookups",)

    def __init__(self, kv: KvManager) -> None:
        save, num_blocks = kv.cpu.save_block, kv.pool.num_blocks
        super().__init__(b"key", num_blocks=num_blocks, is_enabled=True, save=save)
        self.num_lookups = 0

    def find_block(self, key: BlockKey) -> int | None:
        self.num_lookups += 1
        return super().find_block(key)

    def find_prefix(
        self,
        keys: list[BlockKey],
        root: bytes,
        token_ids: array[int],
        *,
        num_blocks: int,
        block_size: int,
    ) -> list[int]:
        self.num_lookups += 1
        return super().find_prefix(
            keys, root, token_ids, num_blocks=num_blocks, block_size=block_size
        )


def make_watched_manager(*windows: int | None) -> tuple[KvManager, WatchedTier]:
    options = KvOptions(
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS * max(len(windows), 1),
        num_cpu_blocks=8,
        enable_cpu_prefix_cache=False,
        windows=windows or (None,),
    )
    kv = KvManager(options, costs=None, limits=StepLimits(max_num_batched_tokens=100))
    device = WatchedTier(kv)
    kv.device, kv.pool = device, device.pool
    kv.prefixes = PrefixCache(
        kv.groups, device, kv.cpu, None, block_size=BLOCK_SIZE, grid=BLOCK_SIZE
    )
    return kv, device


def make_sequence(token_ids: tuple[int, ...]) -> Sequence:
    return make_active(make_request("r", token_ids, max_tokens=99)).sequences[0]


def compute(kv: KvManager, sequence: Sequence) -> None:
    """Take all known tokens of an admitted sequence as computed."""
    sequence.blocks.extend(len(sequence.token_ids), kv.block_size, kv.groups.num_groups)
    sequence.num_computed = len(sequence.token_ids)
    kv.prefixes.register_blocks(sequence)


def has_room(kv: KvManager, sequence: Sequence, *, num_tokens: int, num_spare: int) -> bool:
    """Return whether a sequence can be admitted, by looking up its whole prefix."""
    cache = kv.device
    if kv.groups.has_windows:
        # Without what is known of the last failure.
        unknown = make_sequence(tuple(sequence.token_ids))
        prefix = kv.prefixes.find_blocks(unknown, (len(sequence.token_ids) - 1) // BLOCK_SIZE)
        num_shared = sum(block >= 0 and block not in kv.pool.idle_blocks for block in prefix.table)
        return kv.groups.blocks_for(num_tokens) - num_shared + num_spare <= kv.pool.num_free
    parent, num_shared = cache.root(""), 0
    for first in range(0, len(sequence.token_ids) - BLOCK_SIZE, BLOCK_SIZE):
        key = cache.key_after(parent, sequence.token_ids[first : first + BLOCK_SIZE])
        block = cache.find_block(key)
        if block is None:
            break
        parent = key.digest
        num_shared += block not in kv.pool.idle_blocks
    return kv.groups.blocks_for(num_tokens) - num_shared + num_spare <= kv.pool.num_free


PROMPTS = [(1, 1, 2, 2, 3, 3, 4), (1, 1, 2, 2, 5, 5, 6, 6, 7), (1, 1, 8, 8), (9,) * 11]


@pytest.mark.parametrize("windows", [(), (None, 3)])
@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 3), st.integers(0, 3)), min_size=30, max_size=60
    )
)
def test_a_sequence_is_admitted_as_soon_as_there_is_room(
    windows: tuple[int | None, ...],
    events: list[tuple[int, int, int]],
) -> None:
    kv, _ = make_watched_manager(*windows)
    waiting = [make_sequence((*prompt, 0)) for prompt in PROMPTS]
    running: list[Sequence] = []
    for event, which, amount in events:
        if event < 3:
            # Others come, and compute the same prefixes.
            other = make_sequence(PROMPTS[which])
            if admit(kv, other, num_tokens=len(other.token_ids)):
                compute(kv, other)
                running.append(other)
        elif event < 5 and running:
            kv.release(running.pop(which % len(running)))
        elif event == 5 and running:
            kv.append(running[which % len(running)])
        elif event == 6 and running and amount == 0:
            kv.prefixes.forget_blocks(running[which % len(running)])
        elif event == 7 and running and kv.can_swap_out(running[-1]):
            # Its blocks are in transit until step 1 is acknowledged.
            swapped = running.pop()
            swap_out(kv, swapped, step=1)
            kv.release(swapped)
        elif event == 8:
            kv.acknowledge(1)
        for sequence in waiting:
            limits = {"num_tokens": len(sequence.token_ids), "num_spare": amount}
            expected = has_room(kv, sequence, **limits)
            assert bool(admit(kv, sequence, **limits)) == expected
            if expected:
                kv.release(sequence)


def test_a_waiting_sequence_looks_up_its_prefix_once() -> None:
    kv, cache = make_watched_manager()
    first = make_sequence((1,) * 9)
    assert admit(kv, first, num_tokens=9)
    compute(kv, first)
    kv.release(first)
    running = make_sequence((2,) * 15)
    assert admit(kv, running, num_tokens=15)
    waiting = make_sequence((1,) * 10)
    assert not admit(kv, waiting, num_tokens=10)
    num_lookups = cache.num_lookups
    assert num_lookups > 0
    for _ in range(5):
        assert not admit(kv, waiting, num_tokens=10)
    assert cache.num_lookups == num_lookups
    kv.release(running)
    assert admit(kv, waiting, num_tokens=10)


def test_a_waiting_sequence_finds_blocks_under_renewed_keys() -> None:
    kv, _ = make_watched_manager()
    bad, longer = make_sequence((1, 1, 2, 2, 3, 3, 4)), make_sequence((1, 1, 2, 2, 3, 3, 5, 5, 6))
    for sequence in (bad, longer):
        assert admit(kv, sequence, num_tokens=len(sequence.token_ids))
        compute(kv, sequence)
    waiting = make_sequence((1, 1, 2, 2, 3, 3, 5, 5, 7))
    kv.release(longer)
    kv.release(bad)
    assert not admit(kv, waiting, num_tokens=9, num_spare=9)
    # Three blocks are forgotten; of the fourth, which is not, only the key is renewed.
    kv.prefixes.forget_blocks(bad)
    again = make_sequence((1, 1, 2, 2, 3, 3, 5, 5, 6))
    assert admit(kv, again, num_tokens=9)
    compute(kv, again)
    assert admit(kv, waiting, num_tokens=9, num_spare=6)
