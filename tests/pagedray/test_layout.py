"""The groups of layers of the KV cache, and the blocks that sequences hold in them."""

import random

import pytest

from pagedray.layout import CacheLayout, cache_layout, num_entries_before, num_held_blocks


def windows_of(num_full: int, num_windowed: int, window: int) -> list[int | None]:
    """Return windows in which the full layers are spread evenly."""
    num_layers = num_full + num_windowed
    full = {(index + 1) * num_layers // num_full - 1 for index in range(num_full)}
    return [None if layer in full else window for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("num_full", "num_windowed", "sizes"),
    [
        (12, 12, [12, 12]),  # gpt-oss-20b
        (18, 18, [18, 18]),  # gpt-oss-120b
        (10, 52, [10, 10, 10, 10, 10, 10, 2]),  # Gemma-3-27B
        (8, 40, [8] * 6),  # Gemma-3-12B
        (5, 29, [5, 5, 5, 5, 5, 5, 4]),  # Gemma-3-4B
        (4, 22, [4, 4, 4, 4, 4, 4, 2]),  # Gemma-3-1B
        (13, 13, [13, 13]),  # Gemma-2-2B
    ],
)
def test_layers_of_known_models_are_cut_into_groups(
    num_full: int, num_windowed: int, sizes: list[int]
) -> None:
    windows = windows_of(num_full, num_windowed, 128)
    layout = cache_layout(windows, 16)
    assert [len(group.layers) for group in layout.groups] == sizes
    assert layout.windows == (None, *[128] * (len(sizes) - 1))


@pytest.mark.parametrize("windows", [[None] * 5, [64] * 5, []])
def test_equal_layers_are_one_group(windows: list[int | None]) -> None:
    groups = cache_layout(windows, 16).groups
    assert [group.layers for group in groups] == ([tuple(range(5))] if windows else [])


def test_every_layer_is_in_one_group_of_its_kind_and_blocks_have_one_size() -> None:
    draws = random.Random(1)
    for _ in range(300):
        kinds = [(draws.choice((None, 4, 64, 1000)), draws.choice((1, 1, 2, 3))) for _ in range(3)]
        layers = [draws.choice(kinds) for _ in range(draws.randint(1, 70))]
        windows, sizes = [one[0] for one in layers], [one[1] for one in layers]
        groups = cache_layout(windows, 16, sizes).groups
        assert sorted(layer for group in groups for layer in group.layers) == [*range(len(layers))]
        for group in groups:
            assert {layers[layer][0] for layer in group.layers} == {group.window}
            assert len({layers[layer][1] for layer in group.layers}) == 1
        assert len(groups) <= max(16, len(set(layers)))
        if None in windows:
            assert groups[0].window is None
        # Every group but the last of its kind fills its blocks.
        filled = [sum(sizes[layer] for layer in group.layers) for group in groups]
        assert sum(size < max(filled) for size in filled) <= len(set(layers))


def test_a_lonely_layer_does_not_make_a_group_of_every_other_layer() -> None:
    layout = cache_layout([None, *[8] * 30], 16)
    sizes = [len(group.layers) for group in layout.groups]
    assert len(sizes) <= 16
    assert len(sizes) * max(sizes) <= 1.3 * 31


def test_layers_of_other_shapes_fill_blocks_of_equal_bytes() -> None:
    # Gemma-4-31B: 10 full layers of 4 x 512, 50 window layers of 16 x 256.
    windows = windows_of(10, 50, 1024)
    sizes = [4 * 512 if window is None else 16 * 256 for window in windows]
    groups = cache_layout(windows, 16, sizes).groups
    assert [len(group.layers) for group in groups] == [10, *[5] * 10]


@pytest.mark.parametrize(
    ("num_full", "full_kib", "num_windowed", "window_kib", "sizes"),
    [
        (5, 64, 25, 128, [5, *[3] * 8, 1]),  # Gemma-4-26B-A4B
        (8, 32, 40, 128, [8, *[3] * 13, 1]),  # Gemma-4-12B
    ],
)
def test_blocks_of_a_small_group_without_a_window_are_not_left_half_empty(
    num_full: int, full_kib: int, num_windowed: int, window_kib: int, sizes: list[int]
) -> None:
    windows = windows_of(num_full, num_windowed, 1024)
    kib = [full_kib if window is None else window_kib for window in windows]
    groups = cache_layout(windows, 16, kib).groups
    assert [len(group.layers) for group in groups] == sizes


def brute_force(num_tokens: int, layout: CacheLayout, step_tokens: int) -> int:
    """Return the most blocks held while a sequence computes its tokens in equal steps."""
    most = 0
    for first in range(0, num_tokens, step_tokens):
        end = min(first + step_tokens, num_tokens)
        num_held = 0
        for window in layout.windows:
            seen = {
                position // layout.block_size
                for query in range(first, end)
                for position in range(0 if window is None else max(0, query - window + 1), end)
            }
            num_held += len(seen)
        most = max(most, num_held)
    return most


def test_a_sequence_never_needs_more_blocks_than_are_counted_and_hardly_less() -> None:
    draws = random.Random(2)
    for _ in range(200):
        block_size = draws.choice((1, 2, 4))
        windows = [draws.choice((None, 1, 2, 3, 5, 8)) for _ in range(draws.randint(1, 3))]
        layout = cache_layout(windows, block_size)
        num_tokens, step_tokens = draws.randint(1, 40), draws.choice((1, 2, 3, 7))
        needed = brute_force(num_tokens, layout, step_tokens)
        counted = num_held_blocks(
            num_tokens, windows=layout.windows, block_size=block_size, step_tokens=step_tokens
        )
        assert needed <= counted <= needed + 3 * len(layout.groups)


def test_without_windows_every_token_takes_its_place() -> None:
    assert num_held_blocks(9, windows=(None,), block_size=4, step_tokens=2) == 3
    assert num_held_blocks(9, windows=(None, None), block_size=4, step_tokens=2) == 6


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
def test_entries_before_a_query_are_those_that_no_key_of_it_is_in(window: int) -> None:
    for position in range(40):
        first_key = max(0, position - window + 1)
        assert num_entries_before(position, window=window, block_size=4) == first_key // 4
