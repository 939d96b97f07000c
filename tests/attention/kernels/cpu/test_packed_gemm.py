"""The packed GEMM with each instruction set of this machine that the kernel distinguishes."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from attention.kernels.cpu import instruction_set, native, packed_gemm
from attention.kernels.cpu.packed_gemm import PackedGemm
from tests.attention.kernels.cpu.variants import compile_with, variants

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
DTYPES = [torch.float32, torch.bfloat16]
# Several tiles and chunks of k; neither size a multiple of anything; less than one tile or slice.
SIZES = [(96, 1200), (37, 51), (64, 130), (5, 1)]
MANY_ROWS = [*range(1, 41), 97, 300]

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(
    scope="module",
    autouse=True,
    params=[
        "",
        *variants("-DEMULATE_AMX", "-mno-avx512bf16", "-mno-avx512f", "-mno-avx512f -mno-fma"),
    ],
)
def uses_amx(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Compile the kernels without some instructions, or with AMX in plain C."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            compile_with(patch, request.param)
        has_amx = "-DEMULATE_AMX" in request.param or (
            not request.param and instruction_set.has_amx()
        )
        patch.setattr(packed_gemm, "has_amx", lambda: has_amx)
        folder = Path(packed_gemm.__file__).parent
        sources = [*packed_gemm._SOURCES.values(), packed_gemm._AMX_SOURCE]
        libraries = {source: native.load_kernels(folder / source) for source in sources}
        patch.setattr(packed_gemm, "_library", libraries.get)
        if has_amx:
            assert hasattr(libraries[packed_gemm._AMX_SOURCE], "packed_gemm_bfloat")
        yield has_amx


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _made(weight: torch.Tensor, bias: torch.Tensor | None = None, *, tile: int = 32) -> PackedGemm:
    """Return the GEMM with a weight that it packs, or that is packed in larger tiles."""
    if tile == 32:
        gemm = PackedGemm.make(weight, bias)
    else:
        gemm = PackedGemm.over(_in_tiles(weight, tile), weight, bias)
    assert gemm is not None
    return gemm


def _in_tiles(weight: torch.Tensor, tile: int) -> torch.Tensor:
    """Return a weight as oneDNN packs it: steps of a tile of columns, one after the other."""
    step = 1 if weight.dtype == torch.float32 else 2
    num_columns, num_elements = weight.shape
    slices = -(-num_elements // (16 * step))
    padded = torch.zeros(-(-num_columns // tile) * tile, slices * 16 * step, dtype=weight.dtype)
    padded[:num_columns, :num_elements] = weight
    blocks = padded.unflatten(1, (-1, step)).unflatten(0, (-1, tile))
    packed: torch.Tensor = blocks.permute(0, 2, 1, 3).flatten()
    return packed


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm_equals_torch_for_any_number_of_rows(
    dtype: torch.dtype, tile: int, size: tuple[int, int]
) -> None:
    weight, bias = torch.randn(size).to(dtype), torch.randn(size[0]).to(dtype)
    plain, biased = _made(weight, tile=tile), _made(weight, bias, tile=tile)
    for num_rows in MANY_ROWS:
        # Rows that lie apart, with other values between them.
        x = torch.randn(num_rows, size[1] + 7).to(dtype)[:, 3:-4]
        exact = x.double() @ weight.double().t()
        assert _error(plain(x), exact) < TOLERANCE[dtype]
        assert _error(biased(x), exact + bias.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize(("size", "tolerance"), [((128, 70), 1), ((74, 70), 3)])
@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_is_silu_of_one_half_times_the_other(
    dtype: torch.dtype, tile: int, size: tuple[int, int], tolerance: float
) -> None:
    weight, bias = torch.randn(size).to(dtype), torch.randn(size[0]).to(dtype)
    gemm = _made(weight, bias, tile=tile)
    for num_rows in MANY_ROWS:
        x = torch.randn(num_rows, size[1]).to(dtype)
        gate, other = (x.double() @ weight.double().t() + bias.double()).chunk(2, dim=1)
        # Halves that share a tile are rounded before they are multiplied.
        exact = functional.silu(gate) * other
        assert _error(gemm.gated(x), exact) < tolerance * TOLERANCE[dtype]


def test_bfloat16_is_multiplied_with_amx(uses_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not uses_amx:
        pytest.skip("needs AMX, or its emulation")
    source = packed_gemm._AMX_SOURCE
    monkeypatch.setattr(packed_gemm, "_library", {source: packed_gemm._library(source)}.get)
    weight, x = torch.randn(64, 96), torch.randn(5, 96).bfloat16()
    assert PackedGemm.make(weight, None) is None
    # What packs weights in place is in another library.
    gemm = PackedGemm.make(weight.bfloat16(), None, overwrites=True)
    assert gemm is not None
    exact = x.double() @ weight.bfloat16().double().t()
    assert _error(gemm(x), exact) < TOLERANCE[torch.bfloat16]


def test_gate_holds_at_extremes() -> None:
    gates = torch.tensor([-300.0, -88.0, -87.0, -1e-30, 0.0, 1e-30, 88.0, 300.0, torch.nan])
    weight = torch.zeros(64, 1)
    weight[: len(gates), 0], weight[32:, 0] = gates, 1.0
    result = _made(weight).gated(torch.ones(1, 1))[0, : len(gates)]
    torch.testing.assert_close(result, functional.silu(gates), equal_nan=True)


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_does_not_depend_on_its_batch(dtype: torch.dtype, tile: int) -> None:
    gemm = _made(torch.randn(128, 1300).to(dtype), tile=tile)
    x = torch.randn(300, 1300).to(dtype)
    alone = torch.cat([gemm(x[i : i + 1]) for i in range(len(x))])
    gated_alone = torch.cat([gemm.gated(x[i : i + 1]) for i in range(len(x))])
    for num_rows in MANY_ROWS:
        assert torch.equal(gemm(x[:num_rows]), alone[:num_rows])
        assert torch.equal(gemm.gated(x[:num_rows]), gated_alone[:num_rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_result_does_not_depend_on_the_number_of_threads(
    dtype: torch.dtype,
) -> None:
    gemm = _made(torch.randn(70, 90).to(dtype))
    for num_rows in (1, 5, 40, 300):
        x = torch.randn(num_rows, 90).to(dtype)
        results = []
        # Seven threads are more than there are tiles.
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            results.append(gemm(x))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_too_long_for_a_whole_tile_are_multiplied(dtype: torch.dtype) -> None:
    weight, x = torch.randn(3, 2**18).to(dtype), torch.randn(5, 2**18).to(dtype)
    assert _error(_made(weight)(x), x.double() @ weight.double().t()) < TOLERANCE[dtype]


def test_no_rows_are_multiplied_to_no_rows() -> None:
    assert _made(torch.randn(64, 8))(torch.empty(0, 8)).shape == (0, 64)


def test_weight_is_copied() -> None:
    weight, x = torch.randn(32, 1), torch.randn(2, 1)
    gemm = _made(weight)
    before = gemm(x)
    weight.zero_()
    assert torch.equal(gemm(x), before)


@pytest.mark.parametrize("size", [(96, 96), (32, 32), (64, 1312), (64, 40), (40, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_packed_in_place_multiplies_as_its_copy(
    dtype: torch.dtype, size: tuple[int, int]
) -> None:
    weight, bias = torch.randn(size).to(dtype), torch.randn(size[0]).to(dtype)
    copied, x = _made(weight, bias), torch.randn(7, size[1]).to(dtype)
    kept = weight.clone()
    torch.set_num_threads(2)
    gemm = PackedGemm.make(weight, bias, overwrites=True)
    assert gemm is not None
    assert torch.equal(gemm(x), copied(x))
    assert torch.equal(gemm.gated(x), copied.gated(x))
    # Only whole tiles and slices are packed in place.
    is_whole = size[0] % 32 == 0 and size[1] % (32 if dtype == torch.bfloat16 else 16) == 0
    assert torch.equal(weight, kept) != is_whole


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_layouts_are_not_multiplied_by(dtype: torch.dtype) -> None:
    weight = torch.randn(640, 130).to(dtype)
    for tile in (32, 64):
        packed = _in_tiles(weight, tile)
        assert PackedGemm.over(packed, weight, None) is not None
        for place in (0, -1):
            other = packed.clone()
            other[place] += 1
            assert PackedGemm.over(other, weight, None) is None
        assert PackedGemm.over(packed[:-1], weight, None) is None
    assert PackedGemm.over(_in_tiles(weight, 16), weight, None) is None
    assert PackedGemm.over(weight.flatten(), weight, None) is None


def test_the_layout_of_a_constant_weight_is_not_guessed() -> None:
    weight = torch.ones(128, 64)
    assert PackedGemm.over(_in_tiles(weight, 64), weight, None) is None


def test_unsupported_weights_are_rejected() -> None:
    assert PackedGemm.make(torch.randn(4, 4).half(), None) is None
    assert PackedGemm.make(torch.empty(1, 2**18 + 1), None) is None
    half = torch.randn(64, 64).half()
    assert PackedGemm.over(half.flatten(), half, None) is None


def test_unsupported_biases_are_rejected() -> None:
    weight = torch.randn(64, 64)
    assert PackedGemm.make(weight, torch.randn(3)) is None
    assert PackedGemm.make(weight.bfloat16(), torch.randn(64)) is None
