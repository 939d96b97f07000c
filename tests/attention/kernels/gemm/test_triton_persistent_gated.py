"""GEMMs of many rows, against torch in float64."""

import pytest
import torch
from torch.nn import functional

from attention.kernels.arguments import num_multiprocessors
from attention.kernels.triton.gated_activation import gated
from attention.kernels.triton.gemm.persistent_gated import keeps_gpu_busy, persistent_gated
from attention.kernels.triton.norm_rope import add_norm
from tests.attention.kernels.kernel_device import DEVICE

TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


def weights(size: int, in_size: int, dtype: torch.dtype) -> torch.Tensor:
    weight: torch.Tensor = torch.randn(2 * size, in_size) / in_size**0.5
    return weight.to(dtype).to(DEVICE)


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, other = functional.linear(x.double(), weight.double()).chunk(2, 1)
    return functional.silu(gate) * other


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "size", "in_size"),
    [(128, 128, 64), (300, 256, 128), (1, 136, 72), (2500, 128, 64), (70, 512, 200)],
)
def test_gated_product_equals_that_of_float64(
    num_rows: int, size: int, in_size: int, dtype: torch.dtype
) -> None:
    # Rows of a wider matrix.
    x = torch.randn(num_rows, in_size + 8).to(dtype).to(DEVICE)[:, :in_size]
    weight = weights(size, in_size, dtype)
    product = persistent_gated(x, weight, "silu", 5)
    assert product.shape == (num_rows, size)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(product.double(), exact(x, weight), rtol=tolerance, atol=tolerance)


def test_a_value_that_is_not_finite_stays_in_its_row() -> None:
    x = torch.ones(200, 64, dtype=torch.float16, device=DEVICE)
    x[150, 5] = torch.nan
    product = persistent_gated(x, weights(128, 64, torch.float16), "silu", 5)
    assert product.isnan().any(1).nonzero().tolist() == [[150]]


def test_no_rows_give_no_rows() -> None:
    none = torch.empty(0, 64, dtype=torch.float16, device=DEVICE)
    assert persistent_gated(none, weights(128, 64, torch.float16), "silu", 5).shape == (0, 128)


@pytest.mark.parametrize(
    ("num_rows", "size", "is_busy"),
    [
        # On an H200: Llama 3 8B on one GPU and on two.
        (0, 14336, False),
        (16, 14336, False),
        (64, 14336, False),
        (128, 14336, True),
        (192, 14336, False),
        (256, 14336, True),
        (272, 14336, False),
        (2048, 14336, True),
        (256, 7168, True),
        (8192, 7168, True),
        (256, 1024, False),
    ],
)
def test_it_is_used_where_it_keeps_an_h200_busy(num_rows: int, size: int, is_busy: bool) -> None:
    weight = torch.empty(2 * size, 64, dtype=torch.bfloat16)
    assert keeps_gpu_busy(num_rows, weight, 132) == is_busy


@pytest.mark.parametrize(
    ("dtype", "in_size", "is_used"),
    [
        (torch.bfloat16, 72, True),
        (torch.float16, 72, True),
        (torch.float16, 76, False),
        (torch.float32, 72, False),
    ],
)
def test_it_is_used_for_aligned_rows_of_16_bits(
    dtype: torch.dtype, in_size: int, is_used: bool
) -> None:
    assert keeps_gpu_busy(4096, torch.empty(2 * 8192, in_size, dtype=dtype), 132) == is_used


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
@pytest.mark.parametrize("num_rows", [256, 4096])
def test_layers_in_a_graph_give_the_bits_of_two_kernels(num_rows: int) -> None:
    """Each kernel reads what the one before has just written, and may start before that ends."""
    size, hidden_size = 14336, 4096
    num_programs = num_multiprocessors(torch.device("cuda", torch.cuda.current_device()))
    layers = [
        (weights(size, hidden_size, torch.bfloat16), weights(hidden_size, size, torch.bfloat16))
        for _ in range(2)
    ]
    norm_weight = torch.ones(hidden_size, dtype=torch.bfloat16, device=DEVICE)
    stream = torch.randn(num_rows, hidden_size).bfloat16().to(DEVICE)

    def run(is_fused: bool) -> torch.Tensor:
        x = stream
        for inner, down in layers:
            normed = add_norm(
                x.clone(), None, norm_weight, None, 1e-5, is_centered=False, overlaps=True
            )
            if is_fused:
                product = persistent_gated(normed, inner, "silu", num_programs)
            else:
                product = gated(functional.linear(normed, inner), "silu")
            x = functional.linear(product, down[:hidden_size])
        return x

    expected = run(is_fused=False)
    run(is_fused=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(is_fused=True)
    for _ in range(20):
        graph.replay()
        assert torch.equal(found, expected)
