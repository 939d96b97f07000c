"""A norm and an MLP with fp8 weights on a GPU, where kernels quantize rows on the way."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional

from attention.kernels.quantized_rows import QuantizedRows
from pagedray.weight_format import FormatRule, Fp8Format, Quantization
from workers.layers.mlp import GatedMLP, MLPParams
from workers.layers.norm import RMSNorm
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
    norm = RMSNorm("norm", HIDDEN, 1e-6, dtype=dtype, device=device)
    params = MLPParams(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, activation="silu", has_bias=False
    )
    mlp = GatedMLP(
        ("gate", "up"),
        "down",
        params,
        reduces=False,
        group=SoloGroup(),
        quantization=Quantization(method="fp8", rules=rules),
        dtype=dtype,
        device=device,
    )
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
    stream = torch.randn(num_rows, HIDDEN, device=device).to(dtype)
    rows = norm.quantized(stream.clone(), None)
    assert isinstance(rows, QuantizedRows)
    assert mlp.takes_quantized(num_rows) == (num_rows > 16)
    found = mlp(norm(stream.clone()))
    if mlp.takes_quantized(num_rows):
        assert torch.equal(mlp(rows), found)
    normed = functional.rms_norm(stream.double(), (HIDDEN,), weights["norm.weight"], 1e-6)
    gate, up = (functional.linear(normed, weights[f"{name}.weight"]) for name in ("gate", "up"))
    exact = functional.linear(functional.silu(gate) * up, weights["down.weight"])
    error = (found.double() - exact).norm() / exact.norm()
    # Both products round each number to 4 significant bits.
    assert error < 0.08
