"""Which rows share prefixes, in one step and kept from step to step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from attention.gpu.decode_schedule import (
    DecodeDivision,
    KeptPrefixes,
    SharedPrefixes,
    SplitCosts,
    find_shared_prefixes,
)

WIDTH = 24
Sets = list[tuple[int, list[int]]]
"""Number of blocks and rows of each."""


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
def steps(draw: st.DrawFn) -> list[list[Row]]:
    """Return the rows of steps of which each follows from the one before."""
    rows: list[Row] = []
    for _ in range(draw(st.integers(0, 8))):
        rows.append(draw(started_rows(rows)))
    following = [rows]
    for _ in range(draw(st.integers(1, 10))):
        following.append(draw(changed(following[-1])))
    return following


@given(steps=steps(), min_blocks=st.integers(1, 8), max_rows=st.integers(2, 5))
def test_kept_sets_are_those_of_a_search_whatever_changes(
    steps: list[list[Row]], min_blocks: int, max_rows: int
) -> None:
    prefixes = KeptPrefixes(min_blocks=min_blocks, max_rows=max_rows)
    for rows in steps:
        found = prefixes.find(*arrays(rows))
        assert as_sets(found) == plain_sets(rows, min_blocks, max_rows)


@given(steps=steps(), rows_per_item=st.integers(1, 5), num_slots=st.integers(1, 30))
def test_schedule_with_kept_sets_is_the_one_without(
    steps: list[list[Row]], rows_per_item: int, num_slots: int
) -> None:
    division = DecodeDivision(
        block_size=4,
        tile_keys=4,
        rows_per_item=rows_per_item,
        costs=SplitCosts(num_slots=num_slots, num_saturating=num_slots / 2),
    )
    prefixes = division.kept_prefixes()
    for rows in filter(None, steps):
        tables, num_blocks = arrays(rows)
        lens = 4 * num_blocks + 1
        items = division.items(lens, tables, prefixes)
        assert (items == division.items(lens, tables, division.kept_prefixes())).all()


def test_sets_are_kept_while_rows_only_grow() -> None:
    prefixes = KeptPrefixes(min_blocks=2, max_rows=4)
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
