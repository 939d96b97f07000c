"""Vectors of the kernels in C, with the instructions of this machine and with fewer."""

import ctypes
import shutil

import pytest
import torch
from torch.nn import functional

from attention.kernels.cpu import instruction_set, native
from attention.kernels.cpu.native import load_kernels
from tests.attention.kernels.cpu.variants import compile_with

HEADER = native.__file__.replace("native.py", "lanes.h")
SOURCE = f"""
#include "{HEADER}"
void rounded(const float *start, const float *x, const float *y, float *out) {{
    Floats sums = load_float(start);
    sums = add_product(sums, load_float(x), load_float(y));
    *(Floats *)out = sums - load_float(start);
}}
#define EACH for (int i = 0; i < 16; i += LANES)
void bounded(const float *x, float *out) {{
    EACH *(Floats *)(out + i) = tanh_of(load_float(x + i));
}}
void gated(const float *x, float *out) {{
    EACH *(Floats *)(out + i) = silu_of(load_float(x + i));
}}
void narrowed(const float *x, uint16_t *out) {{
    EACH store_all_bfloat(out + i, load_float(x + i));
}}
void widened(const uint16_t *x, float *out) {{
    EACH *(Floats *)(out + i) = load_bfloat(x + i);
}}
void reduced(const float *x, float *out) {{
    EACH {{
        out[i] = sum_of(load_float(x + i));
        out[i + 1] = largest_of(load_float(x + i));
        out[i + 2] = LANES;
    }}
}}
void summed(const float *x, float *out) {{
    sums_of_four(
        load_float(x), load_float(x + 16), load_float(x + 32), load_float(x + 48), out);
    out[4] = LANES;
}}
"""
WITHOUT = ["-mno-avx512f", "-mno-avx512f -mno-avx2 -mno-fma"]
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module", params=["", *WITHOUT])
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    """Return the functions above, compiled with fewer instructions or with all."""
    without = str(request.param)
    if without and b" avx" not in instruction_set.read_cpu_features():
        pytest.skip("needs x86-64 with AVX")
    folder = tmp_path_factory.mktemp("lanes")
    source = folder / "vectors.c"
    source.write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        compile_with(patch, without, folder)
        library = load_kernels(source)
    assert library is not None
    return library


def test_a_sum_is_rounded_before_more_is_added(library: ctypes.CDLL) -> None:
    # The product is less than half of the distance between floats there, so that nothing is left of
    # it. A compiler that reassociates would see that the start cancels out.
    start, x, y = (torch.full((16,), value) for value in (1e8, 1.0, 3.0))
    out = torch.ones(16)
    library.rounded(*(ctypes.c_void_p(one.data_ptr()) for one in (start, x, y, out)))
    assert out[:4].tolist() == [0.0] * 4
    assert not (out != 0).logical_and(out != 1).any()


def test_tanh_is_that_of_torch(library: ctypes.CDLL) -> None:
    numbers = torch.cat((torch.linspace(-12, 12, 973), torch.logspace(-9, 38, 51)))
    numbers = torch.cat((numbers, -numbers, torch.tensor([0.0, float("inf"), -float("inf")])))
    numbers = functional.pad(numbers, (0, -len(numbers) % 16))
    out = torch.full_like(numbers, 7)
    for x, result in zip(numbers.split(16), out.split(16), strict=True):
        library.bounded(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(result.data_ptr()))
    torch.testing.assert_close(out.double(), numbers.double().tanh(), rtol=0, atol=2e-7)
    nan = torch.full((16,), float("nan"))
    library.bounded(ctypes.c_void_p(nan.data_ptr()), ctypes.c_void_p(nan.data_ptr()))
    assert nan.isnan().all()


def test_silu_is_that_of_torch(library: ctypes.CDLL) -> None:
    numbers = torch.cat((torch.linspace(-80, 80, 3989), torch.logspace(-9, 30, 51)))
    numbers = functional.pad(torch.cat((numbers, -numbers)), (0, -2 * len(numbers) % 16))
    out = torch.full_like(numbers, 7)
    for x, result in zip(numbers.split(16), out.split(16), strict=True):
        library.gated(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(result.data_ptr()))
    exact = functional.silu(numbers.double())
    torch.testing.assert_close(out.double(), exact, rtol=3e-6, atol=1e-30)


def test_bfloats_are_rounded_as_by_torch(library: ctypes.CDLL) -> None:
    # Of each sign and exponent, subnormal numbers, infinities and NaN too, with ties among them.
    tops = torch.arange(2**16, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    numbers = (tops[::7, None] | lower).flatten().view(torch.float32)
    numbers = functional.pad(numbers, (0, -len(numbers) % 16))
    out = torch.full_like(numbers, 7, dtype=torch.bfloat16)
    for x, result in zip(numbers.split(16), out.split(16), strict=True):
        library.narrowed(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(result.data_ptr()))
    is_nan = numbers.isnan()
    exact = numbers.bfloat16().view(torch.int16).masked_fill(is_nan, 0x7FC0)
    assert is_nan.any()
    assert torch.equal(out.view(torch.int16), exact)


def test_bfloats_are_widened_exactly(library: ctypes.CDLL) -> None:
    x, out = torch.arange(16, dtype=torch.int16).mul(3999).view(torch.bfloat16), torch.empty(16)
    library.widened(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()))
    assert torch.equal(out, x.float())


def test_lanes_are_added_and_compared_across_a_vector(library: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    for place in range(16):
        x, out = torch.randint(-9, 9, (64,)).float(), torch.zeros(16)
        x[place] = 100.0
        library.reduced(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()))
        lanes = int(out[2])
        parts = x[:16].view(-1, lanes)
        assert torch.equal(out[::lanes], parts.sum(1))
        assert torch.equal(out[1::lanes], parts.amax(1))
        library.summed(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()))
        assert torch.equal(out[:4], x.view(4, 16)[:, :lanes].sum(1))
