"""Conversions of keys and values to and from fp8, by torch."""

from functools import cache

import torch

__all__ = ["from_fp8", "pair_table", "to_fp8"]


def to_fp8(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Return `x / scale` as the bytes of an fp8 dtype, contiguous `torch.uint8`.

    Values saturate, and NaN stays NaN.
    """
    most = torch.finfo(dtype).max
    # Divide in float32, so that values are rounded only once.
    ratio = x.float() / scale if scale != 1.0 else x
    return ratio.clamp(-most, most).to(dtype).contiguous().view(torch.uint8)


def from_fp8(stored: torch.Tensor, dtype: torch.dtype, model_dtype: torch.dtype) -> torch.Tensor:
    """Return fp8 values of any shape in the model's dtype, exactly and without their scale."""
    return stored.view(dtype).to(model_dtype)


@cache
def pair_table(dtype: torch.dtype, model_dtype: torch.dtype) -> torch.Tensor:
    """Return the values of each pair of bytes, `[65536]`, two of the model's dtype as one element.

    On a CPU looking up pairs takes a tenth of the time of torch's conversion.
    """
    with torch.inference_mode(False):
        pairs = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
        wide = torch.float64 if model_dtype.itemsize == 4 else torch.float32
        return from_fp8(pairs, dtype, model_dtype).view(wide)
