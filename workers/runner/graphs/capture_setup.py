"""The setup that all CUDA graphs of a rank share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagedray.rank_progress import ProgressWord
from workers.models.decoder import Decoder
from workers.runner.token_table import TokenTable

__all__ = ["CaptureSetup"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CaptureSetup:
    """The model to capture, its inputs and outputs, and the group that must capture together."""

    model: Decoder
    kv_cache: torch.Tensor
    """The pool of blocks on the device, as the attention backend lays it out."""
    table: TokenTable
    """Where steps begin: their tokens and positions."""
    pool: Any  # Any: torch does not export the type
    """The memory of all graphs."""
    progress: ProgressWord
    is_alone: bool
    """Whether no other rank runs the same steps."""
