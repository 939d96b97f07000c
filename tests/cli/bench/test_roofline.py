"""The share of the roofline, against a count of each step and token."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from cluster.cli.bench.engine_command import (
    MeasuredRun,
    SequenceLengths,
    UnknownRoofline,
    share_of_roofline,
)
from pagedray.rank_roofline import (
    AttentionWork,
    DeviceSpeed,
    ExpertChoice,
    RankRoofline,
    WeightWork,
)

BODY = WeightWork(num_bytes=1000, row_flop=70.0)
SAMPLED = WeightWork(num_bytes=300, row_flop=11.0)
ATTENTION = (
    AttentionWork(window=None, token_bytes=8, pair_flop=5.0),
    AttentionWork(window=6, token_bytes=16, pair_flop=3.0),
)
SPEED = DeviceSpeed(read_bytes_per_s=1e4, flop_per_s=1e5)


def roofline(
    body: WeightWork = BODY,
    *,
    sampled: WeightWork = SAMPLED,
    experts: ExpertChoice | None = None,
    speed: DeviceSpeed = SPEED,
) -> RankRoofline:
    return RankRoofline(
        weights=body, sampled=sampled, attention=ATTENTION, experts=experts, speed=speed
    )


def run(*requests: SequenceLengths, num_steps: float = 10) -> MeasuredRun:
    return MeasuredRun(seconds=2.0, num_steps=num_steps, requests=requests, max_step_tokens=16)


def seen(position: int, window: int | None) -> int:
    """Return how many tokens the token at a position sees."""
    return sum(window is None or position - other < window for other in range(position + 1))


@pytest.mark.parametrize(
    "lengths",
    [
        SequenceLengths(9, 0, 5),
        SequenceLengths(9, 8, 5),
        SequenceLengths(3, 0, 1),
        SequenceLengths(2, 0, 12),
        SequenceLengths(5, 2, 2),
    ],
)
def test_every_token_reads_and_sees_its_context(lengths: SequenceLengths) -> None:
    num_tokens = lengths.num_prompt + lengths.num_output - 1
    flop, kv_bytes = 0.0, 0
    for work in ATTENTION:
        for position in range(lengths.num_cached, num_tokens):
            flop += work.pair_flop * seen(position, work.window)
            if position >= lengths.num_prompt:
                kv_bytes += work.token_bytes * seen(position, work.window)
        if lengths.num_cached:
            kv_bytes += work.token_bytes * seen(lengths.num_cached - 1, work.window)
    flop += 70.0 * (num_tokens - lengths.num_cached) + 11.0 * lengths.num_output
    share = share_of_roofline(run(lengths), [roofline()])
    assert share.kv_bytes_per_step == pytest.approx(kv_bytes / 10)
    assert share.weight_bytes_per_step == 1300.0
    assert share.flop_per_step == pytest.approx(flop / 10)
    assert share.memory_share == pytest.approx((13000 + kv_bytes) / 1e4 / 2.0)
    assert share.compute_share == pytest.approx(flop / 1e5 / 2.0)
    assert share.share == max(share.memory_share, share.compute_share)
    assert share.step_ms == pytest.approx(200.0)


def test_decodes_read_and_write_their_states() -> None:
    lengths = SequenceLengths(9, 0, 5)
    plain = share_of_roofline(run(lengths), [roofline()])
    share = share_of_roofline(run(lengths), [replace(roofline(), state_bytes=1000)])
    # The prompt gives the first token.
    assert share.kv_bytes_per_step - plain.kv_bytes_per_step == pytest.approx(4 * 2000 / 10)


def test_products_in_fp8_take_their_own_time() -> None:
    body = WeightWork(num_bytes=10, row_flop=20.0, fp8_row_flop=600.0)
    sampled = WeightWork(num_bytes=1, fp8_row_flop=40.0)
    speed = DeviceSpeed(read_bytes_per_s=1e9, flop_per_s=1e3, fp8_flop_per_s=3e3)
    lengths = SequenceLengths(4, 0, 1)
    plain = share_of_roofline(
        run(lengths), [roofline(WeightWork(), sampled=WeightWork(), speed=speed)]
    )
    found = share_of_roofline(run(lengths), [roofline(body, sampled=sampled, speed=speed)])
    seconds = 4 * 20 / 1e3 + (4 * 600 + 40) / 3e3
    assert found.compute_share - plain.compute_share == pytest.approx(seconds / 2.0)


def test_the_expected_part_is_the_mean_of_all_choices() -> None:
    choice = ExpertChoice(num_experts=4, num_chosen=1)
    counts = [len(set(chosen)) for chosen in product(range(4), repeat=3)]
    assert choice.expected_part(3) == pytest.approx(sum(counts) / len(counts) / 4)
    assert ExpertChoice(num_experts=8, num_chosen=3).expected_part(1) == pytest.approx(3 / 8)


def test_experts_are_read_in_steps_of_prompts_and_of_single_rows() -> None:
    choice = ExpertChoice(num_experts=4, num_chosen=1)
    body = WeightWork(num_bytes=100, expert_bytes=4000)
    # Two steps have 12 tokens of prompts each, and eight steps a row of both requests.
    requests = [SequenceLengths(12, 0, 9)] * 2
    share = share_of_roofline(
        run(*requests), [roofline(body, sampled=WeightWork(), experts=choice)]
    )
    parts = 2 * (1 - 0.75**12) + 8 * (1 - 0.75**2)
    assert share.weight_bytes_per_step == pytest.approx(100 + 4000 * parts / 10)
    assert share.experts_per_layer == pytest.approx(4 * parts / 10)
    assert "of 4 in a layer" in share.rows()["Experts read by a step"]


def test_the_rank_with_the_highest_roofline_counts() -> None:
    slow = DeviceSpeed(read_bytes_per_s=8e3, flop_per_s=1e5)
    lengths = SequenceLengths(9, 0, 5)
    share = share_of_roofline(run(lengths), [roofline(), roofline(speed=slow), roofline()])
    assert share.rank == 1
    assert share.read_bytes_per_second == 8e3


def test_the_reason_stands_where_nothing_was_measured() -> None:
    unknown = UnknownRoofline("Too little GPU memory is free.")
    assert unknown.figures() == {"share": None, "reason": "Too little GPU memory is free."}
    assert unknown.rows() == {"Share of the roofline": "unknown: Too little GPU memory is free."}
