"""Writes a checkpoint of random values at a shape of Llama, as a real one lies on disk."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from bench.engine.shapes import save_model

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write_checkpoint"]

_INDEX = "model.safetensors.index.json"
_LAYERS_PER_FILE = 4
_STANDARD_DEVIATION = 0.02


def write_checkpoint(folder: Path, shape: dict[str, Any]) -> None:  # Any: JSON values
    """Write configuration, tokenizer and weights, unless the folder has weights already."""
    if (folder / _INDEX).exists():
        return
    save_model(folder, shape)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    num_layers = shape["num_hidden_layers"]
    parts = [
        _outer_shapes(shape),
        *(
            {
                name: one
                for layer in range(first, min(first + _LAYERS_PER_FILE, num_layers))
                for name, one in _layer_shapes(shape, layer).items()
            }
            for first in range(0, num_layers, _LAYERS_PER_FILE)
        ),
    ]
    file_of: dict[str, str] = {}
    for number, shapes in enumerate(parts):
        name = f"model-{number:05d}.safetensors"
        tensors = {key: _values(one, generator) for key, one in shapes.items()}
        save_file(tensors, folder / name)
        file_of |= dict.fromkeys(shapes, name)
    # Last, so that an interrupted run leaves no checkpoint that seems complete.
    (folder / _INDEX).write_text(json.dumps({"weight_map": file_of}))


def _values(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    values = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return values.normal_(0.0, _STANDARD_DEVIATION, generator=generator).cpu()


def _outer_shapes(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:  # Any: JSON values
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not shape["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _layer_shapes(shape: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:  # Any: as above
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"model.layers.{layer}.{name}.weight": one for name, one in shapes.items()}
