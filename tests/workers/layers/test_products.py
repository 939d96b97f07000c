"""Linear layers: their kernels, split products and MLPs."""

import pytest
import torch
from torch.nn import functional

from attention.kernels.arguments import SplitKPartials
from pagedray.model_config import Activation
from workers.layers.activation import activation_function
from workers.layers.hopper_linear import HopperLinear, is_faster_split
from workers.layers.linear_choice import OneDnnLinear, num_padded_rows
from workers.layers.mlp import MLP, GatedMLP, MLPParams, PlainMLP
from workers.layers.norm import RMSNorm
from workers.layers.weight import Placement
from workers.models.fused_norm import FusedNorm
from workers.parallel.group import SoloGroup

CPU = torch.device("cpu")
# Without a GPU the interpreter of Triton runs the kernel.
SKINNY_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ACTIVATIONS: list[Activation] = ["silu", "gelu", "gelu_tanh"]


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
    torch.testing.assert_close(kernel.gated(x, "silu").double(), gated, rtol=4e-3, atol=1e-2)


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
    torch.testing.assert_close(kernel.gated(x, "silu").double(), gated, rtol=4e-3, atol=1e-2)
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


def _filled(
    kind: type[MLP], names: tuple[str, ...], activation: Activation
) -> tuple[MLP, dict[str, list[torch.Tensor]]]:
    torch.manual_seed(0)
    mlp = kind(
        names,
        "down",
        MLPParams(hidden_size=12, intermediate_size=20, activation=activation, has_bias=False),
        Placement(SoloGroup(), torch.float32, torch.device("cpu")),
    )
    weights: dict[str, list[torch.Tensor]] = {}
    for shard in mlp.weight_shards():
        weights.setdefault(shard.name, []).append(shard.target.normal_().clone())
    mlp.finalize()
    return mlp, weights


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("names", [("gate", "up"), ("both",)])
@torch.inference_mode()
def test_a_gated_mlp_activates_the_gate(names: tuple[str, ...], activation: Activation) -> None:
    mlp, weights = _filled(GatedMLP, names, activation)
    gate, up = (tensor for name in names for tensor in weights[f"{name}.weight"])
    x = torch.randn(3, 12)
    bent = activation_function(activation)(functional.linear(x, gate)) * functional.linear(x, up)
    torch.testing.assert_close(mlp(x), functional.linear(bent, weights["down.weight"][0]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@torch.inference_mode()
def test_a_plain_mlp_has_no_gate(activation: Activation) -> None:
    mlp, weights = _filled(PlainMLP, ("up",), activation)
    x = torch.randn(3, 12)
    bent = activation_function(activation)(functional.linear(x, weights["up.weight"][0]))
    torch.testing.assert_close(mlp(x), functional.linear(bent, weights["down.weight"][0]))


def test_activations_match_their_names() -> None:
    x = torch.linspace(-3.0, 3.0, 50)
    exact = 0.5 * x * (1.0 + torch.erf(x / 2**0.5))
    inner = (2.0 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    torch.testing.assert_close(activation_function("gelu")(x), exact)
    torch.testing.assert_close(activation_function("gelu_tanh")(x), 0.5 * x * (1.0 + inner.tanh()))
