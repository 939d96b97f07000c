from array import array

from cluster.scheduling.blocks.prefix_cache import PrefixCache
from cluster.scheduling.kv_manager import KvManager
from cluster.scheduling.sequence import ActiveRequest, Sequence
from pagedray.batch import BlockCopy
from pagedray.request import Request, SamplingParams
from tests.scheduling.blocks.test_block_pool import state_of
from tests.scheduling.blocks.test_cpu_prefix_cache import make_cpu_cache

BLOCK_SIZE = 4


def make_manager(
    *,
    num_blocks: int = 8,
    num_cpu_blocks: int = 8,
    enable_prefix_cache: bool = True,
    has_cpu_cache: bool = False,
) -> KvManager:
    return KvManager(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        prefix_cache=PrefixCache(b"key", num_blocks=num_blocks, is_enabled=enable_prefix_cache),
        cpu_cache=make_cpu_cache(num_cpu_blocks) if has_cpu_cache else None,
    )


def make_sequences(num_tokens: int, *, n: int = 1, tenant: str = "") -> list[Sequence]:
    request = Request(
        id="r",
        prompt_token_ids=tuple(range(num_tokens)),
        sampling=SamplingParams(n=n),
        seed=0,
        tenant=tenant,
    )
    return ActiveRequest(
        request, prompt=array("I", request.prompt_token_ids), arrival=0, max_model_len=100
    ).sequences


def run_prompt(kv: KvManager, sequence: Sequence) -> None:
    """Admit a sequence and take its prompt as computed."""
    num_tokens = len(sequence.token_ids)
    assert kv.admit(sequence, num_tokens=num_tokens, num_spare=0)
    kv.extend(sequence, num_tokens)
    sequence.num_computed = num_tokens
    kv.registry.register_blocks(sequence)


def test_admitted_sequence_has_blocks_for_its_tokens() -> None:
    kv = make_manager()
    (sequence,) = make_sequences(9)
    assert kv.admit(sequence, num_tokens=9, num_spare=0)
    assert kv.pool.num_owned == 3
    assert len(kv.extend(sequence, 5)) == 2
    assert sequence.num_slots == 8
    assert len(kv.extend(sequence, 9)) == 1


def test_rejected_admission_changes_nothing() -> None:
    kv = make_manager(num_blocks=4)
    run_prompt(kv, make_sequences(8)[0])
    before = state_of(kv.pool)
    (sequence,) = make_sequences(17)
    assert not kv.admit(sequence, num_tokens=17, num_spare=0)
    assert state_of(kv.pool) == before
    assert sequence.block_ids == []


def test_spare_blocks_stay_free() -> None:
    kv = make_manager(num_blocks=4)
    (sequence,) = make_sequences(9)
    assert not kv.admit(sequence, num_tokens=9, num_spare=2)
    assert kv.admit(sequence, num_tokens=9, num_spare=1)


def test_hits_that_are_idle_count_as_taken() -> None:
    kv = make_manager(num_blocks=3)
    (first,) = make_sequences(9)
    run_prompt(kv, first)
    kv.release(first)
    (second,) = make_sequences(9)
    assert not kv.admit(second, num_tokens=13, num_spare=0)
    assert kv.admit(second, num_tokens=12, num_spare=0)


def test_known_prefix_is_not_computed_again() -> None:
    kv = make_manager()
    first, second = make_sequences(10)[0], make_sequences(10)[0]
    run_prompt(kv, first)
    assert kv.admit(second, num_tokens=10, num_spare=0)
    assert second.num_computed == 8
    assert second.block_ids == first.block_ids[:2]
    assert (kv.num_queried_tokens, kv.num_hit_tokens) == (20, 8)


def test_one_token_is_computed_though_all_are_known() -> None:
    kv = make_manager()
    first, second = make_sequences(8)[0], make_sequences(8)[0]
    run_prompt(kv, first)
    assert kv.admit(second, num_tokens=8, num_spare=0)
    assert second.num_computed == 4


def test_partial_block_is_not_shared() -> None:
    kv = make_manager()
    first, second = make_sequences(7)[0], make_sequences(9)[0]
    run_prompt(kv, first)
    assert kv.admit(second, num_tokens=9, num_spare=0)
    assert second.block_ids == first.block_ids[:1]


def test_prefix_of_another_tenant_is_not_known() -> None:
    kv = make_manager()
    run_prompt(kv, make_sequences(10)[0])
    (other,) = make_sequences(10, tenant="other")
    assert kv.admit(other, num_tokens=10, num_spare=0)
    assert other.num_computed == 0


def test_prefix_outlives_its_sequence_until_the_block_is_needed() -> None:
    kv = make_manager(num_blocks=3)
    (first,) = make_sequences(9)
    run_prompt(kv, first)
    kv.release(first)
    assert (kv.pool.num_free, kv.pool.num_idle) == (3, 2)
    for _ in range(3):
        kv.pool.allocate()
    assert len(kv.prefix_cache) == 0


def test_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    kv = make_manager(num_blocks=2)
    (first,) = make_sequences(8)
    run_prompt(kv, first)
    blocks = list(first.block_ids)
    kv.release(first)
    assert kv.pool.allocate() == blocks[1]


def test_forgotten_sequence_leaves_no_prefix() -> None:
    kv = make_manager()
    first, second = make_sequences(9)[0], make_sequences(9)[0]
    run_prompt(kv, first)
    kv.registry.forget_blocks(first)
    kv.release(first)
    assert kv.pool.num_idle == 0
    assert kv.admit(second, num_tokens=9, num_spare=0)
    assert second.num_computed == 0


def test_nothing_is_hashed_without_a_prefix_cache() -> None:
    kv = make_manager(enable_prefix_cache=False)
    (sequence,) = make_sequences(9)
    run_prompt(kv, sequence)
    kv.release(sequence)
    assert sequence.keys == []
    assert kv.pool.num_idle == 0


def test_fork_shares_full_blocks_and_copies_the_last() -> None:
    kv = make_manager()
    first, second = make_sequences(10, n=2)
    run_prompt(kv, first)
    copies = kv.fork(second, first, num_tokens=10, num_spare=0)
    assert copies == [BlockCopy(first.block_ids[2], second.block_ids[2])]
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert second.num_computed == 9


def test_fork_copies_a_full_last_block_because_its_last_slot_is_written() -> None:
    kv = make_manager()
    first, second = make_sequences(8, n=2)
    run_prompt(kv, first)
    copies = kv.fork(second, first, num_tokens=8, num_spare=0)
    assert copies == [BlockCopy(first.block_ids[1], second.block_ids[1])]


def test_fork_copies_nothing_if_the_last_block_has_one_token() -> None:
    kv = make_manager()
    first, second = make_sequences(9, n=2)
    run_prompt(kv, first)
    assert kv.fork(second, first, num_tokens=9, num_spare=0) == []
    assert second.block_ids[2] != first.block_ids[2]


def test_rejected_fork_changes_nothing() -> None:
    kv = make_manager(num_blocks=3)
    first, second = make_sequences(10, n=2)
    run_prompt(kv, first)
    before = state_of(kv.pool)
    assert kv.fork(second, first, num_tokens=10, num_spare=0) is None
    assert state_of(kv.pool) == before


def test_swapped_out_blocks_are_free_once_the_step_is_acknowledged() -> None:
    kv = make_manager(enable_prefix_cache=False)
    (sequence,) = make_sequences(10)
    run_prompt(kv, sequence)
    copies = kv.swap_out(sequence, step=5)
    assert [copy.target for copy in copies] == sequence.cpu_block_ids
    assert (kv.pool.num_free, kv.pool.num_in_transit) == (5, 3)
    kv.acknowledge(4)
    assert kv.pool.num_in_transit == 3
    kv.acknowledge(5)
    assert (kv.pool.num_free, kv.pool.num_in_transit) == (8, 0)


def test_swap_out_copies_only_blocks_without_another_owner() -> None:
    kv = make_manager()
    first, second = make_sequences(10)[0], make_sequences(10)[0]
    run_prompt(kv, first)
    run_prompt(kv, second)
    assert len(kv.swap_out(second, step=0)) == 1
    kv.release(first)
    assert kv.pool.num_in_transit == 1
    kv.acknowledge(0)
    assert kv.pool.num_free == 8


def test_shared_blocks_are_found_again_when_a_sequence_returns() -> None:
    kv = make_manager()
    first, second = make_sequences(10)[0], make_sequences(10)[0]
    run_prompt(kv, first)
    run_prompt(kv, second)
    outs = kv.swap_out(second, step=0)
    kv.acknowledge(0)
    ins = kv.swap_in(second, 1, num_tokens=10, num_spare=0)
    assert ins is not None
    assert [copy.source for copy in ins] == [copy.target for copy in outs]
    assert second.block_ids == [*first.block_ids[:2], ins[0].target]
    assert second.num_computed == 10


def test_a_sequence_whose_shared_blocks_were_evicted_loses_the_others_too() -> None:
    kv = make_manager()
    first, second = make_sequences(10)[0], make_sequences(10)[0]
    run_prompt(kv, first)
    run_prompt(kv, second)
    kv.swap_out(second, step=0)
    kv.acknowledge(0)
    kv.release(first)
    for block in [kv.pool.allocate() for _ in range(8)]:
        kv.pool.release(block)
    assert kv.swap_in(second, 1, num_tokens=10, num_spare=0) is None
    assert second.cpu_block_ids == []
    assert kv.cpu_pool.num_free == 8


def test_blocks_that_are_still_cached_are_not_copied_back() -> None:
    kv = make_manager()
    (sequence,) = make_sequences(10)
    run_prompt(kv, sequence)
    blocks = sequence.block_ids
    assert len(kv.swap_out(sequence, step=0)) == 3
    kv.acknowledge(0)
    ins = kv.swap_in(sequence, 1, num_tokens=10, num_spare=0)
    assert ins is not None
    assert len(ins) == 1
    assert sequence.block_ids[:2] == blocks[:2]
    # The blocks that were not needed are free at once.
    assert kv.cpu_pool.num_free == 7


def test_swapped_in_blocks_hold_what_was_swapped_out() -> None:
    kv = make_manager(enable_prefix_cache=False)
    (sequence,) = make_sequences(10)
    run_prompt(kv, sequence)
    outs = kv.swap_out(sequence, step=0)
    kv.acknowledge(0)
    ins = kv.swap_in(sequence, 1, num_tokens=10, num_spare=0)
    assert ins is not None
    assert [copy.source for copy in ins] == [copy.target for copy in outs]
    assert [copy.target for copy in ins] == sequence.block_ids
    assert kv.cpu_pool.num_in_transit == 3
    kv.acknowledge(1)
    assert kv.cpu_pool.num_free == 8


def test_swapped_in_prefix_is_known_again() -> None:
    kv = make_manager(num_blocks=4)
    first, second = make_sequences(10)[0], make_sequences(10)[0]
    run_prompt(kv, first)
    kv.swap_out(first, step=0)
    kv.acknowledge(0)
    for block in [kv.pool.allocate() for _ in range(4)]:
        kv.pool.release(block)
    kv.swap_in(first, 1, num_tokens=10, num_spare=0)
    kv.acknowledge(1)
    kv.registry.register_blocks(first)
    assert kv.admit(second, num_tokens=10, num_spare=0)
    assert second.block_ids == first.block_ids[:2]


def test_rejected_swap_in_changes_nothing() -> None:
    kv = make_manager(num_blocks=3)
    (sequence,) = make_sequences(10)
    run_prompt(kv, sequence)
    kv.swap_out(sequence, step=0)
    before = state_of(kv.pool), state_of(kv.cpu_pool)
    assert kv.swap_in(sequence, 1, num_tokens=10, num_spare=0) is None
    assert (state_of(kv.pool), state_of(kv.cpu_pool)) == before


def test_released_sequence_leaves_blocks_that_are_still_copied_in_transit() -> None:
    kv = make_manager()
    (sequence,) = make_sequences(10)
    run_prompt(kv, sequence)
    kv.swap_out(sequence, step=0)
    kv.release(sequence)
    assert kv.cpu_pool.num_in_transit == 3
    kv.acknowledge(0)
    assert kv.cpu_pool.num_free == 8


def test_sequence_larger_than_the_cpu_pool_is_not_swapped() -> None:
    kv = make_manager(num_cpu_blocks=2)
    (sequence,) = make_sequences(10)
    run_prompt(kv, sequence)
    assert not kv.can_swap_out(sequence)


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
    kv.registry.prove_blocks(sequence)
    kv.release(sequence)
    return evict_all(kv, 0)


def test_evicted_prefix_is_copied_back() -> None:
    kv = make_manager(has_cpu_cache=True)
    evictions = run_and_evict(kv, make_sequences(10)[0])
    (second,) = make_sequences(10)
    assert kv.admit(second, num_tokens=10, num_spare=0)
    assert second.awaits_copies
    assert second.num_computed == 8
    _, restores = kv.take_copies(1)
    assert {copy.source for copy in restores} == {copy.target for copy in evictions}
    assert [copy.target for copy in restores] == second.block_ids[:2]
    # Its beginning was evicted last.
    assert [copy.source for copy in restores] == [copy.target for copy in reversed(evictions)]


def test_blocks_on_their_way_back_are_shared_and_awaited() -> None:
    kv = make_manager(has_cpu_cache=True)
    run_and_evict(kv, make_sequences(10)[0])
    second, third, fourth = (make_sequences(10)[0] for _ in range(3))
    assert kv.admit(second, num_tokens=10, num_spare=0)
    kv.take_copies(1)
    assert kv.admit(third, num_tokens=10, num_spare=0)
    assert third.awaits_copies
    assert third.block_ids == second.block_ids
    assert kv.take_copies(2) == ([], [])
    kv.acknowledge(1)
    assert kv.admit(fourth, num_tokens=10, num_spare=0)
    assert not fourth.awaits_copies


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
    kv.registry.forget_blocks(first)
    (second,) = make_sequences(10)
    assert kv.admit(second, num_tokens=10, num_spare=0)
    assert second.num_computed == 0
    assert kv.cpu_pool.num_idle == 0


def test_prefix_of_another_tenant_is_not_copied_back() -> None:
    kv = make_manager(has_cpu_cache=True)
    run_and_evict(kv, make_sequences(10)[0])
    (other,) = make_sequences(10, tenant="other")
    assert kv.admit(other, num_tokens=10, num_spare=0)
    assert (other.num_computed, other.awaits_copies) == (0, False)


def test_a_preempted_sequence_takes_the_place_of_cached_blocks() -> None:
    kv = make_manager(num_cpu_blocks=3, has_cpu_cache=True)
    run_and_evict(kv, make_sequences(12)[0])
    assert (kv.cpu_pool.num_free, kv.cpu_pool.num_idle) == (3, 3)
    (running,) = make_sequences(10, tenant="other")
    run_prompt(kv, running)
    assert kv.can_swap_out(running)
    assert len(kv.swap_out(running, step=1)) == 3
    assert kv.cpu_pool.num_idle == 0
    (second,) = make_sequences(12)
    assert kv.admit(second, num_tokens=12, num_spare=0)
    assert second.num_computed == 0


def test_blocks_that_are_copied_back_do_not_lose_their_place_meanwhile() -> None:
    kv = make_manager(num_blocks=3, num_cpu_blocks=4, has_cpu_cache=True)
    run_and_evict(kv, make_sequences(10)[0])
    (other,) = make_sequences(10, tenant="other")
    run_prompt(kv, other)
    other.token_ids = other.token_ids + array("I", [0])
    kv.registry.prove_blocks(other)
    kv.release(other)
    kv.take_copies(1)
    kv.acknowledge(1)
    # The blocks of the other one are evicted for it in the same plan.
    (second,) = make_sequences(10)
    assert kv.admit(second, num_tokens=10, num_spare=0)
    evictions, restores = kv.take_copies(2)
    assert len(evictions) == len(restores) == 2
    assert not {copy.target for copy in evictions} & {copy.source for copy in restores}


def test_no_block_is_copied_back_that_the_device_has_behind_a_missing_one() -> None:
    kv = make_manager(has_cpu_cache=True)
    assert kv.cpu_cache is not None
    first, second = (make_sequences(13)[0] for _ in range(2))
    run_prompt(kv, first)
    keys, blocks = first.keys, first.block_ids
    kv.release(first)
    for key, block in zip(keys, blocks, strict=False):
        kv.cpu_cache.save_block(key, block)
    kv.take_copies(0)
    kv.acknowledge(0)
    # The second of three is left on the device.
    for block in (blocks[0], blocks[2]):
        kv.prefix_cache.forget_block(block)
        kv.pool.discard(block)
    assert kv.admit(second, num_tokens=13, num_spare=0)
    _, restores = kv.take_copies(1)
    assert [copy.target for copy in restores] == second.block_ids
    assert len(second.block_ids) == 1
    assert kv.prefix_cache.find_block(keys[1]) == blocks[1]
