"""oneDNN GEMMs pad their rows to few distinct numbers, which does not change results."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from attention.kernels.arguments import SplitKPartials
from workers.layers.hopper_linear import HopperLinear
from workers.layers.linear_choice import OneDnnLinear, num_padded_rows

CPU = torch.device("cpu")
# Without a GPU the interpreter of Triton runs the kernel.
SKINNY_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_padding_leaves_few_numbers_of_rows_and_adds_little() -> None:
    padded = {rows: num_padded_rows(rows) for rows in range(1, 8193)}
    assert all(most >= rows for rows, most in padded.items())
    assert len(set(padded.values())) <= 16 + 36 + 240
    # At most one tile of rows is added, and to batches of decodes at most a quarter.
    assert all(most - rows < 32 for rows, most in padded.items())
    assert all(most <= 1.25 * rows for rows, most in padded.items() if rows <= 128)
    # Small decode batches are not padded.
    assert all(padded[rows] == rows for rows in range(1, 17))


@pytest.mark.parametrize("num_rows", [1, 16, 17, 29, 32, 33, 63, 127, 511, 513, 600])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(
                not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
                reason="oneDNN does not multiply bfloat16 on this CPU",
            ),
        ),
    ],
)
def test_padding_does_not_change_the_rows(num_rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x, weight = (torch.randn(n, 48, generator=generator).to(dtype) for n in (num_rows, 40))
    kernel = OneDnnLinear.empty(40, 48, has_bias=False, dtype=dtype, device=CPU)
    kernel.weight.copy_(weight)
    kernel.finalize()
    expected = functional.linear(x.double(), weight.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    found = kernel(x)
    assert found.shape == (num_rows, 40)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("num_rows", [100, 128, 250])
def test_many_rows_are_gated_as_two_kernels_would(num_rows: int) -> None:
    kernel = HopperLinear.empty(256, 128, has_bias=False, dtype=torch.float16, device=SKINNY_DEVICE)
    kernel.weight.copy_(torch.randn(256, 128) / 11)
    x = torch.randn(num_rows, 128).half().to(SKINNY_DEVICE)
    gate, other = functional.linear(x.double(), kernel.weight.double()).chunk(2, dim=1)
    gated = functional.silu(gate) * other
    torch.testing.assert_close(kernel.gated(x).double(), gated, rtol=4e-3, atol=1e-2)


@pytest.mark.parametrize("num_rows", [1, 16, 17])
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_and_many_give_the_same_columns(num_rows: int, has_bias: bool) -> None:
    kernel = HopperLinear.empty(
        64, 256, has_bias=has_bias, dtype=torch.float16, device=SKINNY_DEVICE
    )
    kernel.weight.copy_(torch.randn(64, 256) / 16)
    bias = None
    if kernel.bias is not None:
        bias = kernel.bias.copy_(torch.randn(64)).double()
    x = torch.randn(num_rows, 256).half().to(SKINNY_DEVICE)
    exact = functional.linear(x.double(), kernel.weight.double(), bias)
    gate, other = exact.chunk(2, dim=1)
    torch.testing.assert_close(kernel(x).double(), exact, rtol=2e-3, atol=4e-3)
    gated = functional.silu(gate) * other
    torch.testing.assert_close(kernel.gated(x).double(), gated, rtol=4e-3, atol=1e-2)
    stream = torch.randn(num_rows, 64).half().to(SKINNY_DEVICE)
    before = stream.clone()
    product = kernel.forward_residual(stream, x)
    assert not isinstance(product, SplitKPartials)
    added = before.double() + exact if product is None else before.double()
    torch.testing.assert_close(stream.double(), added, rtol=2e-3, atol=4e-3)
    if product is not None:
        torch.testing.assert_close(product.double(), exact, rtol=2e-3, atol=4e-3)
    elif num_rows > 1:
        assert not has_bias
