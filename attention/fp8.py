"""Keys and values as numbers of 8 bits, by plain torch."""

from functools import cache

import torch

__all__ = ["from_fp8", "pair_table", "to_fp8"]


def to_fp8(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Return `x / scale` as the bytes of an fp8 dtype, contiguous `torch.uint8`.

    What is too large becomes the largest that there is, and NaN stays NaN.
    """
    most = torch.finfo(dtype).max
    # Divided in float32, so that a number is rounded once and not twice.
    ratio = x.float() / scale if scale != 1.0 else x
    return ratio.clamp(-most, most).to(dtype).contiguous().view(torch.uint8)


def from_fp8(stored: torch.Tensor, dtype: torch.dtype, model_dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that bytes stand for, without the scale, which all model dtypes hold."""
    return stored.view(dtype).to(model_dtype)


@cache
def pair_table(dtype: torch.dtype, model_dtype: torch.dtype) -> torch.Tensor:
    """Return what each two bytes stand for, `[65536]`, two numbers of the model's dtype as one.

    On a CPU to look numbers up by pairs takes a tenth of the time that torch takes to convert.
    """
    with torch.inference_mode(False):
        pairs = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
        wide = torch.float64 if model_dtype.itemsize == 4 else torch.float32
        return from_fp8(pairs, dtype, model_dtype).view(wide)
