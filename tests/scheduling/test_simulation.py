"""Long random runs of a scheduler, by seed."""

import random
from array import array
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from pagedray.config import Preemption
from pagedray.errors import CapacityError
from pagedray.layout import num_held_blocks
from tests.scheduling.harness import Harness

NUM_SEEDS = 20
NUM_SLOW_SEEDS = 200
NUM_ACTIONS = 150
PREEMPTIONS: tuple[Preemption, ...] = ("swap", "swap", "recompute", "auto")


def draw_windows(rng: random.Random) -> tuple[int | None, ...]:
    """Return the windows of one to four groups; a group that sees all tokens comes first."""
    num_full = rng.choice((0, 1, 1, 1, 2))
    window = rng.choice((1, 2, 3, 5, 8, 13))
    others = [rng.choice((window, window, 4)) for _ in range(rng.choice((1, 1, 2)))]
    return (*[None] * num_full, *others)


def make_harness(
    rng: random.Random,
    *,
    has_windows: bool = False,
    has_states: bool = False,
    has_drafts: bool = False,
    has_head: bool = False,
    has_gaps: bool = False,
) -> Harness:
    block_size = rng.choice((1, 2, 4))
    num_blocks = rng.randint(16, 40) // block_size + 2
    drafting: dict[str, Any] = {}  # Any: options of any type
    if has_drafts or has_head:
        drafting = {"num_drafts": rng.randint(1, 9), "right": rng.choice((0.3, 0.8, 0.95, 1.0))}
        drafting |= {"has_head": has_head, "has_gaps": has_gaps}
    if has_windows:
        return make_windowed(rng, block_size=block_size, **drafting)
    if has_states:
        return make_stateful(rng, block_size=block_size, **drafting)
    return Harness(
        block_size=block_size,
        num_blocks=num_blocks,
        num_cpu_blocks=rng.choice((0, 4, 16, 40)),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.choice((1, 3, 5, 8, 30)),
        max_model_len=num_blocks * block_size - rng.randint(0, 9),
        preemption=rng.choice(PREEMPTIONS),
        block_copy_s=rng.choice((0.0, 0.1)),
        token_s=0.04,
        enable_prefix_cache=rng.random() < 0.75,
        enable_cpu_prefix_cache=rng.random() < 0.75,
        num_disk_blocks=rng.choice((0, 3, 60)),
        **drafting,
    )


# Any: options of any type
def make_windowed(rng: random.Random, *, block_size: int, **options: Any) -> Harness:
    """Return a harness with several groups, and a pool that holds a few sequences."""
    windows = draw_windows(rng)
    num_tokens = rng.randint(16, 40)
    max_num_batched_tokens = rng.choice((1, 3, 5, 8, 30))
    num_blocks = num_held_blocks(
        num_tokens, windows=windows, block_size=block_size, step_tokens=max_num_batched_tokens
    )
    return Harness(
        block_size=block_size,
        num_blocks=num_blocks + rng.choice((0, 2, num_blocks // 2, num_blocks)),
        num_cpu_blocks=rng.choice((0, 4, 16, 40, 100)),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=num_tokens,
        preemption=rng.choice(PREEMPTIONS),
        block_copy_s=rng.choice((0.0, 0.1)),
        token_s=0.04,
        enable_prefix_cache=rng.random() < 0.75,
        enable_cpu_prefix_cache=rng.random() < 0.75,
        num_disk_blocks=rng.choice((0, 3, 60)),
        windows=windows,
        **options,
    )


# Any: options of any type
def make_stateful(rng: random.Random, *, block_size: int, **options: Any) -> Harness:
    """Return a harness with recurrent states, in one group of layers or several."""
    windows = rng.choice(((None,), (None,), (None,), draw_windows(rng)))
    num_tokens, state_blocks = rng.randint(16, 40), rng.choice((1, 2, 5))
    max_num_batched_tokens = rng.choice((1, 3, 5, 8, 30))
    num_blocks = state_blocks + num_held_blocks(
        num_tokens, windows=windows, block_size=block_size, step_tokens=max_num_batched_tokens
    )
    return Harness(
        block_size=block_size,
        num_blocks=num_blocks + rng.choice((0, 2, num_blocks // 2, num_blocks)),
        num_cpu_blocks=rng.choice((0, 4, 16, 40, 100)),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=num_tokens,
        preemption=rng.choice(PREEMPTIONS),
        block_copy_s=rng.choice((0.0, 0.1)),
        token_s=0.04,
        enable_prefix_cache=rng.random() < 0.85,
        enable_cpu_prefix_cache=rng.random() < 0.75,
        num_disk_blocks=rng.choice((0, 3, 60)),
        windows=windows,
        state_blocks=state_blocks,
        state_grid=rng.choice((1, 2, 4)),
        **options,
    )


def add_random(
    harness: Harness, rng: random.Random, *, structures: float, bad_values: float
) -> None:
    """Add a request whose prefix others are likely to share; some follow a structure."""
    stem = rng.choice(([1] * 30, [1, 2] * 15, [2] * 30))
    prompt = stem[: rng.randint(0, 12)] + [rng.randint(0, 4) for _ in range(rng.randint(1, 6))]
    max_tokens = rng.choice((1, 4, 12, 30, 50))
    with suppress(CapacityError):
        harness.add(
            prompt[: harness.max_model_len - 1],
            tenant=rng.choice(("", "", "other")),
            priority=rng.choice((0, 0, 0, 1)),
            n=rng.choice((1, 1, 1, 2, 4)),
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens),
            ignore_eos=rng.random() < 0.6,
            stop_token_ids=rng.choice(((), (), (5,))),
            deadline_s=rng.choice((None, None, None, 1.0)),
            bad_length=len(prompt) + rng.randint(0, 6) if rng.random() < 0.05 else None,
            bad_position=rng.randint(0, 20) if rng.random() < bad_values else None,
            is_masked=structures > 0.0 and rng.random() < structures,
            anchors=() if harness.state_blocks == 0 else rng.choice(((), (rng.randint(1, 15),))),
        )


def replace_worker(harness: Harness, rng: random.Random) -> None:
    """Replace the worker; its CPU pool is new, or outlives it."""
    harness.replace_worker(keeps_cpu_pool=rng.random() < 0.6)


def act(
    harness: Harness,
    rng: random.Random,
    *,
    restrictions: float = 0.0,
    structures: float = 0.0,
    bad_values: float = 0.0,
    most_open: int = 7,
) -> None:
    """Do one random operation that is possible; `restrictions` is the weight of one kind.

    At most `most_open` requests are open.
    """
    worker = harness.worker
    match rng.choices(
        (
            "add",
            "turn",
            "schedule",
            "execute",
            "collect",
            "acknowledge",
            "end disk job",
            "abort",
            "finish",
            "expire",
            "replace",
            "restrict",
        ),
        (16, 50, 20, 20, 20, 15, 15, 1, 1, 0.5, 0.3, restrictions),
    )[0]:
        case "add":
            if len(harness.scheduler._table.requests) < most_open:
                add_random(harness, rng, structures=structures, bad_values=bad_values)
        case "turn":
            harness.turn()
        case "schedule":
            harness.schedule()
        case "execute":
            if harness.can_execute:
                harness.execute()
        case "collect":
            if worker.outputs:
                harness.collect()
        case "acknowledge":
            harness.acknowledge(rng.randint(harness.acknowledged_step, worker.executed_step))
        case "end disk job":
            end_disk_job(harness, rng)
        case "abort":
            if harness.requests:
                harness.abort(rng.choice(list(harness.requests)))
        case "expire":
            harness.expire(rng.choice((0.5, 1.0)))
        case "replace":
            replace_worker(harness, rng)
        case "restrict":
            names = list(harness.scheduler._table.requests)
            harness.restrict(rng.choice((None, {n for n in names if rng.random() < 0.5})))
        case "finish":
            if harness.results.tokens:
                harness.finish(*rng.choice(list(harness.results.tokens)))


def end_disk_job(harness: Harness, rng: random.Random) -> None:
    """Report reads or writes; after one of these has failed, there are none for a while."""
    is_read = rng.random() < 0.5
    num_failed = rng.choices((0, 1, 9), (5 if is_read else 60, 1, 1))[0]
    harness.end_disk_job(is_read=is_read, num_failed=num_failed)


def live_with_disk(
    seed: int, *, windows: tuple[int | None, ...] = (None,), state_blocks: int = 0
) -> Harness:
    """Run prompts that come back, with pools that hold a few of them."""
    rng = random.Random(seed)
    block_size = rng.choice((1, 2))
    harness = Harness(
        block_size=block_size,
        num_blocks=20 // block_size * len(windows) + 2 * state_blocks,
        num_cpu_blocks=rng.choice((8, 20)) * len(windows) * (1 + state_blocks),
        max_num_seqs=rng.randint(1, 3),
        max_num_batched_tokens=rng.choice((5, 8, 30)),
        max_model_len=20,
        preemption=rng.choice(("swap", "auto")),
        token_s=0.04,
        num_disk_blocks=rng.choice((10, 60)) * len(windows) * (1 + state_blocks),
        windows=windows,
        state_blocks=state_blocks,
        state_grid=2,
    )
    for _ in range(60):
        if harness.scheduler.num_open < 3:
            token_id = rng.randint(0, 6)
            harness.add(
                [token_id, 1] * 6 + [rng.randint(0, 1)],
                tenant=rng.choice(("", "", "other")),
                max_tokens=rng.choice((1, 4)),
                bad_length=14 if rng.random() < 0.03 else None,
            )
        for _ in range(rng.randint(1, 8)):
            harness.turn()
            end_disk_job(harness, rng)
        if rng.random() < 0.02:
            replace_worker(harness, rng)
    harness.drain()
    return harness


def live(
    seed: int,
    *,
    has_windows: bool = False,
    has_states: bool = False,
    has_drafts: bool = False,
    has_head: bool = False,
    has_gaps: bool = False,
    most_open: int = 7,
    **weights: float,
) -> Harness:
    """Run a scheduler with random operations to the end."""
    rng = random.Random(seed)
    harness = make_harness(
        rng,
        has_windows=has_windows,
        has_states=has_states,
        has_drafts=has_drafts,
        has_head=has_head,
        has_gaps=has_gaps,
    )
    for _ in range(NUM_ACTIONS):
        act(harness, rng, most_open=most_open, **weights)
    if weights.get("restrictions"):
        harness.restrict(None)
    harness.drain()
    return harness


def test_every_sequence_ends_as_if_it_had_been_alone() -> None:
    """The runs also cover every case."""
    harnesses = [live(seed) for seed in range(NUM_SEEDS)]
    stats = [harness.scheduler.stats() for harness in harnesses]
    assert sum(one.num_swap_preemptions for one in stats) > 10
    assert sum(one.num_recompute_preemptions for one in stats) > 10
    assert sum(one.num_hit_tokens for one in stats) > 50
    assert sum(one.num_saved_blocks for one in stats) > 50
    assert sum(one.num_restored_blocks for one in stats) > 3
    plans = [plan for harness in harnesses for plan in harness.plans]
    assert sum(len(plan.copies) for plan in plans) > 5
    assert sum(len(plan.swap_ins) for plan in plans) > 10
    assert sum(harness.num_unswapped for harness in harnesses) > 10
    reasons = {reason for harness in harnesses for reason in harness.results.reasons.values()}
    assert len(reasons) == 4


def test_blocks_on_the_disk_come_back_as_they_were_and_lost_ones_are_computed() -> None:
    stats = [live_with_disk(seed).scheduler.stats() for seed in range(NUM_SEEDS)]
    assert sum(one.num_written_blocks for one in stats) > 500
    assert sum(one.num_read_blocks for one in stats) > 50
    assert sum(one.num_failed_writes for one in stats) > 5
    assert sum(one.num_failed_reads for one in stats) > 10


def test_windows_free_their_blocks_and_every_query_finds_what_it_sees() -> None:
    """The worker checks it. The runs also cover every case."""
    harnesses = [
        live(seed, has_windows=True, structures=0.3 * (seed % 2), bad_values=0.1 * (seed % 3 == 0))
        for seed in range(NUM_SEEDS)
    ]
    stats = [harness.scheduler.stats() for harness in harnesses]
    assert sum(one.num_swap_preemptions for one in stats) > 10
    assert sum(one.num_recompute_preemptions for one in stats) > 10
    assert sum(one.num_hit_tokens for one in stats) > 50
    assert sum(one.num_saved_blocks for one in stats) > 50
    assert sum(one.num_restored_blocks for one in stats) > 3
    assert sum(harness.num_late for harness in harnesses) > 5
    plans = [plan for harness in harnesses for plan in harness.plans]
    assert sum(len(plan.copies) for plan in plans) > 5
    starts = [start for plan in plans for start in plan.starts]
    assert sum(-1 in start.block_ids for start in starts) > 20
    assert sum(harness.num_unswapped for harness in harnesses) > 10


def test_window_blocks_on_the_disk_come_back_as_they_were() -> None:
    stats = [
        live_with_disk(seed, windows=draw_windows(random.Random(seed))).scheduler.stats()
        for seed in range(12)
    ]
    assert sum(one.num_read_blocks for one in stats) > 50
    assert sum(one.num_failed_reads for one in stats) > 5


def test_rows_take_in_every_token_once() -> None:
    """The worker checks it. The runs also cover every case."""
    harnesses = [
        live(seed, has_states=True, structures=0.4 * (seed % 2), bad_values=0.1 * (seed % 3 == 0))
        for seed in range(NUM_SEEDS)
    ]
    stats = [harness.scheduler.stats() for harness in harnesses]
    assert sum(one.num_swap_preemptions for one in stats) > 5
    assert sum(one.num_recompute_preemptions for one in stats) > 5
    assert sum(one.num_hit_tokens for one in stats) > 50
    assert sum(one.num_restored_blocks for one in stats) > 3
    assert sum(harness.num_unswapped for harness in harnesses) > 5
    copiers = [harness.scheduler._kv.states for harness in harnesses]
    assert sum(one.num_loaded for one in copiers if one is not None) > 50
    assert sum(one.num_skipped for one in copiers if one is not None) > 5


def test_states_on_the_disk_come_back_as_they_were() -> None:
    stats = [live_with_disk(seed, state_blocks=1 + seed % 3).scheduler.stats() for seed in range(8)]
    assert sum(one.num_read_blocks for one in stats) > 20


def live_with_drafts(seed: int) -> Harness:
    """Run a scheduler with drafts, some of which are wrong, and with all else that may happen."""
    return live(
        seed,
        has_drafts=True,
        has_windows=seed % 4 == 3,
        structures=0.3 * (seed % 3 == 1),
        restrictions=3.0 * (seed % 5 == 2),
        bad_values=0.1 * (seed % 3 == 2),
    )


def test_drafts_change_no_token() -> None:
    """The worker and the harness check it. The runs also cover every case."""
    harnesses = [live_with_drafts(seed) for seed in range(2 * NUM_SEEDS)]
    stats = [harness.scheduler.stats() for harness in harnesses]
    assert sum(one.num_swap_preemptions for one in stats) > 10
    assert sum(one.num_recompute_preemptions for one in stats) > 10
    assert sum(one.num_hit_tokens for one in stats) > 50
    assert sum(one.speculation.num_accepted_tokens for one in stats) > 300
    assert sum(one.speculation.num_refused_tokens for one in stats) > 200
    plans = [plan for harness in harnesses for plan in harness.plans]
    plans = [plan for plan in plans if plan.decodes.draft_ids]
    assert sum(len(plan.decodes.growing_rows) > 4 for plan in plans) > 50
    assert sum(len(plan.chunks) > 0 for plan in plans) > 20


def live_with_overlaps(seed: int, *, has_head: bool) -> Harness:
    """Run a scheduler with a few requests and overlapped plans, and all else that may happen."""
    return live(
        seed,
        has_head=has_head,
        has_drafts=not has_head,
        has_gaps=True,
        most_open=1 + seed % 4,
        has_windows=seed % 4 == 3,
        has_states=seed % 11 == 5,
        structures=0.3 * (seed % 3 == 1),
        restrictions=3.0 * (seed % 5 == 2),
        bad_values=0.1 * (seed % 3 == 2),
    )


def test_overlapped_plans_change_no_token() -> None:
    """The worker checks it. The runs also cover every case."""
    seeds = range(NUM_SEEDS, 3 * NUM_SEEDS)
    harnesses = [live_with_overlaps(seed, has_head=True) for seed in seeds]
    others = [live_with_overlaps(seed, has_head=False) for seed in seeds]
    stats = [harness.scheduler.stats() for harness in harnesses]
    assert sum(one.num_swap_preemptions + one.num_recompute_preemptions for one in stats) > 20
    assert sum(one.speculation.num_accepted_tokens for one in stats) > 100
    assert sum(one.speculation.num_refused_tokens for one in stats) > 40
    plans = [plan for harness in harnesses for plan in harness.plans if plan.is_overlapped]
    assert sum(len(plan.decodes) > len({*array("i", plan.decodes.rows)}) for plan in plans) > 10
    assert sum(plan.num_drafts == 0 for plan in plans) > 5
    assert sum(len(plan.decodes.growing_rows) > 0 for plan in plans) > 10
    assert sum(len(plan.evictions) > 0 for plan in plans) > 0
    plans = [plan for harness in others for plan in harness.plans if plan.is_overlapped]
    assert sum(bool(plan.decodes.draft_ids) for plan in plans) > 3
    assert sum(not plan.decodes.draft_ids for plan in plans) > 3


def live_with_chained_states(seed: int) -> Harness:
    """Run a scheduler with recurrent states and drafts, and with all else that may happen."""
    return live(
        seed,
        has_states=True,
        has_drafts=True,
        structures=0.3 * (seed % 3 == 1),
        restrictions=3.0 * (seed % 5 == 2),
        bad_values=0.1 * (seed % 3 == 2),
    )


def test_rows_take_in_the_accepted_tokens_of_chains() -> None:
    """The worker checks it. The runs also cover every case."""
    harnesses = [live_with_chained_states(seed) for seed in range(NUM_SEEDS)]
    stats = [harness.scheduler.stats() for harness in harnesses]
    assert sum(one.num_swap_preemptions for one in stats) > 5
    assert sum(one.num_recompute_preemptions for one in stats) > 5
    assert sum(one.speculation.num_accepted_tokens for one in stats) > 100
    assert sum(one.speculation.num_refused_tokens for one in stats) > 50
    plans = [plan for harness in harnesses for plan in harness.plans]
    plans = [plan for plan in plans if plan.decodes.draft_ids]
    # States are loaded and saved before chains.
    assert sum(len(plan.copies) > 0 for plan in plans) > 20


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(NUM_SEEDS, NUM_SLOW_SEEDS, 20))
def test_every_sequence_ends_as_if_it_had_been_alone_in_many_runs(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 20):
        live(seed)
        live_with_disk(seed)
        live_with_drafts(seed)
        live_with_chained_states(seed)
        live_with_overlaps(seed, has_head=True)
        live_with_overlaps(seed, has_head=False)
        live(seed, has_windows=True, structures=0.3 * (seed % 2), bad_values=0.1 * (seed % 3 == 0))
        live(seed, has_windows=True, restrictions=5.0)
        live(seed, has_states=True, structures=0.4, bad_values=0.1 * (seed % 3 == 0))
        live(seed, has_states=True, restrictions=5.0)
        live_with_disk(seed, state_blocks=1 + seed % 3)
        live_with_disk(seed, windows=draw_windows(random.Random(seed)))


SOME_SEEDS = [range(8), pytest.param(range(8, 100), marks=pytest.mark.slow)]


@pytest.mark.parametrize("seeds", SOME_SEEDS)
def test_quarantined_requests_lose_nothing_and_continue(seeds: range) -> None:
    for seed in seeds:
        live(seed, restrictions=5.0)


@pytest.mark.parametrize("seeds", SOME_SEEDS)
def test_late_masks_change_no_token_and_delay_no_sequence_forever(seeds: range) -> None:
    runs = [live(seed, structures=0.6, restrictions=2.0 * (seed % 2)) for seed in seeds]
    assert sum(harness.num_late for harness in runs) > 5


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 100), marks=pytest.mark.slow)])
def test_no_new_request_finds_a_block_that_is_known_to_be_bad(seeds: range) -> None:
    # The worker checks it.
    runs = [live(seed, bad_values=0.3) for seed in seeds]
    assert sum(len(harness.known_bad) for harness in runs) > 5


def test_equal_runs_give_equal_plans() -> None:
    encode = msgspec.msgpack.encode
    assert encode(live(7).plans) == encode(live(7).plans)
