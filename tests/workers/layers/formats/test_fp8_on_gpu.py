"""A norm and an MLP with fp8 weights on a GPU, where kernels quantize rows on the way."""

import re

import pytest
import torch
from torch.nn import functional

from attention.kernels.arguments import QuantizedRows
from pagedray.weight_format import FormatRule, Fp8Format, Quantization
from workers.layers.mlp import GatedMLP, MLPParams
from workers.layers.norm import RMSNorm
from workers.layers.weight import Placement
from workers.models.fused_norm import FusedNorm
from workers.models.fused_parts import FusedMLP
from workers.parallel.group import SoloGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

HIDDEN, INTERMEDIATE = 256, 512


@pytest.mark.parametrize("num_rows", [16, 17, 200])
@torch.inference_mode()
def test_an_mlp_takes_what_its_norm_has_quantized(num_rows: int) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    rules = (FormatRule(re.compile(""), Fp8Format(is_made_at_load=True)),)
    place = Placement(SoloGroup(), dtype, device, Quantization(method="fp8", rules=rules))
    norm = RMSNorm("norm", HIDDEN, 1e-6, place)
    params = MLPParams(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, activation="silu", has_bias=False
    )
    mlp = GatedMLP(("gate", "up"), "down", params, place)
    weights = {}
    for shard in (*norm.weight_shards(), *mlp.weight_shards()):
        weight = torch.randn(shard.target.shape, device=device) / 16
        if shard.scales is not None:
            shard.scales.copy_(weight.abs().amax(1, keepdim=True) / 448)
            shard.target.copy_(weight / shard.scales)
        else:
            shard.target.copy_(weight)
        weights[shard.name] = weight.double()
    mlp.finalize()
    fused_norm, fused = FusedNorm(norm), FusedMLP(mlp)
    stream = torch.randn(num_rows, HIDDEN, device=device).to(dtype)
    rows = fused_norm.rows_for(stream.clone(), None, fused)
    assert isinstance(rows, QuantizedRows) == (num_rows > 16)
    found = fused.partial(fused_norm(stream.clone()))
    assert torch.equal(fused.partial(rows), found)
    plain = mlp(norm(stream))
    assert (found.double() - plain.double()).norm() < 0.05 * plain.double().norm()
    normed = functional.rms_norm(stream.double(), (HIDDEN,), weights["norm.weight"], 1e-6)
    gate, up = (functional.linear(normed, weights[f"{name}.weight"]) for name in ("gate", "up"))
    exact = functional.linear(functional.silu(gate) * up, weights["down.weight"])
    error = (found.double() - exact).norm() / exact.norm()
    # Both products round each number to 4 significant bits.
    assert error < 0.08
