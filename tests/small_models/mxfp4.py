"""Turns saved checkpoints of gpt-oss into ones whose experts are in mxfp4, as published."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_PROJECTIONS = (".experts.gate_up_proj", ".experts.down_proj")
_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4_of(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks and scales of `[..., in_size]`, uint8, each number rounded to the nearest."""
    groups = matrices.float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1).clamp(min=2.0**-100)
    # The largest number of 4 bits is 6, whose exponent is 2.
    exponents = (largest / 6.0).log2().ceil()
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - _MAGNITUDES).abs().argmin(-1)
    codes += 8 * (scaled < 0)
    pairs = codes.unflatten(-1, (-1, 2))
    blocks = pairs[..., 0] + 16 * pairs[..., 1]
    return blocks.to(torch.uint8), (exponents + 127).to(torch.uint8)


def value_of(code: int, scale: int) -> float:
    """Return what one number of 4 bits and the scale of its block stand for."""
    magnitude = float(_MAGNITUDES[code & 7])
    return math.ldexp(-magnitude if code & 8 else magnitude, scale - 127)


def quantize_experts(folder: Path) -> None:
    """Store the experts of a checkpoint in mxfp4."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(_PROJECTIONS)]:
        blocks, scales = mxfp4_of(tensors.pop(name).transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    path.write_text(json.dumps(values))
