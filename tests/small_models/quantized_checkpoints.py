"""Quantized checkpoints of small random models."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

FP8_MAX = 448.0
SMALLEST = torch.finfo(torch.float32).tiny


def save_wide(folder: Path, vocab_size: int = 131) -> None:
    """Write a random Llama whose sizes are multiples of 64, but for that of the vocabulary."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=vocab_size,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def save_compressed(
    folder: Path,
    compressed: Path,
    weights: dict[str, Any],
    inputs: dict[str, Any] | None,
    ignore: tuple[str, ...] = ("lm_head",),
    *,
    kv_cache_scheme: dict[str, Any] | None = None,
) -> None:
    """Write the checkpoint as compressed-tensors does, by the arguments of its schemes.

    Layers in `ignore` stay plain. Scales of inputs, if they are stored, are the same for all
    layers.
    """
    # The library is slow to import.
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if inputs is None else QuantizationArgs(**inputs),
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=list(ignore),
        kv_cache_scheme=None if kv_cache_scheme is None else QuantizationArgs(**kv_cache_scheme),
    )
    apply_quantization_config(model, config)
    # Any: the library adds attributes.
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if getattr(module, "quantization_scheme", None) is None or not hasattr(module, "weight"):
            continue
        groups = _groups(module.weight.data, weights)
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        module.weight_scale.data.copy_(scale.view_as(module.weight_scale))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.view_as(module.weight_zero_point))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.02)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(compressed)
    compressor.update_config(compressed)


def _groups(weight: torch.Tensor, weights: dict[str, Any]) -> torch.Tensor:
    """Return the values of each scale, `[..., values]`."""
    strategy = weights["strategy"]
    if strategy == "tensor":
        return weight.view(1, -1)
    if strategy == "channel":
        return weight
    if strategy == "group":
        return weight.view(len(weight), -1, weights["group_size"])
    height, depth = weights["block_structure"]
    blocks = weight.view(len(weight) // height, height, -1, depth).transpose(1, 2)
    return blocks.flatten(2)


def save_replaced(
    folder: Path,
    target: Path,
    replaced: Callable[[str, torch.Tensor], dict[str, torch.Tensor]],
    config: dict[str, Any] | None = None,
    kept: Sequence[str] = (),
) -> None:
    """Write the checkpoint with other tensors for the weight of each layer's matrix.

    `replaced` gets a layer's name and weight; `config` is the `quantization_config`. Layers whose
    names end with one of `kept` stay as they are.
    """
    shutil.copytree(folder, target)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        is_kept = any(layer.endswith(f".{one}") for one in kept)
        if tensor.dim() == 2 and "embed" not in name and "lm_head" not in name and not is_kept:
            tensors |= replaced(layer, tensor)
        else:
            tensors[name] = tensor
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    path = target / "config.json"
    values = json.loads(path.read_text())
    if config is not None:
        values["quantization_config"] = config
    path.write_text(json.dumps(values))


def save_fp8_blocks(
    folder: Path, quantized: Path, dequantized: Path, block: int, *, kept: Sequence[str] = ()
) -> None:
    """Write the checkpoint as Qwen's and DeepSeek's in fp8 are, and with what it stands for."""

    def both(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        height, width = weight.shape
        padded = torch.zeros(-(-height // block) * block, -(-width // block) * block)
        padded[:height, :width] = weight
        blocks = padded.view(len(padded) // block, block, -1, block)
        scale = blocks.abs().amax((1, 3)) / FP8_MAX
        spread = scale.clamp_min(SMALLEST)[:, None, :, None]
        values = (blocks / spread).to(torch.float8_e4m3fn)
        exact = (values.float() * spread).view_as(padded)[:height, :width]
        return values.view_as(padded)[:height, :width], scale, exact

    def stored(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        values, scale, _ = both(weight)
        return {f"{name}.weight": values, f"{name}.weight_scale_inv": scale}

    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": list(kept),
    }
    save_replaced(folder, quantized, stored, config, kept)
    save_replaced(
        folder,
        dequantized,
        lambda name, weight: {f"{name}.weight": both(weight)[2]},
        kept=kept,
    )
