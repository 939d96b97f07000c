"""Unpacks numbers of four or eight bits from the int32 of each format.

GPTQ: E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2023. AWQ: J. Lin et al., "AWQ: Activation-aware Weight Quantization for LLM
Compression and Acceleration", 2024.
"""

from __future__ import annotations

import torch

__all__ = ["unpacked"]

# Where AWQ's kernels find number 0, 1, 2, ... of a word.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def unpacked(
    words: torch.Tensor, dim: int, *, is_awq: bool = False, num_bits: int = 4
) -> torch.Tensor:
    """Return the uint8 numbers in an int32 matrix; `dim` becomes `32 / num_bits` times as long."""
    places = _AWQ_PLACES if is_awq else range(32 // num_bits)
    shifts = torch.tensor(
        [num_bits * place for place in places], dtype=torch.int32, device=words.device
    )
    shape = [1, 1, 1]
    shape[dim + 1] = len(shifts)
    numbers = words.unsqueeze(dim + 1).bitwise_right_shift(shifts.view(shape))
    return numbers.bitwise_and_(2**num_bits - 1).to(torch.uint8).flatten(dim, dim + 1)
