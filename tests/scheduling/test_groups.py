"""Groups of layers with windows: blocks behind a window are released and not needed for a hit."""

import random
from itertools import product

import pytest

from cluster.scheduling.device_tier import group_key
from cluster.scheduling.groups import GroupTables
from cluster.scheduling.kv_manager import Admitted, KvManager, KvOptions
from cluster.scheduling.sequence import Sequence
from cluster.simulation.step_cost import StepCost
from cluster.simulation.virtual_replica import VirtualReplica, distinct_prompt
from pagedray.config import SchedulerConfig, StepLimits
from pagedray.layout import cache_layout, num_held_blocks
from tests.scheduling.builders import make_sequences
from tests.scheduling.harness import Harness

BLOCK_SIZE = 4


def make_manager(*windows: int | None, num_blocks: int = 40, num_cpu_blocks: int = 0) -> KvManager:
    options = KvOptions(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        hash_key=b"key",
        windows=windows,
    )
    return KvManager(options, costs=None, limits=StepLimits(max_num_batched_tokens=100))


def compute(kv: KvManager, sequence: Sequence) -> None:
    """Admit a sequence, take its tokens as computed and their blocks as verified."""
    num_tokens = len(sequence.token_ids)
    assert isinstance(kv.admit(sequence, 0, num_tokens=num_tokens, num_spare=0), Admitted)
    sequence.blocks.extend(num_tokens, BLOCK_SIZE, kv.groups.num_groups)
    sequence.num_computed = num_tokens
    kv.prefixes.register_blocks(sequence)
    sequence.blocks.num_verified = 0
    kv.prefixes.mark_verified(sequence)


def forget(kv: KvManager, sequence: Sequence, *, group: int, entries: range) -> None:
    """Evict blocks of a sequence that has ended."""
    for entry in entries:
        block = kv.device.find_block(group_key(sequence.blocks.keys[entry], group))
        assert block is not None
        kv.device.forget_block(block)


def num_hit(kv: KvManager, num_tokens: int) -> int:
    """Return the tokens that a sequence with the same first tokens finds."""
    (sequence,) = make_sequences(num_tokens)
    assert isinstance(kv.admit(sequence, 0, num_tokens=num_tokens, num_spare=0), Admitted)
    num_computed = sequence.num_computed
    kv.release(sequence)
    return num_computed


def test_a_hit_needs_no_block_behind_the_window() -> None:
    kv = make_manager(None, 6)
    (sequence,) = make_sequences(33)
    compute(kv, sequence)
    kv.release(sequence)
    # A query at 32 sees positions from 27 on, hence entries 6 and 7.
    forget(kv, sequence, group=1, entries=range(6))
    assert num_hit(kv, 33) == 32


def test_a_missing_block_of_a_window_shortens_a_hit_to_before_it() -> None:
    kv = make_manager(None, 6)
    (sequence,) = make_sequences(33)
    compute(kv, sequence)
    kv.release(sequence)
    forget(kv, sequence, group=1, entries=range(6, 7))
    # A query at 24 sees entries 4 and 5.
    assert num_hit(kv, 33) == 24
    forget(kv, sequence, group=0, entries=range(2, 3))
    assert num_hit(kv, 33) == 8


def test_a_model_with_windows_only_finds_a_prefix_without_its_beginning() -> None:
    kv = make_manager(6)
    (sequence,) = make_sequences(33)
    compute(kv, sequence)
    kv.release(sequence)
    forget(kv, sequence, group=0, entries=range(6))
    assert num_hit(kv, 33) == 32
    assert num_hit(kv, 30) == 0


def test_groups_do_not_find_blocks_of_each_other() -> None:
    kv = make_manager(None, None)
    (sequence,) = make_sequences(9)
    compute(kv, sequence)
    first, second = sequence.blocks.ids[:2]
    key = sequence.blocks.keys[0]
    assert [kv.device.find_block(group_key(key, group)) for group in range(2)] == [first, second]
    assert first != second


def test_only_blocks_that_the_next_query_sees_are_swapped_out() -> None:
    kv = make_manager(None, 6, num_cpu_blocks=20)
    (sequence,) = make_sequences(33)
    compute(kv, sequence)
    assert kv.can_swap_out(sequence)
    swapped, copies = kv.swap_out(sequence, 0)
    # A query at 33 sees positions from 28 on: entries 7 and 8 of the window group.
    assert len(copies) == 9 + 2
    assert swapped.cpu_ids.count(-1) == 7


def test_blocks_released_before_their_logits_came_are_kept_in_the_cpu_pool() -> None:
    # The first decode is planned before the output of the prompt is known, and releases blocks.
    harness = Harness(num_blocks=12, num_cpu_blocks=100, windows=(11,), max_model_len=50)
    prompts = [[token_id] * 32 for token_id in (1, 2, 4)]
    for _ in range(2):
        for prompt in prompts:
            harness.add(prompt, max_tokens=8)
            while harness.scheduler.has_work:
                harness.turn()
            harness.settle()
    assert harness.scheduler.stats().num_hit_tokens == 3 * 28


@pytest.mark.parametrize("seed", range(4))
def test_the_longest_prefix_is_the_longest_with_all_blocks_that_a_query_sees(seed: int) -> None:
    draws = random.Random(seed)
    for _ in range(200):
        windows = sorted(
            (draws.choice((None, 1, 2, 4, 5, 9, 13)) for _ in range(draws.randint(1, 3))),
            key=lambda window: (window is not None, window),
        )
        groups = GroupTables(windows, block_size=BLOCK_SIZE, step_tokens=10)
        most = draws.randint(0, 10)
        missing = {
            place
            for place in product(range(most), range(len(windows)))
            if draws.random() < draws.choice((0.05, 0.3))
        }

        def is_whole(num_entries: int) -> bool:
            position = num_entries * BLOCK_SIZE
            return not any(
                (key // BLOCK_SIZE, group) in missing  # noqa: B023  # called in this round
                for group, window in enumerate(windows)  # noqa: B023
                for key in range(0 if window is None else max(0, position - window + 1), position)
            )

        expected = max(filter(is_whole, range(most + 1)))
        found = groups.longest_prefix(
            most,
            lambda entry, group: (entry, group) not in missing,  # noqa: B023
            first=0,
        )
        assert found == expected


def test_a_long_prompt_runs_in_a_pool_that_holds_its_windows_only() -> None:
    windows = (None, 6, 6)
    num_blocks = num_held_blocks(100, windows=windows, block_size=4, step_tokens=8)
    assert num_blocks < 2 * 25
    harness = Harness(
        num_blocks=num_blocks, max_num_batched_tokens=8, max_model_len=100, windows=windows
    )
    harness.add([1, 2] * 40, max_tokens=20)
    harness.drain()
    assert harness.scheduler.stats().num_recompute_preemptions == 0


def test_a_sibling_is_not_forked_once_the_first_has_released_the_prompt() -> None:
    harness = Harness(max_num_seqs=1, windows=(None, 6), enable_prefix_cache=False)
    harness.add([1] * 21, n=2, max_tokens=30)
    harness.drain()
    assert not any(plan.copies for plan in harness.plans)
    # With two rows, it starts at once.
    harness = Harness(max_num_seqs=2, windows=(None, 6), num_blocks=100)
    harness.add([1] * 22, n=2, max_tokens=30)
    harness.drain()
    assert sum(len(plan.copies) for plan in harness.plans) == 2


def most_tokens(windows: tuple[int | None, ...], num_blocks: int) -> int:
    """Return the most tokens that running sequences of 32 000 tokens hold in a pool."""
    replica = VirtualReplica(
        SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192, max_queued_tokens=10**8),
        KvOptions(
            block_size=16,
            num_blocks=num_blocks,
            num_cpu_blocks=0,
            enable_prefix_cache=False,
            windows=windows,
        ),
        StepCost(points=((0, 0.01), (8192, 0.2))),
        max_model_len=40_000,
    )
    for number in range(70):
        replica.submit(distinct_prompt(number, 32_000), num_output_tokens=768)
    most = 0
    while replica.has_work and replica.num_steps < 400:
        replica.run(num_steps=1)
        running = replica.scheduler._table.running
        most = max(most, sum(one.num_computed for one in running if not one.is_prefill))
    return most


@pytest.mark.parametrize(
    ("num_full", "num_windowed", "window", "least"),
    [(12, 12, 128, 1.8), (10, 52, 1024, 4.0)],
    ids=["gpt-oss-20b", "Gemma-3-27B"],
)
def test_windows_that_free_their_blocks_hold_more_tokens(
    num_full: int, num_windowed: int, window: int, least: float
) -> None:
    num_layers = num_full + num_windowed
    windows = [None] * num_full + [window] * num_windowed
    layout = cache_layout(windows, 16)
    num_blocks = 8 * 2048 * num_layers
    before = most_tokens((None,), num_blocks // num_layers)
    after = most_tokens(layout.windows, num_blocks // len(layout.groups[0].layers))
    assert after >= least * before


def test_blocks_behind_a_window_are_saved_where_other_prompts_diverge() -> None:
    harness = Harness(
        num_blocks=30,
        num_cpu_blocks=200,
        windows=(None, 6),
        max_num_batched_tokens=8,
        max_model_len=100,
    )
    num_hits = [0]
    for own in (11, 12, 13):
        # 10 entries that all prompts share, then 10 of its own.
        harness.add([9] * 40 + [own] * 40, max_tokens=14)
        while harness.scheduler.has_work:
            harness.turn()
        harness.settle()
        num_hits.append(harness.scheduler.stats().num_hit_tokens)
    # The second prompt finds blocks of the first group, which say where the prompts diverge.
    assert num_hits[2] < 40
    assert num_hits[3] - num_hits[2] == 40
    saved = [
        key.token_bytes[::4]
        for key in harness.scheduler._kv.cpu._key_of.values()
        if len(key.digest) == 33
    ]
    # A query at the end of a prompt sees 2 entries.
    assert [saved.count(bytes([own] * 4)) for own in (11, 12)] == [2, 2]
