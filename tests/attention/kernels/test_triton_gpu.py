"""The kernels as compiled for a GPU, at sizes that the interpreter would take too long for."""

import pytest
import torch
import triton
import triton.language as tl

from attention.kernels.arguments import DecodeItems
from attention.kernels.triton.cache_write import cache_write
from attention.kernels.triton.kernel_launcher import KernelLauncher, RepeatedLaunch
from attention.kernels.triton.paged_decode import PagedDecode
from attention.kernels.triton.tuning import AttentionOptions, default_decode_tuning
from tests.attention.kernels.decode_items import decode_items
from tests.attention.kernels.decode_launch import paged_decode
from tests.attention.kernels.features import FEATURES, HEADS, Shape
from tests.attention.kernels.paged_case import PagedCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_equals_the_reference(feature: str, dtype: torch.dtype) -> None:
    shape = Shape(num_heads=8, num_kv_heads=2, head_size=128, dtype=dtype)
    case = PagedCase(shape, [700, 1, 333, 64])
    case.check_chunks([300, 1, 333, 10], FEATURES[feature])
    case.check_ragged([300, 1, 333, 10], FEATURES[feature])
    case.check_decode(FEATURES[feature], num_splits=1)
    case.check_decode(FEATURES[feature], num_splits=5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [16, 64, 80, 96, 112, 120, 192, 256, 512])
def test_every_head_size_equals_the_reference(head_size: int, dtype: torch.dtype) -> None:
    shape = Shape(num_heads=6, num_kv_heads=2, head_size=head_size, dtype=dtype)
    case = PagedCase(shape, [300, 65])
    case.check_chunks([129, 65], {})
    case.check_decode({}, num_splits=3)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [*HEADS, (71, 1), (130, 1)])
def test_every_ratio_of_heads_equals_the_reference(num_heads: int, num_kv_heads: int) -> None:
    shape = Shape(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=64, dtype=torch.bfloat16
    )
    case = PagedCase(shape, [300, 65])
    case.check_chunks([129, 65], FEATURES["ALiBi and window"])
    case.check_decode(FEATURES["ALiBi and window"], num_splits=3)


@pytest.mark.parametrize("block_size", [4, 16, 32, 64, 128])
@pytest.mark.parametrize("cache_dtype", [None, *FP8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_cache_equals_the_reference(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, block_size: int
) -> None:
    k_scale, v_scale = (1.0, 1.0) if cache_dtype is None else (0.6, 1.7)
    shape = Shape(
        head_size=128,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    case = PagedCase(shape, [300, 65])
    case.check_chunks([129, 65], {})
    case.check_decode({}, num_splits=3)


@pytest.mark.parametrize("cache_dtype", FP8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_cache_holds_the_rounded_quotient(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    key, value = (20 * torch.randn(2, 500, 72, device="cuda")).to(dtype)
    key[7, 3] = torch.nan
    cache = torch.zeros(32, 2, 16, 3, 24, device="cuda").to(cache_dtype)
    slots = torch.randperm(512, device="cuda")[:500]
    cache_write(key, value, cache, slots, k_scale=0.37, v_scale=2.9)
    for side, (tensor, scale) in enumerate([(key, 0.37), (value, 2.9)]):
        largest = torch.finfo(cache_dtype).max
        expected = (tensor.float() / scale).clamp(-largest, largest).to(cache_dtype).float()
        actual = cache[:, side].float().reshape(512, 72)[slots]
        # Some conversions go by way of float16, and what is then halfway may go the other way.
        is_equal = (actual == expected) | (actual.isnan() & expected.isnan())
        assert is_equal.float().mean() > 0.98
        step = torch.finfo(cache_dtype).eps
        torch.testing.assert_close(actual, expected, rtol=step, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize("num_splits", [1, 6])
def test_captured_decode_follows_other_lengths(num_splits: int) -> None:
    shape = Shape(num_heads=8, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    case = PagedCase(shape, [1200] * 5)
    query = case.query(5)
    tables = case.tables.cuda()
    tuning = default_decode_tuning(num_queries_per_kv=4, head_size=128, dtype=torch.bfloat16)

    def items_of(lengths: list[int]) -> DecodeItems:
        host = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        cache = case.cache[:, 1]
        return decode_items(8, cache, host, case.tables, tuning, num_splits=num_splits)

    items = items_of([1] * 5)

    def decode() -> torch.Tensor:
        out = torch.empty_like(query)
        paged_decode(
            query,
            case.cache[:, 1],
            block_tables=tables,
            items=items,
            options=AttentionOptions(scale=0.1, window_right=0),
            tuning=tuning,
            out=out,
        )
        return out

    decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode()
    for lengths in ([1, 15, 16, 17, 0], [1200, 64, 65, 1199, 1024], [0, 0, 0, 0, 3]):
        items.words.copy_(items_of(lengths).words)
        graph.replay()
        assert torch.equal(captured, decode())


def test_offsets_of_blocks_may_exceed_32_bits() -> None:
    num_blocks, shape = 17000, (2, 64, 8, 128)
    content = torch.randn(4, *shape, dtype=torch.bfloat16, device="cuda")
    far = torch.zeros(num_blocks, *shape, dtype=torch.bfloat16, device="cuda")
    assert far.numel() > 2**31
    far[-4:] = content
    query = torch.randn(1, 8, 128, dtype=torch.bfloat16, device="cuda")
    tuning = default_decode_tuning(num_queries_per_kv=1, head_size=128, dtype=torch.bfloat16)
    seq_lens = torch.tensor([250], dtype=torch.int32, device="cuda")
    outs = []
    for cache, first in ((content, 0), (far, num_blocks - 4)):
        outs.append(torch.empty_like(query))
        tables = torch.arange(first, first + 4, device="cuda").int()[None]
        paged_decode(
            query,
            cache,
            block_tables=tables,
            items=decode_items(8, cache, seq_lens, tables, tuning),
            options=AttentionOptions(scale=0.1, window_right=0),
            tuning=tuning,
            out=outs[-1],
        )
    assert torch.equal(*outs)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _add(
    numbers: tl.tensor, result: tl.tensor, stride: tl.tensor, size: tl.constexpr, tile: tl.constexpr
) -> None:
    elements = tl.arange(0, tile) * stride
    mask = tl.arange(0, tile) < size
    tl.store(result + elements, tl.load(numbers + elements, mask=mask) + 1.0, mask=mask)


def test_repeated_launch_computes_on_the_tensors_of_each() -> None:
    launch = RepeatedLaunch(_add, (1, 1, 1), (1, 30, 32), num_warps=1)
    numbers = torch.rand(8, 64, device="cuda")
    results = torch.zeros_like(numbers)
    # The third and the fourth are not aligned.
    for row, first in enumerate((0, 0, 1, 3, 0, 4)):
        launch.launch(numbers[row, first:], results[row, first:])
        assert torch.equal(results[row, first : first + 30], numbers[row, first : first + 30] + 1.0)
        assert not results[row, first + 30 :].any()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch.launch(numbers[6], results[6])
    stream.synchronize()
    assert torch.equal(results[6, :30], numbers[6, :30] + 1.0)


def test_launcher_computes_on_the_tensors_and_arguments_of_each_launch() -> None:
    launcher = KernelLauncher(_add)
    for dtype in (torch.float32, torch.float16):
        numbers = torch.rand(8, 64, device="cuda", dtype=dtype)
        results = torch.zeros_like(numbers)
        for row, (first, stride, size) in enumerate(
            [(0, 1, 30), (1, 1, 30), (0, 2, 30), (3, 2, 12), (0, 1, 30), (4, 1, 12)]
        ):
            from_row, to_row = numbers[row, first:], results[row, first:]
            launcher.launch((1, 1, 1), (from_row, to_row), (stride, size, 32), num_warps=1)
            changed = results[row].nonzero().flatten()
            assert changed.tolist() == [first + stride * index for index in range(size)]
            assert torch.equal(results[row, changed], numbers[row, changed] + 1.0)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_decode_of_several_layers_equals_that_of_each(num_splits: int) -> None:
    shape = (33, 3, 2, 16, 2, 64)
    cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    tuning = default_decode_tuning(num_queries_per_kv=4, head_size=64, dtype=torch.bfloat16)
    seq_lens = torch.tensor([250, 1, 70], dtype=torch.int32, device="cuda")
    block_tables = torch.randperm(32, device="cuda").int().add(1).repeat(3, 1)
    options = AttentionOptions(scale=0.1, window_right=0)
    items = decode_items(8, cache[:, 0], seq_lens, block_tables, tuning, num_splits=num_splits)
    queries = torch.randn(3, 5, 8, 64, device="cuda", dtype=torch.bfloat16)[:, 1:4]
    outs, expected = torch.zeros_like(queries), torch.zeros_like(queries)
    decode = PagedDecode(
        queries[0],
        cache[:, 0],
        outs[0],
        block_tables=block_tables,
        items=items,
        options=options,
        tuning=tuning,
    )
    for layer in range(3):
        blocks = cache[:, layer]
        assert decode.fits(queries[layer], blocks, outs[layer], options, None)
        decode.launch(queries[layer], blocks[:, 0], blocks[:, 1], outs[layer])
        paged_decode(
            queries[layer],
            blocks,
            block_tables=block_tables,
            items=items,
            options=options,
            tuning=tuning,
            out=expected[layer],
        )
    assert torch.equal(outs, expected)
    assert outs.any()
    assert not decode.fits(queries[0, :, :, ::2], cache[:, 0], outs[0], options, None)
