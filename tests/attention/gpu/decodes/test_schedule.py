"""Schedules of decodes: what every row reads, bounds, and balance, for random steps."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from attention.gpu.decode_schedule import DecodeDivision, SplitCosts
from attention.kernels.arguments import NUM_ITEM_WORDS

BLOCK = 4
TILE = 8
Step = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Lengths and block tables."""


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Return rows whose block tables begin as paths of a tree of blocks."""
    num_rows = draw(st.integers(1, 14))
    lens = np.array(draw(st.lists(st.integers(0, 130), min_size=num_rows, max_size=num_rows)))
    width = 33
    tables = np.arange(1, num_rows * width + 1).reshape(num_rows, width)
    for row in range(1, num_rows):
        other = draw(st.integers(0, row))
        depth = draw(st.integers(0, 25))
        if other < row:
            tables[row, :depth] = tables[other, :depth]
    return lens.astype(np.int32), tables.astype(np.int32)


costs = st.builds(SplitCosts, num_slots=st.integers(1, 30), num_saturating=st.floats(0.2, 15.0))
divisions = st.builds(
    DecodeDivision,
    block_size=st.just(BLOCK),
    tile_keys=st.just(TILE),
    rows_per_item=st.integers(1, 5),
    costs=costs,
    window=st.one_of(st.none(), st.integers(1, 60)),
)


def division_of(num_slots: int, rows_per_item: int = 1) -> DecodeDivision:
    split_costs = SplitCosts(num_slots=num_slots, num_saturating=num_slots * 1.75 / 4)
    return DecodeDivision(
        block_size=16, tile_keys=64, rows_per_item=rows_per_item, costs=split_costs
    )


def items_of(
    division: DecodeDivision, lens: NDArray[np.int32], tables: NDArray[np.int32]
) -> NDArray[np.int32]:
    return division.items(lens, tables, division.kept_prefixes())


@given(step=steps(), division=divisions)
def test_every_row_reads_each_of_its_tiles_once(step: Step, division: DecodeDivision) -> None:
    lens, tables = step
    num_rows = len(lens)
    items = items_of(division, lens, tables).reshape(-1, 1 + division.rows_per_item, NUM_ITEM_WORDS)
    assert len(items) <= division.max_items(num_rows)
    ranges: dict[int, dict[int, tuple[int, int]]] = {row: {} for row in range(num_rows)}
    places: dict[int, tuple[int, int]] = {}
    for (num_item_rows, first, end, part), *words in items.tolist():
        assert 1 <= num_item_rows <= division.rows_per_item
        leader = words[0][0]
        for row, length, first_part, num_parts in words[:num_item_rows]:
            assert length == lens[row]
            assert places.setdefault(row, (first_part, num_parts)) == (first_part, num_parts)
            assert part not in ranges[row]
            ranges[row][part] = first, end
            if num_item_rows > 1:
                # All of them see all of these keys, in the blocks of the first, and not the last.
                assert end * TILE < length
                blocks = slice(first * TILE // BLOCK, end * TILE // BLOCK)
                assert (tables[row, blocks] == tables[leader, blocks]).all()
    taken: list[int] = []
    for row, length in enumerate(lens.tolist()):
        begin = 0 if division.window is None else max(length - division.window, 0) // TILE
        first_part, num_parts = places[row]
        assert len(ranges[row]) == num_parts
        own = [ranges[row][part] for part in range(num_parts)]
        assert own[0][0] == begin
        assert own[-1][1] == -(-length // TILE)
        assert all(one[1] == other[0] for one, other in pairwise(own))
        if num_parts > 1:
            assert all(start < end for start, end in own)
            taken += range(first_part, first_part + num_parts)
    assert len(set(taken)) == len(taken)
    assert all(0 <= part < division.max_parts(num_rows) for part in taken)


@given(
    tiles=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    costs=costs,
    num_spare=st.integers(0, 50),
)
def test_splits_are_fair_and_fit(tiles: list[int], costs: SplitCosts, num_spare: int) -> None:
    units = np.array(tiles, dtype=np.int32)
    max_items = len(tiles) + num_spare
    splits = costs.splits(units, max_items)
    assert (splits >= 1).all()
    assert (splits <= np.maximum(units, 1)).all()
    assert splits.sum() <= max_items
    fair = max(1, -(-sum(tiles) // costs.num_slots))
    if len(tiles) > costs.num_slots and np.maximum(-(-units // fair), 1).sum() <= max_items:
        assert (-(-units // splits)).max() <= fair


def test_few_long_rows_are_split_and_even_ones_that_fill_the_gpu_are_not() -> None:
    def num_items(lens: list[int]) -> int:
        tables = np.zeros((len(lens), 400), dtype=np.int32)
        return len(items_of(division_of(66), np.array(lens, dtype=np.int32), tables))

    assert num_items([300]) == 5
    assert num_items([20_000]) == 63
    assert num_items([1280] * 35) == 35
    assert num_items([384] * 64) == 64
    assert num_items([700] * 256) == 256
    assert num_items([300] * 100 + [20_000]) > 110


def test_prefixes_are_read_once_for_as_many_rows_as_fit() -> None:
    lens = np.full(33, 2100, dtype=np.int32)
    tables = np.arange(33 * 132, dtype=np.int32).reshape(33, 132)
    tables[:, :2] = tables[0, :2]  # of a template, which all of them share
    tables[32, :40] = tables[0, :40]
    for first in (0, 16):
        tables[first : first + 16, :128] = tables[first, :128]
    items = items_of(division_of(1, rows_per_item=4), lens, tables)
    shared = items[items[:, 0] > 1]
    assert shared[:, 0].tolist() == [4] * 8
    assert shared[:, 1:3].tolist() == [[0, 32]] * 8
    alone = items[items[:, 0] == 1]
    assert alone[:, 1:3].tolist() == [[0, 33]] + [[32, 33]] * 32
    # Those of one prefix are adjacent.
    assert (shared[:, NUM_ITEM_WORDS] // 16).tolist() == [0] * 4 + [1] * 4


def test_rows_without_a_common_prefix_share_nothing() -> None:
    lens = np.array([700, 0, 300], dtype=np.int32)
    tables = np.arange(3 * 44, dtype=np.int32).reshape(3, 44)
    items = items_of(division_of(2, rows_per_item=4), lens, tables)
    # 16 tiles in 2 slots: of 8 at most, the longest first.
    assert items[:, :4].tolist() == [[1, 5, 11, 1], [1, 0, 5, 0], [1, 0, 5, 0], [1, 0, 0, 0]]
    # Row, keys, first part and parts.
    assert items[:, 4:8].tolist() == [
        [0, 700, 0, 2],
        [0, 700, 0, 2],
        [2, 300, 2, 1],
        [1, 0, 2, 1],
    ]
