"""The gate of an MLP on the CPU against its definition in float64."""

import pytest
import torch

from attention.kernels.cpu.token_rows import Gate

SPECIAL = (0.0, -0.0, -80.0, -1e4, 1e4, float("inf"), float("-inf"), float("nan"))


def _gate() -> Gate:
    gate = Gate.make(torch.device("cpu"))
    if gate is None:
        pytest.skip("no C compiler")
    return gate


def _exact(columns: torch.Tensor) -> torch.Tensor:
    gate, up = columns.double().chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


# Rows of one vector and of several, with and without a rest; many elements take several threads.
@pytest.mark.parametrize(
    ("num_rows", "size"), [(0, 16), (1, 5), (3, 16), (7, 37), (65, 512), (40, 431)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_product_is_the_nearest_number(num_rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Rows are strided, and what is behind their columns must not matter.
    columns = (4 * torch.randn(num_rows, 2 * size + 3)).to(dtype)[:, : 2 * size]
    result = _gate()(columns)
    assert result.shape == (num_rows, size)
    # Half a unit in the last place of bfloat16, and the error of the exponential. Torch, which
    # computes float16, rounds twice.
    tolerance = {torch.float32: 5e-7, torch.bfloat16: 2**-8, torch.float16: 2**-9}[dtype]
    floor = 1e-6 if dtype == torch.float16 else 1e-30
    torch.testing.assert_close(result.double(), _exact(columns), rtol=tolerance, atol=floor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_special_values_give_what_torch_gives(dtype: torch.dtype) -> None:
    values = torch.tensor([[gate, up] for gate in SPECIAL for up in SPECIAL]).to(dtype)
    columns = values.t().reshape(1, -1)
    expected = _exact(columns).to(dtype)
    torch.testing.assert_close(_gate()(columns), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    columns = torch.randn(300, 200).to(dtype)
    gate = _gate()
    assert torch.equal(gate(columns)[7:8], gate(columns[7:8]))
