"""Products in parts, and what adds the parts to the residual stream, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from attention.kernels.arguments import SplitKPartials
from workers.layers.hopper_linear import HopperLinear, is_faster_split
from workers.layers.norm import RMSNorm
from workers.layers.weight import Placement
from workers.models.fused_layers import FusedNorm
from workers.parallel.group import SoloGroup

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("num_rows", "shape", "is_split"),
    [
        (17, (4096, 14336), True),
        (256, (4096, 14336), True),
        # Two parts of 96 tiles are more than the GPU computes at the same time.
        (257, (4096, 14336), False),
        (512, (2048, 8192), True),
        (128, (8192, 28672), True),
        (129, (8192, 28672), False),
        (256, (4096, 4096), False),
        # Parts of other sizes begin at addresses that kernels cannot read well.
        (256, (4096, 8192 + 64), False),
    ],
)
def test_a_product_is_split_if_all_parts_are_computed_at_the_same_time(
    num_rows: int, shape: tuple[int, int], is_split: bool
) -> None:
    assert is_faster_split(num_rows, torch.empty(shape, device="meta"), 132) == is_split


@torch.inference_mode()
def test_layers_add_parts_as_they_add_their_sum() -> None:
    parts = torch.randn(3, 5, 48)
    norm = RMSNorm("norm", 48, 1e-6, Placement(SoloGroup(), torch.float32, CPU))
    next(norm.weight_shards()).target.normal_()
    before = torch.randn(5, 48)
    for layer in (FusedNorm(norm), FusedNorm(None)):
        for call in (layer, layer.quantized):
            stream, expected = before.clone(), before.clone()
            rows = layer(expected, parts.sum(0))
            torch.testing.assert_close(call(stream, SplitKPartials(parts)), rows)
            torch.testing.assert_close(stream, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_rows", [17, 64, 100, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_norm_adds_the_parts_of_a_product(num_rows: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    kernel = HopperLinear.empty(4096, 14336, has_bias=False, dtype=dtype, device=device)
    kernel.weight.normal_().mul_(14336**-0.5)
    norm = RMSNorm("norm", 4096, 1e-5, Placement(SoloGroup(), dtype, device))
    next(norm.weight_shards()).target.normal_()
    weight = next(norm.weight_shards()).target.double()
    x = torch.randn(num_rows, 2 * 14336, dtype=dtype, device=device)[:, :14336]
    stream = torch.randn(num_rows, 4096, dtype=dtype, device=device)
    total = stream.double() + functional.linear(x.double(), kernel.weight.double())
    delta = kernel.forward_residual(stream, x)
    assert isinstance(delta, SplitKPartials)
    normed = FusedNorm(norm)(stream, delta)
    limit = torch.finfo(dtype).eps
    torch.testing.assert_close(stream.double(), total, rtol=limit, atol=limit)
    exact = functional.rms_norm(stream.double(), (4096,), weight, 1e-5)
    torch.testing.assert_close(normed.double(), exact, rtol=limit, atol=limit)
