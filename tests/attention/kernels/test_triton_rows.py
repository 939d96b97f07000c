"""Norms, rotations and gates of token rows, against torch in float64."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from attention.batch import AttentionBatch
from attention.kernels.triton.advance import advance
from attention.kernels.triton.cache_write import cache_write
from attention.kernels.triton.copy_blocks import copy_blocks
from attention.kernels.triton.draft_rows import count_refused
from attention.kernels.triton.gated_activation import Gate, gated, sigmoid_gated, soft_capped
from attention.kernels.triton.gather_blocks import gather_blocks
from attention.kernels.triton.norm_rope import add_norm, add_parts_norm, norm_heads, rotate_heads
from attention.kernels.triton.pinned_copy import append_tokens, copy_words, place_tokens, row_words
from attention.kernels.triton.post_norm import add_normed
from tests.attention.kernels.features import Shape
from tests.attention.kernels.kernel_device import DEVICE
from tests.attention.kernels.paged_case import PagedCase

# One bit of the type's last place; Triton's interpreter cuts bfloat16 off where a GPU rounds it.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCES)
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SLOTS = [5, -1, 16, 2, 63, -1, 40]
NUM_ROWS, LENGTH = 37, 51


def strided(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of a wider matrix, with numbers of order one."""
    return torch.randn(num_rows, size + 8).to(dtype).to(DEVICE)[:, :size]


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=2 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 80, 4096])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rows_are_added_and_normed(size: int, eps: float, dtype: torch.dtype) -> None:
    stream, delta = strided(3, size, dtype), strided(3, size, dtype)
    weight = torch.randn(size).to(dtype).to(DEVICE)
    total = stream.double() + delta.double()
    normed = add_norm(stream, delta, weight, None, eps, is_centered=False)
    assert_near(stream, total)
    assert_near(normed, functional.rms_norm(stream.double(), (size,), weight.double(), eps))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_parts", "size"), [(2, 80), (4, 4096)])
def test_parts_of_rows_are_added_and_normed(num_parts: int, size: int, dtype: torch.dtype) -> None:
    stream, parts = strided(3, size, dtype), torch.randn(num_parts, 3, size, device=DEVICE)
    weight, bias = torch.randn(2, size).to(dtype).to(DEVICE)
    total = stream.double() + parts.double().sum(0)
    normed = add_parts_norm(stream, parts, weight, bias, 1e-6, is_centered=False)
    assert_near(stream, total)
    exact = functional.rms_norm(stream.double(), (size,), weight.double(), 1e-6) + bias.double()
    assert_near(normed, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "num_norms"), [(16, 0), (80, 1), (704, 2), (4096, 3)])
@pytest.mark.parametrize("has_all", [False, True])
def test_outputs_are_normed_added_and_the_sum_is_normed(
    size: int, num_norms: int, has_all: bool, dtype: torch.dtype
) -> None:
    eps = 0.1

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (size,), weight.double(), eps)

    stream, output, other = (strided(3, size, dtype) for _ in range(3))
    norm, output_norm, other_norm, *weights = torch.randn(3 + num_norms, size).to(dtype).to(DEVICE)
    scale = torch.tensor([0.75], dtype=dtype, device=DEVICE)
    total = output.double()
    if has_all:
        total = normed(total, output_norm) + normed(other.double(), other_norm)
    total = stream.double() + normed(total, norm)
    if has_all:
        total *= 0.75
    found = add_normed(
        stream,
        output,
        weights,
        norm=norm,
        eps=eps,
        beside=(other, output_norm, other_norm) if has_all else None,
        scale=scale if has_all else None,
    )
    # Sums of rounded norms differ by the rounding of the largest.
    tolerance = 4 * TOLERANCES[dtype]
    torch.testing.assert_close(stream.double(), total, rtol=tolerance, atol=4 * tolerance)
    assert len(found) == num_norms
    for rows, weight in zip(found, weights, strict=True):
        assert_near(rows, normed(stream.double(), weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_capped(dtype: torch.dtype) -> None:
    logits = 50 * strided(3, 1500, dtype)
    logits[0, :3] = torch.tensor([1e-3, 1e4, -1e4])
    capped = soft_capped(logits, 30.0)
    assert capped.dtype == torch.float32
    assert_near(capped, 30.0 * torch.tanh(logits.double() / 30.0))
    assert soft_capped(logits[:0], 30.0).shape == (0, 1500)


def test_no_rows_are_normed() -> None:
    none, weight = torch.empty(0, 16, device=DEVICE), torch.ones(16, device=DEVICE)
    (rows,) = add_normed(none, none, [weight], norm=weight, eps=1e-6)
    assert rows.shape == (0, 16)


def test_without_a_delta_the_stream_stays() -> None:
    stream = strided(3, 80, torch.float32)
    before, weight = stream.clone(), torch.ones(80, device=DEVICE)
    add_norm(stream, None, weight, None, 1e-6, is_centered=False)
    assert torch.equal(stream, before)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_centered_norm_is_the_layer_norm(has_bias: bool) -> None:
    # A large mean would drown a variance that is taken as a difference of squares.
    stream = strided(3, 80, torch.float32) + 100.0
    weight, noise = torch.randn(2, 80, device=DEVICE)
    bias = noise if has_bias else None
    normed = add_norm(stream, None, weight, bias, 1e-5, is_centered=True)
    exact = functional.layer_norm(
        stream.double(),
        (80,),
        weight.double(),
        None if bias is None else bias.double(),
        1e-5,
    )
    torch.testing.assert_close(normed.double(), exact, rtol=1e-4, atol=1e-4)


def test_a_float32_weight_is_not_rounded_to_the_rows_type() -> None:
    stream = torch.ones(1, 16, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.full((16,), 1.0 + 2.0**-10, device=DEVICE)
    bias = torch.full((16,), -1.0, device=DEVICE)
    normed = add_norm(stream, None, weight, bias, 0.0, is_centered=False)
    assert normed.tolist() == [[2.0**-10] * 16]


@pytest.mark.parametrize("head_size", [64, 80])
def test_each_head_is_normed_with_its_own_weight(head_size: int) -> None:
    heads = strided(4, 11 * head_size, torch.float32).unflatten(1, (11, head_size))
    weight = torch.randn(11, head_size, device=DEVICE)
    exact = functional.rms_norm(heads.double(), (head_size,), None, 1e-6) * weight.double()
    normed = norm_heads(heads, weight, 1e-6)
    assert normed.is_contiguous()
    assert_near(normed, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_heads_are_rotated_in_place_by_their_positions(head_size: int, dtype: torch.dtype) -> None:
    angles = torch.outer(torch.arange(9.0), torch.rand(head_size // 2))
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)
    heads = strided(5, 11 * head_size, dtype).unflatten(1, (11, head_size))
    positions = torch.tensor([3, 0, 7, 7, 1], device=DEVICE)
    first, second = heads.double().chunk(2, dim=2)
    cos, sin = table.double()[positions].unsqueeze(1).chunk(2, dim=2)
    exact = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)
    rotate_heads(heads, positions, table)
    assert_near(heads, exact)


def test_a_part_of_each_head_is_rotated() -> None:
    table = torch.randn(9, 64, device=DEVICE)
    positions = torch.tensor([3, 0, 7, 7, 1], device=DEVICE)
    heads = strided(5, 11 * 96, torch.float32).unflatten(1, (11, 96))
    part, rest = heads[:, :, :64].clone(), heads[:, :, 64:].clone()
    rotate_heads(part, positions, table)
    rotate_heads(heads[:, :, :64], positions, table)
    assert torch.equal(heads, torch.cat((part, rest), dim=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_multiplied_by_sigmoids(dtype: torch.dtype) -> None:
    gate, x = strided(3, 1500, dtype), strided(3, 1500, dtype).contiguous()
    gate[1, :2] = torch.tensor([200.0, -200.0])
    exact = x.double() * gate.double().sigmoid()
    assert sigmoid_gated(x, gate) is x
    assert_near(x, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("silu", functional.silu),
        ("gelu", functional.gelu),
        ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh")),
    ],
)
# The second half begins inside a tile, and what a tile has beyond the first is not written.
@pytest.mark.parametrize("size", [24, 1500])
def test_the_first_half_gates_the_second(
    size: int, kind: Gate, function: torch.nn.Module, dtype: torch.dtype
) -> None:
    columns = strided(3, 2 * size, dtype) * 3
    gate, other = columns.double().chunk(2, dim=1)
    assert_near(gated(columns, kind), function(gate) * other)


def test_no_rows_launch_no_kernel() -> None:
    none = torch.empty(0, 64, device=DEVICE)
    weight = torch.ones(64, device=DEVICE)
    assert add_norm(none, none, weight, None, 1e-6, is_centered=False).shape == (0, 64)
    assert gated(none, "silu").shape == (0, 32)


def write(
    key: torch.Tensor, value: torch.Tensor, cache_dtype: torch.dtype, *, scales: tuple[float, float]
) -> torch.Tensor:
    """Return both layers of a cache that was NaN before, `[4, 2, 2, 16, 3, 24]`."""
    cache = torch.full((4, 2, 2, 16, 3, 24), torch.nan).to(cache_dtype).to(DEVICE)
    slots = torch.tensor(SLOTS, device=DEVICE)
    k_scale, v_scale = scales
    cache_write(key, value, cache[:, 1], slots, k_scale=k_scale, v_scale=v_scale)
    return cache


def rows_of(cache: torch.Tensor, side: int) -> torch.Tensor:
    """Return the slots of the second layer, float32 `[64, 72]`."""
    return cache[:, 1, side].float().reshape(64, 72)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tokens_are_at_their_slots_and_nothing_else_is_written(dtype: torch.dtype) -> None:
    # One row of each token holds query, key and value; one more token is padding.
    tokens = torch.randn(len(SLOTS) + 1, 3 * 72).to(dtype).to(DEVICE)
    cache = write(tokens[:, 72:144], tokens[:, 144:], dtype, scales=(1.0, 1.0))
    assert cache[:, 0].isnan().all()
    for side in range(2):
        expected = torch.full((64, 72), torch.nan, device=DEVICE)
        for token, slot in enumerate(SLOTS):
            if slot >= 0:
                expected[slot] = tokens[token, 72 * (side + 1) :][:72].float()
        torch.testing.assert_close(rows_of(cache, side), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cache_dtype", FP8, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fp8_cache_holds_the_quotient(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    # Quotients that need no rounding, because Triton's interpreter does not round to nearest.
    quotients = torch.tensor([0.5, -1.0, 1.5, -3.0, 0.0, 6.0])[torch.randint(6, (2, 7, 72))]
    key = (quotients[0] * 0.375).to(dtype).to(DEVICE)
    value = (quotients[1] * 8.0).to(dtype).to(DEVICE)
    cache = write(key, value, cache_dtype, scales=(0.375, 8.0))
    for side in range(2):
        actual = rows_of(cache, side).cpu()
        for token in (0, 2, 3, 4, 6):
            assert torch.equal(actual[SLOTS[token]], quotients[side, token])


@pytest.mark.parametrize(("cache_dtype", "largest"), [(FP8[0], 448.0), (FP8[1], 57344.0)])
def test_too_large_numbers_become_the_largest(cache_dtype: torch.dtype, largest: float) -> None:
    key = torch.tensor([1e30, -1e30, torch.inf, -torch.inf, 2 * largest, 1.01 * largest])
    key = key.repeat(len(SLOTS), 12).to(DEVICE)
    cache = write(key, key, cache_dtype, scales=(1.0, 0.5))
    expected = largest * key[0].sign()
    assert torch.equal(rows_of(cache, 0)[SLOTS[0]], expected)
    assert torch.equal(rows_of(cache, 1)[SLOTS[0]], expected)


@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_rows_are_the_keys_and_values_from_the_starts(
    cache_dtype: torch.dtype | None, dtype: torch.dtype, block_size: int
) -> None:
    k_scale, v_scale = (1.0, 1.0) if cache_dtype is None else (0.5, 4.0)
    shape = Shape(
        num_kv_heads=3,
        head_size=24,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    case = PagedCase(shape, [37, 5, 70, 9])
    starts, counts = [30, 0, 3, 9], [7, 5, 67, 0]
    key, value = torch.full((2, 81, 3, 24), 7.0, dtype=dtype, device=DEVICE)
    gather_blocks(
        case.cache[:, 1],
        block_tables=case.tables.to(DEVICE),
        starts=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        cu_lens=torch.tensor([0, 7, 12, 79, 79], dtype=torch.int32, device=DEVICE),
        max_len=67,
        key=key,
        value=value,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    contents = [
        case.keys_and_values(i)[:, start : start + count]
        for i, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
    expected = torch.cat(contents, dim=1).to(dtype)
    assert torch.equal(torch.stack([key, value]).cpu()[:, :79], expected)
    assert (key[79:] == 7.0).all()
    assert (value[79:] == 7.0).all()


def test_steps_equal_those_of_the_batch_on_the_host() -> None:
    num_rows, block_size = 300, 4
    tables = torch.randint(0, 2**31 - 1, (num_rows, 6), dtype=torch.int32)
    lengths = torch.randint(1, 20, (num_rows,), dtype=torch.int32)
    batch = AttentionBatch(
        num_prefills=0,
        query_lens=np.ones(num_rows, np.int32),
        seq_lens=lengths.numpy(),
        block_tables=tables.numpy(),
        slot_mapping=np.zeros(num_rows, np.int64),
    )
    seq_lens, slots = lengths.to(DEVICE, copy=True), torch.zeros(num_rows).long().to(DEVICE)
    for _ in range(4):
        advance(seq_lens, slots, tables.to(DEVICE), block_size=block_size)
        batch = batch.advanced(block_size)
        assert seq_lens.tolist() == batch.seq_lens.tolist()
        assert slots.tolist() == batch.slot_mapping.tolist()


def test_padding_stays_as_it_is() -> None:
    seq_lens = torch.tensor([0, 0, 3], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([11, -1, 9, -1], device=DEVICE)
    tables = torch.tensor([[2**31 - 1] * 2, [2**31 - 1] * 2, [2, 0]], dtype=torch.int32)
    advance(seq_lens, slots, tables.to(DEVICE), block_size=4)
    assert seq_lens.tolist() == [0, 0, 4]
    assert slots.tolist() == [11, -1, 11, -1]


def test_row_with_a_full_table_becomes_padding() -> None:
    seq_lens = torch.tensor([7, 8], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([14, 7], device=DEVICE)
    tables = torch.tensor([[0, 3], [0, 1]], dtype=torch.int32, device=DEVICE)
    for _ in range(3):
        advance(seq_lens, slots, tables, block_size=4)
    assert seq_lens.tolist() == [8, 8]
    assert slots.tolist() == [-1, -1]


@pytest.mark.parametrize("head_size", [1, 2, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_destinations_equal_their_sources_and_all_else_stays(
    dtype: torch.dtype, head_size: int
) -> None:
    shape = 9, 3, 2, 4, 1, head_size
    cache = torch.randint(0, 256, shape).to(dtype).to(DEVICE)
    expected = cache.clone()
    expected[[0, 8, 5]] = cache[[3, 3, 7]]
    copy_blocks(cache, torch.tensor([[3, 0], [3, 8], [7, 5]], device=DEVICE))
    assert torch.equal(cache, expected)


def test_fp8_content_is_copied_bit_by_bit() -> None:
    cache = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(2, 1, 2, 4, 2, 8)
    expected = cache[0].clone()
    copy_blocks(cache.view(torch.float8_e4m3fn), torch.tensor([[0, 1]], device=DEVICE))
    assert torch.equal(cache[1], expected)


def test_empty_list_copies_nothing() -> None:
    cache = torch.zeros(2, 1, 2, 4, 2, 8, device=DEVICE)
    copy_blocks(cache, torch.zeros(0, 2, dtype=torch.int64, device=DEVICE))
    assert not cache.any()


def pinned(words: torch.Tensor) -> torch.Tensor:
    return words.pin_memory() if torch.cuda.is_available() else words


def random_table() -> torch.Tensor:
    return torch.randint(0, 128256, (NUM_ROWS, LENGTH), device=DEVICE)


@pytest.mark.parametrize("num_words", [0, 1, 16, 255, 1000])
def test_words_are_copied_both_ways(num_words: int) -> None:
    host = pinned(torch.randint(-(2**62), 2**62, (num_words,)))
    device = torch.zeros(num_words + 1, dtype=torch.int64, device=DEVICE)
    back = pinned(torch.zeros(num_words + 1, dtype=torch.int64))
    copy_words(device[:num_words], host)
    copy_words(back, device)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert back.tolist() == [*host.tolist(), 0]


@pytest.mark.parametrize(("num_tokens", "num_others"), [(1, 6), (16, 0), (300, 8), (3, 700)])
def test_tokens_of_a_step_are_those_of_the_table(num_tokens: int, num_others: int) -> None:
    table = random_table()
    rows = torch.randint(0, NUM_ROWS, (num_tokens,))
    columns = torch.randint(0, LENGTH, (num_tokens,))
    others = torch.randint(0, 2**40, (num_others,))
    token_ids = torch.full((num_tokens + 2,), -7, device=DEVICE)
    positions, copied = token_ids.clone(), torch.zeros_like(others, device=DEVICE)
    draft_ids = torch.full((num_tokens,), -1)
    # Drafts at places of their own; 0 is a token too.
    draft_ids[:NUM_ROWS:3] = torch.arange(len(draft_ids[:NUM_ROWS:3]))
    rows[:NUM_ROWS] = torch.arange(len(rows[:NUM_ROWS]))
    columns[:NUM_ROWS], columns[NUM_ROWS:] = LENGTH - 1, columns[NUM_ROWS:].clamp(max=LENGTH - 2)
    words = torch.from_numpy(row_words(rows.numpy(), draft_ids.numpy()))
    host = pinned(torch.cat((words, columns, others)))
    expected = table.cpu()
    expected[rows[draft_ids >= 0], columns[draft_ids >= 0]] = draft_ids[draft_ids >= 0]
    # Only overlapped steps read the numbers of refused drafts.
    refused = torch.full((NUM_ROWS,), 2, device=DEVICE)
    arguments = token_ids[:num_tokens], positions[:num_tokens], copied, host, table, refused
    place_tokens(*arguments, is_overlapped=False)
    assert token_ids.tolist() == [*expected[rows, columns].tolist(), -7, -7]
    assert torch.equal(table.cpu(), expected)
    assert positions.tolist() == [*columns.tolist(), -7, -7]
    assert copied.tolist() == others.tolist()


@pytest.mark.parametrize("num_tokens", [1, 300])
def test_positions_of_overlapped_steps_are_less_by_the_refused_drafts(num_tokens: int) -> None:
    table = random_table()
    rows = torch.randint(0, NUM_ROWS, (num_tokens,))
    columns = torch.randint(5, LENGTH, (num_tokens,))
    refused = torch.randint(0, 6, (NUM_ROWS,))
    token_ids = torch.full((num_tokens,), -7, device=DEVICE)
    positions, copied = token_ids.clone(), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    host = pinned(torch.cat((rows, columns, torch.tensor([3, 4]))))
    place_tokens(
        *(token_ids, positions, copied, host, table, refused.to(DEVICE)), is_overlapped=True
    )
    expected = columns - refused[rows]
    assert positions.tolist() == expected.tolist()
    assert token_ids.tolist() == table.cpu()[rows, expected].tolist()
    assert copied.tolist() == [3, 4]


def test_refused_drafts_of_chains_are_counted() -> None:
    table = random_table()
    # Of chains in rows 3, 0 and 2, none, one and all drafts are right; row 3 has no drafts.
    drafts: list[list[int]] = [[], [5, 6], [7, 8, 9]]
    sampled = [[1], [5, 4, 2], [7, 8, 9, 3]]
    starts, rows = [4, 2, 0], [3, 0, 2]
    step_ids: list[int] = []
    positions: list[int] = []
    firsts, ends = [], []
    for chain, tokens, first, row in zip(drafts, sampled, starts, rows, strict=True):
        firsts.append(len(step_ids))
        step_ids += [99, *chain]
        positions += range(first, first + len(tokens))
        ends.append(len(step_ids))
        table[row, first + 1 : first + 1 + len(tokens)] = torch.tensor(tokens)
    refused = torch.full((NUM_ROWS,), -5, device=DEVICE)
    chains = torch.tensor([rows, firsts, ends], device=DEVICE)
    step = torch.tensor([step_ids, positions], device=DEVICE)
    count_refused(refused, (chains[0], chains[1], chains[2]), (step[0], step[1]), table)
    assert [refused[row].item() for row in rows] == [0, 1, 0]
    assert (refused == -5).sum() == NUM_ROWS - 3


@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_sampled_tokens_reach_the_table_and_the_host(num_tokens: int) -> None:
    table = random_table()
    rows = torch.randperm(NUM_ROWS)[:num_tokens]
    columns = torch.randint(0, LENGTH, (num_tokens,))
    token_ids = torch.randint(0, 128256, (num_tokens,))
    token_ids[::2] = -1
    host = pinned(torch.zeros(num_tokens, dtype=torch.int64))
    expected = table.cpu()
    expected[rows, columns] = token_ids.clamp(min=0)
    append_tokens(table, rows.to(DEVICE), columns.to(DEVICE), token_ids.to(DEVICE), host)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert host.tolist() == token_ids.tolist()
    assert torch.equal(table.cpu(), expected)
