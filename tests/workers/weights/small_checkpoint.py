"""A small checkpoint to load, and its decoder on ranks that never communicate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.model_config import ModelConfig
from tests.workers.lone_rank import LoneRank
from tests.workers.reference import CPU
from workers.models.decoder import Decoder

CASE = "llama-6-heads-2-kv-biases"
UNTIED = "llama-12-heads-4-kv-llama3"
"""Its head is not tied to its embedding."""
QUERY = "model.layers.0.self_attn.q_proj.weight"
"""A tensor of both."""


def decoder_of(config: ModelConfig, rank: int = 0, size: int = 1) -> Decoder:
    """Return the decoder of a rank, without weights."""
    return Decoder(config, LoneRank(rank, size), backend=TorchSDPABackend, device=CPU)


def rewrite(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    """Replace the tensors of a checkpoint in one file."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)
