"""Layers beside their plain definitions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from attention.kernels.token_rows import AddNorm, Rotate
from pagedray.config import RopeConfig
from workers.layers.norm import ResidualNorm
from workers.layers.products import (
    DenseProduct,
    PackedProduct,
    Product,
    TwoWayProduct,
    make_product,
    product_class,
)
from workers.layers.rope import RotaryEmbedding

CPU = torch.device("cpu")
KINDS = [DenseProduct, PackedProduct, TwoWayProduct]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def _inference() -> None:
    torch.manual_seed(0)


def _near(result: torch.Tensor, exact: torch.Tensor) -> bool:
    error = (result.double() - exact.double()).norm() / exact.double().norm()
    return bool(error < TOLERANCE[result.dtype])


@pytest.mark.parametrize("num_rows", [1, 2, 8, 33])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_every_way_of_multiplying_agrees(
    kind: type[Product], dtype: torch.dtype, has_bias: bool, num_rows: int
) -> None:
    product = kind.empty(37, 50, has_bias=has_bias, dtype=dtype, device=CPU)
    weight, bias, x = torch.randn(37, 50), torch.randn(37), torch.randn(num_rows, 50)
    product.weight.copy_(weight)
    if product.bias is not None:
        product.bias.copy_(bias)
    product.finalize()
    exact = functional.linear(
        x.to(dtype).double(),
        weight.to(dtype).double(),
        bias.to(dtype).double() if has_bias else None,
    )
    assert _near(product(x.to(dtype)), exact)


@pytest.mark.parametrize("num_rows", [1, 4, 5])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_gated_product_is_silu_of_one_half_times_the_other(
    kind: type[Product], dtype: torch.dtype, has_bias: bool, num_rows: int
) -> None:
    product = kind.empty(74, 50, has_bias=has_bias, dtype=dtype, device=CPU)
    weight, bias, x = torch.randn(74, 50), torch.randn(74), torch.randn(num_rows, 50)
    product.weight.copy_(weight)
    if product.bias is not None:
        product.bias.copy_(bias)
    product.finalize()
    gate, other = functional.linear(
        x.to(dtype).double(),
        weight.to(dtype).double(),
        bias.to(dtype).double() if has_bias else None,
    ).chunk(2, dim=1)
    assert _near(product.gated(x.to(dtype)), functional.silu(gate) * other)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_product_takes_over_a_strided_weight(kind: type[Product]) -> None:
    table, x = torch.randn(37, 64), torch.randn(3, 50)
    product = kind(table[:, :50], None)
    product.finalize()
    assert _near(product(x), x.double() @ table[:, :50].double().t())


def test_the_choice_of_product_is_fixed() -> None:
    assert product_class(torch.bfloat16, torch.device("cuda")) is DenseProduct
    chosen = {type(make_product(4, 4, has_bias=False, dtype=torch.float32, device=CPU))}
    assert chosen == {product_class(torch.float32, CPU)}


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 5, 2000])
@pytest.mark.parametrize("has_kernel", [True, False])
@torch.inference_mode()
def test_the_norm_of_the_residual_is_that_of_torch(
    has_kernel: bool,
    num_rows: int,
    dtype: torch.dtype,
    eps: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_kernel:
        monkeypatch.setattr(AddNorm, "make", lambda weight, eps: None)
    norm = ResidualNorm("norm", 48, eps, dtype=dtype, device=CPU)
    (slot,) = norm.slots()
    slot.target.normal_()
    stream, delta = torch.randn(2, num_rows, 48).to(dtype)
    hidden = stream.clone()

    def exact(x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x.double(), (48,), slot.target.double(), eps)

    assert _near(norm(stream), exact(hidden))
    assert _near(norm(stream, delta), exact(hidden + delta))
    assert torch.equal(stream, hidden + delta)


@torch.inference_mode()
def test_the_norm_of_zeros_is_zero() -> None:
    norm = ResidualNorm("norm", 8, 1e-6, dtype=torch.float32, device=CPU)
    next(norm.slots()).target.fill_(1.0)
    assert torch.equal(norm(torch.zeros(2, 8)), torch.zeros(2, 8))


@torch.inference_mode()
def test_the_norm_of_no_rows_is_no_rows() -> None:
    norm = ResidualNorm("norm", 8, 1e-6, dtype=torch.float32, device=CPU)
    assert norm(torch.empty(0, 8)).shape == (0, 8)


@pytest.mark.parametrize("has_kernel", [True, False])
@torch.inference_mode()
def test_rotation_turns_pairs_by_position_times_frequency(
    has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernel:
        monkeypatch.setattr(Rotate, "make", lambda table, dtype: None)
    rope = RotaryEmbedding(
        RopeConfig(theta=100.0), head_size=6, max_positions=50, dtype=torch.float32, device=CPU
    )
    heads, positions = torch.randn(2, 3, 6), torch.tensor([0, 41])
    # Heads lie in wider rows, among values that must stay.
    rows = torch.cat((heads.flatten(1), torch.ones(2, 4)), dim=1)
    turned = rope.at(positions)(rows.narrow(1, 0, 18).unflatten(1, (3, 6)))
    assert torch.equal(rows[:, 18:], torch.ones(2, 4))
    frequencies = 100.0 ** (-torch.arange(0, 6, 2) / 6)
    angles = positions[:, None, None] * frequencies
    pairs = torch.complex(heads[..., :3], heads[..., 3:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    torch.testing.assert_close(turned, torch.cat((pairs.real, pairs.imag), dim=-1))
    assert torch.equal(turned[0], heads[0])
