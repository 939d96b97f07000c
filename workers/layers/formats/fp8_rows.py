"""Rows in float8_e4m3fn with one scale each; a row represents its values times its scale."""

from __future__ import annotations

import torch

__all__ = ["FP8", "FP8_MAX", "quantized_rows"]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest value."""


def quantized_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in float8_e4m3fn and their scales, `[num_rows, 1]` float32.

    The largest magnitude of a row is mapped to the largest value. Finite rows have finite scales.
    """
    exact = rows.float()
    scales = exact.abs().amax(1, keepdim=True).div_(FP8_MAX)
    # A row of zeros may have any scale but 0.
    scales.masked_fill_(scales == 0.0, 1.0)
    return exact.div(scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales
