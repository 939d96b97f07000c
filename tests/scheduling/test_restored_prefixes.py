"""Prefixes that were evicted to the CPU pool are copied back to the device."""

from array import array

from cluster.scheduling.kv_manager import Admitted, KvManager
from cluster.scheduling.sequence import Sequence
from pagedray.batch import BlockCopy
from tests.scheduling.kv_sequences import (
    admit,
    make_manager,
    make_sequences,
    run_prompt,
    swap_out,
)


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
    kv.mark_verified(sequence)
    kv.release(sequence)
    return evict_all(kv, 0)


def test_evicted_prefix_is_copied_back() -> None:
    kv = make_manager(has_cpu_cache=True)
    evictions = run_and_evict(kv, make_sequences(10)[0])
    (second,) = make_sequences(10)
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
    kv.forget_blocks(first)
    (second,) = make_sequences(10)
    assert admit(kv, second, num_tokens=10)
    assert second.num_computed == 0
    assert kv.cpu_pool.num_idle == 0


def test_prefix_of_another_tenant_is_not_copied_back() -> None:
    kv = make_manager(has_cpu_cache=True)
    run_and_evict(kv, make_sequences(10)[0])
    (other,) = make_sequences(10, tenant="other")
    assert admit(kv, other, num_tokens=10) == Admitted()
    assert other.num_computed == 0


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
    kv.mark_verified(other)
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
    assert [copy.target for copy in restores] == list(second.blocks.ids)
    assert len(second.blocks.ids) == 1
    assert kv.device.find_block(keys[1]) == blocks[1]
