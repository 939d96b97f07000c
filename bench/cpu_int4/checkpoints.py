"""Checkpoints of one random model, in bfloat16 and in int4 as compressed-tensors stores it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.compressors import pack_to_int32
from safetensors.torch import load_file, save_file

from bench.engine import LLAMA_8B, save_model
from bench.engine.random_checkpoint import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BFLOAT16", "write_checkpoints"]

BFLOAT16 = "bfloat16"
_EMBEDDING = "model.embed_tokens.weight"
_LLAMA_1B: dict[str, Any] = {  # Any: JSON values
    **LLAMA_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def write_checkpoints(folder: Path, group_sizes: list[int]) -> dict[str, Path]:
    """Return the folders of the checkpoints by name, written if they are missing."""
    plain = folder / "bf16"
    plain.mkdir(parents=True, exist_ok=True)
    write_checkpoint(plain, _LLAMA_1B)
    folders = {BFLOAT16: plain}
    for size in group_sizes:
        for has_int8_head in (False, True):
            target = folder / f"int4-{size}{'-head' if has_int8_head else ''}"
            if not (target / "config.json").exists():
                _write_int4(plain, target, size, has_int8_head=has_int8_head)
            name = f"int4, groups of {size}"
            folders[f"{name}, head in int8" if has_int8_head else name] = target
    return folders


def _write_int4(plain: Path, target: Path, group_size: int, *, has_int8_head: bool) -> None:
    """Write the checkpoint with linear layers in int4, as compressed-tensors stores them."""
    target.mkdir(parents=True, exist_ok=True)
    file_of: dict[str, str] = {}
    for path in sorted(plain.glob("*.safetensors")):
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(path).items():
            if tensor.dim() == 1 or name == _EMBEDDING:
                tensors[name] = tensor
            else:
                tensors |= _packed(name.removesuffix(".weight"), tensor, 4, group_size)
            if name == _EMBEDDING and has_int8_head:
                tensors |= _packed("lm_head", tensor, 8, tensor.shape[1])
        save_file(tensors, target / path.name)
        file_of |= dict.fromkeys(tensors, path.name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size}
    groups: dict[str, Any] = {"layers": {"targets": ["re:.*_proj$"], "weights": int4}}
    if has_int8_head:
        int8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
        groups["head"] = {"targets": ["lm_head"], "weights": int8}
    section = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
    }
    shape = {**_LLAMA_1B, "tie_word_embeddings": not has_int8_head}
    # Last, so that an interrupted run leaves no checkpoint that seems complete.
    save_model(target, {**shape, "quantization_config": section})


def _packed(
    layer: str, weight: torch.Tensor, num_bits: int, group_size: int
) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer, rounded to the nearest numbers."""
    largest = 2 ** (num_bits - 1) - 1
    groups = weight.float().view(len(weight), -1, group_size)
    scales = (groups.abs().amax(2, keepdim=True) / largest).bfloat16()
    numbers = (groups / scales.float()).round().clamp(-largest - 1, largest).to(torch.int8)
    return {
        f"{layer}.weight_packed": pack_to_int32(numbers.view(weight.shape), num_bits=num_bits),
        f"{layer}.weight_scale": scales.squeeze(2),
        f"{layer}.weight_shape": torch.tensor(weight.shape),
    }
