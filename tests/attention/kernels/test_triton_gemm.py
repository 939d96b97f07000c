"""GEMMs of fp8 rows in small tiles, against torch in float64."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional

from attention.kernels.arguments import DeferredRMSNorm, QuantizedRows
from attention.kernels.triton.gemm import trials
from attention.kernels.triton.gemm.fp8_tiles import (
    Fp8Tiling,
    fp8_tiles_gemm,
    fp8_tiling,
    new_arrivals,
)
from attention.kernels.triton.gemm.int4 import MAX_ROWS as MAX_INT4_ROWS
from attention.kernels.triton.gemm.int4 import (
    dequantize_int4,
    int4_gated,
    int4_gemm,
    packed_int4,
    scale_words,
)
from attention.kernels.triton.gemm.skinny import (
    MAX_ROWS,
    SkinnyGemmTuning,
    default_skinny_tuning,
    skinny_gated,
    skinny_gemm,
)
from attention.kernels.triton.gemm.trials import TRIALS, failed_trials
from tests.attention.kernels.kernel_device import DEVICE
from workers.layers.formats.fp8_weight import quantized_rows
from workers.layers.hopper_linear import HopperLinear
from workers.layers.linear_choice import replaced_kernels

ON = torch.device(DEVICE)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
TUNING = SkinnyGemmTuning(tile_columns=16, tile_depth=32, num_warps=2, num_stages=3)
Weight = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def quantized(num_rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = quantized_rows(torch.randn(num_rows, size))
    return values.to(DEVICE), scales.to(DEVICE)


def tiling(rows: int, depth: int, parts: int = 1) -> Fp8Tiling:
    return Fp8Tiling(tile_rows=rows, tile_depth=depth, num_stages=3, num_parts=parts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "size", "in_size", "tiling"),
    [
        (128, 64, 128, tiling(128, 128)),
        (150, 200, 272, tiling(128, 128)),
        (150, 200, 272, tiling(64, 256)),
        (1, 16, 16, tiling(64, 128)),
        (17, 80, 272, tiling(32, 256)),
        (31, 144, 512, tiling(32, 128, parts=2)),
        (50, 144, 512, tiling(64, 256, parts=2)),
    ],
)
def test_product_equals_that_of_float64(
    num_rows: int, size: int, in_size: int, tiling: Fp8Tiling, dtype: torch.dtype
) -> None:
    values, row_scales = quantized(num_rows, in_size)
    weight, scales = quantized(size, in_size)
    rows, arrivals = QuantizedRows(values, row_scales, dtype), new_arrivals(size, weight.device)
    # A launch leaves the counters as the next one needs them.
    for _ in range(2):
        product = fp8_tiles_gemm(rows, weight, scales, tiling, arrivals)
    assert product.dtype == dtype
    assert not arrivals.any()
    exact = functional.linear(
        values.double() * row_scales.double(), weight.double() * scales.double()
    )
    tolerance = 2e-3 if dtype == torch.float16 else 2e-2
    if DEVICE == "cuda":
        # The tensor cores add products of fp8 numbers with some 14 bits.
        tolerance = 2e-2
    torch.testing.assert_close(product.double(), exact, rtol=tolerance, atol=10 * tolerance)


def test_rows_after_the_last_one_do_not_change_the_product() -> None:
    values, row_scales = quantized(128, 256)
    weight, scales = quantized(64, 256)
    # Rows whose memory is followed by other rows, and by numbers that are not finite.
    values.view(torch.uint8)[50:] = 0x7F
    arrivals = new_arrivals(64, weight.device)
    products = [
        fp8_tiles_gemm(
            QuantizedRows(rows, row_scales[:50], torch.bfloat16),
            weight,
            scales,
            tiling(64, 256),
            arrivals,
        )
        for rows in (values[:50], values[:50].clone())
    ]
    assert torch.equal(*products)
    assert products[0].isfinite().all()


def test_a_weight_with_tiles_for_one_turn_and_a_fifth_is_left_to_cublas() -> None:
    # Queries, keys and values of Llama 3 70B.
    assert fp8_tiling(64, 10240, 8192, 132) is None
    assert fp8_tiling(32, 10240, 8192, 132) is not None


LLAMA = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


@pytest.mark.parametrize(
    ("num_rows", "tile_rows", "num_parts"),
    [
        (17, {"qkv": 32, "o": 32, "gate_up": 32, "down": 32}, {"down": 2}),
        (64, {"qkv": 64, "o": 64, "gate_up": 64, "down": 64}, {"down": 2}),
        (72, {"qkv": 128, "o": 64, "down": 64}, {}),
        (128, {"qkv": 128, "o": 64, "down": 64}, {}),
        (192, {"o": 64, "down": 64}, {}),
        (144, {"o": 64, "down": 64}, {}),
        (200, {"o": 128, "down": 128}, {}),
        (256, {"o": 128, "down": 128}, {}),
        (272, {}, {}),
        (8192, {}, {}),
    ],
)
def test_tiles_are_chosen_that_keep_an_h200_busy(
    num_rows: int, tile_rows: dict[str, int], num_parts: dict[str, int]
) -> None:
    found = {name: fp8_tiling(num_rows, *shape, 132) for name, shape in LLAMA.items()}
    assert {name: one.tile_rows for name, one in found.items() if one is not None} == tile_rows
    split = {name: one.num_parts for name, one in found.items() if one and one.num_parts > 1}
    assert split == num_parts


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[int]]]:
    """Let all kernels fail to compile; counts how often each is tried."""
    tried: dict[str, list[int]] = {name: [] for name in TRIALS}

    def fail(name: str) -> None:
        tried[name].append(1)
        raise RuntimeError(f"PassManager::run failed in {name}\nmany lines")

    monkeypatch.setattr(
        trials, "TRIALS", {name: lambda _, name=name: fail(name) for name in TRIALS}
    )
    failed_trials.cache_clear()
    yield tried
    failed_trials.cache_clear()


def test_kernels_compile(caplog: pytest.LogCaptureFixture) -> None:
    failed_trials.cache_clear()
    assert failed_trials(ON) == frozenset()
    assert caplog.messages == []


def test_failures_are_logged_once(
    failing: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert [failed_trials(ON) for _ in range(3)] == [frozenset(TRIALS)] * 3
    assert caplog.messages == [
        f"The kernel of {name}.py does not compile; another, which is slower, takes its place: "
        f"PassManager::run failed in {name}"
        for name in TRIALS
    ]
    assert failing == {name: [1] for name in TRIALS}


def test_a_gpu_without_memory_says_nothing_about_kernels(
    failing: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    with monkeypatch.context() as patch:
        patch.setitem(trials.TRIALS, "skinny", fail)
        with pytest.raises(torch.OutOfMemoryError):
            failed_trials(ON)
    assert failed_trials(ON) == frozenset(TRIALS)
    assert failing["skinny"] == [1]


def linear() -> HopperLinear:
    torch.manual_seed(0)
    kernel = HopperLinear.empty(256, 256, has_bias=False, dtype=torch.float16, device=ON)
    kernel.weight.copy_(torch.randn(256, 256) / 16)
    return kernel


@pytest.mark.parametrize("num_rows", [1, 7, 128])
def test_products_are_the_same_without_the_kernels(
    num_rows: int, request: pytest.FixtureRequest
) -> None:
    kernel = linear()
    x = torch.randn(num_rows, 256).half().to(ON)
    product, gated = kernel(x), kernel.gated(x, "silu")
    request.getfixturevalue("failing")
    replaced = linear()
    assert not replaced.accepts_deferred_norm(1)
    torch.testing.assert_close(replaced(x), product, rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(replaced.gated(x, "silu"), gated, rtol=4e-3, atol=1e-2)


def test_a_row_is_normed_by_its_product_if_the_kernel_compiles() -> None:
    kernel = linear()
    assert kernel.accepts_deferred_norm(1)
    row = DeferredRMSNorm(torch.ones(1, 256).half().to(ON), torch.ones(256).half().to(ON), 0.0)
    expected = kernel.weight.float().sum(1).half()[None]
    torch.testing.assert_close(kernel.forward_with_norm(row), expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    ("capability", "kernels"), [((9, 0), tuple(sorted(TRIALS))), ((8, 0), ())], ids=str
)
def test_replaced_kernels_are_those_that_a_gpu_would_use(
    capability: tuple[int, int],
    kernels: tuple[str, ...],
    failing: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    monkeypatch.setattr("torch.cuda.device", lambda _: nullcontext())
    assert replaced_kernels(torch.device("cuda", 0)) == kernels
    assert replaced_kernels(torch.device("cpu")) == ()
    assert failing == {name: [1] if kernels else [] for name in TRIALS}


def weights(out_size: int, in_size: int, dtype: torch.dtype) -> torch.Tensor:
    weight: torch.Tensor = torch.randn(out_size, in_size) / in_size**0.5
    return weight.to(dtype).to(DEVICE)


def strided(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of a wider matrix."""
    return torch.randn(num_rows, size + 16).to(dtype).to(DEVICE)[:, :size]


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 7, MAX_ROWS])
@pytest.mark.parametrize("out_size", [16, 40])
def test_product_equals_that_of_float64_of_few_rows(
    out_size: int, num_rows: int, dtype: torch.dtype
) -> None:
    x, weight = strided(num_rows, 96, dtype), weights(out_size, 96, dtype)
    bias = torch.randn(out_size).to(dtype).to(DEVICE)
    exact = functional.linear(x.double(), weight.double())
    assert_near(skinny_gemm(x, weight, None, TUNING), exact)
    assert_near(skinny_gemm(x, weight, bias, TUNING), exact + bias.double())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_rows", [1, MAX_ROWS])
def test_gate_is_applied_to_the_product(num_rows: int, dtype: torch.dtype) -> None:
    x, weight = strided(num_rows, 64, dtype), weights(2 * 24, 64, dtype)
    gate, other = functional.linear(x.double(), weight.double()).chunk(2, 1)
    assert_near(skinny_gated(x, weight, "silu", TUNING), functional.silu(gate) * other)


@pytest.mark.parametrize("is_gated", [False, True])
def test_default_tuning_computes_the_same(is_gated: bool) -> None:
    tuning = default_skinny_tuning(96, 512, is_gated=is_gated)
    assert tuning is not None
    x, weight = strided(3, 512, torch.float16), weights(96, 512, torch.float16)
    exact = functional.linear(x.double(), weight.double())
    if is_gated:
        gate, other = exact.chunk(2, 1)
        exact = functional.silu(gate) * other
        assert_near(skinny_gated(x, weight, "silu", tuning), exact)
    else:
        assert_near(skinny_gemm(x, weight, None, tuning), exact)


def test_a_value_that_is_not_finite_stays_in_its_row() -> None:
    x = torch.ones(3, 32, device=DEVICE)
    x[1, 5] = torch.nan
    product = skinny_gemm(x, weights(16, 32, torch.float32), None, TUNING)
    assert product.isnan().any(1).tolist() == [False, True, False]


def test_no_rows_give_no_rows() -> None:
    none = torch.empty(0, 32, device=DEVICE)
    assert skinny_gemm(none, weights(16, 32, torch.float32), None, TUNING).shape == (0, 16)


@pytest.mark.parametrize(("out_size", "in_size"), [(128256, 4096), (4096, 4000)])
def test_shapes_for_which_another_kernel_is_faster_have_no_tuning(
    out_size: int, in_size: int
) -> None:
    assert default_skinny_tuning(out_size, in_size, is_gated=False) is None


def int4_weight(out_size: int, in_size: int, group_size: int) -> Weight:
    """Return packed numbers, words of scales, and in float64 what they stand for."""
    numbers = torch.randint(0, 16, (out_size, in_size), dtype=torch.uint8)
    scales = (torch.rand(out_size, in_size // group_size) / 8).half()
    zeros = torch.randint(0, 17, scales.shape, dtype=torch.uint8)
    spread = (tensor.double().repeat_interleave(group_size, 1) for tensor in (zeros, scales))
    zero, scale = spread
    exact = (numbers.double() - zero) * scale
    packed = packed_int4(numbers, group_size)
    return packed.to(DEVICE), scale_words(scales, zeros).to(DEVICE), exact.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 7, 17, MAX_INT4_ROWS])
@pytest.mark.parametrize(("in_size", "group_size"), [(256, 32), (192, 192)])
def test_product_equals_that_of_dequantized_weights(
    in_size: int, group_size: int, num_rows: int, dtype: torch.dtype
) -> None:
    packed, words, exact = int4_weight(40, in_size, group_size)
    x = torch.randn(num_rows, in_size + 16).to(dtype).to(DEVICE)[:, :in_size]
    bias = torch.randn(40).to(dtype).to(DEVICE)
    expected = functional.linear(x.double(), exact)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for given, added in ((None, 0.0), (bias, bias.double())):
        found = int4_gemm(x, packed, words, given)
        torch.testing.assert_close(
            found.double(), expected + added, rtol=tolerance, atol=10 * tolerance
        )


def test_both_halves_of_a_gate_have_their_groups() -> None:
    packed, words, exact = int4_weight(48, 512, 128)
    x = torch.randn(3, 512, device=DEVICE)
    gate, other = functional.linear(x.double(), exact).chunk(2, 1)
    found = int4_gated(x, packed, words, "silu")
    torch.testing.assert_close(found.double(), functional.silu(gate) * other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("in_size", "group_size"), [(256, 32), (96, 96), (512, 256)])
def test_all_weights_are_dequantized(in_size: int, group_size: int) -> None:
    packed, words, exact = int4_weight(40, in_size, group_size)
    found = dequantize_int4(packed, words, torch.float32)
    torch.testing.assert_close(found, exact.float(), rtol=1e-6, atol=1e-6)
