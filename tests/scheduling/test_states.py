"""Recurrent states: snapshots at few positions, which hits need, and which copies bring to rows.

The worker checks that a row has taken in each token exactly once.
"""

from __future__ import annotations

import random
from itertools import islice
from typing import TYPE_CHECKING

import pytest

from bench.scheduler.reused_tokens import ConversationLoad, part_reused
from cluster.scheduling.device_tier import group_key, state_key
from pagedray.errors import CapacityError
from pagedray.request import FinishReason
from tests.scheduling.harness import Harness
from tests.slow_params import some_slow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.scheduling.states import StateCopier
    from pagedray.config import Preemption

GRID = 64


def make_harness(
    *,
    num_blocks: int = 200,
    num_cpu_blocks: int = 0,
    num_disk_blocks: int = 0,
    budget: int = 1000,
    max_num_seqs: int = 8,
    preemption: Preemption = "auto",
    windows: tuple[int | None, ...] = (None,),
    enable_prefix_cache: bool = True,
    state_blocks: int = 3,
) -> Harness:
    return Harness(
        block_size=16,
        num_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        num_disk_blocks=num_disk_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=2000,
        preemption=preemption,
        windows=windows,
        enable_prefix_cache=enable_prefix_cache,
        state_blocks=state_blocks,
        state_grid=GRID,
    )


def states_of(harness: Harness) -> StateCopier:
    states = harness.scheduler._kv.states
    assert states is not None
    return states


def tokens(seed: int, number: int) -> list[int]:
    draws = random.Random(seed)
    return [draws.randint(4, 10) for _ in range(number)]


def run(harness: Harness, prompt: Sequence[int], *, max_tokens: int = 1, **options: str) -> int:
    """Run a request to its end; return how many tokens of its prompt were cached."""
    name = harness.add(prompt, max_tokens=max_tokens, **options)  # type: ignore[arg-type]
    while harness.scheduler.has_work:
        harness.turn()
    harness.settle()
    return next(one.num_cached_tokens for one in harness.results.events if one.request_id == name)


def chunk_ends(harness: Harness) -> list[int]:
    return [one.first_position + one.num_tokens for plan in harness.plans for one in plan.chunks]


def saved_positions(harness: Harness) -> list[int]:
    return [save.position for plan in harness.plans for save in plan.saves]


def output_of(harness: Harness, number: int) -> list[int]:
    return harness.results.tokens[f"request-{number}", 0]


def test_a_prompt_that_comes_again_is_found_up_to_its_last_snapshot() -> None:
    harness, prompt = make_harness(), tokens(1, 300)
    assert run(harness, prompt) == 0
    assert run(harness, prompt) == 256
    assert run(harness, tokens(1, 256)) == 0
    assert states_of(harness).num_loaded == 1


def test_prompts_with_a_common_beginning_find_its_branch_point_from_the_third_on() -> None:
    harness, shared = make_harness(), tokens(1, 100)
    cached = [run(harness, shared + tokens(seed, 200)) for seed in range(2, 6)]
    assert cached == [0, 0, 64, 64]
    # The second saw 96 cached tokens, the third computed 32 of them again.
    assert states_of(harness).num_unreused_tokens == 96 + 32 + 32


def test_a_branch_point_that_saves_few_tokens_is_not_kept() -> None:
    # A snapshot takes the blocks of 2 048 tokens, and must save 128.
    harness = make_harness(num_blocks=2000, state_blocks=128)
    for num_shared, num_found in ((120, 0), (130, 128)):
        shared = tokens(num_shared, num_shared)
        cached = [run(harness, shared + tokens(seed, 200)) for seed in range(3)]
        assert cached == [0, 0, num_found]


def test_prompts_wait_for_the_branch_point_that_another_is_about_to_keep() -> None:
    harness, shared = make_harness(budget=256), tokens(1, 100)
    for seed in range(6):
        harness.add(shared + tokens(10 + seed, 200), max_tokens=1)
    harness.drain()
    found = [one.num_cached_tokens for one in harness.results.events if one.token_ids]
    # The first has no prefix to find, and the second keeps the branch point.
    assert sorted(found) == [0, 0, 64, 64, 64, 64]


def test_no_prompt_waits_for_a_sequence_that_has_ended() -> None:
    harness, shared = make_harness(budget=100), tokens(1, 100)
    names = [harness.add(shared + tokens(10 + seed, 200), max_tokens=1) for seed in range(3)]
    while not states_of(harness).is_pending:
        harness.turn()
    harness.abort(names[0])
    harness.abort(names[1])
    assert not states_of(harness).is_pending
    harness.drain()


def test_prompts_with_an_anchor_find_it_from_the_second_on() -> None:
    harness, system = make_harness(), tokens(1, 200)
    names = [harness.add(system + tokens(seed, 90), anchors=(200, 285)) for seed in (2, 3)]
    harness.drain()
    found = {one.request_id: one.num_cached_tokens for one in harness.results.events}
    assert [found[name] for name in names] == [0, 0]
    assert run(harness, system + tokens(4, 90)) == 192


@pytest.mark.parametrize("num_generated", [1, 60, 100, 128, 200, 300])
def test_the_end_of_a_sequence_is_found_within_127_tokens(num_generated: int) -> None:
    harness, prompt = make_harness(), tokens(1, 70)
    run(harness, prompt, max_tokens=num_generated)
    conversation = prompt + output_of(harness, 0)
    cached = run(harness, conversation + tokens(2, 20))
    # The last token is never computed.
    assert len(conversation) - 1 - cached <= 127


def test_a_running_sequence_keeps_only_its_last_snapshot() -> None:
    harness = make_harness()
    run(harness, tokens(1, 70), max_tokens=320)
    kv = harness.scheduler._kv
    # Of the prompt one, and the last of those at 128, 256 and 384.
    num_table = 389 // 16
    assert kv.pool.num_idle == num_table + 2 * 3


def test_a_conversation_that_repeats_its_output_keeps_no_end_of_its_prompts() -> None:
    harness, conversation = make_harness(), tokens(1, 130)
    for turn in range(4):
        cached = run(harness, conversation, max_tokens=200)
        if turn:
            assert len(conversation) - 30 - cached <= 128
        conversation += output_of(harness, turn) + tokens(10 + turn, 30)
    kv, keys = harness.scheduler._kv, harness.sequences[3].blocks.keys
    found = [
        index + 1
        for index, key in enumerate(keys)
        if kv.device.find_block(state_key(key, 0)) is not None
    ]
    # The end of the first prompt, and of each output.
    assert [16 * one for one in found][:1] == [128]
    assert len(found) == 5


def test_short_outputs_are_kept_once_a_turn_has_repeated_its_output() -> None:
    # In the first turn, a snapshot must be 136 tokens behind that of the prompt.
    harness, conversation = make_harness(num_blocks=1000, state_blocks=136), tokens(1, 130)
    num_unreused = []
    for turn in range(3):
        num_unreused.append(len(conversation) - run(harness, conversation, max_tokens=140))
        conversation += output_of(harness, turn) + tokens(10 + turn, 30)
    assert num_unreused[1] == 130 + 140 + 30 - 128
    assert num_unreused[2] <= 30 + 128


def test_a_conversation_that_drops_its_output_makes_no_snapshots_while_it_decodes() -> None:
    harness, conversation = make_harness(), tokens(1, 130)
    for turn in range(3):
        num_saved = states_of(harness).num_saved
        cached = run(harness, conversation, max_tokens=300)
        # The first turn makes one at the end of its prompt, and others while it decodes.
        assert states_of(harness).num_saved - num_saved == (1 if turn else 3)
        assert cached == max(0, len(conversation) - 131) // 64 * 64
        conversation += tokens(10 + turn, 130)


def test_a_snapshot_that_only_the_next_turn_needed_is_evicted_first() -> None:
    harness, prompt = make_harness(), tokens(1, 300)
    run(harness, prompt)
    kv, keys = harness.scheduler._kv, harness.sequences[0].blocks.keys
    snapshot = [kv.device.find_block(state_key(keys[15], part)) for part in range(3)]
    run(harness, prompt + tokens(2, 100))
    # A prefix is found quickly not to have a snapshot without its first part.
    assert list(islice(kv.pool.idle_blocks, 3)) == snapshot


@pytest.mark.parametrize("repeats_output", [True, False])
def test_both_ends_of_a_turn_are_evicted_first_after_the_next(*, repeats_output: bool) -> None:
    harness, prompt = make_harness(), tokens(1, 130)
    run(harness, prompt, max_tokens=150)
    output = output_of(harness, 0)
    kv, keys = harness.scheduler._kv, harness.sequences[0].blocks.keys
    ends = {
        kv.device.find_block(state_key(keys[index], part)) for index in (7, 15) for part in range(3)
    }
    assert None not in ends
    next_prompt = prompt + (output if repeats_output else []) + tokens(2, 200)
    assert run(harness, next_prompt) == (256 if repeats_output else 128)
    assert set(islice(kv.pool.idle_blocks, 6)) == ends


def test_a_snapshot_that_two_continued_is_kept() -> None:
    harness, prompt = make_harness(), tokens(1, 300)
    run(harness, prompt)
    for seed in (2, 3):
        harness.add(prompt + tokens(seed, 100), max_tokens=1)
    harness.drain()
    kv, keys = harness.scheduler._kv, harness.sequences[0].blocks.keys
    snapshot = {kv.device.find_block(state_key(keys[15], part)) for part in range(3)}
    assert states_of(harness).num_loaded == 2
    assert snapshot.isdisjoint(islice(kv.pool.idle_blocks, 2))


@pytest.mark.parametrize("is_snapshot", [True, False])
def test_without_its_snapshot_or_a_block_a_prefix_is_not_found(*, is_snapshot: bool) -> None:
    harness, prompt = make_harness(), tokens(1, 300)
    run(harness, prompt)
    kv = harness.scheduler._kv
    keys = harness.sequences[0].blocks.keys
    key = state_key(keys[15], 1) if is_snapshot else group_key(keys[3], 0)
    block = kv.device.find_block(key)
    assert block is not None
    kv.device.forget_block(block)
    assert run(harness, prompt) == 0
    # It was computed again.
    assert run(harness, prompt) == 256


def test_a_snapshot_comes_back_from_the_cpu_pool() -> None:
    harness = make_harness(num_blocks=40, num_cpu_blocks=100, preemption="swap")
    prompt = tokens(1, 300)
    run(harness, prompt)
    for seed in (2, 3):
        run(harness, tokens(seed, 560))
    assert run(harness, prompt) == 256
    assert states_of(harness).num_loaded == 1
    assert harness.scheduler.stats().num_restored_blocks == 16 + 3


def test_a_longer_prefix_in_the_cpu_pool_replaces_a_shorter_prefix_on_the_device() -> None:
    harness = make_harness(num_blocks=40, num_cpu_blocks=100, preemption="swap")
    prompt = tokens(1, 300)
    harness.add(prompt, anchors=(64, 300), max_tokens=1)
    harness.drain()
    assert run(harness, prompt[:70]) == 64
    run(harness, tokens(2, 400))
    kv, keys = harness.scheduler._kv, harness.sequences[0].blocks.keys
    assert kv.device.find_block(state_key(keys[3], 0)) is not None
    assert kv.device.find_block(state_key(keys[15], 0)) is None
    assert run(harness, prompt) == 256
    harness.check_end()


def test_a_snapshot_comes_back_from_the_cpu_pool_of_a_rank_that_died() -> None:
    harness = make_harness(num_blocks=40, num_cpu_blocks=100, preemption="swap")
    prompt = tokens(1, 300)
    run(harness, prompt)
    for seed in (2, 3):
        run(harness, tokens(seed, 560))
    harness.replace_worker(keeps_cpu_pool=True)
    assert run(harness, prompt) == 256


def test_a_snapshot_comes_back_from_the_disk() -> None:
    harness = make_harness(
        num_blocks=40, num_cpu_blocks=80, num_disk_blocks=400, budget=64, preemption="swap"
    )
    prompt = tokens(1, 300)
    run(harness, prompt)
    for seed in range(2, 8):
        run(harness, tokens(seed, 560))
    assert harness.scheduler._kv.cpu.find_block(harness.sequences[0].blocks.keys[0]) is None
    assert run(harness, prompt) == 256
    assert harness.scheduler.stats().num_read_blocks >= 16


def test_tenants_do_not_find_snapshots_of_each_other() -> None:
    harness, prompt = make_harness(), tokens(1, 300)
    run(harness, prompt)
    assert run(harness, prompt, tenant="other") == 0


@pytest.mark.parametrize("budget", [64, 128, 100, 37])
def test_chunks_end_on_the_grid_if_the_budget_allows_it(budget: int) -> None:
    harness = make_harness(budget=budget)
    run(harness, tokens(1, 500))
    ends = [end for end in chunk_ends(harness) if end < 500]
    assert 448 in (*ends, *saved_positions(harness))
    assert budget < 64 or all(end % 64 == 0 for end in ends)


def test_a_prompt_with_snapshots_takes_one_step() -> None:
    harness, prompt = make_harness(), tokens(1, 500)
    harness.add(prompt, anchors=(200, 300, 490), max_tokens=1)
    harness.drain()
    assert chunk_ends(harness) == [500]
    assert saved_positions(harness) == [192, 256, 448]
    assert [run(harness, prompt[:end]) for end in (200, 300, 490)] == [192, 256, 448]


def test_prompts_without_a_spare_state_end_at_their_snapshots() -> None:
    harness = make_harness(num_blocks=400, max_num_seqs=16, budget=2000)
    prompts = [tokens(seed, 100) for seed in range(10)]
    for prompt in prompts:
        harness.add(prompt, max_tokens=1)
    harness.drain()
    assert sorted(chunk_ends(harness)) == [64] * 2 + [100] * 10
    assert saved_positions(harness) == [64] * 8
    assert [run(harness, prompt) for prompt in prompts] == [64] * 10


def test_a_chunk_that_begins_off_the_grid_ends_at_its_snapshot() -> None:
    harness, prompt = make_harness(budget=37), tokens(1, 100)
    assert run(harness, prompt) == 0
    assert chunk_ends(harness) == [37, 64, 100]
    assert run(harness, prompt) == 64


@pytest.mark.parametrize("state_blocks", [0, 3])
def test_prompts_that_find_too_few_tokens_left_begin_on_the_grid(state_blocks: int) -> None:
    harness = make_harness(budget=340, state_blocks=state_blocks)
    for seed in range(2):
        harness.add(tokens(seed, 300), max_tokens=1)
    harness.add(tokens(2, 40), max_tokens=1)
    harness.drain()
    plans = [[one.num_tokens for one in plan.chunks] for plan in harness.plans]
    assert [one for one in plans if one] == (
        [[300], [300, 40]] if state_blocks else [[300, 40], [260, 40]]
    )


@pytest.mark.parametrize("num_tokens", [64, 65, 128])
def test_a_snapshot_at_the_end_of_a_chunk_needs_no_spare_state(num_tokens: int) -> None:
    harness, prompt = make_harness(budget=64), tokens(1, num_tokens)
    harness.add(prompt, anchors=(64,), max_tokens=5)
    harness.drain()
    assert saved_positions(harness) == []
    assert run(harness, [*prompt[:64], 5]) == 64


def test_long_prompts_have_snapshots_at_long_distances() -> None:
    harness = Harness(
        block_size=1,
        num_blocks=1400,
        max_num_batched_tokens=2000,
        max_model_len=1300,
        state_blocks=1,
        state_grid=4,
    )
    run(harness, tokens(2, 10))
    run(harness, tokens(1, 1200))
    assert saved_positions(harness) == [8, 512, 1024, 1196]
    assert states_of(harness).num_saved == 4
    kv, keys = harness.scheduler._kv, harness.sequences[1].blocks.keys
    assert next(iter(kv.pool.idle_blocks)) == kv.device.find_block(state_key(keys[511], 0))


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("position", [1, 63, 64, 65, 128, 200])
def test_a_preempted_sequence_takes_in_every_token_once(
    preemption: Preemption, position: int
) -> None:
    harness = make_harness(num_cpu_blocks=200, preemption=preemption, max_num_seqs=1)
    harness.add(tokens(1, max(1, position - 15)), max_tokens=60, priority=1)
    while harness.sequences[0].num_computed < position:
        harness.turn()
    # It takes the only row.
    harness.add(tokens(2, 100), max_tokens=3)
    harness.drain()
    assert harness.sequences[0].num_preemptions == 1
    stats = harness.scheduler.stats()
    assert stats.num_swap_preemptions == (preemption == "swap")


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_prompt_that_is_preempted_between_chunks_continues(preemption: Preemption) -> None:
    harness = make_harness(num_cpu_blocks=200, preemption=preemption, max_num_seqs=1, budget=100)
    harness.add(tokens(1, 700), max_tokens=3, priority=1)
    while harness.sequences[0].num_computed < 250:
        harness.turn()
    harness.add(tokens(2, 100), max_tokens=3)
    harness.drain()
    assert harness.sequences[0].num_preemptions == 1


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 200])
def test_siblings_start_from_the_last_snapshot_before_the_last_token(num_tokens: int) -> None:
    harness = make_harness()
    harness.add(tokens(1, num_tokens), n=3, max_tokens=20)
    harness.drain()
    assert states_of(harness).num_loaded == 2 * (num_tokens > GRID)
    starts = [start for plan in harness.plans for start in plan.starts]
    assert [start.donor_row for start in starts] == [-1] * 3


def test_siblings_keep_the_ends_of_their_outputs() -> None:
    harness, prompt = make_harness(), tokens(1, 130)
    harness.add(prompt, n=2, max_tokens=140)
    harness.drain()
    for index in range(2):
        output = harness.results.tokens["request-0", index]
        assert run(harness, prompt + output + [4]) == 256


def test_siblings_compute_the_prompt_without_a_prefix_cache() -> None:
    harness = make_harness(enable_prefix_cache=False)
    harness.add(tokens(1, 200), n=3, max_tokens=200)
    harness.drain()
    assert not any(plan.copies for plan in harness.plans)


def test_a_masked_sequence_runs_only_once_its_mask_is_made() -> None:
    harness = make_harness()
    harness.masks.lateness = 0.7
    harness.add(tokens(1, 100), n=2, max_tokens=20, is_masked=True, seed=0)
    harness.add(tokens(2, 100), max_tokens=20, is_masked=True, seed=1)
    harness.add(tokens(3, 100), max_tokens=20)
    for _ in range(80):
        harness.turn()
    assert harness.num_late == 0
    harness.drain()


@pytest.mark.parametrize("is_evicted", [False, True])
def test_snapshots_of_values_that_are_not_finite_are_forgotten(*, is_evicted: bool) -> None:
    harness, prompt = make_harness(num_blocks=60, num_cpu_blocks=100), tokens(1, 300)
    kv = harness.scheduler._kv
    if is_evicted:
        run(harness, prompt)
        run(harness, tokens(2, 900))
        assert len(kv.cpu)
    harness.add(prompt, max_tokens=5, bad_position=300)
    harness.drain()
    name, sequence = f"request-{2 * is_evicted}", harness.sequences[-1]
    assert harness.results.reasons[name, 0] is FinishReason.ERROR
    parts = [state_key(key, part) for key in sequence.blocks.keys for part in range(3)]
    assert not any(kv.cpu.has_key(key) or kv.device.find_block(key) is not None for key in parts)
    assert run(harness, prompt) == 0


def test_a_snapshot_that_a_sequence_waits_to_load_is_not_replaced_under_it() -> None:
    # A sequence that starts from the last snapshot of another that still runs.
    harness = make_harness()
    harness.add(tokens(1, 70), max_tokens=400)
    while harness.sequences[0].num_computed < 256:
        harness.turn()
    conversation = harness.sequences[0].token_ids.tolist()[:257]
    harness.add(conversation, max_tokens=3)
    while harness.sequences[0].num_computed < 390:
        harness.turn()
    harness.drain()
    assert states_of(harness).num_loaded == 1


def test_more_sequences_than_fit_wait_and_all_end() -> None:
    harness = make_harness(num_blocks=40, max_num_seqs=8)
    for seed in range(10):
        harness.add(tokens(seed % 4, 100 + 20 * (seed % 5)), max_tokens=50)
    harness.drain()


def test_a_request_that_leaves_no_room_for_its_state_is_rejected() -> None:
    harness = make_harness(num_blocks=10)
    with pytest.raises(CapacityError):
        harness.add([5] * 100, max_tokens=20)
    harness.add([5] * 100, max_tokens=12)
    harness.drain()


def test_windows_and_states_find_the_longest_prefix_that_has_both() -> None:
    harness, shared = make_harness(windows=(None, 40)), tokens(1, 300)
    run(harness, shared + tokens(2, 100))
    # Behind the window, the blocks of the second group may be gone.
    assert run(harness, shared + tokens(2, 200)) == 384
    assert run(harness, shared + tokens(3, 100)) == 0
    assert run(harness, shared + tokens(4, 100)) == 256


def test_windows_before_snapshots_are_not_evicted_first() -> None:
    harness, prompt = make_harness(num_blocks=70, windows=(None, 40)), tokens(1, 70)
    run(harness, prompt, max_tokens=300)
    # This evicts as many blocks as it needs.
    run(harness, tokens(5, 200))
    conversation = prompt + output_of(harness, 0)
    assert len(conversation) - 1 - run(harness, conversation + tokens(2, 20)) <= 127


@pytest.mark.parametrize("num_blocks", some_slow([40_000, 9000], slow=[40_000]))
def test_conversations_find_nearly_as_many_tokens_as_without_states(num_blocks: int) -> None:
    load = ConversationLoad(num_conversations=20, num_system_prompts=4, duration_s=60.0)
    dense, found = (
        part_reused(load, num_blocks=num_blocks, state_blocks=state_blocks)
        for state_blocks in (0, 197)
    )
    assert found >= 0.97 * dense
