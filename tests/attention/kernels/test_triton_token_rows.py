"""Norms, rotations and gates of token rows, against torch in float64."""

import pytest
import torch
from torch.nn import functional

from attention.kernels.triton.gated_activation import Gate, gated
from attention.kernels.triton.norm_rope import add_norm, add_parts_norm, norm_heads, rotate_heads
from tests.attention.kernels.kernel_device import DEVICE

# One bit of the type's last place; Triton's interpreter cuts bfloat16 off where a GPU rounds it.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCES)


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
