"""Schedules of decodes: what every row reads, bounds, and balance, for random steps."""

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from attention.gpu.batch import PinnedRing, copy_from_host
from attention.gpu.decode_schedule import (
    CachedPrefixes,
    DecodeDivision,
    SharedPrefixes,
    SplitCosts,
    find_shared_prefixes,
)
from attention.kernels.arguments import NUM_ITEM_WORDS

BLOCK = 4
TILE = 8
Step = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Lengths and block tables."""
WIDTH = 24
Sets = list[tuple[int, list[int]]]
"""Number of blocks and rows of each."""


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
    return division.items(lens, tables, division.cached_prefixes())


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
    # Splits are kept by the tiles, the GPU and the bound.
    costs.splits(units, max_items + 1)
    replace(costs, num_slots=costs.num_slots + 1).splits(units, max_items)
    assert np.array_equal(costs.splits(units, max_items), costs.find_splits(units, max_items))
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


@dataclass(slots=True)
class Row:
    """A sequence: all entries of its block table, of which some may be shared."""

    table: list[int]
    num_blocks: int


@st.composite
def started_rows(draw: st.DrawFn, others: list[Row]) -> Row:
    """Return a row whose table may begin as that of another row, with any blocks behind it."""
    blocks = st.integers(1, 10_000)
    table = draw(st.lists(blocks, min_size=WIDTH, max_size=WIDTH))
    if others:
        depth = draw(st.integers(0, WIDTH))
        table[:depth] = draw(st.sampled_from(others)).table[:depth]
    return Row(table, draw(st.integers(0, WIDTH)))


@st.composite
def changed(draw: st.DrawFn, rows: list[Row]) -> list[Row]:
    """Return the rows of the next step: all of them a little longer, or a change beside."""
    rows = [Row(list(row.table), row.num_blocks) for row in rows]
    changes = ("none", "grow", "start", "end", "move", "replace", "reorder")
    change = draw(st.sampled_from(changes if rows else ("start",)))
    if change == "grow":
        for row in rows:
            row.num_blocks = min(WIDTH, row.num_blocks + draw(st.integers(0, 2)))
    elif change == "start":
        rows.insert(draw(st.integers(0, len(rows))), draw(started_rows(rows)))
    elif change == "end":
        rows.pop(draw(st.integers(0, len(rows) - 1)))
    elif change == "move":
        draw(st.sampled_from(rows)).table[:] = draw(started_rows(rows)).table
    elif change == "replace":
        table = draw(st.sampled_from(rows)).table
        table[draw(st.integers(0, WIDTH - 1))] = draw(st.integers(1, 10_000))
    elif change == "reorder":
        rows = draw(st.permutations(rows))
    return rows


def arrays(rows: list[Row]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    tables = np.array([row.table for row in rows], dtype=np.int32).reshape(-1, WIDTH)
    return tables, np.array([row.num_blocks for row in rows], dtype=np.int32)


def as_sets(found: SharedPrefixes) -> Sets:
    rows = [[row for row in one if row >= 0] for one in found.rows.tolist()]
    return list(zip(found.num_blocks.tolist(), rows, strict=True))


def plain_sets(rows: list[Row], min_blocks: int, max_rows: int) -> Sets:
    """Return what `find_shared_prefixes` should, row by row."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        if row.num_blocks >= min_blocks:
            groups[row.table[min_blocks - 1]].append(index)
    prefixes: Sets = []
    for _, members in sorted(groups.items()):
        while len(members) > 1:
            first, *others = members
            depths = {other: common(rows[first], rows[other]) for other in others}
            options = [
                (depth * sum(one >= depth for one in depths.values()), depth)
                for depth in depths.values()
            ]
            _, depth = max(options)
            chosen = [other for other in others if depths[other] >= depth >= min_blocks]
            if chosen:
                prefixes.append((depth, [first, *chosen]))
            members = [other for other in others if other not in chosen]
    prefixes.sort(key=lambda prefix: -prefix[0] * (len(prefix[1]) - 1))
    return [
        (depth, members[first : first + max_rows])
        for depth, members in prefixes
        for first in range(0, len(members) - 1, max_rows)
    ]


def common(one: Row, other: Row) -> int:
    depth = 0
    while depth < min(one.num_blocks, other.num_blocks) and one.table[depth] == other.table[depth]:
        depth += 1
    return depth


@given(data=st.data(), min_blocks=st.integers(1, 8), max_rows=st.integers(2, 5))
def test_sets_are_those_of_a_search_row_by_row(
    data: st.DataObject, min_blocks: int, max_rows: int
) -> None:
    rows: list[Row] = []
    for _ in range(data.draw(st.integers(0, 16))):
        rows.append(data.draw(started_rows(rows)))
    found = find_shared_prefixes(*arrays(rows), min_blocks=min_blocks, max_rows=max_rows)
    assert as_sets(found) == plain_sets(rows, min_blocks, max_rows)


@st.composite
def steps_of_shared_prefixes(draw: st.DrawFn) -> list[list[Row]]:
    """Return the rows of steps of which each follows from the one before."""
    rows: list[Row] = []
    for _ in range(draw(st.integers(0, 8))):
        rows.append(draw(started_rows(rows)))
    following = [rows]
    for _ in range(draw(st.integers(1, 10))):
        following.append(draw(changed(following[-1])))
    return following


@given(steps=steps_of_shared_prefixes(), min_blocks=st.integers(1, 8), max_rows=st.integers(2, 5))
def test_kept_sets_are_those_of_a_search_whatever_changes(
    steps: list[list[Row]], min_blocks: int, max_rows: int
) -> None:
    prefixes = CachedPrefixes(min_blocks=min_blocks, max_rows=max_rows)
    for rows in steps:
        found = prefixes.find(*arrays(rows))
        assert as_sets(found) == plain_sets(rows, min_blocks, max_rows)


@given(
    steps=steps_of_shared_prefixes(), rows_per_item=st.integers(1, 5), num_slots=st.integers(1, 30)
)
def test_schedule_with_kept_sets_is_the_one_without(
    steps: list[list[Row]], rows_per_item: int, num_slots: int
) -> None:
    division = DecodeDivision(
        block_size=4,
        tile_keys=4,
        rows_per_item=rows_per_item,
        costs=SplitCosts(num_slots=num_slots, num_saturating=num_slots / 2),
    )
    prefixes = division.cached_prefixes()
    for rows in filter(None, steps):
        tables, num_blocks = arrays(rows)
        lens = 4 * num_blocks + 1
        items = division.items(lens, tables, prefixes)
        assert (items == division.items(lens, tables, division.cached_prefixes())).all()


def test_sets_are_kept_while_rows_only_grow() -> None:
    prefixes = CachedPrefixes(min_blocks=2, max_rows=4)
    tables = np.arange(4 * 8, dtype=np.int32).reshape(4, 8)
    tables[:2, :3] = tables[0, :3]
    # The last two rows have too few blocks to share any.
    found = prefixes.find(tables, np.array([4, 5, 1, 0], dtype=np.int32))
    assert as_sets(found) == [(3, [0, 1])]
    grown = tables.copy()
    grown[:2, 4:] += 100
    grown[2:, 1:] += 100
    assert prefixes.find(grown, np.array([6, 8, 1, 1], dtype=np.int32)) is found
    tables[1, 0] = 99
    assert as_sets(prefixes.find(tables, np.array([4, 5, 1, 0], dtype=np.int32))) == []


def test_a_buffer_keeps_its_words_until_its_next_turn() -> None:
    ring = PinnedRing(torch.device("cpu"), num_buffers=2)
    buffers = []
    for value, size in ((1, 3), (2, 5)):
        with ring.next_buffer(size) as words:
            words.fill_(value)
            buffers.append(words)
    assert [words.tolist() for words in buffers] == [[1] * 3, [2] * 5]
    with ring.next_buffer(4) as third:
        assert third.data_ptr() == buffers[0].data_ptr()
    with ring.next_buffer(9) as fourth:
        # The larger buffer is another one.
        assert len(fourth) == 9
        assert buffers[1].tolist() == [2] * 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_busy_gpu_reads_what_each_upload_has_written() -> None:
    device = torch.device("cuda")
    ring, uploaded = PinnedRing(device, num_buffers=2), []
    for value in range(50):
        torch.cuda._sleep(1_000_000)
        target = torch.empty(1000, dtype=torch.int64, device=device)
        with ring.next_buffer(1000) as words:
            words.fill_(value)
            copy_from_host(target, words)
        uploaded.append(target)
    assert [int(target.min()) for target in uploaded] == list(range(50))
    assert [int(target.max()) for target in uploaded] == list(range(50))
