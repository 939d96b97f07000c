"""The GEMM with small integers, with each instruction set that the kernel distinguishes."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.nn import functional

from attention.kernels.cpu import integer_gemm, native
from attention.kernels.cpu.integer_gemm import IntegerGemm
from tests.attention.kernels.cpu.variants import compile_with, variants

SOURCE = Path(integer_gemm.__file__).with_suffix(".c")
TOLERANCE = 4e-3
# Several tiles and groups; less than a tile; a group of several pieces, the last one shorter.
SIZES = [(160, 512, 32), (64, 256, 128), (24, 40, 8), (72, 304, 304)]
MANY_ROWS = [*range(1, 9), 13, 97, 200]

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(
    scope="module",
    autouse=True,
    params=["", *variants("-mno-avx512bf16", "-mno-avx512f", "-mno-avx512f -mno-fma")],
)
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile the kernels without some instructions."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            compile_with(patch, request.param)
        library = native.load_kernels(SOURCE)
        patch.setattr(integer_gemm, "_library", lambda: library)
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A packed weight, and what it stands for, in float64."""

    gemm: IntegerGemm
    exact: torch.Tensor


def _random(
    size: tuple[int, int, int],
    num_bits: Literal[4, 8],
    *,
    has_minimums: bool = False,
    bias: torch.Tensor | None = None,
) -> Weight:
    out_size, in_size, group_size = size
    scales = torch.rand(out_size, in_size // group_size).half()
    minimums = None
    if num_bits == 4:
        numbers = torch.randint(0, 16, (out_size, in_size), dtype=torch.uint8)
        middle = 8
    else:
        numbers = torch.randint(-128, 128, (out_size, in_size), dtype=torch.int8)
        middle = 0
    groups = (numbers.double() - middle).view(*scales.shape, group_size)
    exact = groups * scales.double().unsqueeze(2)
    if has_minimums:
        minimums = 9 * torch.randn(scales.shape)
        exact += minimums.double().unsqueeze(2)
    gemm = IntegerGemm(numbers, scales, minimums, bias, num_bits=num_bits)
    return Weight(gemm, exact.view(out_size, in_size))


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("has_minimums", [False, True])
def test_gemm_equals_torch_for_any_number_of_rows(
    num_bits: Literal[4, 8], has_minimums: bool, size: tuple[int, int, int]
) -> None:
    bias = 100 * torch.randn(size[0]).bfloat16()
    plain = _random(size, num_bits, has_minimums=has_minimums)
    biased = _random(size, num_bits, has_minimums=has_minimums, bias=bias)
    for num_rows in MANY_ROWS:
        # Rows that lie apart, with other values between them.
        x = torch.randn(num_rows, size[1] + 7).bfloat16()[:, 3:-4]
        exact = x.double() @ plain.exact.t()
        assert _error(plain.gemm(x), exact) < TOLERANCE
        exact = x.double() @ biased.exact.t() + bias.double()
        assert _error(biased.gemm(x), exact) < TOLERANCE


@pytest.mark.parametrize(("out_size", "tolerance"), [(128, 2), (80, 3)])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_gated_is_silu_of_one_half_times_the_other(
    num_bits: Literal[4, 8], out_size: int, tolerance: int
) -> None:
    weight = _random((out_size, 64, 32), num_bits)
    for num_rows in (1, 4, 30):
        x = torch.randn(num_rows, 64).bfloat16() / 1000
        gate, other = functional.linear(x.double(), weight.exact).chunk(2, dim=1)
        assert _error(weight.gemm.gated(x), functional.silu(gate) * other) < tolerance * TOLERANCE


@pytest.mark.parametrize("num_bits", [4, 8])
def test_a_row_depends_neither_on_other_rows_nor_on_threads(num_bits: Literal[4, 8]) -> None:
    gemm = _random((200, 512, 256), num_bits, has_minimums=True).gemm
    x = torch.randn(200, 512).bfloat16()
    alone = torch.cat([gemm(row) for row in x.split(1)])
    for num_rows in MANY_ROWS:
        assert torch.equal(gemm(x[:num_rows]), alone[:num_rows])
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(gemm(x), alone)
    finally:
        torch.set_num_threads(num_threads)


def test_no_rows_have_no_products() -> None:
    assert _random((64, 32, 32), 4).gemm(torch.empty(0, 32).bfloat16()).shape == (0, 64)
