"""GEMMs of many rows that rotate queries and keys, against torch in float64."""

import pytest
import torch
from torch.nn import functional

from attention.kernels.arguments import Rotary, num_multiprocessors
from attention.kernels.triton.gated_activation import gated
from attention.kernels.triton.gemm.persistent_gated import keeps_gpu_busy, persistent_gated
from attention.kernels.triton.gemm.persistent_rotated import persistent_rotated, rotates_faster
from attention.kernels.triton.norm_rope import add_norm, rotate_heads
from tests.attention.kernels.kernel_device import DEVICE

TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
HEAD_SIZE = 128


def rotary_of(positions: list[int]) -> Rotary:
    angles = torch.outer(torch.arange(1000.0), 1 / 10000 ** (torch.arange(0, 128, 2) / 128))
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    return Rotary(torch.tensor(positions).to(DEVICE), table.to(DEVICE))


def exact(x: torch.Tensor, weight: torch.Tensor, rotary: Rotary, num_rotated: int) -> torch.Tensor:
    product = functional.linear(x.double(), weight.double())
    heads, values = product[:, :num_rotated], product[:, num_rotated:]
    angles = rotary.table.double()[rotary.positions].unsqueeze(1)
    # A pair of elements is a complex number, which the angle turns.
    pairs = torch.complex(*heads.unflatten(1, (-1, HEAD_SIZE)).chunk(2, dim=2))
    turned = pairs * torch.complex(*angles.chunk(2, dim=2))
    return torch.cat((torch.cat((turned.real, turned.imag), 2).flatten(1), values), 1)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_heads", "num_rotated_heads", "in_size"),
    [(128, 2, 2, 64), (300, 6, 4, 128), (1, 3, 2, 72), (700, 4, 0, 64), (2500, 2, 2, 64)],
)
def test_rotated_product_equals_that_of_float64(
    num_rows: int, num_heads: int, num_rotated_heads: int, in_size: int, dtype: torch.dtype
) -> None:
    # Rows of wider matrices.
    x = torch.randn(num_rows, in_size + 8).to(dtype).to(DEVICE)[:, :in_size]
    size, num_rotated = num_heads * HEAD_SIZE, num_rotated_heads * HEAD_SIZE
    out = torch.full((num_rows, size + 8), 7.0, dtype=dtype, device=DEVICE)
    weight = (torch.randn(size, in_size) / in_size**0.5).to(dtype).to(DEVICE)
    rotary = rotary_of([(7 * row) % 1000 for row in range(num_rows)])
    persistent_rotated(x, weight, rotary, num_rotated, out[:, :size], 5)
    tolerance = TOLERANCES[dtype]
    expected = exact(x, weight, rotary, num_rotated)
    torch.testing.assert_close(out[:, :size].double(), expected, rtol=tolerance, atol=tolerance)
    assert (out[:, size:] == 7.0).all()


def test_a_value_that_is_not_finite_stays_in_its_row() -> None:
    x = torch.ones(200, 64, dtype=torch.float16, device=DEVICE)
    x[150, 5] = torch.nan
    out, weight = (x.new_ones(200, 512), x.new_ones(512, 64))
    persistent_rotated(x, weight, rotary_of([3] * 200), 256, out, 5)
    assert out.isnan().any(1).nonzero().tolist() == [[150]]


def test_no_rows_write_nothing() -> None:
    x = torch.empty(0, 64, dtype=torch.float16, device=DEVICE)
    persistent_rotated(x, x.new_ones(256, 64), rotary_of([]), 256, x.new_empty(0, 256), 5)


@pytest.mark.parametrize(
    ("num_rows", "num_heads", "is_used"),
    [
        # On an H200: Llama 3 8B on one GPU.
        (0, 32, False),
        (1024, 32, False),
        (2048, 32, True),
        (3072, 32, False),
        (4096, 32, True),
        (8192, 32, True),
        (8191, 32, True),
        # On each of two.
        (4096, 16, True),
        (3072, 16, False),
        (8192, 16, True),
    ],
)
def test_it_is_used_where_it_keeps_an_h200_busy(
    num_rows: int, num_heads: int, is_used: bool
) -> None:
    num_kv_heads = num_heads // 4
    weight = torch.empty((num_heads + 2 * num_kv_heads) * HEAD_SIZE, 64, dtype=torch.bfloat16)
    num_rotated = (num_heads + num_kv_heads) * HEAD_SIZE
    assert rotates_faster(num_rows, weight, num_rotated, 132) == is_used


@pytest.mark.parametrize(
    ("dtype", "in_size", "num_rotated_heads", "is_used"),
    [
        (torch.bfloat16, 72, 40, True),
        (torch.float16, 72, 40, True),
        # One of two heads of a tile would be rotated.
        (torch.float16, 72, 39, False),
        (torch.float16, 76, 40, False),
        (torch.float32, 72, 40, False),
    ],
)
def test_it_is_used_for_pairs_of_heads_and_aligned_rows_of_16_bits(
    dtype: torch.dtype, in_size: int, num_rotated_heads: int, is_used: bool
) -> None:
    weight = torch.empty(48 * HEAD_SIZE, in_size, dtype=dtype)
    assert rotates_faster(8192, weight, num_rotated_heads * HEAD_SIZE, 132) == is_used


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
@pytest.mark.parametrize("num_rows", [2048, 8191])
def test_a_hopper_gpu_gives_the_bits_of_two_kernels(num_rows: int) -> None:
    """Each product reads what the one before has just written, and may start before that ends."""
    num_programs = num_multiprocessors(torch.device("cuda", torch.cuda.current_device()))
    num_rotated = 5120
    weight = (torch.randn(6144, 4096, device=DEVICE) / 64).bfloat16()
    x = torch.randn(num_rows, 4096, device=DEVICE).bfloat16()
    rotary = rotary_of([row % 1000 for row in range(num_rows)])

    def run(is_fused: bool) -> list[torch.Tensor]:
        outputs = [x]
        for _ in range(4):
            hidden = outputs[-1][:, :4096]
            if is_fused:
                out = x.new_empty(num_rows, 6144)
                persistent_rotated(hidden, weight, rotary, num_rotated, out, num_programs)
            else:
                out = functional.linear(hidden, weight)
                heads = out[:, :num_rotated].unflatten(1, (-1, HEAD_SIZE))
                rotate_heads(heads, rotary.positions, rotary.table)
            outputs.append(out)
        return outputs

    expected = run(is_fused=False)
    run(is_fused=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(is_fused=True)
    for _ in range(20):
        graph.replay()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def weights(size: int, in_size: int, dtype: torch.dtype) -> torch.Tensor:
    weight: torch.Tensor = torch.randn(2 * size, in_size) / in_size**0.5
    return weight.to(dtype).to(DEVICE)


def exact_if_gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
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
    torch.testing.assert_close(
        product.double(), exact_if_gated(x, weight), rtol=tolerance, atol=tolerance
    )


def test_a_value_that_is_not_finite_stays_in_its_row_if_gated() -> None:
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
def test_it_is_used_where_it_keeps_an_h200_busy_if_gated(
    num_rows: int, size: int, is_busy: bool
) -> None:
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
